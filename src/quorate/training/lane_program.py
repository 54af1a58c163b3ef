"""Forward and backward of one micro-batch: how a lane's work is done on its device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from quorate.core.spans import BACKWARD, FORWARD, SpanRecorder
from quorate.core.user_code import RAISED, Hint, blame_user_code
from quorate.training.gradients import Gradients
from quorate.training.losses import GivenLoss, checked_losses
from quorate.training.optimizers import SOLE
from quorate.training.replica import Replica
from quorate.training.task import Task


class MicroBatch(NamedTuple):
    """A lane's samples that go through the model at once, of a step with `batch_samples`. `is_last`: the lane has no
    other."""

    content: Any
    samples: int
    batch_samples: int
    is_last: bool


class LaneProgram(Protocol):
    """Adds one micro-batch's gradient to what the lane has collected, and gives its losses, still on the device."""

    def run(self, batch: MicroBatch, spans: SpanRecorder | None) -> list[GivenLoss]: ...


class Captures(ABC):
    """What a device has recorded of a worker's lanes, by the structure of a batch. Kept through all generations."""

    @property
    @abstractmethod
    def number(self) -> int:
        """How many there are."""

    @abstractmethod
    def program(self, eager: LaneProgram, replica: Replica, gradients: Gradients) -> LaneProgram:
        """Replays what is recorded; else the task's own code runs, by `eager`."""

    @abstractmethod
    def lane_ended(self, assigned: Sequence[str]) -> None:
        """A lane is over, in which user code has assigned these."""

    @abstractmethod
    def take_notes(self) -> list[str]:
        """What is to be told, once."""

    @abstractmethod
    def forget(self) -> None:
        """Begin again: nothing is where it was."""


class EagerProgram:
    """The task's own code, called each time."""

    def __init__(self, task: Task, replica: Replica, gradients: Gradients) -> None:
        self._task = task
        self._replica = replica
        self._gradients = gradients

    def run(self, batch: MicroBatch, spans: SpanRecorder | None) -> list[GivenLoss]:
        replica, samples = self._replica, batch.samples
        began = 0.0 if spans is None else spans.clock()
        content = replica.device.move(batch.content)
        try:
            with replica.device.autocast():
                loss = replica.device.compiled(self._task.loss)(replica.model, content)
        except RAISED as error:
            blame_user_code(error, "loss()", self._hint_of(batch))
            raise
        if spans is not None:
            began = spans.pass_on(FORWARD, began)
        losses = checked_losses(loss, samples, replica.optimizers.by_name)
        for position, (name, _, value, _, per_item) in enumerate(losses, 1):
            weight = 1.0 if per_item else samples / batch.batch_samples
            scale = replica.loss_scale
            start = weight if scale is None else scale.times(torch.full_like(value, weight))
            # One optimizer: the plain backward pass, so that one lane gives the bits of a hand-written loop.
            inputs = None if name == SOLE else replica.optimizers.parameters(name)
            is_last = batch.is_last and name == SOLE
            try:
                self._gradients.backward(value, start, inputs, retain=position < len(losses), is_last=is_last)
            except RAISED as error:
                blame_user_code(error, "backward()", self._hint_of(batch))
                raise
        if spans is not None:
            spans.pass_on(BACKWARD, began)
        return losses

    def _hint_of(self, batch: MicroBatch) -> Hint:
        from quorate.training.hints import Share  # rarely

        return Share(batch.samples, batch.batch_samples, self._replica.spec).hint

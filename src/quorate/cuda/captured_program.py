"""A lane's work, captured once: forward and backward of a micro-batch as one graph, run again without its Python.

A graph reads and writes fixed addresses: static copies of a batch, the parameters and buffers of the replica, gradients
of its own. All of these outlive generations, and so do graphs (`LaneGraphs`): a recovery captures nothing again.

Python does not run when a graph does. What it would have done besides is looked for while the work is warmed up, and
whatever is found keeps the work from being captured, with its reason told once. Captured or not, the same kernels give
the same bits: workers need not agree on it.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Any

import torch

from quorate.core.spans import REPLAY, SpanRecorder
from quorate.data.collate import StructureError, mapped, structure_of
from quorate.replica.device import Capture
from quorate.replica.gradients import Gradients, run_backward
from quorate.replica.losses import GivenLoss, checked_losses
from quorate.replica.optimizers import SOLE
from quorate.replica.replica import Replica
from quorate.replica.state_watch import users_hooks
from quorate.task.task import LOG, Task, take_log
from quorate.training.lane import Captures, Eager, MicroBatch

log = logging.getLogger(__name__)

WARM_UPS = 3
MOST_GRAPHS = 4
"""Batches of so many structures are captured; each graph keeps gradients of its own."""

_Seen = tuple[tuple[Any, ...], tuple[Any, ...]]
_ADDRESS, _MODE = methodcaller("data_ptr"), attrgetter("training")


class _CaptureError(Exception):
    """Why a lane's work is not captured."""


@dataclass
class _Captured:
    """A graph with the tensors that it reads and writes."""

    replay: Callable[[], None]
    batch: list[torch.Tensor]
    weights: list[torch.Tensor]
    losses: list[GivenLoss]
    logged: dict[str, list[Any]]
    gradients: list[torch.Tensor | None]
    addresses: list[int]
    weighted: list[float] = field(default_factory=list)


@dataclass
class _Work:
    """Micro-batches of one structure: warmed up so many times, then captured."""

    warm_ups: int = 0
    is_ready: bool = False
    seen: _Seen = ((), ())
    captured: _Captured | None = None


class LaneGraphs(Captures):
    """The graphs of a worker, by the structure of a batch. Made once, and kept through all generations."""

    def __init__(self, task: Task, replica: Replica, capture: Capture) -> None:
        self._task, self._replica, self._capture = task, replica, capture
        self._parameters = [parameter for _, parameter in replica.parameters]
        self._modules = list(replica.model.modules())
        self._buffers = [(module._buffers, name) for module in self._modules for name in module._buffers]
        self._works: dict[Hashable, _Work] = {}
        self._notes: list[str] = []
        self._refused = False
        self._has_told_limit = False
        if hook := next(users_hooks(replica.model), None):
            self.refuse(f"the model has a hook of its own, {getattr(hook, '__qualname__', type(hook).__qualname__)}()")
        elif replica.spec.memory.checkpoint_activations and not replica.device.compiles:
            self.refuse("blocks that are computed again read the state of the random generator, which a graph cannot")

    @property
    def number(self) -> int:
        return sum(work.captured is not None for work in self._works.values())

    def run(
        self,
        batch: MicroBatch,
        gradients: Gradients,
        spans: SpanRecorder | None,
        eager: Eager,
    ) -> list[GivenLoss]:
        began = 0.0 if spans is None else spans.clock()
        batch = batch._replace(content=self._replica.device.move(batch.content))
        work, tensors = self._work_for(batch.content)
        if work is not None and work.captured is not None and work.captured.addresses != self._addresses():
            self.forget()  # parameters and buffers are no longer where it finds them
            work, tensors = self._work_for(batch.content)
        if work is None:
            return eager(batch, spans)
        if work.captured is None:
            if not work.is_ready:
                return self._warm_up(work, lambda: eager(batch, spans))
            if not self._record(work, batch, gradients):
                return eager(batch, spans)
        assert work.captured is not None
        losses = self._replay(work.captured, batch, tensors)
        gradients.take(work.captured.gradients, is_last=batch.is_last)
        if spans is not None:
            spans.pass_on(REPLAY, began)
        return losses

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _work_for(self, content: Any) -> tuple[_Work | None, list[torch.Tensor]]:
        """The work of batches like this one; None where it is not captured."""
        if self._refused and not self._works:
            return None, []
        try:
            structure, tensors = structure_of(content)
        except StructureError as why:
            self.refuse(str(why))
            return None, []
        work = self._works.get(structure)
        if work is None and not self._refused:
            if len(self._works) < MOST_GRAPHS:
                work = self._works[structure] = _Work()
            elif not self._has_told_limit:
                self._has_told_limit = True
                self._tell(
                    f"batches of more than {MOST_GRAPHS} shapes, or with other values than tensors in them that "
                    "change: those beyond are computed without a graph, and more slowly"
                )
        return (None if work is None or (self._refused and work.captured is None) else work), tensors

    def refuse(self, why: str) -> None:
        """Capture nothing more."""
        if not self._refused:
            self._refused = True
            self._works = {key: work for key, work in self._works.items() if work.captured is not None}
            self._tell(f"a lane's work is not captured in a graph, and so takes longer to begin: {why}")

    def _warm_up(self, work: _Work, run: Callable[[], list[GivenLoss]]) -> list[GivenLoss]:
        """Run it for real, and look for what a graph would not repeat."""
        losses: list[GivenLoss] = []
        streams, modes, addresses = self._capture.host_streams(), self._modes(), self._addresses()
        why = self._capture.warm_up(lambda: losses.extend(run()))
        seen = _of_host(losses, self._task.__dict__.get(LOG, {}))
        if not work.warm_ups:
            pass  # the first call sets up and compiles, which nothing repeats
        elif why is not None:
            self.refuse(why)
        elif self._capture.host_streams() != streams:
            self.refuse("loss() draws random numbers on the host. Draw them with torch, on the device of the batch")
        elif self._modes() != modes:
            self.refuse("loss() leaves a layer in another mode (train() or eval()) than it found it in")
        elif self._addresses() != addresses:
            self.refuse("a buffer is assigned while training. Write into it (copy_) instead")
        elif seen != work.seen:
            self.refuse("loss() gives or logs numbers of the host that change. Give them as tensors")
        work.warm_ups, work.seen = work.warm_ups + 1, seen
        return losses

    def lane_ended(self, assigned: Sequence[str]) -> None:
        """Only now is it known what user code has assigned: nothing is captured before its warm-up's lane is over."""
        if assigned and any(work.captured is None for work in self._works.values()):
            self.refuse(f"'{assigned[0]}' is assigned while a lane runs")
        for work in self._works.values():
            work.is_ready = work.is_ready or work.warm_ups >= WARM_UPS

    def _record(self, work: _Work, batch: MicroBatch, gradients: Gradients) -> bool:
        """Capture this work; False where that cannot be done."""
        try:
            with gradients.aside():
                work.captured = self._recorded(work, batch, gradients)
        except (Exception, SystemExit) as error:
            self._works.clear()  # graphs from before cannot be used after a recording that was broken off
            self.refuse(_reason(error))
            return False
        log.info("a lane's work is captured in a graph: %d of at most %d", self.number, MOST_GRAPHS)
        return True

    def forget(self) -> None:
        self._works.clear()

    def _replay(self, captured: _Captured, batch: MicroBatch, tensors: list[torch.Tensor]) -> list[GivenLoss]:
        """Run the graph on this batch."""
        if tensors:
            torch._foreach_copy_(captured.batch, tensors)
        # What a loss's gradient is multiplied by, so that all lanes' gradients need only be added.
        weighted = [1.0 if loss.per_item else batch.samples / batch.batch_samples for loss in captured.losses]
        if weighted != captured.weighted:
            for tensor, weight in zip(captured.weights, weighted, strict=True):
                tensor.fill_(weight)
            captured.weighted = weighted
        captured.replay()
        if captured.logged:
            self._task.__dict__[LOG] = {name: [_kept(one) for one in ones] for name, ones in captured.logged.items()}
        return [
            loss._replace(samples=batch.samples, items=_kept(loss.items) if loss.per_item else float(batch.samples))
            for loss in captured.losses
        ]

    def _recorded(self, work: _Work, batch: MicroBatch, gradients: Gradients) -> _Captured:
        task, replica = self._task, self._replica
        content = mapped(batch.content, _copied)
        inputs = structure_of(content)[1]
        weights = [torch.ones(shape, dtype=dtype, device=on) for _, dtype, shape, on, _ in work.seen[0]]
        losses: list[GivenLoss] = []

        def run() -> None:
            with replica.device.autocast():
                loss = replica.device.compiled(task.loss)(replica.model, content)
            given = checked_losses(loss, batch.samples, replica.optimizers.by_name)
            if len(given) != len(weights):
                raise _CaptureError("loss() gives other losses than before")
            for position, (one, weight) in enumerate(zip(given, weights, strict=True), 1):
                own = None if one.name == SOLE else replica.optimizers.parameters(one.name)
                # Within the graph, which finds the scale of each replay where it lies.
                start = weight if replica.loss_scale is None else replica.loss_scale.times(weight)
                run_backward(one.value, start, own, position < len(given))
            losses.extend(one._replace(value=one.value.detach()) for one in given)

        # Empty, and there: what was compiled for the warm-ups would be compiled anew for a task without it.
        before = take_log(task)
        task.__dict__[LOG] = {}
        try:
            replay = self._capture.record(run)
            logged: dict[str, list[Any]] = task.__dict__.get(LOG, {})
        finally:
            task.__dict__[LOG] = before
        if _of_host(losses, logged) != work.seen:
            raise _CaptureError("loss() gives or logs numbers of the host that change. Give them as tensors")
        found = [parameter.grad for parameter in gradients.parameters]
        if any(one is not None and (one.layout is not torch.strided or one.requires_grad) for one in found):
            raise _CaptureError("a gradient is sparse, or carries a graph")
        return _Captured(replay, inputs, weights, losses, logged, found, self._addresses())

    def _tell(self, note: str) -> None:
        log.warning("%s", note)
        self._notes.append(note)

    def _modes(self) -> list[bool]:
        return list(map(_MODE, self._modules))

    def _addresses(self) -> list[int]:
        buffers = [held[name] for held, name in self._buffers]
        return [*map(_ADDRESS, self._parameters), *(0 if one is None else one.data_ptr() for one in buffers)]


def _of_host(losses: Sequence[GivenLoss], logged: dict[str, list[Any]]) -> _Seen:
    """What of a call's outcome no graph computes: it must be the same each time."""
    return (
        tuple(
            (
                one.name,
                one.value.dtype,
                one.value.shape,
                one.value.device,
                _number(one.items) if one.per_item else "mean",
            )
            for one in losses
        ),
        tuple((name, *map(_number, ones)) for name, ones in logged.items()),
    )


def _reason(error: BaseException) -> str:
    """In words of the error that has ended a recording, not of those that followed from it."""
    while error.__context__ is not None:
        error = error.__context__
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, _CaptureError) else f"{type(error).__name__}: {first}"


def _number(value: Any) -> Hashable:
    return "tensor" if isinstance(value, torch.Tensor) else float(value).hex()


def _kept(value: Any) -> Any:
    """The next replay writes to the tensors of this one."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # keeps the strides of what lies side by side

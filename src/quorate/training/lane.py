"""One lane's part of a step: forward and backward over its micro-batches, from the committed buffers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.core.errors import LossError
from quorate.core.seeds import derive_seed
from quorate.core.user_code import given, likely_slip, user_code
from quorate.data.indices import NO_INDICES, Indices
from quorate.data.ledger import NOTHING, Tally
from quorate.data.streams import seed_generators
from quorate.training.gradients import Gradients
from quorate.training.hints import Share, hint_for
from quorate.training.optimizers import SOLE
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import Task, take_log


@dataclass
class LossSum:
    """A loss on the way to its mean. `per_item`: the count is of something other than samples, so the gradient is
    that of the sum and is divided once all lanes' counts are known."""

    total: float = 0.0
    count: float = 0.0
    per_item: bool = False

    def add(self, other: "LossSum") -> None:
        """Add another part of the batch."""
        if self.count and self.per_item != other.per_item:
            raise LossError("loss() gave a mean for some batches and (sum, count) for others; give one kind always.")
        self.total += other.total
        self.count += other.count
        self.per_item = other.per_item

    @property
    def mean(self) -> float:
        """The mean so far."""
        return self.total / self.count if self.count else 0.0


@dataclass
class LaneResult:
    """What a lane contributes besides its gradient; `read` are the samples that it has read, `tally` adds them up, and
    `bad` are those that could not be read and were left out; `why` says of the first of these what is wrong. `data_s`
    are the seconds that its worker has waited for them, `put_back` the names of what user code has assigned."""

    lane: int
    samples: int
    present: int = 0
    losses: dict[str, LossSum] = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tally: Tally = NOTHING
    read: Indices = field(default_factory=lambda: NO_INDICES)
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    data_s: float = 0.0
    put_back: tuple[str, ...] = ()


class LaneRunner:
    """Runs lanes one after another on the worker's replica."""

    def __init__(self, task: Task, replica: Replica, gradients: Gradients, watch: StateWatch, seed: int) -> None:
        self._task = task
        self._replica = replica
        self._gradients = gradients
        self._watch = watch
        self._seed = seed

    def run(self, step: int, lane: int, batches: Sequence[tuple[int, Any]], batch_samples: int) -> LaneResult:
        """Gradient of one lane; `batches` are (samples, batch) pairs, `batch_samples` the size of the global batch."""
        result = LaneResult(lane, sum(samples for samples, _ in batches))
        if not batches:
            self._gradients.clear(lane)
            return result
        self._replica.begin_lane()
        put_back = self._watch.before_lane()
        self._pin_threads()
        seed_generators(derive_seed(self._seed, "lane", step, lane))
        self._gradients.begin(lane)
        logged: dict[str, LossSum] = {}
        for number, (samples, batch) in enumerate(batches, 1):
            with user_code("loss()", Share(samples, batch_samples, self._replica.spec).hint):
                loss = self._task.loss(self._replica.model, batch)
            for name, part in self._backward(loss, samples, batch_samples, number == len(batches)).items():
                result.losses.setdefault(name, LossSum()).add(part)
            for name, value in take_log(self._task).items():
                logged.setdefault(name, LossSum()).add(LossSum(value * samples, samples))
        result.present = self._gradients.finish()
        result.log = {name: total.mean for name, total in logged.items()}
        result.buffers = self._replica.buffers.take_changes()
        put_back += self._watch.after_lane()
        result.put_back = tuple(put_back)
        self._pin_threads()
        return result

    def _pin_threads(self) -> None:
        # A loss() that sets another number sets it for the rest of its lane: the next may run in another process.
        if torch.get_num_threads() != self._replica.spec.threads:
            torch.set_num_threads(self._replica.spec.threads)

    def _backward(self, loss: Any, samples: int, batch_samples: int, is_last: bool) -> dict[str, LossSum]:
        by_name = dict(loss) if isinstance(loss, Mapping) else {SOLE: loss}
        expected = self._replica.optimizers.by_name
        if by_name.keys() != expected.keys() and loss is not None:
            raise LossError(
                f"loss() gave {_names(by_name)} and optimizer() {_names(expected)}: both must have the same names."
            )
        sums = {}
        for position, (name, given_loss) in enumerate(by_name.items()):
            tensor, count, per_item = _scalar(given_loss, samples, name)
            weight = 1.0 if per_item else samples / batch_samples
            # One optimizer: the plain backward pass, so that one lane gives the bits of a hand-written loop.
            inputs = None if name == SOLE else self._replica.optimizers.parameters(name)
            others = len(by_name) - 1 - position
            with user_code("backward()", hint_for):
                self._gradients.backward(tensor, weight, inputs, retain=others > 0, is_last=is_last and name == SOLE)
            value = tensor.item()
            sums[name] = LossSum(value if per_item else value * samples, count, per_item)
        return sums


def not_finite(losses: Mapping[str, LossSum]) -> tuple[str, float] | None:
    """The first loss that is not a number any more: what to call it, and its value."""
    for name, loss in losses.items():
        if not math.isfinite(loss.total):
            return called(name), loss.total
    return None


def called(name: str) -> str:
    """What to call a loss in a message."""
    return f"loss '{name}'" if name else "loss"


def _scalar(given_loss: Any, samples: int, name: str) -> tuple[torch.Tensor, float, bool]:
    whose = "" if name == SOLE else f" for '{name}'"
    tensor, count, per_item = given_loss, float(samples), False
    if isinstance(given_loss, tuple):
        tensor, count, per_item = _sum_and_count(given_loss, whose)
    if not isinstance(tensor, torch.Tensor):
        raise LossError(f"loss() gave {given(tensor)}{whose}; it must return a tensor with one element.{_slip(tensor)}")
    if tensor.numel() != 1:
        raise LossError(
            f"loss() gave a tensor of shape {tuple(tensor.shape)}{whose}; it must have one element: the mean over the "
            "samples of the batch (such as loss.mean()), or (sum, count)."
        )
    if not tensor.requires_grad:
        raise LossError(
            f"loss() gave a tensor{whose} that does not depend on the parameters. Return it as it comes out of the "
            "model: .detach(), .item(), torch.tensor() and torch.no_grad() cut it off."
        )
    return tensor, count, per_item


def _sum_and_count(pair: tuple[Any, ...], whose: str) -> tuple[Any, float, bool]:
    if len(pair) != 2:
        raise LossError(f"loss() gave {given(pair)}{whose}; a tuple must be (sum, count).")
    try:
        return pair[0], float(pair[1]), True
    except (TypeError, ValueError, RuntimeError):
        raise LossError(
            f"loss() gave {given(pair[1])}{whose} as the count of (sum, count); it must be a number."
        ) from None


def _slip(value: Any) -> str:
    if isinstance(value, float | int):
        return " Return the tensor itself, not its .item()."
    return likely_slip(value)


def _names(mapping: Mapping[str, Any]) -> str:
    names = ", ".join(f"'{name}'" for name in mapping if name != SOLE)
    return f"a dict with {names}" if names else "a single one"

"""One lane's part of a step: forward and backward over its micro-batches, from the committed buffers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import LossError
from quorate.core.spans import BACKWARD, FORWARD, SpanRecorder
from quorate.core.user_code import blame_user_code, given, likely_slip
from quorate.data.indices import NO_INDICES, Indices
from quorate.data.ledger import NOTHING, Tally
from quorate.spec.job import JobSpec
from quorate.training.device import is_scalar
from quorate.training.gradients import Gradients
from quorate.training.optimizers import SOLE
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import LOG, Task, take_log


@dataclass
class LossSum:
    """A loss on the way to its mean. `per_item`: the count is of something other than samples, so the gradient is
    that of the sum and is divided once all lanes' counts are known."""

    total: float = 0.0
    count: float = 0.0
    per_item: bool = False

    def add(self, other: "LossSum") -> None:
        if self.count and self.per_item != other.per_item:
            raise LossError("loss() gave a mean for some batches and (sum, count) for others; give one kind always.")
        self.total += other.total
        self.count += other.count
        self.per_item = other.per_item

    @property
    def mean(self) -> float:
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


class _Loss(NamedTuple):
    """A loss that is still on the device."""

    name: str
    samples: int
    value: torch.Tensor
    items: float | torch.Tensor
    per_item: bool


SEEDS_AHEAD = 32


class LaneRunner:
    """Runs lanes one after another on the worker's replica."""

    def __init__(self, task: Task, replica: Replica, gradients: Gradients, watch: StateWatch, seed: int) -> None:
        self._task = task
        self._replica = replica
        self._device = replica.device
        self._threads = replica.spec.threads
        self._gradients = gradients
        self._watch = watch
        self._seed = seed
        self._seeds: dict[tuple[int, int], int] = {}

    def run(
        self,
        step: int,
        lane: int,
        batches: Sequence[tuple[int, Any]],
        batch_samples: int,
        spans: SpanRecorder | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> LaneResult:
        """Gradient of one lane; `batches` are (samples, batch) pairs, `batch_samples` the size of the global batch.

        `meanwhile` is called when the device has got all that it has to do for the lane, and before it is waited for.
        """
        result = LaneResult(lane, sum([samples for samples, _ in batches]), read=NO_INDICES)
        if not batches:
            self._gradients.clear(lane)
            return result
        task, replica, device = self._task, self._replica, self._device
        replica.begin_lane()
        put_back = self._watch.before_lane()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        device.seed(self._seed_of(step, lane))
        self._gradients.begin(lane)
        losses: list[_Loss] = []
        logged: dict[str, LossSum] = {}
        for number, (samples, content) in enumerate(batches, 1):
            began = 0.0 if spans is None else spans.clock()
            batch = device.move(content)
            try:
                with device.autocast():
                    loss = task.loss(replica.model, batch)
            except (Exception, SystemExit) as error:
                blame_user_code(error, "loss()", Share(samples, batch_samples, replica.spec).hint)
                raise
            losses += self._backward(loss, samples, batch_samples, number == len(batches), spans, began)
            if task.__dict__.get(LOG):
                for name, value in take_log(task, device).items():
                    logged.setdefault(name, LossSum()).add(LossSum(value * samples, samples))
        result.present = self._gradients.finish()
        meanwhile()
        result.losses = self._read(losses)
        if logged:
            result.log = {name: total.mean for name, total in logged.items()}
        if replica.buffers.exist:
            result.buffers = replica.buffers.take_changes()
        result.put_back = (*put_back, *self._watch.after_lane())
        # A loss() that sets another number sets it for the rest of its lane: the next may run in another process.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return result

    def _seed_of(self, step: int, lane: int) -> int:
        """Of many steps at once, which takes a fraction of the time that each takes within its step."""
        seed = self._seeds.get((step, lane))
        if seed is None:
            steps = range(step, step + SEEDS_AHEAD)
            self._seeds = {key: value for key, value in self._seeds.items() if key[0] >= step}
            self._seeds |= {(each, lane): derive_seed(self._seed, "lane", each, lane) for each in steps}
            seed = self._seeds[step, lane]
        return seed

    def _backward(
        self, loss: Any, samples: int, batch_samples: int, is_last: bool, spans: SpanRecorder | None, began: float
    ) -> list[_Loss]:
        if spans is not None:
            began = spans.pass_on(FORWARD, began)
        by_name = {SOLE: loss} if isinstance(loss, torch.Tensor) or not isinstance(loss, Mapping) else dict(loss)
        expected = self._replica.optimizers.by_name
        if by_name.keys() != expected.keys() and loss is not None:
            raise LossError(
                f"loss() gave {_names(by_name)} and optimizer() {_names(expected)}: both must have the same names."
            )
        losses = []
        for position, (name, given_loss) in enumerate(by_name.items()):
            tensor, count, per_item = _scalar(given_loss, samples, name)
            weight = 1.0 if per_item else samples / batch_samples
            # One optimizer: the plain backward pass, so that one lane gives the bits of a hand-written loop.
            inputs = None if name == SOLE else self._replica.optimizers.parameters(name)
            others = len(by_name) - 1 - position
            try:
                self._gradients.backward(tensor, weight, inputs, retain=others > 0, is_last=is_last and name == SOLE)
            except (Exception, SystemExit) as error:
                blame_user_code(error, "backward()", hint_for)
                raise
            # A copy if more user code runs in the lane, which may write to its own tensors.
            value = tensor.detach() if is_last else tensor.detach().clone()
            losses.append(_Loss(name, samples, value, count, per_item))
        if spans is not None:
            spans.pass_on(BACKWARD, began)
        return losses

    def _read(self, losses: Sequence[_Loss]) -> dict[str, LossSum]:
        """Bring a lane's losses to the host: once, when all that the device has to do for the lane is under way."""
        scalars = [loss.value for loss in losses]
        scalars += [loss.items for loss in losses if isinstance(loss.items, torch.Tensor)]
        numbers = self._device.numbers(scalars)()
        counts = iter(numbers[len(losses) :])
        sums: dict[str, LossSum] = {}
        for (name, samples, _, items, per_item), value in zip(losses, numbers, strict=False):
            count = next(counts) if isinstance(items, torch.Tensor) else items
            part = LossSum(value if per_item else value * samples, count, per_item)
            if name in sums:
                sums[name].add(part)
            else:
                sums[name] = part
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


def _scalar(given_loss: Any, samples: int, name: str) -> tuple[torch.Tensor, float | torch.Tensor, bool]:
    whose = "" if name == SOLE else f" for '{name}'"
    tensor, count, per_item = (
        _sum_and_count(given_loss, whose) if isinstance(given_loss, tuple) else (given_loss, float(samples), False)
    )
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


def _sum_and_count(pair: tuple[Any, ...], whose: str) -> tuple[Any, float | torch.Tensor, bool]:
    if len(pair) != 2:
        raise LossError(f"loss() gave {given(pair)}{whose}; a tuple must be (sum, count).")
    total, count = pair
    if is_scalar(count):
        return total, count.detach().clone(), True
    try:
        return total, float(count), True
    except (TypeError, ValueError, RuntimeError):
        raise LossError(
            f"loss() gave {given(count)}{whose} as the count of (sum, count); it must be a number."
        ) from None


def _slip(value: Any) -> str:
    if isinstance(value, float | int):
        return " Return the tensor itself, not its .item()."
    return likely_slip(value)


def _names(mapping: Mapping[str, Any]) -> str:
    names = ", ".join(f"'{name}'" for name in mapping if name != SOLE)
    return f"a dict with {names}" if names else "a single one"


class Share(NamedTuple):
    """What a lane had to work on: its samples of a batch, in a job."""

    samples: int
    batch_samples: int
    spec: JobSpec

    def hint(self, error: BaseException) -> str:
        return hint_for(error, self)


def hint_for(error: BaseException, share: Share | None = None) -> str:
    """A hint that is surely right for this exception, or nothing."""
    for pattern, say in _HINTS:
        found = re.search(pattern, str(error), re.IGNORECASE)
        if found is not None:
            return say(found, share) if callable(say) else say
    return ""


def _lonely_sample(_: re.Match[str], share: Share | None) -> str:
    if share is None or share.samples != 1:
        return ""
    spec = share.spec
    accumulate = f" × accumulate {spec.accumulate}" if spec.accumulate > 1 else ""
    is_rest = share.batch_samples < spec.batch_size
    kept = "; last_batch: keep" if is_rest else ""
    enough = 2 * spec.lanes * spec.accumulate
    remedy = "Drop such a rest (last_batch: drop)" if is_rest else f"Use a batch_size of at least {enough}"
    return (
        f"Batch normalization needs at least 2 samples at a time, and this lane had 1: {share.batch_samples} samples "
        f"for {spec.lanes} lanes{accumulate} (batch_size: {spec.batch_size}{kept}). {remedy}, or use fewer lanes."
    )


def _class_out_of_bounds(found: re.Match[str], _: Share | None) -> str:
    needed = int(found[1]) + 1
    return f"Classes count from 0, so a target of {found[1]} needs a model with at least {needed} outputs."


Say = Callable[[re.Match[str], Share | None], str]

_HINTS: tuple[tuple[str, str | Say], ...] = (
    (r"Expected more than 1 value per channel when training", _lonely_sample),
    (
        r"does not have a deterministic implementation",
        "`deterministic: false` in the job file allows it; the bits may then differ from run to run.",
    ),
    (
        r"dtype, but got Double and Float|Input type \(double\) and (bias|weight) type \(float\)",
        "NumPy's numbers are float64 and a model's weights float32: convert the data, as with .float().",
    ),
    (
        r"dtype, but got (Long|Int|Byte|Bool) and Float|Input type \((long|int|unsigned char|bool)\) and",
        "A layer computes with floats: convert its input, as with .float().",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long but found",
        "Targets of this loss are classes, whole numbers of 64 bits: convert them, as with .long().",
    ),
    (r"Target (\d+) is out of bounds", _class_out_of_bounds),
    (
        r"backward through the graph a second time",
        "Compute what the loss depends on anew in each call of loss(), or .detach() what is kept.",
    ),
)

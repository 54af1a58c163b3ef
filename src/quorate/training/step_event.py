"""What is told of a step that is done, and how long it has taken."""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple, cast

from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE
from quorate.data.indices import ranges_of
from quorate.data.sampler import Sampler
from quorate.observe.events import SkippedStep, StepCompleted
from quorate.training.strategy import Agreement


class Timing(NamedTuple):
    """What a step has taken: from one to the next, and this worker's time in each phase."""

    elapsed: float
    seconds: dict[str, float]


class Laps:
    """A stopwatch: from one completed step to the next."""

    def __init__(self) -> None:
        self.last = perf_counter()

    def lap(self, steps: int = 1) -> float:
        """Seconds since the last one. Several steps that are completed at once have taken what they took together."""
        now = perf_counter()
        elapsed, self.last = max(now - self.last, 1e-9) / steps, now
        return elapsed


def step_completed(
    step: int,
    agreement: Agreement,
    warnings: tuple[str, ...],
    timing: Timing,
    rates: dict[str, float],
    sampler: Sampler,
    optimizers: Iterable[str],
    draws: bool,
    tensors: Sequence[str] | None = None,
) -> StepCompleted:
    """Whether it was read at once or late, it is the same but for its times. `tensors` are the names of what has
    gradients, where digests are recorded."""
    epoch, seconds, skipped = sampler.epoch_of(step), timing.seconds, agreement.skipped
    # A step that changes nothing has no loss. What ends an epoch tells what the ledger must know of it.
    losses: dict[str, float | None] = {name: loss.mean for name, loss in agreement.losses.items()}
    if agreement.is_void:
        losses = dict.fromkeys(optimizers)
    # A lane without samples has none.
    told = () if tensors is None else agreement.digests
    lanes = [[f"{each:016x}" for each in of_lane] or [""] for of_lane in told]
    by_tensor = len(max(lanes, key=len, default=[])) > 1
    is_own = sampler.is_own(epoch)
    ends = sampler.ends_epoch(step)
    return StepCompleted(
        step=step,
        epoch=epoch,
        losses=losses,
        learning_rates=rates,
        gradient_norms=dict(agreement.norms),
        samples=agreement.samples + (len(skipped.samples) if skipped is not None and skipped.is_partial else 0),
        samples_per_second=agreement.samples / timing.elapsed,
        data_s=seconds[DATA],
        compute_s=seconds[COMPUTE],
        exchange_s=seconds[EXCHANGE],
        apply_s=seconds[APPLY],
        ledger=cast(str, agreement.tally),  # made when the event is told
        own_order=is_own,
        dropped=tuple(sorted(sampler.dropped(epoch).tolist())) if ends else (),
        planned=str(sampler.planned(epoch)) if ends and is_own else None,
        # Of another worker, for which this one has waited in the exchange.
        longest_data_s=agreement.data_s if agreement.data_s > seconds[DATA] + 1e-6 else None,
        draws=draws,  # what is decoded is another sample in each epoch, and cannot be cached
        log=agreement.log or None,
        # All of them, however many: the ledger adds up what was left out with what was used.
        bad_samples=len(agreement.bad),
        bad=ranges_of(agreement.bad) if agreement.bad else (),
        warnings=warnings,
        loss_scale=None if agreement.scaling is None else agreement.scaling.scale,
        overflow=agreement.has_overflowed,
        skipped=None
        if skipped is None
        else SkippedStep(tuple(skipped.lanes), tuple(skipped.samples), skipped.is_partial),
        lanes=tuple(each[0] for each in lanes),
        tensors={
            name: tuple(each[index] if len(each) > 1 else "" for each in lanes)
            for index, name in enumerate(tensors or (), 1)
        }
        if by_tensor
        else None,
    )

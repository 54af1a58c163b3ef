"""What the loop asks of a strategy: how the results of the lanes become the next state, agreed on by all workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import torch

from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE
from quorate.data.indices import ranges_of
from quorate.data.ledger import Tally
from quorate.data.sampler import Sampler, StepPlan
from quorate.observe.event import Event
from quorate.observe.events import SkippedStep, StepCompleted
from quorate.replica.device import Numbers
from quorate.replica.loss_scale import Scaling
from quorate.replica.losses import LossSum
from quorate.task.progress import Progress
from quorate.training.activity import Timing
from quorate.training.lane import LaneResult


class Save(IntEnum):
    """Whether a checkpoint is saved at a step boundary, besides those that the job's steps ask for."""

    NONE = 0
    BEGIN = 1  # training goes on meanwhile, in the next generation too
    COMMIT = 2  # it is waited for: nobody who stays holds the state


@dataclass(frozen=True)
class StepRequest:
    """What a worker is asked to do at the end of a step. All workers do what any of them is asked.

    `stop`: why the job ends here, if it does. `leave`: the generation ends here, to let somebody in or go; the job goes
    on in the next.
    """

    stop: str | None = None
    save: Save = Save.NONE
    leave: bool = False

    @staticmethod
    def combine(requests: Iterable["StepRequest"]) -> "StepRequest":
        """What all do of what some are asked: the first reason to stop, and rather save than not."""
        given = list(requests)
        if len(given) == 1:
            return given[0]
        return StepRequest(
            next((request.stop for request in given if request.stop is not None), None),
            max(request.save for request in given),
            any(request.leave for request in given),
        )


NOTHING_ASKED = StepRequest()


@dataclass(frozen=True)
class Skipped:
    """The lanes whose loss is not finite, and the samples that they have read. Their whole step is void, unless it
    `is_partial`: where lanes are applied one by one, only these are left out."""

    lanes: tuple[int, ...]
    samples: tuple[int, ...]
    is_partial: bool = False


@dataclass(frozen=True)
class Shortage:
    """A step that is done again with more micro-batches: somewhere, memory ran out with the number that was `tried`, in
    these `lanes`, as `why` says. No lanes: some workers had tried fewer, and know now what the others knew."""

    tried: int
    lanes: tuple[int, ...] = ()
    why: str = ""


NO_NORMS: Mapping[str, float] = MappingProxyType({})


class Agreement(NamedTuple):
    """What all workers know of a step, and know alike, before the state changes.

    Nothing of a step that `is_void` may reach the state; one with a `shortage` is done again. `present` says which
    parameters have a gradient, as bits, and `buffers` are the values to commit. `bad` samples were left out; `why` says
    of the first of them what is wrong. `data_s` are the seconds that the worker which waited longest has waited for
    data, `put_back` the names of what user code has assigned. `scaling` is known with the sum of the gradients: where
    these overflow, the optimizers leave the step out. `digests` are those of each lane, where they are asked for.

    When the step is completed, it has the norm of each optimizer's gradient, before clipping, and what the strategy has
    `told` of it; `learning_rates` are there if they are not those of now.
    """

    samples: int
    tally: Tally
    present: int
    losses: dict[str, LossSum]
    log: dict[str, float]
    buffers: dict[str, torch.Tensor]
    request: StepRequest
    skipped: Skipped | None = None
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    data_s: float = 0.0
    put_back: tuple[str, ...] = ()
    shortage: Shortage | None = None
    scaling: Scaling = Scaling()
    digests: tuple[tuple[int, ...], ...] = ()
    norms: Mapping[str, float] = NO_NORMS
    told: tuple[Event, ...] = ()
    learning_rates: dict[str, float] | None = None

    @property
    def planned(self) -> int:
        """How many samples the step was to have, by which each lane has weighted its gradient."""
        return self.samples + len(self.bad)

    @property
    def is_void(self) -> bool:
        """Whether the step changes nothing: a loss is not finite, memory ran out, or no lane has a single sample."""
        is_skipped = self.skipped is not None and not self.skipped.is_partial
        return is_skipped or self.shortage is not None or not self.samples


def advanced(progress: Progress, agreed: Agreement) -> Progress:
    """How far a job is with one more step."""
    if agreed.is_void:
        return progress.after_step(0, bad=len(agreed.bad), is_barren=not agreed.samples)
    after = progress.after_step(agreed.samples, agreed.tally, bad=len(agreed.bad))
    return replace(after, overflows=after.overflows + 1) if agreed.scaling.overflowed else after


def step_completed(
    plan: StepPlan,
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
    seconds, skipped = timing.seconds, agreement.skipped
    # A step that changes nothing has no loss. What ends an epoch tells what the ledger must know of it.
    losses: dict[str, float | None] = {name: loss.mean for name, loss in agreement.losses.items()}
    if agreement.is_void:
        losses = dict.fromkeys(optimizers)
    # A lane without samples has none.
    told = () if tensors is None else agreement.digests
    lanes = [[f"{each:016x}" for each in of_lane] or [""] for of_lane in told]
    by_tensor = len(max(lanes, key=len, default=[])) > 1
    return StepCompleted(
        step=plan.step,
        epoch=plan.epoch,
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
        own_order=plan.own_order,
        dropped=tuple(sorted(sampler.dropped(plan.epoch).tolist())) if plan.ends_epoch else (),
        planned=str(sampler.planned(plan.epoch)) if plan.ends_epoch and plan.own_order else None,
        # Of another worker, for which this one has waited in the exchange.
        longest_data_s=agreement.data_s if agreement.data_s > seconds[DATA] + 1e-6 else None,
        draws=draws,  # what is decoded is another sample in each epoch, and cannot be cached
        log=agreement.log or None,
        # All of them, however many: the ledger adds up what was left out with what was used.
        bad_samples=len(agreement.bad),
        bad=ranges_of(agreement.bad) if agreement.bad else (),
        warnings=warnings,
        loss_scale=agreement.scaling.scale,
        overflow=agreement.scaling.overflowed,
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


@dataclass(frozen=True)
class PendingStep:
    """A step that the device still computes. What all do at its end is known at once; what became of it, when its
    numbers have arrived: `finish` waits for them, and raises what is wrong with the step. Steps are finished in order.
    """

    request: StepRequest
    arriving: Numbers
    finish: Callable[[], Agreement]


class Strategy(Protocol):
    """Turns the lanes' results into the next state, together with the other members of a generation.

    It is `worker` who hosts these lanes, and who `leads` is the first in what `gather` gives, and commits checkpoints.

    The loop calls it from one thread: for each step `begin` before the first lane runs, after which gradients may be
    exchanged as they become ready, and `advance` after the last. That exchanges, agrees with all others on the step and
    on what anybody was asked to do, and updates; the lease is checked before the state changes, and trouble is raised
    before that. `gather`, in evaluations and saves, has the payloads of all members on every one of them, those of
    workers in lane order. `close`, at the end of the generation, lets go of the other members, and of the parameters.
    """

    @property
    def worker(self) -> int: ...

    @property
    def hosted(self) -> range: ...

    @property
    def leads(self) -> bool: ...

    def begin(self, step: int) -> None: ...

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement: ...

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]: ...

    def close(self) -> None: ...


class Lag(Protocol):
    """Agrees on steps on the device, and updates there, before anybody has read them: on those that it `can_take`, as
    they do without the host. A strategy that need not wait for its device at each step has one as its `lag`."""

    def can_take(self, results: Sequence[LaneResult]) -> bool: ...

    def begin(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> PendingStep: ...

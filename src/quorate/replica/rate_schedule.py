"""The schedule of the learning rate: how the job file's moves, and whether a task's was meant to count epochs."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.optim import lr_scheduler

from quorate.data.sampler import Sampler
from quorate.spec.job import ScheduleSpec

_FADED = 0.1
"""A rate that falls below this part of itself within its first epoch was hardly meant to."""


def factor_at(schedule: ScheduleSpec, step: int, sampler: Sampler) -> float:
    """What the base rate is multiplied by at a step of a job; the same for a whole epoch where epochs are counted."""
    if schedule.per == "epoch":
        epochs = -(-sampler.total_steps // sampler.steps_per_epoch)
        return rate_factor(schedule, sampler.epoch_of(step) + 1, epochs)
    return rate_factor(schedule, step, sampler.total_steps)


def rate_factor(schedule: ScheduleSpec, step: int, total_steps: int) -> float:
    """What the base rate is multiplied by at a step (counted from 1): up over the warm-up, then down to `final`."""
    if step <= schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "range":
        return float(schedule.final ** (1.0 - (step - 1) / (total_steps - 1)))
    # From the full rate at the first step after the warm-up; `final` is reached just after the last one, so that no
    # step is wasted on a rate of zero.
    done = min(1.0, (step - 1 - schedule.warmup) / max(1, total_steps - schedule.warmup))
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final + (1.0 - schedule.final) * shape


def notice_of_pace(schedule: ScheduleSpec | None, schedulers: Iterable[Any], sampler: Sampler) -> str | None:
    """What to say of a task's schedule that steps after every update, and looks as if it were to count epochs."""
    length = sampler.steps_per_epoch
    if schedule is not None or length == 1 or sampler.total_steps <= length:
        return None  # said by the job, or there is no difference
    for scheduler in schedulers:
        # Whether all that it does is over within the first epoch, if it steps after every update.
        ends = [_ENDS[type(part)](part, length) for part in _parts(scheduler) if type(part) in _ENDS]
        if ends and all(ends):
            return (
                f"{type(scheduler).__name__} steps after every update, {length:,} times an epoch, and looks as if it "
                "counts epochs. To step it once an epoch, write `schedule: {per: epoch}` in the job file; "
                "`schedule: {per: step}` keeps it as it is, without this notice."
            )
    return None


def _parts(scheduler: Any) -> list[Any]:
    inner = getattr(scheduler, "_schedulers", None)
    return [scheduler] if inner is None else [part for each in inner for part in _parts(each)]


def _product(factor: Callable[[int], float], step: int) -> float:
    return float(factor(1) ** step)


def _fades(factor: Callable[[int], float], length: int) -> bool:
    try:
        return bool(factor(length) < _FADED * factor(1))
    except Exception:  # such as a list that has a rate for each epoch, and no more
        return True


_ENDS: dict[type, Callable[[Any, int], bool]] = {
    lr_scheduler.StepLR: lambda it, length: it.step_size < length,
    lr_scheduler.MultiStepLR: lambda it, length: max(it.milestones, default=length) < length,
    lr_scheduler.CosineAnnealingLR: lambda it, length: it.T_max < length,
    lr_scheduler.CosineAnnealingWarmRestarts: lambda it, length: length > it.T_0,
    lr_scheduler.PolynomialLR: lambda it, length: it.total_iters < length,
    lr_scheduler.ExponentialLR: lambda it, length: it.gamma**length < _FADED,
    lr_scheduler.MultiplicativeLR: lambda it, length: any(_fades(partial(_product, f), length) for f in it.lr_lambdas),
    lr_scheduler.LambdaLR: lambda it, length: any(_fades(f, length) for f in it.lr_lambdas),
}
"""Those that make a rate fall; whatever is not here is a warm-up, or counts updates by its nature (OneCycleLR)."""

"""Learning rates: the job file's schedule, as a pure function of the step."""

import math

from quorate.spec.job import ScheduleSpec


def rate_factor(schedule: ScheduleSpec, step: int, total_steps: int) -> float:
    """What the base rate is multiplied by at a step (counted from 1): up over the warm-up, then down to `final`."""
    if step <= schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    # From the full rate at the first step after the warm-up; `final` is reached just after the last one, so that no
    # step is wasted on a rate of zero.
    done = min(1.0, (step - 1 - schedule.warmup) / max(1, total_steps - schedule.warmup))
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final + (1.0 - schedule.final) * shape

"""How many cores' worth of work this process can do at once."""

import math
import os

from quorate.core.cgroup import read_limits


def usable_cores() -> int:
    """The cores that this process may run on, or fewer where its container is given less time than that."""
    return cores_within(len(os.sched_getaffinity(0)), read_limits().cores)


def cores_within(allowed: int, quota: float | None) -> int:
    """Whole cores: a worker that is given half a core's time makes all others wait for it at every step."""
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))

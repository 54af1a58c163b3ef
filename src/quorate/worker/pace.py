"""A worker's own pace, from one heartbeat to the next."""

import threading
from collections.abc import Mapping

from quorate.core.worker_status import APPLY, COMPUTE, DATA, Pace

_OWN = (DATA, COMPUTE, APPLY)


class PaceMeter:
    """Told of each step by the thread that trains, and asked by the one that sends heartbeats."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._seconds = dict.fromkeys(_OWN, 0.0)
        self._steps = 0
        self._runs = 0
        self._lanes = 0

    def add_step(self, seconds: Mapping[str, float], lanes: int) -> None:
        """A step with so many lanes took so long, by phase."""
        with self._turn:
            for phase in _OWN:
                self._seconds[phase] += seconds[phase]
            self._steps += 1
            self._runs += lanes
            self._lanes = lanes

    def take(self) -> Pace | None:
        """The mean of the steps that have not been told yet, if there are any.

        Those of a heartbeat that is lost are lost with it: others follow.
        """
        with self._turn:
            seconds, steps, runs = self._seconds, self._steps, self._runs
            self._seconds, self._steps, self._runs = dict.fromkeys(_OWN, 0.0), 0, 0
        if not runs:
            return None
        return Pace(steps, self._lanes, seconds[DATA] / runs, seconds[COMPUTE] / runs, seconds[APPLY] / steps)

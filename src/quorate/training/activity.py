"""What a worker is doing right now, and for how long it has been doing each thing in this step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

DATA, COMPUTE, EXCHANGE, APPLY = "data", "compute", "exchange", "apply"
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"


class Activity:
    """Phases of a step: told to whoever watches as they begin, and timed."""

    def __init__(self, tell: Callable[[int, str, int | None], None]) -> None:
        self._tell = tell
        self.step = 0
        self.lane: int | None = None
        self.phase = "start"
        self.seconds: dict[str, float] = {}

    def begin_step(self, step: int) -> None:
        """Times count from zero again."""
        self.step = step
        self.seconds = dict.fromkeys((DATA, COMPUTE, EXCHANGE, APPLY), 0.0)

    @contextmanager
    def during(self, phase: str, lane: int | None = None) -> Iterator[None]:
        """The worker is in this phase. After an error the place stays as it was, for the report."""
        self.phase, self.lane = phase, lane
        self._tell(self.step, phase, lane)
        started = perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - started
        self.lane = None

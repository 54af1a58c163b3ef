"""What a worker is doing right now, and for how long it has been doing each thing in this step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from quorate.core.spans import SpanRecorder
from quorate.core.worker_status import APPLY, COMPUTE, DATA, EXCHANGE


class Activity:
    """Phases of a step: written to the worker's status as they begin, and timed.

    `moves` changes whenever the worker comes further inside a phase, which tells a slow one from one that is stuck.
    `write_samples` tells which samples of an epoch the lane reads that the worker is in; `add_step` counts the times of
    a complete step, with so many lanes, for the worker's pace. `spans` is there in a step that is traced.
    """

    def __init__(
        self,
        write_status: Callable[[int, str, int | None], None],
        write_samples: Callable[[int, memoryview], None] = lambda _epoch, _samples: None,
        add_step: Callable[[Mapping[str, float], int], None] = lambda _seconds, _lanes: None,
        stretch: Callable[[str, float], float] | None = None,
    ) -> None:
        self._write_status = write_status
        self.write_samples = write_samples
        self.add_step = add_step
        self._stretch = stretch
        self.step = 0
        self.lane: int | None = None
        self.phase = "start"
        self.moves = 0
        self.waits_for = ""
        self.seconds: dict[str, float] = {}
        self.spans: SpanRecorder | None = None
        self._entered = 0.0

    def begin_step(self, step: int) -> None:
        self.step = step
        self.seconds = dict.fromkeys((DATA, COMPUTE, EXCHANGE, APPLY), 0.0)

    def enter(self, phase: str, lane: int | None = None) -> None:
        """The worker is in this phase until it leaves it; no phase is inside another."""
        self.phase, self.lane = phase, lane
        self._write_status(self.step, phase, lane)
        if self.spans is not None:
            self.spans.enter(phase, lane)
        self._entered = perf_counter()

    def leave(self) -> None:
        """Not called after an error: the place stays as it was, for the report."""
        seconds = perf_counter() - self._entered
        if self._stretch is not None:  # somebody makes this worker slow
            seconds += self._stretch(self.phase, seconds)
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + seconds
        self.lane = None
        if self.spans is not None:
            self.spans.leave()

    def count_as(self, phase: str, seconds: float) -> None:
        """So long the worker has done another phase's work within this one."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._entered += seconds

    @contextmanager
    def during(self, phase: str, lane: int | None = None) -> Iterator[None]:
        """Both, around a `with` block: for what is not done at every step, since it costs more."""
        self.enter(phase, lane)
        yield
        self.leave()

    def advance(self) -> None:
        """It has come further in its phase: by a batch, or by a piece of a copy or of a save."""
        self.moves += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Until the end of a `with` block the worker does nothing itself, and waits for this."""
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = ""
            self.advance()

"""What a worker is doing right now, how long each thing takes, and which steps are traced."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE, JOIN, Generation
from quorate.core.spans import CONNECT, SAVE, STEP, Span, SpanRecorder
from quorate.core.timing import ClockOffset
from quorate.observe.event import Event


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


@dataclass
class Tracer:
    """Traces one step in `every`, and the first of each generation with the way into it: so a recovery is traced too.

    A step lasts until the next begins: what follows from it, such as an evaluation, is in its trace. One that is not
    completed is not told. `offset` says how far the coordinator's clock is ahead of this process's monotonic one.
    """

    every: int
    worker: int
    publish: Callable[[Event], None]
    offset: Callable[[], ClockOffset | None]
    _generation: Generation | None = None
    _join: SpanRecorder | None = None
    _step: int = 0
    _spans: SpanRecorder | None = None

    def join(self, generation: Generation) -> None:
        """The worker knows of a generation, and begins to connect to its other members."""
        self._generation = generation
        self._join = self._recorder(JOIN, generation.cursor.step + 1)
        self._join.enter(CONNECT, None)

    def enter(self, phase: str) -> None:
        """The next part of the way into a generation."""
        if self._join is not None:
            self._join.leave()
            self._join.enter(phase, None)

    def begin_step(self, step: int) -> SpanRecorder | None:
        """What to record the step with, if it is traced. What was recorded of the last one is published."""
        self._finish()
        is_first = self._join is not None
        if self._join is not None:
            self._join.leave()
            self._join.end()
            self._join = None
        if step % self.every and not is_first:
            return None
        self._step, self._spans = step, self._recorder(STEP, step)
        return self._spans

    def begin_save(self, step: int) -> SpanRecorder:
        """What to record the checkpoint of a step with: it goes its own way, while training goes on."""
        return self._recorder(SAVE, step)

    def end(self, completed: int) -> None:
        """The generation is over, after that step: one that was under way is not told."""
        if self._step > completed:
            self._spans = None
        self._finish()
        self._join = None

    def _finish(self) -> None:
        if self._spans is not None:
            self._spans.end()
            self._spans = None

    def _recorder(self, root: str, step: int) -> SpanRecorder:
        assert self._generation is not None, "a worker joins a generation first"
        return SpanRecorder(root, partial(self._tell, self._generation, step))

    def _tell(self, generation: Generation, step: int, spans: tuple[Span, ...]) -> None:
        began = spans[0].start
        own = time.time() - time.monotonic()
        known = self.offset()
        # Only here: most jobs are not traced.
        from quorate.observe.seldom_events import StepTraced

        event = StepTraced(
            step=step,
            generation=str(generation.id),
            worker=self.worker,
            first=generation.members[0].worker,
            began=began + (own if known is None else known.seconds),
            clock_offset=None if known is None else known.seconds - own,
            clock_uncertainty=None if known is None else known.uncertainty,
            spans=tuple(span._replace(start=span.start - began) for span in spans),
        )
        self.publish(event)

"""Which steps of a worker are traced, and what becomes of their spans: events in the coordinator's time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quorate.core.generation import Generation
from quorate.core.spans import CONNECT, SAVE, STEP, Span, SpanRecorder
from quorate.core.timing import ClockOffset
from quorate.core.worker_status import JOIN
from quorate.observe.event import Event


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

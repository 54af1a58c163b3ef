"""What a worker is doing right now, and for how long it has been doing each thing in this step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from quorate.core.worker_status import APPLY, COMPUTE, DATA, EXCHANGE
from quorate.data.indices import Indices


class Activity:
    """Phases of a step: written to the worker's status as they begin, and timed.

    `moves` changes whenever the worker comes further inside a phase, which tells a slow one from one that is stuck.
    """

    def __init__(
        self,
        write_status: Callable[[int, str, int | None], None],
        write_samples: Callable[[int, memoryview], None] = lambda _epoch, _samples: None,
        add_step: Callable[[Mapping[str, float], int], None] = lambda _seconds, _lanes: None,
        stretch: Callable[[str, float], float] | None = None,
    ) -> None:
        self._write_status = write_status
        self._write_samples = write_samples
        self._add_step = add_step
        self._stretch = stretch
        self.step = 0
        self.lane: int | None = None
        self.phase = "start"
        self.moves = 0
        self.waits_for = ""
        self.seconds: dict[str, float] = {}
        self._entered = 0.0

    def begin_step(self, step: int) -> None:
        """Times count from zero again."""
        self.step = step
        self.seconds = dict.fromkeys((DATA, COMPUTE, EXCHANGE, APPLY), 0.0)

    def during(self, phase: str, lane: int | None = None) -> "Activity":
        """For a `with` block, of which none stands inside another: the worker is in this phase.

        After an error the place stays as it was, for the report. (A generator would cost three times as much.)
        """
        self.phase, self.lane = phase, lane
        self._write_status(self.step, phase, lane)
        self._entered = perf_counter()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        seconds = perf_counter() - self._entered
        if self._stretch is not None:  # somebody makes this worker slow
            seconds += self._stretch(self.phase, seconds)
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + seconds
        self.lane = None

    def advance(self) -> None:
        """The worker has come further in the phase that it is in: by a batch, or by a piece of a copy or of a save."""
        self.moves += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For a `with` block: until its end the worker does nothing itself, and waits for this."""
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = ""
            self.advance()

    def reads(self, epoch: int, samples: Indices) -> None:
        """The lane that the worker is in reads these samples of an epoch."""
        self._write_samples(epoch, samples.data)

    def end_step(self, lanes: int) -> None:
        """The step, with so many lanes, is complete: its times count for the worker's pace."""
        self._add_step(self.seconds, lanes)

"""Who keeps the curves of a run for others to see, and how one is brought all that the run's file tells."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.core.masking import mask
from quorate.history.curves import LOSS, VALIDATION, Curves, Point, StepSet
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.observe.jsonl import EventTail, end_of_events
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER

log = logging.getLogger(__name__)

_SAVED_EVERY = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class Held:
    """The points that somebody has already: what is given again is not logged again."""

    def __init__(self) -> None:
        self._steps: dict[str, StepSet] = {}
        self._newest: dict[str, int] = {}

    def add(self, point: Point) -> None:
        if point.is_sample:
            self._newest[point.name] = max(point.milliseconds, self._newest.get(point.name, 0))
        else:
            self._steps.setdefault(point.name, StepSet()).add(point.step)

    def lacks(self, point: Point) -> bool:
        if point.is_sample:
            return point.milliseconds > self._newest.get(point.name, -1)
        return point.corrects or point.name not in self._steps or point.step not in self._steps[point.name]


class Series:
    """The shape of some curves: of each at most so many points, evenly spread, however long the run is."""

    _MOST = 4000

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self._stride: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, point: Point) -> None:
        """Of the curves that are drawn: losses, and what was measured on the validation set."""
        name = point.name
        if not (name == LOSS or name.startswith((f"{LOSS}.", f"{VALIDATION}/"))):
            return
        curve, stride = self.curves.setdefault(name, []), self._stride.setdefault(name, 1)
        seen = self._seen[name] = self._seen.get(name, -1) + 1
        if seen % stride == 0:
            curve.append((point.step, point.value))
        if len(curve) > self._MOST:
            del curve[1::2]
            self._stride[name] = 2 * stride


class Tracker:
    """Keeps the curves of one run: MLflow, TensorBoard, W&B. Whatever raises is tried again later.

    A `Follower` calls `begin` until it succeeds; then it gives it the events of the run's file, of which it makes
    points and sends them in batches; and calls `finish` when no more will come. Points that it was given before may
    come again, and are not to be there twice.
    """

    name: str
    """For people: what it is, and where."""
    key: str
    """For files: no other tracker of the run has it."""
    batch = 1000
    """Points in one call: MLflow takes no more."""

    def __init__(self, every: int = 1) -> None:
        self.sent = 0
        """How many points it was given that it did not have."""
        self.last_step = 0
        """Up to which step it has everything."""
        self.series = Series()
        self._curves = Curves(every)
        self._waiting: list[Any] = []

    def load(self) -> None:
        """Import its libraries, which takes seconds. May be called early, on any thread, or not at all; nothing else is
        called meanwhile."""

    def begin(self) -> bool:
        """Find or make its run. False if it is to be given all of the run's file, whatever it was given before."""
        raise NotImplementedError

    def log(self, points: Sequence[Any]) -> int:
        """Take points, which are safe when this returns; how many of them it did not have."""
        raise NotImplementedError

    def finish(self, status: str) -> None:
        """The run has ended: complete, failed, interrupted, terminated or lost."""

    def close(self) -> None:
        """Let go of what it has opened."""

    def recall(self, events: Iterable[Event]) -> None:
        """Know what was told before: the tracker has it."""
        for event in events:
            self._made(event)
        self.last_step = self._newest

    def handle(self, event: Event) -> None:
        """Take an event, and keep what is to be sent of it."""
        self._waiting += self._made(event)

    def flush(self) -> None:
        """All that was taken is safe when this returns. What raises is kept, and flushed again later."""
        while self._waiting:
            batch = self._waiting[: self.batch]
            self.sent += self.log(batch)
            del self._waiting[: self.batch]
            if isinstance(last := batch[-1], Point):
                # Of the step that the next batch begins with, this one may have a part.
                self.last_step = max(self.last_step, min(last.step - 1, self._newest))
        self.last_step = self._newest

    @property
    def _newest(self) -> int:
        """The last step that was told."""
        return self._curves.last_step

    def _made(self, event: Event) -> Sequence[Any]:
        """What an event adds to what was told before it."""
        points = self._curves.points(event)
        for point in points:
            self.series.add(point)
        return points


class Follower:
    """Brings a tracker every point of a run, once, whoever dies or is away meanwhile.

    It begins when there is a step to tell of: a job that is refused before its first one leaves no trace.
    """

    def __init__(self, run: RunFolder, tracker: Tracker, clock: Callable[[], float] = time.monotonic) -> None:
        self.tracker = tracker
        self.has_begun = False
        self.trouble: Exception | None = None
        self._clock = clock
        self._run = run
        self._pause = _FIRST_PAUSE
        self._not_before = clock()
        # How far the tracker has come, kept in a file, so that another process goes on there after a kill.
        self._offset_file = _file_of(run, tracker, "offset")
        self._tail = EventTail(run.events_file)
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._tail.offset = max(0, int(self._offset_file.read_text()))
        self._offset = self._tail.offset

    @property
    def sent(self) -> int:
        """How many points it was given by this process that it did not have."""
        return self.tracker.sent

    @property
    def last_step(self) -> int:
        """Up to which step it was given everything, by this process or, as far as that was written down, before."""
        if self.has_begun:
            return self.tracker.last_step
        try:
            told = _events_until(self._run.events_file, self._offset)
            return max((event.step or 0 for event in told if isinstance(event, StepCompleted)), default=0)
        except (OSError, RunError):
            return 0

    def has_all(self, status: str) -> bool:
        """Whether it was told, by whatever process, all that there is to tell, and that the run has ended so."""
        try:
            finished = _file_of(self._run, self.tracker, "finished")
            if finished.exists():
                # A run that was resumed has a longer file.
                return finished.read_text() == f"{status} {end_of_events(self._run.events_file)}"
            return self._offset == 0 and not self._has_steps()
        except (OSError, ValueError):
            return False

    def is_needed(self) -> bool:
        """Whether there is anything to bring: a job may be refused before its first step."""
        try:
            return self.has_begun or self._has_steps()
        except OSError:
            return True

    def poll(self, *, always_begin: bool = False, patiently: bool = True) -> bool:
        """Bring what is new; whether the tracker has all there is. One that is away is asked less and less often, if it
        is done `patiently`."""
        if patiently and self._clock() < self._not_before:
            return False
        try:
            if not self.has_begun:
                if not always_begin and not self._has_steps():
                    return True
                self._begin()
            self._bring()
        except Exception as error:  # of the tracker, or of the disk
            self._note(error)
            return False
        self._note(None)
        return True

    def finish(self, status: str) -> bool:
        """Tell the tracker how the run has ended; whether it took that."""
        try:
            self.tracker.finish(status)
        except Exception as error:
            self._note(error)
            return False
        with contextlib.suppress(OSError):  # then it is told once more
            write_atomically(_file_of(self._run, self.tracker, "finished"), f"{status} {self._offset}")
        self._note(None)
        return True

    def close(self) -> None:
        """Let go of what it has opened."""
        self.tracker.close()

    def _begin(self) -> None:
        # A file that has become shorter is another file.
        if self.tracker.begin() and self._offset <= end_of_events(self._run.events_file):
            self.tracker.recall(_events_until(self._run.events_file, self._offset))
        else:
            write_atomically(self._offset_file, "0")
            self._offset = self._tail.offset = 0
        self.has_begun = True
        log.info("%s: begun at byte %d of the run's file", self.tracker.name, self._offset)

    def _bring(self) -> None:
        """Give it every event of the file, in order and at least once. Where something raises, the same event is
        given again by the next call, and nothing after it before."""
        self._advance()
        for handled, event in enumerate(self._tail):
            if handled % _SAVED_EVERY == 0:
                self._advance()
            self.tracker.handle(event)
        self._advance()

    def _advance(self) -> None:
        """Write down how far the tracker has come, once that is safe."""
        if self._tail.offset == self._offset:
            return
        self.tracker.flush()
        self._offset = self._tail.offset
        with contextlib.suppress(OSError):  # a full disk: after a restart more is given again
            write_atomically(self._offset_file, str(self._offset))

    def _has_steps(self) -> bool:
        tail = EventTail(self._run.events_file)
        tail.offset = self._offset
        return any(isinstance(event, StepCompleted) for event in tail)

    def _note(self, trouble: Exception | None) -> None:
        if trouble is None:
            if self.trouble is not None:
                log.info("%s: it works again", self.tracker.name)
            self._pause, self._not_before = _FIRST_PAUSE, self._clock()
        else:
            # Each kind of trouble once: a server may be away for a day.
            if type(trouble) is not type(self.trouble):
                log.warning("%s: %s. It is tried again.", self.tracker.name, reason(trouble))
            self._not_before = self._clock() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.trouble = trouble


def reason(error: BaseException) -> str:
    """Why something failed, in a line: libraries tell whole stories, and addresses with passwords."""
    # SQLAlchemy begins with how it came to do what has failed.
    lines = (line.strip() for line in mask(str(error)).splitlines())
    told = next((line for line in lines if line and not line.startswith("(raised as a result")), type(error).__name__)
    return told if len(told) <= 200 else f"{told[:199]}…"


def _file_of(run: RunFolder, tracker: Tracker, kind: str) -> Path:
    return run.path / FOLDER / f"{tracker.key}.{kind}"


def _events_until(file: Path, offset: int) -> Iterator[Event]:
    tail = EventTail(file)
    for event in tail:
        if tail.offset >= offset:
            return
        yield event

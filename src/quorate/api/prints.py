"""What a task prints and logs, from the logs of its run to whoever looks on: nobody who trains waits for a terminal."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from quorate.core.log_records import STDERR, STDOUT, WARNINGS
from quorate.history.logs import LogRecord, RunLogs
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, RunFinished
from quorate.observe.sinks import Printed, Round, Sink
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder

LOOK_EVERY = 0.2
MOST_LINES = 200
"""Lines of a look that are shown, the last ones: a terminal takes no more, and the log has them all."""
BAR_EVERY = 10.0
"""Seconds between two states of a progress bar that are shown, until it has come to its end."""
SPEAKERS = ("worker-*", "fork_server*")


class WithPrints:
    """A sink that is also told what the task prints and logs in the processes of a run, from now on.

    The end of the job is told after what was printed before it, which the log has once all processes have ended.
    """

    def __init__(self, sink: Sink, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._logs = RunLogs(run, SPEAKERS)
        self._logs.skip()
        self._due = clock()
        # Since when which worker has hosted the first lane: one that is lost has printed before that.
        self._first: list[tuple[float, int]] = []
        # By processes, of progress bars that have not ended: the newest state, and when one was shown.
        self._bars: dict[str, LogRecord] = {}
        self._bar_shown: dict[str, float] = {}
        self._end: Event | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            self._end = event
            return
        if isinstance(event, GenerationFormed) and event.members:
            host = next((each.worker for each in event.members if 0 in each.lanes), event.members[0].worker)
            self._first.append((event.time, host))
        if isinstance(event, Round) and (event.is_last or self._clock() >= self._due):
            self._due = self._clock() + LOOK_EVERY
            for printed in self._new(is_last=event.is_last):
                self._sink.handle(printed)
        self._sink.handle(event)
        if self._end is not None and isinstance(event, Round) and event.is_last:
            self._sink.handle(self._end)

    def close(self) -> None:
        self._sink.close()

    def _new(self, *, is_last: bool) -> Iterator[Printed]:
        count, newest = 0, deque[LogRecord](maxlen=MOST_LINES)
        for record in self._of_task(is_last=is_last):
            count += 1
            newest.append(record)
        left_out = count - len(newest)
        for (process, is_first), alike in groupby(newest, lambda each: (each.process, self._is_first(each))):
            lines = tuple(line for record in alike for line in _lines(record))
            yield Printed(process=process, lines=lines, is_first=is_first, left_out=left_out)
            left_out = 0

    def _of_task(self, *, is_last: bool) -> Iterator[LogRecord]:
        """What is new and not of Quorate itself; of a progress bar its end, and now and then how far it is."""
        for record in self._logs.new():
            process, source = record.process, record.fields.get("source")
            if record.fields.get("overwritten"):
                self._bars[process] = record
                if record.time - self._bar_shown.setdefault(process, record.time) < BAR_EVERY:
                    continue
                self._bar_shown[process] = record.time
                yield self._bars.pop(process)
            elif source in (STDOUT, STDERR):
                if source == STDERR:
                    self._bars.pop(process, None)
                    self._bar_shown.pop(process, None)
                yield record
            elif _is_logged_by_task(record.fields):
                yield record
        if is_last:
            yield from self._bars.values()

    def _is_first(self, record: LogRecord) -> bool:
        # Python gives a warning once in a process, in whichever lane that may be.
        if record.fields.get("lane") and record.fields.get("logger") != WARNINGS:
            return False
        worker = record.fields.get("worker")
        hosts = [host for since, host in self._first if since <= record.time] or [0]
        return worker is None or worker == hosts[-1]


def _is_logged_by_task(fields: Mapping[str, Any]) -> bool:
    """By the task or a library that it uses, and not printed by a handler of its own as well."""
    logger = str(fields.get("logger", "quorate"))
    return logger.partition(".")[0] != "quorate" and not fields.get("printed") and fields.get("level") != "debug"


def _lines(record: LogRecord) -> list[str]:
    logger = record.fields.get("logger")
    head = "" if logger in (None, WARNINGS) else f"{record.level.upper()} {logger}: "
    return [*(f"{head}{record.message}".splitlines() or [""]), *record.exception.splitlines()]


@dataclass(frozen=True)
class RunStart:
    """What is known when a run begins, for whoever shows it."""

    run: RunFolder
    spec: JobSpec
    workers: int


class NoDisplay:
    """Shows nothing."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


Watch = Callable[[RunStart], Sink]
"""Called once when a run begins; what it returns is told every event, and then that there are no more."""

"""What a task prints, from the logs of its run to whoever looks on: nobody who trains waits for a terminal."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby

from quorate.core.log_records import STDOUT
from quorate.history.logs import LogRecord, RunLogs
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, RunFinished
from quorate.observe.live import Printed, Round
from quorate.observe.sinks import Sink
from quorate.storage.run_folder import RunFolder

LOOK_EVERY = 0.2
MOST_LINES = 200
"""Lines of a look that are shown, the last ones: a terminal takes no more, and the log has them all."""
SPEAKERS = ("worker-*", "fork_server*")


class WithPrints:
    """A sink that is also told what the processes of a run print, from now on.

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
            for printed in self._new():
                self._sink.handle(printed)
        self._sink.handle(event)
        if self._end is not None and isinstance(event, Round) and event.is_last:
            self._sink.handle(self._end)

    def close(self) -> None:
        self._sink.close()

    def _new(self) -> Iterator[Printed]:
        count, newest = 0, deque[LogRecord](maxlen=MOST_LINES)
        for record in self._logs.new():
            if record.fields.get("source") == STDOUT:
                count += 1
                newest.append(record)
        left_out = count - len(newest)
        for (process, is_first), alike in groupby(newest, lambda each: (each.process, self._is_first(each))):
            lines = tuple(record.message for record in alike)
            yield Printed(process=process, lines=lines, is_first=is_first, left_out=left_out)
            left_out = 0

    def _is_first(self, record: LogRecord) -> bool:
        worker = record.fields.get("worker")
        hosts = [host for since, host in self._first if since <= record.time] or [0]
        return worker is None or worker == hosts[-1]

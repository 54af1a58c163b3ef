"""TensorBoard: event files in the run folder."""

import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quorate.history.curves import Point
from quorate.storage.atomic import write_fully
from quorate.storage.run_folder import RunFolder
from quorate.tracking.tracker import Held, Tracker

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Writes curves as scalars. Each process that tracks a run adds a file, of what the files before it do not have."""

    name = "TensorBoard"
    key = "tensorboard"

    def __init__(self, run: RunFolder, every: int = 1) -> None:
        super().__init__(every)
        self._folder = run.path / FOLDER
        self._held = Held()
        self._file: int | None = None

    def load(self) -> None:
        import tensorboard.backend.event_processing.event_file_loader
        import tensorboard.summary.writer.record_writer  # noqa: F401

    def begin(self) -> bool:
        self._folder.mkdir(exist_ok=True)
        self._held = Held()
        there = False
        for point in read_back(self._folder):
            self._held.add(point)
            there = True
        return there

    def log(self, points: Sequence[Point]) -> int:
        from tensorboard.compat.proto import event_pb2

        new = [point for point in points if self._held.lacks(point)]
        if not new:
            return 0
        if self._file is None:
            name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        events = [_event(list(group)) for _, group in itertools.groupby(new, lambda point: (point.step, point.time))]
        if not os.fstat(self._file).st_size:
            # Without it TensorBoard would take a look at the machine that is a step behind for a restart.
            events.insert(0, event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(events)
        return len(new)

    def finish(self, status: str) -> None:  # noqa: ARG002
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, events: Sequence[Any]) -> None:
        """All of them or none: whoever reads a file stops at half a record."""
        assert self._file is not None
        whole = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            write_fully(self._file, b"".join(_record(event.SerializeToString()) for event in events))
        except OSError:
            os.ftruncate(self._file, whole)
            os.lseek(self._file, whole, os.SEEK_SET)
            raise


def read_back(folder: Path) -> Iterator[Point]:
    """The points of all event files."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for file in sorted(folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield Point(value.tag, value.simple_value, event.step, event.wall_time)


def _event(points: Sequence[Point]) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    values = [summary_pb2.Summary.Value(tag=point.name, simple_value=point.value) for point in points]
    return event_pb2.Event(wall_time=points[0].time, step=points[0].step, summary=summary_pb2.Summary(value=values))


def _record(content: bytes) -> bytes:
    """Framed as a record of TensorFlow."""
    import io

    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(content)
    return framed.getvalue()

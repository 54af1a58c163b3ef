"""The logs of a run, read back: what all its processes have logged and printed, in the order of time."""

import contextlib
import heapq
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from quorate.core.generation import member_of
from quorate.core.log_records import level_number
from quorate.core.masking import mask
from quorate.core.regular_file import opened_regular
from quorate.storage.log_file import parts_of
from quorate.storage.run_folder import RunFolder

LOOK_EVERY = 0.2
LAST_LOOKS = 2
"""How often logs are looked at once more when the job has ended: what was printed last may still be on its way."""

_LONGEST = 2**23
"""Bytes of a line that are read at a time: a file may be of anybody's making."""

_ATTEMPTS = 10
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) [\w.]+: (.*)", re.DOTALL)


@dataclass(frozen=True)
class LogRecord:
    """One line of a log. `order` is its time, but never before that of a line which stands before it in its file."""

    order: float
    fields: Mapping[str, Any]

    @property
    def time(self) -> float:
        return _number(self.fields.get("time"))

    @property
    def level(self) -> str:
        return str(self.fields.get("level", "info"))

    @property
    def process(self) -> str:
        return str(self.fields.get("process", ""))

    @property
    def message(self) -> str:
        return str(self.fields.get("message", ""))

    @property
    def exception(self) -> str:
        return str(self.fields.get("exception", ""))


@dataclass(frozen=True)
class Filter:
    """Which lines are wanted: all of them, unless something is said."""

    worker: int | None = None
    level: str = ""
    text: str = ""

    def takes(self, record: LogRecord) -> bool:
        if self.worker is not None and record.fields.get("worker") != self.worker:
            return False
        if self.level and _severity(record.level) < _severity(self.level):
            return False
        wanted = self.text.lower()
        return not wanted or wanted in record.message.lower() or wanted in record.exception.lower()


class RunLogs:
    """The logs of a run, or those whose names match a pattern. `new` gives what was written since the last call, in the
    order of time."""

    def __init__(self, run: RunFolder, names: Sequence[str] = ("*",)) -> None:
        self._run = run
        self._names = names
        self._logs: dict[Path, _Log] = {}

    def skip(self) -> None:
        """Leave out what there is so far."""
        self._find()
        for log in self._logs.values():
            log.skip()

    def new(self) -> Iterator[LogRecord]:
        self._find()
        # What was asked for later cannot go before what was shown already: each call is merged by itself.
        yield from heapq.merge(*(log.new() for log in self._logs.values()), key=attrgetter("order"))

    def _find(self) -> None:
        for path in (path for name in self._names for path in self._run.logs.glob(name)):
            # The one that is written may not be there: it was full, and the next begins with the next line.
            if (name := re.fullmatch(r"(.+\.(?:jsonl|log))(?:\.\d+)?", path.name)) is not None:
                log = path.with_name(name[1])
                self._logs.setdefault(log, _Log(log))

    def follow(self, is_running: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> Iterator[LogRecord]:
        """All there is and all that comes, until the job has ended."""
        remaining = LAST_LOOKS
        while True:
            if not is_running():
                remaining -= 1
            yield from self.new()
            if remaining <= 0:
                return
            wait(LOOK_EVERY)


class _Log:
    """One log, which may have several files: where its reader is, by the file's number and the place in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._beginning = b""
        self._offset = 0
        self._order = 0.0
        stem = path.stem
        self._process = re.sub(r"-(?=\d+$)|_", " ", stem)
        self._worker = member_of(stem)

    def new(self) -> Iterator[LogRecord]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(file) for file in self._open_all()]
            # The file that was read last: a new one may have the number of one that was removed.
            known = next(
                (
                    at
                    for at, file in enumerate(files)
                    if os.fstat(file.fileno()).st_ino == self._inode and _beginning(file).startswith(self._beginning)
                ),
                None,
            )
            for at, file in list(enumerate(files))[known or 0 :]:
                if at != known:
                    self._inode, self._beginning, self._offset = os.fstat(file.fileno()).st_ino, b"", 0
                yield from self._read(file, is_last=at == len(files) - 1)
                self._beginning = _beginning(file)[: self._offset]

    def skip(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in [stack.enter_context(file) for file in self._open_all()][-1:]:
                about = os.fstat(file.fileno())
                self._inode, self._offset = about.st_ino, about.st_size
                self._beginning = _beginning(file)[: self._offset]

    def _open_all(self) -> list[io.BufferedReader]:
        """All its files, the oldest first. Again if they were renamed meanwhile: one might have been missed."""
        opened: list[tuple[Path, io.BufferedReader]] = []
        for _ in range(_ATTEMPTS):
            for _, file in opened:
                file.close()
            opened = []
            parts = list(parts_of(self._path))
            for part in parts:
                with contextlib.suppress(OSError):  # it is gone, or somebody else's
                    opened.append((part, opened_regular(part)))
            with contextlib.suppress(OSError):
                there = all(os.fstat(file.fileno()).st_ino == part.stat().st_ino for part, file in opened)
                if parts == list(parts_of(self._path)) and there:
                    break
        return [file for _, file in opened]

    def _read(self, file: io.BufferedReader, is_last: bool) -> Iterator[LogRecord]:
        if os.fstat(file.fileno()).st_size < self._offset:
            self._offset = 0  # it was written anew
        file.seek(self._offset)
        while line := file.readline(_LONGEST):
            if is_last and not line.endswith(b"\n") and len(line) < _LONGEST:
                return  # it is being written
            yield self._record(line, file)
            self._offset += len(line)

    def _record(self, line: bytes, file: io.BufferedReader) -> LogRecord:
        text = line.rstrip(b"\r\n").decode(errors="backslashreplace")
        fields: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(text)
        if not isinstance(fields, dict):  # a crash has left half a record, or it is the text log of an earlier version
            stamped = _STAMPED.fullmatch(text)
            moment, level, said = self._order or os.fstat(file.fileno()).st_mtime, "info", text
            if stamped is not None:
                moment = datetime.fromisoformat(stamped[1]).astimezone().timestamp() + int(stamped[2]) / 1000
                level, said = stamped[3].lower(), stamped[4]
            fields = {"time": moment, "level": level, "message": mask(said), "process": self._process}
            fields |= {} if self._worker is None else {"worker": self._worker}
        self._order = max(self._order, _number(fields.get("time")))
        return LogRecord(self._order, fields)


def _beginning(file: io.BufferedReader) -> bytes:
    return os.pread(file.fileno(), 64, 0)


def _severity(level: str) -> int:
    with contextlib.suppress(KeyError):
        return level_number(level)
    return 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

"""What a process logs, as records of JSON: one a line, with its time, its place in the job, and no secrets in it."""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

from quorate.core.masking import mask_all

RECORD = "\x1e"
"""Leads a record that goes the way of what a process prints: to standard error, in one piece. Control character
"record separator", which no text begins with."""

LANE = "\x1d"
"""Stands before and after the number of a lane, which leads a line that is printed in it. Control character "group
separator"."""

STDOUT, STDERR = "stdout", "stderr"
WARNINGS = "py.warnings"
"""The logger of Python's warnings."""

_LONGEST = 2**16
"""Characters of a message that are kept, and of a traceback the last ones."""


@dataclass
class Place:
    """Which process of which run this is; `moving` tells what changes: generation and step, and `lane` the lane that is
    being computed. They are asked at each record, so they must be cheap."""

    process: str
    run: str
    worker: int | None = None
    moving: Callable[[], Mapping[str, Any]] = field(default=dict)
    lane: Callable[[], int | None] = field(default=lambda: None)

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"process": self.process, "pid": os.getpid(), "run": self.run}
        if self.worker is not None:
            fields["worker"] = self.worker
        moving = {**self.moving(), "lane": self.lane()}
        return fields | {name: value for name, value in moving.items() if value is not None}


class RecordHandler(logging.Handler):
    """Gives each record of the logs, as one line of JSON, to `write`. Never raises into whoever logs."""

    def __init__(self, place: Place, write: Callable[[str], None]) -> None:
        super().__init__()
        self.place = place
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        # Also where a message does not fit its arguments: a mistake in a log must not become one of the job.
        with suppress(Exception):
            self._write(encoded(self._fields(record)))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            message = record.getMessage()
        except Exception as error:
            message = f"{record.msg!r} with {record.args!r} ({error!r})"
        fields: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message[:_LONGEST],
            **self.place.fields(),
        }
        if _is_printed(record.name):
            fields["printed"] = True
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)[-_LONGEST:]
        return mask_all(fields)  # type: ignore[no-any-return]


def _is_printed(name: str) -> bool:
    """Whether a handler of the task's own prints what this logger is given, so that it is in the log twice."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(getattr(handler, "stream", None) in (sys.stdout, sys.stderr) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class _StderrHandler(RecordHandler):
    """Writes to what is standard error now, whatever becomes of that, until it is closed."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, self._write_whole)
        self._descriptor = os.dup(2)

    def _write_whole(self, record: str) -> None:
        data = f"{RECORD}{record}\n".encode()
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def encoded(fields: Mapping[str, Any]) -> str:
    """A record as a line of JSON, without the line's end. What is no text is written as one."""
    return json.dumps(fields, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()


def log_by_stderr(place: Place, level: str) -> None:
    """Log by standard error, where whoever reads it tells records from what is printed.

    By a descriptor of its own: code of the task may close or redirect standard error.
    """
    _show_prints_at_once(place)
    logging.basicConfig(level=level.upper(), handlers=[_StderrHandler(place)], force=True)
    logging.captureWarnings(True)


@contextmanager
def also_logging(handler: RecordHandler, level: str) -> Iterator[None]:
    """Have what Quorate logs handled here as well, from this level on, while the block runs.

    Whoever else listens in this process, such as a terminal or a notebook, hears of what they heard of before. Blocks
    of several threads may overlap: the first changes the logger, and the last puts it back.
    """
    ours = logging.getLogger("quorate")
    with _turn:
        if not any(isinstance(one, _Forward) for one in ours.handlers):
            ours.addHandler(_Forward(ours))
        ours.setLevel(min(level_number(level), ours.getEffectiveLevel()))
        ours.addHandler(handler)
    try:
        yield
    finally:
        with _turn:
            ours.removeHandler(handler)
            if not any(isinstance(one, RecordHandler) for one in ours.handlers):
                for forward in [one for one in ours.handlers if isinstance(one, _Forward)]:
                    forward.put_back(ours)


_turn = threading.Lock()


class _Forward(logging.Handler):
    """To the handlers of all loggers, what would have reached them if nobody had changed this one."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._before = logger.level, logger.propagate
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        level, propagate = self._before
        root = logging.getLogger()
        if propagate and record.levelno >= (level or root.level):
            root.handle(record)

    def put_back(self, logger: logging.Logger) -> None:
        logger.removeHandler(self)
        logger.propagate = self._before[1]
        logger.setLevel(self._before[0])


def level_number(level: str) -> int:
    """The number by which the library compares a level."""
    return logging.getLevelNamesMapping()[level.upper()]


def current_place() -> Place | None:
    """The place of this process, where it logs records."""
    return next((one.place for one in logging.getLogger().handlers if isinstance(one, RecordHandler)), None)


def _show_prints_at_once(place: Place) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a task prints is there when it is printed, not when a buffer is full or lost with the process.
            stream.reconfigure(line_buffering=True)
            stream.write = _MarkedWrite(stream, place)  # type: ignore[method-assign]


class _MarkedWrite:
    """Writes text to a stream, and before each line the lane in which it is printed."""

    def __init__(self, stream: TextIOWrapper, place: Place) -> None:
        self._stream, self._place, self._is_new = stream, place, True

    def __call__(self, text: str) -> int:
        lane, marked = self._place.lane(), text
        if text and isinstance(text, str):
            if lane is not None:
                mark = f"{LANE}{lane}{LANE}"
                marked = (mark if self._is_new else "") + _LINE_BEGINS.sub(mark, text)
            self._is_new = text[-1] in "\r\n"
        TextIOWrapper.write(self._stream, marked)
        return len(text)


_LINE_BEGINS = re.compile(r"(?<=[\r\n])(?=[^\r\n])")

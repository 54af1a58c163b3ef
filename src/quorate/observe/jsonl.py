"""The file of a run's events: how it is written, and how it is followed from another process."""

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from quorate.core.errors import RunError
from quorate.core.masking import mask, mask_all
from quorate.core.regular_file import opened_regular
from quorate.observe.event import Event
from quorate.observe.events import LogMessage, read_event
from quorate.storage.log_file import LineFile

log = logging.getLogger(__name__)

SILENCE = 5.0
"""Seconds without an event after which the folder is tried: a job that tells something can obviously write it."""
_BLOCK = 4096


class JsonlSink(LineFile):
    """Appends each event to a file as one line of JSON.

    Trouble with the file never ends a job. It is told once in the log while it lasts, and in the file when it is over.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.dropped = 0
        self._missing = 0  # of those, the ones since the last that was written
        self._reason = ""
        self._closed = False

    def handle(self, event: Event) -> None:
        """Append an event; it is in the file when this returns, unless the file could not be written."""
        self.append(event.to_json())

    def append(self, line: str) -> None:
        if mask(line) != line:
            line = _masked(line)
        with self._turn:
            try:
                if self._closed:
                    raise OSError("the file is closed")
                self._append(self._note_of_missing() + line.encode() + b"\n")
                self._missing = 0
            except OSError as error:
                if not self._missing:
                    log.warning(
                        "cannot write to %s: %s. Training continues; events are dropped meanwhile.", self.path, error
                    )
                    self._reason = error.strerror or str(error)
                self.dropped += 1
                self._missing += 1

    def close(self) -> None:
        """Write no more; what is written later is dropped."""
        with self._turn:
            if self._missing and not self._closed:
                with contextlib.suppress(OSError):
                    self._append(self._note_of_missing())
            self._closed = True
            self._close()

    def _note_of_missing(self) -> bytes:
        """A line about the events that are not in the file, if there are such."""
        if not self._missing:
            return b""
        count = f"{self._missing:,} events are" if self._missing > 1 else "an event is"
        message = f"{count} missing here: {self.path.name} could not be written ({self._reason})"
        return LogMessage(message=message).to_json().encode() + b"\n"


def _masked(line: str) -> str:
    """An event without secrets, written as every other: readers know it by how it begins. A number stays what it is."""
    record = json.loads(line)
    masked = mask_all(record) | {"kind": record["kind"]}
    return line if masked == record else json.dumps(masked, separators=(",", ":"))


class EventTail:
    """Follows the file that a `JsonlSink` writes, from another process. The file may not exist yet.

    Where nothing comes because nothing can be written, it tells that itself.
    """

    def __init__(self, path: Path, watch: "DiskWatch | None" = None) -> None:
        self.path = path
        self.offset = 0
        self._watch = DiskWatch(path.parent) if watch is None else watch

    def read_new(self) -> list[Event]:
        """What was appended since the last call."""
        return events_in(self.read_lines())

    def read_lines(self, limit: int | None = None) -> list[str]:
        """The same as lines of JSON; where a crash has left half of one, that is among them.

        They are so many bytes at most, but for a single line that is longer.
        """
        lines: list[str] = []
        size = 0
        for line in self._whole_lines():
            size += len(line)
            if lines and limit is not None and size > limit:
                break
            if text := line[:-1].decode(errors="replace"):
                lines.append(text)
        warning = self._watch.look(has_news=bool(lines))
        return lines if warning is None else [*lines, warning.to_json()]

    def __iter__(self) -> Iterator[Event]:
        """What was appended, one by one.

        `offset` is behind an event when the next is asked for: whoever stops at one is given it again.
        """
        for line in self._whole_lines():
            with contextlib.suppress(ValueError):  # a crash has left half a line
                yield read_event(line)

    def _whole_lines(self) -> Iterator[bytes]:
        """The rest is read once it is whole."""
        try:
            with opened_regular(self.path) as file:
                # A file that has become shorter is another file: begin at its start.
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    yield line
                    self.offset += len(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(self.path, error) from error


def end_of_events(path: Path) -> int:
    """The place in the file after all that is there by now, without reading it: a long job writes gigabytes."""
    try:
        with opened_regular(path) as file:
            return file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot read {path}: {error.strerror}. Move it out of the way.")


def events_in(lines: Iterable[str]) -> list[Event]:
    """The events of lines, but for what a crash has left of one."""
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):
            events.append(read_event(line))
    return events


def try_to_write(folder: Path) -> None:
    """Write a block into a file without a name, which is gone at once."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_BLOCK))


class DiskWatch:
    """Tells that nothing can be written in a folder, once while it lasts: the job itself cannot write it down."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        attempt: Callable[[Path], None] = try_to_write,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._attempt = attempt
        self._tried_at = clock()
        self._is_told = False

    def look(self, has_news: bool) -> LogMessage | None:
        """What is to be told, if anything is. `has_news`: the job has told something since the last look."""
        now = self._clock()
        if has_news:
            self._tried_at, self._is_told = now, False
        if self._is_told or now - self._tried_at < SILENCE:
            return None
        self._tried_at = now
        try:
            self._attempt(self._folder)
        except FileNotFoundError:
            return None  # a run folder that is not there yet, or no longer
        except OSError as error:
            self._is_told = True
            return LogMessage(
                message=f"cannot write in {self._folder}: {error.strerror or error}. Training continues, unseen: no "
                "progress is shown or kept meanwhile. Make room there: a checkpoint that fails is tried again when the "
                "next is due, but the last must be saved."
            )
        return None

"""Events as lines of a file."""

import contextlib
import logging
import os
import threading
from pathlib import Path

from quorate.core.regular_file import open_regular
from quorate.observe.event import Event
from quorate.observe.events import LogMessage
from quorate.storage.atomic import write_fully

log = logging.getLogger(__name__)


class JsonlSink:
    """Appends each event to a file as one line of JSON.

    Trouble with the file never ends a job. It is told once in the log while it lasts, and in the file when it is over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._missing = 0  # of those, the ones since the last that was written
        self._reason = ""
        self._descriptor: int | None = None
        self._torn = False
        self._closed = False
        self._turn = threading.Lock()

    def handle(self, event: Event) -> None:
        """Append an event; it is in the file when this returns, unless the file could not be written."""
        self.append(event.to_json())

    def append(self, line: str) -> None:
        with self._turn:
            try:
                self._append(self._note_of_missing() + line.encode() + b"\n")
                self._missing = 0
            except OSError as error:
                if not self._missing:
                    log.warning(
                        "cannot write to %s: %s. Training goes on; events are dropped meanwhile.", self.path, error
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
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._closed:
            raise OSError("the file is closed")
        if self._descriptor is None:
            self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        # A line that was cut short, here or by a crash, is ended first: it costs one event instead of two.
        start = b"\n" if self._torn else b""
        self._torn = True
        write_fully(self._descriptor, start + line)
        self._torn = False

    def _note_of_missing(self) -> bytes:
        """A line about the events that are not in the file, if there are such."""
        if not self._missing:
            return b""
        count = f"{self._missing:,} events are" if self._missing > 1 else "an event is"
        message = f"{count} missing here: {self.path.name} could not be written ({self._reason})"
        return LogMessage(message=message).to_json().encode() + b"\n"

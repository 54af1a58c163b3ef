"""Whether what a job tells can be written: the disk that its run is on may fill up while it runs."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quorate.observe.event import Event

SILENCE = 5.0
"""Seconds without an event after which the folder is tried: a job that tells something can obviously write it."""
_BLOCK = 4096


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

    def look(self, has_heard: bool) -> Event | None:
        """What is to be told, if anything is. `has_heard`: the job has told something since the last look."""
        now = self._clock()
        if has_heard:
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
            return Event("log", fields={"message": self._sentence(error.strerror or str(error))})
        return None

    def _sentence(self, why: str) -> str:
        return (
            f"cannot write in {self._folder}: {why}. Training goes on, unseen: no progress is shown or kept meanwhile. "
            "Make room there: a checkpoint that fails is tried again when the next is due, but the last must be saved."
        )

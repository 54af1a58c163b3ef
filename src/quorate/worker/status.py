"""A page of memory that tells what a worker is doing, readable by its supervisor after the worker's death."""

import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_FORMAT = struct.Struct("<qi16s")
_NO_LANE = -1


@dataclass(frozen=True)
class Status:
    """Where a worker is."""

    step: int
    phase: str
    lane: int | None = None


def status_file(run: RunFolder, slot: int) -> Path:
    """Where a worker's status page is."""
    return run.logs / f"worker-{slot}.status"


class StatusPage:
    """A file of a few bytes, mapped: writing costs less than a microsecond and survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        try:
            self._memory = _map(path)
        except OSError as error:
            # A full disk must not keep a worker from starting: its death will be told with less detail, that is all.
            log.warning("cannot keep a status page in %s: %s", path, error.strerror)
            self._memory = mmap.mmap(-1, _FORMAT.size)
        self._said: tuple[int, str, int | None] = (0, "start", None)

    @property
    def status(self) -> Status:
        """What was said last."""
        return Status(*self._said)

    def write(self, step: int, phase: str, lane: int | None = None) -> None:
        """Say what the worker does from now on."""
        _FORMAT.pack_into(self._memory, 0, step, _NO_LANE if lane is None else lane, phase.encode())
        self._said = (step, phase, lane)


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Reserved, not just sized: on a full disk a write to the mapping would kill the process.
        os.posix_fallocate(descriptor, 0, _FORMAT.size)
        return mmap.mmap(descriptor, _FORMAT.size)
    finally:
        os.close(descriptor)


def read_status(path: Path) -> Status | None:
    """The last word of a worker, if it said any."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _FORMAT.size:
        return None
    step, lane, phase = _FORMAT.unpack_from(content)
    name = phase.rstrip(b"\0").decode()
    return Status(step, name, None if lane == _NO_LANE else lane) if name else None

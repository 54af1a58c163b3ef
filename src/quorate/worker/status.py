"""A small mapped file that tells what a worker is doing: its engine reads it during setup, and after its death."""

import contextlib
import logging
import mmap
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from quorate.core.generation import file_name_of
from quorate.core.regular_file import open_regular, read_regular
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

STARTING, BUILDING, RESTORING, REGISTERING = "start", "build", "restore", "register"
"""What a worker does before it can tell its coordinator."""

MOST_SAMPLES = 512
"""Of a lane that reads more, only the first are told, and how many there are."""

_FORMAT = struct.Struct("<qi20s")
# Step and lane once more, so that the samples of the lane before are not taken for those of this one.
_READING = struct.Struct("<qiqq")
_READING_AT = 32
_SAMPLES_AT = _READING_AT + _READING.size + 4
_SAMPLE_SIZE = array("q").itemsize
_SIZE = _SAMPLES_AT + MOST_SAMPLES * _SAMPLE_SIZE
_NO_LANE = -1
_IN_SETUP = -2


@dataclass(frozen=True)
class Status:
    """Where a worker is; in a lane also which samples of which epoch that has read, or was about to.

    `sample_count` is how many these are, of which `samples` are all or the first. `is_new`: the worker is still being
    built, and its coordinator has not heard of it.
    """

    step: int
    phase: str
    lane: int | None = None
    epoch: int | None = None
    samples: tuple[int, ...] = ()
    sample_count: int = 0
    is_new: bool = False


def status_file(run: RunFolder, slot: int) -> Path:
    """Where a worker's status page is."""
    return run.logs / f"{file_name_of(slot)}.status"


class StatusPage:
    """A file of a few kilobytes, mapped: writing costs about a microsecond and survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        try:
            self._memory = _reserve(path)
        except OSError as error:
            # A full disk must not keep a worker from starting: its death will be told with less detail, that is all.
            log.warning("cannot keep a status page in %s: %s", path, error.strerror)
            self._memory = mmap.mmap(-1, _SIZE)
        self._said: tuple[int, str, int | None] = (0, STARTING, None)
        self.moves = 0

    @property
    def status(self) -> Status:
        return Status(*self._said)

    def write(self, step: int, phase: str, lane: int | None = None) -> None:
        _FORMAT.pack_into(self._memory, 0, step, _NO_LANE if lane is None else lane, phase.encode())
        self._said = (step, phase, lane)
        self.moves += 1

    def write_setup(self, phase: str) -> None:
        """Say what the worker does while it is being built: whose code runs, or what else takes its time."""
        _FORMAT.pack_into(self._memory, 0, 0, _IN_SETUP, phase.encode())

    def write_samples(self, epoch: int, samples: memoryview) -> None:
        """Say which samples the lane that the worker is in has, as whole numbers of 64 bits."""
        step, _, lane = self._said
        told = samples[:MOST_SAMPLES]
        self._memory[_SAMPLES_AT : _SAMPLES_AT + told.nbytes] = told
        # After them: whoever is killed in between has told of no samples.
        _READING.pack_into(self._memory, _READING_AT, step, _NO_LANE if lane is None else lane, epoch, len(samples))


def _reserve(path: Path) -> mmap.mmap:
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        # Reserved, not just sized: on a full disk a write to the mapping would kill the process.
        os.posix_fallocate(descriptor, 0, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def announce_start(path: Path) -> None:
    """Say on a worker's page, before there is a process that could, that it is being started: so it is never silent,
    and what it has to say has its room. On a full disk nothing is said."""
    path.unlink(missing_ok=True)  # of whoever was there before
    with contextlib.suppress(OSError), _reserve(path) as page:
        _FORMAT.pack_into(page, 0, 0, _IN_SETUP, STARTING.encode())


def read_status(path: Path) -> Status | None:
    """The last word of a worker, if it said any."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    if len(content) < _SIZE:
        return None
    step, lane, phase = _FORMAT.unpack_from(content)
    name = phase.rstrip(b"\0").decode(errors="replace")  # one that was too long is cut
    if not name:
        return None
    if lane < 0:
        return Status(step, name, is_new=lane == _IN_SETUP or name in (BUILDING, RESTORING))
    reading_step, reading_lane, epoch, count = _READING.unpack_from(content, _READING_AT)
    if (reading_step, reading_lane) != (step, lane):
        return Status(step, name, lane)
    samples = array("q", content[_SAMPLES_AT : _SAMPLES_AT + min(count, MOST_SAMPLES) * _SAMPLE_SIZE])
    return Status(step, name, lane, epoch, tuple(samples), count)

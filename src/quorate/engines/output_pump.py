"""What the processes of a job print and log, on its way into the run's logs.

Standard output and standard error of fork server and workers are pipes, which one thread of the launcher reads. So
secrets are masked before anything is on a disk, also what C code or a child process prints; and what was printed before
a SIGKILL is kept, since it is in the kernel by then. Whoever prints waits for nobody, unless the thread is a megabyte
behind.
"""

import contextlib
import fcntl
import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from quorate.core.generation import file_name_of, name_of
from quorate.core.log_records import LANE, RECORD, STDERR, STDOUT, encoded
from quorate.core.masking import LineMasker, Secrets, known_secrets
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.worker.status import read_status, status_file

log = logging.getLogger(__name__)

PIPE_SIZE = 2**20
RATE, BURST = 8 * 2**20, 32 * 2**20
"""Bytes of one stream that are kept: in a second, and at once. Of one that prints more only the last are: rotation
would throw the rest away anyway, and whoever prints without end does not have to wait for the pump."""
TAIL = 2**16
LONGEST_LINE = 2**20
GRACE = 1.0
"""Seconds for which is waited, at the end of the job, for a process that still has its pipe."""
CLOSE_PATIENCE = 10.0
"""Seconds for which the thread is waited for at the end: on a busy machine it may have much to write still, but a disk
that hangs must not keep the job."""
REST = 0.002
"""Seconds between two rounds: lines that come fast are handled together."""


@dataclass(frozen=True)
class Pipes:
    """The pipes of a process that is about to be started: its standard output and its standard error.

    `write_ends` are for that process, and closed here once it has them.
    """

    read_ends: tuple[int, int]
    write_ends: tuple[int, int]

    @classmethod
    def open(cls) -> "Pipes":
        pairs = (os.pipe(), os.pipe())
        for _, end in pairs:
            # Not everybody may have as much as this: then whoever prints a lot waits a little sooner.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return cls((pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))


def close_all(descriptors: Sequence[int]) -> None:
    """Close these descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


OpenLog = Callable[[str, dict[str, Any]], LogFile]
"""Opens the log of a name; the fields are for what it says by itself."""


class OutputPump:
    """Reads the pipes of a run's processes, until each has ended."""

    def __init__(self, run: RunFolder, open_log: OpenLog | None = None) -> None:
        self._run = run
        self._open_log = open_log
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._logs: dict[str, LogFile] = {}
        self._is_closed = False
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="output", daemon=True)
        self._thread.start()

    def read(self, pipes: Pipes, pid: int, slot: int | None = None, secrets: Sequence[str] = ()) -> None:
        """Read what the worker of a slot prints, or without one a fork server; these secrets are not written down."""
        name, fields = "fork_server", {"process": "fork server", "pid": pid}
        if slot is not None:
            name, fields = file_name_of(slot), {"process": name_of(slot), "pid": pid, "worker": slot}
        if name not in self._logs:
            about = {"process": fields["process"]}
            opened = None if self._open_log is None else self._open_log(name, about)
            self._logs[name] = opened or LogFile(self._run.logs / f"{name}.jsonl", about)
        masked = Secrets((*known_secrets(), *secrets))
        speaker = _Speaking(self._run, fields, self._logs[name])
        for descriptor, source in zip(pipes.read_ends, (STDOUT, STDERR), strict=True):
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = _Stream(descriptor, source, speaker, masked)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def close(self) -> None:
        """Wait until it has written what was printed last. All who print are gone."""
        if not self._is_closed:
            self._is_closed = True
            # Not by its end alone: a copy may be with a fork of whoever trains here.
            os.write(self._wake, b"x")
            os.close(self._wake)
        self._thread.join(CLOSE_PATIENCE)

    def _serve(self) -> None:
        try:
            self._serve_to_the_end()
        except Exception:
            # Whoever prints from now on waits once its pipe is full: that has to be known.
            log.exception("what the job prints is not read any more")

    def _serve_to_the_end(self) -> None:
        over: float | None = None
        while over is None or (self._streams and time.monotonic() < over):
            streams = list(self._streams.values())
            wait = 0.1 if over is not None or any(one.skipped for one in streams) else None
            for key, _ in self._selector.select(wait):
                if key.fd in self._streams:
                    self._read(self._streams[key.fd])
                elif key.fd == self._woken:
                    self._selector.unregister(self._woken)
                    over = time.monotonic() + GRACE
            now = time.monotonic()
            for stream in list(self._streams.values()):
                stream.catch_up(now)
            time.sleep(REST)
        for stream in list(self._streams.values()):
            self._read(stream)  # what has come since the last round, if this process was held up for so long
        for stream in list(self._streams.values()):
            self._end(stream)
        for file in self._logs.values():
            file.close()
        os.close(self._woken)
        self._selector.close()

    def _read(self, stream: "_Stream") -> None:
        try:
            data = os.read(stream.descriptor, PIPE_SIZE)
        except BlockingIOError:
            return
        if data:
            stream.take(data, time.monotonic())
        else:
            self._end(stream)

    def _end(self, stream: "_Stream") -> None:
        self._selector.unregister(stream.descriptor)
        del self._streams[stream.descriptor]
        stream.finish(time.monotonic())


class _Stream:
    """One pipe: what has come of a line, and how many bytes may come before some are left out."""

    def __init__(self, descriptor: int, source: str, speaker: "_Speaking", secrets: Secrets) -> None:
        self.descriptor = descriptor
        self.source = source
        self.speaker = speaker
        self.masker = LineMasker(secrets.mask, limit=LONGEST_LINE)
        self.second = 0.0
        self.allowed = BURST
        self.skipped = 0
        self.tail = b""

    def take(self, data: bytes, now: float) -> None:
        self.catch_up(now)
        if not self.skipped and len(data) <= self.allowed:
            self.allowed -= len(data)
            self.speaker.write(self.masker.feed(data), self.source)
            return
        # The rest of a line, or half a secret, is of no use to anybody.
        self.masker.drop()
        self.skipped += len(data)
        self.tail = (self.tail + data)[-TAIL:]

    def catch_up(self, now: float, *, at_end: bool = False) -> None:
        """Once the second is over, say what was left out, and write the last of it."""
        if not at_end and now - self.second < 1.0:
            return
        self.allowed = min(BURST, self.allowed + int(RATE * min(now - self.second, BURST / RATE)))
        self.second = now
        if self.skipped:
            last = self.tail.partition(b"\n")[2]
            left_out = self.skipped - len(last)
            self.skipped, self.tail = 0, b""
            self.speaker.note(f"{left_out:,} bytes were left out here: more than {RATE:,} a second were printed")
            self.speaker.write(self.masker.feed(last), self.source)

    def finish(self, now: float) -> None:
        self.catch_up(now, at_end=True)
        self.speaker.write(self.masker.finish(), self.source)
        os.close(self.descriptor)


class _Speaking:
    """A process that prints, its log, and where it is in the job: the step by its status page, the generation by what
    it has logged last."""

    def __init__(self, run: RunFolder, fields: dict[str, Any], log: LogFile) -> None:
        self._fields = {**fields, "run": run.name}
        self._log = log
        slot = fields.get("worker")
        self._status_file = None if slot is None else status_file(run, slot)
        self._generation: str | None = None
        self._is_bar = False

    def write(self, lines: Sequence[str], source: str) -> None:
        if not lines:
            return
        # There may be hundreds of thousands a second, which differ in their message alone.
        head = f'{{"time": {time.time():.6f}, "level": "info", "message": '
        moving: dict[str, Any] = {}
        if self._status_file is not None:
            with contextlib.suppress(OSError):
                status = read_status(self._status_file)
                moving |= {} if status is None or status.is_new else {"step": status.step}
        if self._generation is not None:
            moving["generation"] = self._generation
        tail = encoded(self._fields | moving | {"source": source})[1:]
        parts = lines if source == STDOUT else [part for line in lines for part in self._parts(line)]
        self._log.append(*filter(None, (self._logged(part) or _printed(part, head, tail) for part in parts)))

    def note(self, message: str) -> None:
        """Log something about what it prints."""
        moment = round(time.time(), 6)
        self._log.append(encoded({"time": moment, "level": "warning", "message": message, **self._fields}))

    def _parts(self, line: str) -> tuple[str, ...]:
        """A record goes to the end of a line that is still open, as that of a progress bar is, which goes on below."""
        begun, mark, record = line.partition(RECORD)
        parts = (begun + "\r" * self._is_bar, mark + record) if begun and mark else (line,)
        self._is_bar = line.endswith("\r")
        return parts

    def _logged(self, line: str) -> str | None:
        """The record that a line is, if it was logged and not printed."""
        if line.startswith(RECORD):
            with contextlib.suppress(ValueError):
                record = json.loads(line.removeprefix(RECORD))
                if isinstance(record, dict):
                    self._generation = record.get("generation", self._generation)
                    return line.removeprefix(RECORD)
        return None


def _printed(line: str, head: str, tail: str) -> str:
    """The record of a printed line; empty where it is nothing but the place at which a progress bar begins or ends."""
    facts = ""
    if line.startswith(LANE):
        lane, _, text = line[1:].partition(LANE)
        if lane.isdecimal():
            line, facts = text, f'"lane": {lane}, '
    if line.endswith("\r"):
        line, facts = line[:-1], f'{facts}"overwritten": true, '
        if not line.strip():
            return ""
    return f"{head}{orjson.dumps(line).decode()}, {facts}{tail}"

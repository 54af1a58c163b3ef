"""What the processes of a job print and log, on its way into the run's logs: ``python -m quorate.engines.output_pump``.

Standard output and standard error of fork server and workers are pipes, and one small process per job reads them all.
So secrets are masked before anything is on a disk, also what C code or a child process prints; and what was printed
before a SIGKILL is kept, since it is in the kernel by then. Whoever prints waits for nobody, unless the pump is a
megabyte behind.

Whoever starts a process makes its pipes and keeps the ends that are read, besides giving them to the pump: if the pump
dies, another one takes over, and nobody who prints notices.
"""

import contextlib
import fcntl
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from quorate.core.generation import file_name_of, name_of
from quorate.core.log_records import LANE, RECORD, STDERR, STDOUT, encoded
from quorate.core.masking import LineMasker, known_secrets, register_secrets
from quorate.engines.interpreters import FRESH, Interpreters
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
"""Seconds for which the pump waits, at the end of the job, for a process that still has its pipe."""
CLOSE_PATIENCE = 10.0
"""Seconds for which the pump is waited for at the end: on a busy machine it may have much to write still, but a disk
that hangs must not keep the job."""
REST = 0.002
"""Seconds between two rounds: lines that come fast are handled together."""
RESTART_AFTER = 1.0


@dataclass(frozen=True)
class Speaker:
    """A process whose output is kept: the name of its log, what each of its records says of it, and what it knows that
    must not be in them."""

    log: str
    fields: dict[str, Any]
    secrets: tuple[str, ...] = ()

    @classmethod
    def fork_server(cls, pid: int) -> "Speaker":
        return cls("fork_server", {"process": "fork server", "pid": pid})

    @classmethod
    def worker(cls, slot: int, pid: int, *secrets: str) -> "Speaker":
        return cls(file_name_of(slot), {"process": name_of(slot), "pid": pid, "worker": slot}, secrets)


class OutputPipes:
    """The pipes of a process that is about to be started: its standard output and its standard error."""

    def __init__(self) -> None:
        pairs = (os.pipe(), os.pipe())
        self.read_ends = [reading for reading, _ in pairs]
        self.write_ends = [writing for _, writing in pairs]
        for end in self.write_ends:
            # Not everybody may have as much as this: then whoever prints a lot waits a little sooner.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def close_write_ends(self) -> None:
        _close_all(self.write_ends)

    def close(self) -> None:
        _close_all(self.write_ends)
        _close_all(self.read_ends)

    def send(self, control: socket.socket, speaker: Speaker) -> None:
        """Give the pump the ends that are read. One that is gone is followed by another, which is given them again."""
        message = json.dumps(asdict(speaker)).encode()
        with contextlib.suppress(OSError):
            socket.send_fds(control, [message], self.read_ends, socket.MSG_DONTWAIT)


class OutputPump:
    """The pump's process, as the launcher holds it. By `control` whoever starts a process sends its pipes."""

    def __init__(self, run: RunFolder, interpreters: Interpreters = FRESH) -> None:
        self._interpreters = interpreters
        self._appointment = {"run": str(run.path), "launcher": os.getpid(), "secrets": known_secrets()}
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start()

    def look(self) -> bool:
        """Start another if it is gone; whether that was so, and all pipes have to be sent again."""
        if self._process.poll() is None or time.monotonic() - self._began < RESTART_AFTER:
            return False
        try:
            self._start()
        except OSError as error:  # no process more on this machine, perhaps: that is no reason not to train
            log.warning("what the job prints is not read for now: %s", error)
            return False
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End one that does nothing; the next look starts another."""
        self._process.kill()

    def close(self) -> None:
        """Wait until it has written what was printed last. All who print are gone."""
        with contextlib.suppress(OSError):
            # Nothing, which says the same as the end: a copy of the socket may be with a fork of whoever trains here.
            self.control.send(b"", socket.MSG_DONTWAIT)
        self.control.close()
        self._theirs.close()
        try:
            self._process.wait(CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._process = self._interpreters.start(
            "quorate.engines.output_pump",
            [self._theirs],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as appointment:
            appointment.write(json.dumps(self._appointment).encode())


@dataclass
class _Stream:
    """One pipe: what has come of a line, and how many bytes may come before some are left out."""

    descriptor: int
    source: str
    speaker: "_Speaking"
    masker: LineMasker = field(default_factory=lambda: LineMasker(limit=LONGEST_LINE))
    second: float = 0.0
    allowed: int = BURST
    skipped: int = 0
    tail: bytes = b""

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
        tail = encoded(self._fields | self._moving() | {"source": source})[1:]
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

    def _moving(self) -> dict[str, Any]:
        moving: dict[str, Any] = {}
        if self._status_file is not None:
            with contextlib.suppress(OSError):
                status = read_status(self._status_file)
                if status is not None and not status.is_new:
                    moving["step"] = status.step
        if self._generation is not None:
            moving["generation"] = self._generation
        return moving


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


class Pump:
    """Reads until whoever could send it more pipes is gone, and those that it has are at their end.

    `launcher` is a pidfd: its end is that of all who print.
    """

    def __init__(self, control: socket.socket, run: RunFolder, launcher: int | None = None) -> None:
        self._control = control
        self._launcher = launcher
        self._run = run
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._logs: dict[str, LogFile] = {}

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        if self._launcher is not None:
            self._selector.register(self._launcher, selectors.EVENT_READ)
        over: float | None = None
        while over is None or (self._streams and time.monotonic() < over):
            wait = 0.1 if over is not None or any(one.skipped for one in self._streams.values()) else None
            for key, _ in self._selector.select(wait):
                if key.fd in self._streams:
                    self._read(self._streams[key.fd])
                elif key.fd == self._launcher or not self._receive():
                    self._selector.unregister(key.fileobj)
                    over = over or time.monotonic() + GRACE
            now = time.monotonic()
            for stream in self._streams.values():
                stream.catch_up(now)
            time.sleep(REST)
        for stream in list(self._streams.values()):
            self._read(stream)  # what has come since the last round, if this process was held up for so long
        for stream in list(self._streams.values()):
            self._end(stream)

    def _receive(self) -> bool:
        """Take on the pipes of another process; False when no more will come."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 2**16, 2)
        except OSError:
            message, descriptors = b"", []
        if not message:
            return False
        told = Speaker(**json.loads(message))
        register_secrets(told.secrets)
        path = self._run.logs / f"{told.log}.jsonl"
        log = self._logs.setdefault(told.log, LogFile(path, {"process": told.fields["process"]}))
        speaker = _Speaking(self._run, told.fields, log)
        for descriptor, source in zip(descriptors, (STDOUT, STDERR), strict=False):
            # One that was sent twice, to this one and to the one before it, would be read by two.
            if os.fstat(descriptor).st_ino in {os.fstat(known).st_ino for known in self._streams}:
                os.close(descriptor)
                continue
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = _Stream(descriptor, source, speaker)
            self._selector.register(descriptor, selectors.EVENT_READ)
        return True

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.descriptor, PIPE_SIZE)
        except BlockingIOError:
            return
        if data:
            stream.take(data, time.monotonic())
        else:
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        self._selector.unregister(stream.descriptor)
        del self._streams[stream.descriptor]
        stream.finish(time.monotonic())


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def main() -> None:
    """Serve a job: the argument is the number of the socket by which pipes come."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the job, and not before
    appointment = json.loads(sys.stdin.buffer.read())
    register_secrets(appointment["secrets"])
    try:
        launcher = os.pidfd_open(appointment["launcher"])
    except ProcessLookupError:
        return  # and all who would print with it
    Pump(socket.socket(fileno=int(sys.argv[1])), RunFolder(Path(appointment["run"])), launcher).serve()


if __name__ == "__main__":
    main()

"""Fork servers that stay (one run after the other finds torch and its task imported), and coordinators as children.

The fork server of a first run forks the one that serves that run once it has imported the task, and stays itself. For
each later run of the task it forks another, which is a process of its own in every other way. It has a single thread,
and ends with its owner, whatever way that ends.
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.core.addresses import Network
from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.core.processes import StoppedProcesses, describe_departure
from quorate.engines.fork_template import LONGEST, STREAMS
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

ANSWER_WITHIN = 20.0
"""Seconds after which a process that does not answer is given up: it has nothing to wait for."""
CLOSE_PATIENCE = 5.0


class KeptForkServer:
    """A fork server that stays, as its owner holds it. It is the process of its first run until it has imported the
    task and forks."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._turn = threading.Lock()
        control.settimeout(ANSWER_WITHIN)
        self.pid = process.pid
        self.kill, self.wait, self.poll = process.kill, process.wait, process.poll
        # Whether it can be asked: not while it imports a task, and never if that has started threads.
        self.is_ready = False
        # What it has forked, and would end with it.
        self.children = 0

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def forked(self, pid: int) -> "ForkedProcess":
        """It has forked the fork server of its first run, and stays itself for those that follow."""
        self.children += 1  # first: one that is ready and has none may be ended by another thread
        self.is_ready = True
        return ForkedProcess(self, pid)

    def fork(self, descriptors: Sequence[int], request: Mapping[str, Any]) -> "ForkedProcess | str":
        """What it has forked with these descriptors, or why it has not."""
        folder = os.open(".", os.O_PATH)
        try:
            with self._turn:
                given = [*descriptors[:STREAMS], folder, *descriptors[STREAMS:]]
                socket.send_fds(self._control, [json.dumps(request).encode()], given)
                answer = json.loads(self._control.recv(LONGEST) or "{}")
        except OSError as error:
            log.warning("process %d, which forks others, does not answer: %s", self.pid, error)
            self._process.kill()
            answer = {}
        finally:
            os.close(folder)
        return self.forked(answer["pid"]) if "pid" in answer else str(answer.get("refused", "it is gone"))

    def close(self) -> None:
        """End it, and wait until it is gone."""
        with contextlib.suppress(OSError):
            # Nothing, which says the same as the end: a copy of the socket may be with a fork of the owner.
            self._control.send(b"")
        self._control.close()
        try:
            self._process.wait(CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """What another has forked: the fork server of a run, or a coordinator. How it ends is known to nobody."""

    def __init__(self, kept: KeptForkServer, pid: int) -> None:
        self._kept = kept
        self._turn = threading.Lock()
        self._end: int | None = os.pidfd_open(pid)
        self.pid = pid

    def beside(self, descriptors: Sequence[int]) -> "ForkedProcess | None":
        """A coordinator from the same process, if that can."""
        forked = self._kept.fork(descriptors, {}) if self._kept.is_alive else ""
        return None if isinstance(forked, str) else forked

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
            return 0
        return None

    def wait(self, timeout: float | None = None) -> None:
        with self._turn:
            if self._end is None:
                return
            ended = select.poll()  # select() knows no file beyond the first 1,024 of a process
            ended.register(self._end, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._end)
            self._end = None
            self._kept.children -= 1

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._end is not None:
                signal.pidfd_send_signal(self._end, signal.SIGKILL)


Program = subprocess.Popen[bytes] | KeptForkServer | ForkedProcess
"""A fork server or a coordinator, however it was started."""


# --- a coordinator as a child of this process

GLANCE = 0.1
"""Seconds between two looks at whether one that does not listen yet is stopped."""


class CoordinatorChildProcess:
    """It ends with whoever has started it, whose end of the pipe closes. Fulfils `CoordinatorChild`."""

    def __init__(
        self,
        appointment: Mapping[str, Any],
        network: Network,
        fork: Callable[[Sequence[int]], Program | None] = lambda _streams: None,
    ) -> None:
        """`fork` starts one with these streams in less time than an interpreter takes, if it can."""
        self._log_file = RunFolder(Path(appointment["run"])).logs / "coordinator.log"
        placed = {**appointment, "host": network.address, "network": network.namespace}
        with self._log_file.open("ab") as file:
            (stdin, told), (said, stdout) = os.pipe(), os.pipe()
            self._stdin, self._stdout = os.fdopen(told, "wb"), os.fdopen(said, "rb")
            streams = stdin, stdout, file.fileno()
            try:
                program = [sys.executable, "-P", "-m", "quorate.coordinator"]
                self._process = fork(streams) or subprocess.Popen(
                    program, stdin=stdin, stdout=stdout, stderr=file, start_new_session=True
                )  # a session of its own: Ctrl-C is for the launcher alone
            finally:
                os.close(stdin)
                os.close(stdout)
        self.pid = self._process.pid
        self._stopped = StoppedProcesses(appointment["failure_timeout"])
        self._why_killed = ""
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which `await_answer` tells
            self._stdin.write(json.dumps(placed).encode() + b"\n")
            self._stdin.flush()

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        over = None if limit is None else time.monotonic() + limit
        while not select.select([self._stdout], [], [], GLANCE if limit is None else min(GLANCE, limit))[0]:
            now = time.monotonic()
            for seconds in self._stopped.look(now, [self.pid]).values():
                self._why_killed = f", which had been stopped (SIGSTOP) for {seconds:.1f} s,"
                self.kill()
            if over is not None and now >= over:
                return {}
        line = self._stdout.readline()
        if not line:
            self._process.wait()
            raise JobError(f"{self.departure} before it listened; its log is {self._log_file}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failure("RequestError", answer["error"], exit_code=answer["exit_code"]).error()
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def departure(self) -> str:
        return f"the coordinator (pid {self.pid}){self._why_killed} {describe_departure(self._process.wait())}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self, patience: float) -> None:
        if patience <= 0:
            # Before it sees its standard input end: it would write down that the job is over.
            self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stdout.close()

"""Fork servers that stay: one run after the other finds torch and its task imported.

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
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from quorate.engines.fork_template import LONGEST, STREAMS

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

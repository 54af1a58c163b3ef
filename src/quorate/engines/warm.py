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
from pathlib import Path
from typing import Any

from quorate.engines.coordinator_child import Program
from quorate.engines.engine import Preparation
from quorate.engines.fork_template import LONGEST, STREAMS
from quorate.engines.local import start_fork_server

log = logging.getLogger(__name__)

MOST_KEPT = 2
"""Fork servers that stay: each has a task of its own, and its memory."""
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


class WarmForkServers:
    """Starts fork servers from those that stay, for runs in any thread of its owner."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._kept: dict[Any, KeptForkServer] = {}

    def __call__(
        self,
        run: str,
        messages: socket.socket,
        streams: tuple[int, int],
        environment: Mapping[str, str],
        preparation: Preparation,
    ) -> Program:
        """The fork server of a run."""
        # What the import of the task depends on; of the rest, such as its parameters, it knows nothing yet.
        task = (preparation.task, tuple(preparation.search_path), preparation.deterministic)
        key = (_surroundings(environment), task)
        with self._turn:
            known = self._kept.get(key)
            # What stays is not that of a fork; and another run beside this one may have it imported just now.
            if os.getpid() != self._owner or (known is not None and known.is_alive and not known.is_ready):
                return start_fork_server(run, messages, streams, environment, preparation)
            if known is not None:
                server: ForkedProcess | str = "it is gone"
                if known.is_alive:
                    with Path(os.devnull).open("rb") as null:
                        given = [null.fileno(), *streams, messages.fileno()]
                        server = known.fork(given, {"run": run, "seed": preparation.seed})
                if not isinstance(server, str):
                    log.info("the task is imported already, by process %d", known.pid)
                    return server
                log.info("the task is imported again, and not taken from process %d: %s", known.pid, server)
                self._kept[key, known.pid] = self._kept.pop(key)  # runs beside this one would end with it
            self._drop_idle(MOST_KEPT - 1, old=known)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = start_fork_server(run, messages, streams, environment, preparation, theirs)
            self._kept[key] = KeptForkServer(process, ours)
            return self._kept[key]

    def close(self) -> None:
        """End all that stays."""
        with self._turn:
            while self._kept:
                self._kept.popitem()[1].close()

    def _drop_idle(self, most: int, old: KeptForkServer | None) -> None:
        """The one that is of no use any more, and the longest kept. One whose run is under way is left."""
        for key, kept in list(self._kept.items()):
            is_idle = not kept.is_alive or (kept.is_ready and not kept.children)
            if is_idle and (kept is old or len(self._kept) > most):
                self._kept.pop(key).close()


def _surroundings(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What a process has from the one that starts it, as far as programs look at it."""
    folder = Path.cwd().stat()
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return tuple(sorted(environment.items())), (folder.st_dev, folder.st_ino), umask, cores

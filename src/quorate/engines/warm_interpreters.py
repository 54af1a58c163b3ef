"""Interpreters that are warm: one run after the other finds imported what the run before it has.

Two kinds of processes stay from run to run. One has the imports of coordinator and output pump. The other is a fork
server that has imported torch and a task: for each run it forks one that serves that run alone and ends with it. All of
them end with their owner, whatever way that ends.
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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from quorate.engines.engine import Preparation
from quorate.engines.interpreters import FRESH, PARENT, Argument, Child
from quorate.engines.warm_process import FORK, LONGEST, REAP

log = logging.getLogger(__name__)

MOST_KEPT = 2
"""Fork servers that stay: each has a task of its own, and its memory."""
ANSWER_WITHIN = 20.0
"""Seconds after which a process that does not answer is given up: it has nothing to wait for."""
CLOSE_PATIENCE = 5.0


class WarmParent:
    """A process that forks others when it is asked, as its owner holds it.

    A fork server is the process of its first run until it has imported the task and forks: so it is a `Child`.
    """

    def __init__(self, process: Child, control: socket.socket, *, is_ready: bool) -> None:
        self._process = process
        self._control = control
        self._turn = threading.Lock()
        self._children = 0
        control.settimeout(ANSWER_WITHIN)
        self.pid = process.pid
        self.stdin = self.stdout = None
        # Whether it can be asked: not while it imports a task, and never if that has started threads.
        self.is_ready = is_ready

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        return not self._children

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()

    def forked(self, pid: int) -> "WarmChild":
        """It has forked the process of its first run, and stays itself for those that follow."""
        self._children += 1  # first: one that is ready and idle may be ended by another thread
        self.is_ready = True
        return WarmChild(self, pid)

    def fork(
        self, module: str, arguments: Sequence[Argument], streams: Sequence[int], seed: int | None = None
    ) -> "WarmChild | str":
        """The process that was forked, or why there is none; `seed` is that of the run."""
        words = [None if isinstance(each, socket.socket) else each for each in arguments]
        sockets = [each.fileno() for each in arguments if isinstance(each, socket.socket)]
        folder = os.open(".", os.O_PATH)
        try:
            answer = self._ask([*streams, folder, *sockets], what=FORK, module=module, arguments=words, seed=seed)
        finally:
            os.close(folder)
        if "pid" not in answer:
            return str(answer.get("refused", "it is gone"))
        self._children += 1
        return WarmChild(self, answer["pid"])

    def reap(self, pid: int) -> int:
        """The exit code of a process that it has forked, and that has ended: until then its number is its own."""
        answer = self._ask([], what=REAP, pid=pid)
        self._children -= 1
        # Killed with whoever has forked it, if that does not answer.
        return int(answer.get("code", -signal.SIGKILL))

    def _ask(self, descriptors: Sequence[int], **request: Any) -> dict[str, Any]:
        with self._turn:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                answer = self._control.recv(LONGEST)
            except OSError as error:
                log.warning("process %d, which forks others, does not answer: %s", self.pid, error)
                self._process.kill()
                return {}
        fields: dict[str, Any] = json.loads(answer) if answer else {}
        return fields

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


class WarmChild:
    """A process that a warm one has forked. Fulfils `Child`."""

    def __init__(self, parent: WarmParent, pid: int) -> None:
        self._parent = parent
        self._end: int | None = os.pidfd_open(pid)
        self._turn = threading.Lock()
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        over = None if timeout is None else time.monotonic() + timeout
        with self._turn:
            if self._end is not None:
                ended = select.poll()
                ended.register(self._end, select.POLLIN)
                remaining = None if over is None else max(0.0, over - time.monotonic()) * 1000
                if not ended.poll(remaining):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
                self.returncode = self._parent.reap(self.pid)
                os.close(self._end)
                self._end = None
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._end is not None:
                signal.pidfd_send_signal(self._end, signal.SIGKILL)


class WarmInterpreters:
    """Starts programs from processes that stay. Fulfils `Interpreters`, for runs in any thread of its owner."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._programs: dict[Any, WarmParent] = {}
        self._fork_servers: dict[Any, WarmParent] = {}

    def start(
        self,
        module: str,
        arguments: Sequence[Argument],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        preparation: Preparation | None = None,
    ) -> Child:
        with _Streams(stdin, stdout, stderr) as streams, self._turn:
            if os.getpid() != self._owner:  # what stays is not that of a fork
                child: Child = _fresh(module, arguments, streams.numbers, environment)
            elif preparation is None:
                child = self._program(module, arguments, streams.numbers)
            else:
                child = self._fork_server(module, arguments, streams.numbers, dict(environment or {}), preparation)
            return streams.given_to(child)

    def close(self) -> None:
        """End all that stays."""
        with self._turn:
            for parent in (*self._programs.values(), *self._fork_servers.values()):
                parent.close()
            self._programs, self._fork_servers = {}, {}

    def _program(self, module: str, arguments: Sequence[Argument], streams: Sequence[int]) -> Child:
        surroundings = _surroundings(os.environ)
        parent = self._programs.get(surroundings)
        if parent is None or not parent.is_alive:
            self._drop_idle(self._programs, most=0)
            parent = self._programs[surroundings] = self._start_parent("quorate.engines.warm_process", [PARENT])
        child = parent.fork(module, arguments, streams)
        if isinstance(child, str):
            log.info("%s is started again, and not by process %d: %s", module, parent.pid, child)
            return _fresh(module, arguments, streams)
        return child

    def _start_parent(self, module: str, arguments: Sequence[Argument]) -> WarmParent:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = subprocess.DEVNULL
        with theirs:
            process = FRESH.start(module, [theirs, *arguments], stdin=null, stdout=null, stderr=null)
        return WarmParent(process, ours, is_ready=True)

    def _fork_server(
        self,
        module: str,
        arguments: Sequence[Argument],
        streams: Sequence[int],
        environment: dict[str, str],
        preparation: Preparation,
    ) -> Child:
        # What the import of the task depends on; of the rest, such as its parameters, it knows nothing yet.
        task = (preparation.task, tuple(preparation.search_path), preparation.deterministic)
        key = (_surroundings(environment), task)
        known = self._fork_servers.get(key)
        if known is not None and known.is_alive and not known.is_ready:
            return _fresh(module, arguments, streams, environment)  # another run beside this one has it imported
        if known is not None:
            child = known.fork(module, arguments, streams, preparation.seed) if known.is_alive else "it is gone"
            if not isinstance(child, str):
                log.info("the task is imported already, by process %d", known.pid)
                return child
            log.info("the task is imported again, and not taken from process %d: %s", known.pid, child)
            del self._fork_servers[key]
            if known.is_alive and not known.is_idle:
                # Runs beside this one are forked from it, and would end with it: it is dropped after them.
                self._fork_servers[key, known.pid] = known
            else:
                known.close()
        self._drop_idle(self._fork_servers, most=MOST_KEPT - 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = _fresh(module, [*arguments, theirs], streams, environment)
        parent = self._fork_servers[key] = WarmParent(process, ours, is_ready=False)
        return parent

    def _drop_idle(self, parents: dict[Any, WarmParent], most: int) -> None:
        """The longest kept first. One whose run is under way is left: with it that would end."""
        for key, parent in list(parents.items()):
            if len(parents) > most and (not parent.is_alive or (parent.is_ready and parent.is_idle)):
                parents.pop(key).close()


def _fresh(
    module: str,
    arguments: Sequence[Argument],
    streams: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> Child:
    stdin, stdout, stderr = streams
    return FRESH.start(module, arguments, stdin=stdin, stdout=stdout, stderr=stderr, environment=environment)


def _surroundings(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What a process has from the one that starts it, as far as programs look at it."""
    folder = Path.cwd().stat()
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return tuple(sorted(environment.items())), (folder.st_dev, folder.st_ino), umask, cores


class _Streams:
    """Standard input, output and error of a process to be, which may be asked for as `subprocess` has it."""

    def __init__(self, *asked: int) -> None:
        self.numbers: list[int] = []
        self._theirs: list[int] = []
        self._ours: dict[int, int] = {}
        for number, each in enumerate(asked):
            if each == subprocess.PIPE:
                reading, writing = os.pipe()
                theirs, self._ours[number] = (reading, writing) if number == 0 else (writing, reading)
            elif each == subprocess.DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
            else:
                self.numbers.append(each)
                continue
            self._theirs.append(theirs)
            self.numbers.append(theirs)

    def __enter__(self) -> "_Streams":
        return self

    def given_to(self, child: Any) -> Child:
        """The child with our ends of its pipes."""
        for number, mode, name in ((0, "wb", "stdin"), (1, "rb", "stdout")):
            if number in self._ours:
                setattr(child, name, os.fdopen(self._ours.pop(number), mode))
        given: Child = child
        return given

    def __exit__(self, *_: object) -> None:
        for descriptor in (*self._theirs, *self._ours.values()):
            os.close(descriptor)

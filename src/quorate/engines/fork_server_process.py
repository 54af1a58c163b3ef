"""The fork server's process, as its launcher holds it."""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.core.processes import describe_departure, members_of
from quorate.core.task_source import TaskSource
from quorate.engines.messages import EXITED, FAILED, PREPARE, READY, START, STARTED, Messages
from quorate.engines.pidfds import Pidfds
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

# The same for every worker, on every machine: the bits depend on how many threads a kernel uses, and a hash seed
# decides the order of sets.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "false",
}

PATIENCE = 0.1
CLOSE_PATIENCE = 2.0


@dataclass(frozen=True)
class Preparation:
    """What the fork server imports and checks before the first worker."""

    task: str
    params: dict[str, Any]
    job_source: str
    search_path: list[str]
    seed: int
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class Prepared:
    """What it tells then: facts about machine and task that the bits depend on, and the task's source, unless that is
    too large."""

    facts: dict[str, str]
    source: TaskSource | None


class ForkServerLost(JobError):  # noqa: N818 (a happening, not a mistake)
    """A fork server has died, and its workers with it."""


class ForkServerProcess:
    """Starts at once, beside everything else; ends with the launcher, and all workers with it."""

    def __init__(self, log_file: Path, preparation: Preparation) -> None:
        self._log_file = log_file
        self._is_ready = False
        self._workers = Pidfds()
        ours, theirs = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key != "OMP_THREAD_LIMIT"} | ENVIRONMENT
        with log_file.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quorate.engines.fork_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        # The numbers of its workers, and so of the process groups of whatever they have started.
        self._groups: set[int] = set()
        self._end = os.pidfd_open(self._process.pid)
        self._messages = Messages(ours)
        self._messages.send(PREPARE, **vars(preparation))

    def await_ready(self, give_up: Callable[[], bool]) -> Prepared | None:
        """What it has found, once torch and the task are imported; None when given up."""
        while not self._messages.closed:
            if give_up():
                return None
            ready, _, _ = select.select([self._messages], [], [], PATIENCE)
            for message in self._messages.read() if ready else ():
                if message["what"] == READY:
                    self._is_ready = True
                    source = message["source"]
                    return Prepared(message["facts"], None if source is None else TaskSource.from_json(source))
                if message["what"] == FAILED:
                    raise Failure.from_dict(message["failure"]).error()
        raise JobError(f"{self._departure()} while it imported the task; its log is {self._log_file}.")

    def start(self, assignment: Assignment) -> None:
        """Ask for a worker; a message will tell of its start and one of its end."""
        self._messages.send(START, assignment=assignment.to_json())

    def poll(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What has happened to workers; waits that long for something to happen."""
        ready, _, _ = select.select([self._messages], [], [], seconds)
        if not ready:
            return
        yield from self._read()
        if self._messages.closed:
            raise ForkServerLost(f"{self._departure()}, and the workers with it")

    def kill(self, pid: int) -> None:
        """End one of its workers."""
        self._workers.kill(pid)

    def close(self) -> None:
        """End the fork server and whatever it still has, and wait until they are gone."""
        self._messages.end()
        if not self._is_ready:
            # User code that is being imported does not listen, and has no workers yet that could be left behind.
            self._process.kill()
        if not self._has_ended(CLOSE_PATIENCE):
            self._process.kill()  # the kernel ends the workers with it
            self._has_ended(None)
        self._read_last_words()
        self._messages.close()
        self._reap()
        os.close(self._end)
        # Only the fork server can reap them. Whoever holds the run's lock must not let go of it while one still writes.
        left = self._workers.await_end(CLOSE_PATIENCE)
        if left:
            log.warning("workers still end after %s s: processes %s", CLOSE_PATIENCE, ", ".join(map(str, left)))
        self._workers.close()

    def _read_last_words(self) -> None:
        """Of workers that were started last. It does not wait: what the user's code has forked may hold the socket."""
        while not self._messages.closed and select.select([self._messages], [], [], 0)[0]:
            list(self._read())

    def _read(self) -> Iterator[dict[str, Any]]:
        for message in self._messages.read():
            if message["what"] == STARTED:
                self._workers.add(message["pid"])
                self._groups.add(message["pid"])
            elif message["what"] == EXITED:
                self._workers.discard(message["pid"])
            elif message["what"] == READY:
                self._is_ready = True
            yield message

    def _has_ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._end], [], [], seconds)[0])

    def _reap(self) -> int:
        """Take note of its end, and of its exit code.

        First end what its workers have started and left: it did so itself, unless it was killed. As long as the fork
        server is not reaped its number is that of its session and of no other: nobody else's process is taken for ours.
        """
        over = time.monotonic() + CLOSE_PATIENCE
        while self._process.returncode is None and self._groups and time.monotonic() < over:
            found = members_of(self._process.pid, self._groups)
            if not found:
                break
            left = Pidfds()
            for pid in found:
                left.add(pid)
            for pid in found & members_of(self._process.pid, self._groups):
                left.kill(pid)
            left.await_end(over - time.monotonic())
            left.close()
        return self._process.wait()

    def _departure(self) -> str:
        self._has_ended(None)
        code = self._reap()
        return f"the fork server (pid {self._process.pid}), which starts the workers, {describe_departure(code)}"

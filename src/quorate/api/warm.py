"""Runs one after another in one program, which find imported what the run before them has."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

from quorate.api.run_part import Accept, Runner, Show, run_locally, run_on_engine
from quorate.coordinator.places import Outcome
from quorate.engines.engine import Preparation
from quorate.engines.local import start_fork_server
from quorate.engines.warm import ForkedProcess, KeptForkServer, Program
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch

log = logging.getLogger(__name__)

MOST_KEPT = 2
"""Fork servers that stay: each has a task of its own, and its memory."""


class WarmRunner:
    """Runs jobs here, with fork servers that stay for the next run: a `Runner` for `session.start` and `resume`, in any
    thread of its owner.

    ::

        with WarmRunner() as runner:
            for job in jobs:
                session.start(job, watch, runner)

    Torch and the task are imported by the first run of a task, and again after its source, the environment or the
    working folder has changed; and with another seed if its module draws numbers when it is imported. What a module of
    the task has read from files when it was imported stays as it was. A job for a cluster runs there as ever.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._kept: dict[Any, KeptForkServer] = {}

    def __call__(self, launch: Launch, show: Show, accept: Accept, signals: Signals) -> Outcome:
        if launch.spec.engine.is_cluster:
            return run_on_engine(launch, show, accept, signals)
        return run_locally(launch, show, accept, signals, fork_servers=self._fork_server)

    def __enter__(self) -> "WarmRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fork_server(
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


_runner: ContextVar[Runner] = ContextVar("_runner", default=run_on_engine)


def runner_here() -> Runner:
    """What runs the jobs of this block."""
    return _runner.get()


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Runs in this block reuse the imports of the run before them, and start in a fraction of a second.

    ::

        with quorate.warm():
            for rate in (0.1, 0.03, 0.01):
                quorate.train(job.replace(params={"learning_rate": rate}))

    The task is imported again if its source or the environment has changed, and for another seed if its module draws
    random numbers when it is imported. Other files that the module reads when it is imported are read only once. The
    block applies to its own thread: runs of other threads start as usual, unless they have a block, too.
    """
    with WarmRunner() as runner:
        before = _runner.set(runner)
        try:
            yield
        finally:
            _runner.reset(before)

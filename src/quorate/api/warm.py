"""Runs one after another in one program, which find imported what the run before them has."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType

from quorate.api.run_part import Runner
from quorate.api.session import run_on_engine
from quorate.coordinator.news import Outcome
from quorate.engines.engine import Prepared
from quorate.engines.local import LocalEngine
from quorate.engines.warm import WarmForkServers
from quorate.observe.event import Event
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch, Supervisor


class WarmRunner:
    """Runs jobs here, with processes that stay for the next run: a `Runner` for `session.start` and `resume`.

    ::

        with WarmRunner() as runner:
            for job in jobs:
                session.start(job, watch, runner)

    Torch and the task are imported by the first run of a task, and again after its source, the environment or the
    working folder has changed; and with another seed if its module draws numbers when it is imported. What a module of
    the task has read from files when it was imported stays as it was. A job for a cluster runs there as ever.
    """

    def __init__(self) -> None:
        self._fork_servers = WarmForkServers()

    def __call__(
        self,
        launch: Launch,
        show: Callable[[Event], None],
        accept: Callable[[Prepared], None],
        signals: Signals,
    ) -> Outcome:
        if launch.spec.engine.is_cluster:
            return run_on_engine(launch, show, accept, signals)
        engine = LocalEngine(launch.run, launch.preparation, fork_servers=self._fork_servers)
        return Supervisor(engine, launch, show, accept, signals).run()

    def close(self) -> None:
        """End what has stayed."""
        self._fork_servers.close()

    def __enter__(self) -> "WarmRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


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

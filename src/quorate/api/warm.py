"""Runs one after another in one program, which find imported what the run before them has."""

from collections.abc import Callable
from types import TracebackType

from quorate.api.session import run_on_engine
from quorate.coordinator.news import Outcome
from quorate.engines.engine import Prepared
from quorate.engines.local import LocalEngine
from quorate.engines.warm_interpreters import WarmInterpreters
from quorate.observe.event import Event
from quorate.spec.engine import LocalSpec
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch, Supervisor


class WarmRunner:
    """Runs jobs here, with processes that stay for the next run: a `Runner` for `session.start` and `resume`.

    ::

        with WarmRunner() as runner:
            for job in jobs:
                session.start(job, watch, runner)

    Torch and the task are imported by the first run of a task, and again after its source, its seed, the environment
    or the working folder has changed. What a module of the task has read from files when it was imported stays as it
    was. A job for a cluster runs there as ever.
    """

    def __init__(self) -> None:
        self._interpreters = WarmInterpreters()

    def __call__(
        self,
        launch: Launch,
        show: Callable[[Event], None],
        accept: Callable[[Prepared], None],
        signals: Signals,
    ) -> Outcome:
        if not isinstance(launch.spec.engine, LocalSpec):
            return run_on_engine(launch, show, accept, signals)
        engine = LocalEngine(launch.run, launch.preparation, interpreters=self._interpreters)
        return Supervisor(engine, launch, show, accept, signals).run()

    def close(self) -> None:
        """End what has stayed."""
        self._interpreters.close()

    def __enter__(self) -> "WarmRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

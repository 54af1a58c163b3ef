"""A job in this process, for a debugger: `quorate train --debug` and `quorate.train(job, debug=True)`."""

import bdb
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from quorate.api import session
from quorate.api.prints import RunStart, Watch
from quorate.api.result import Result
from quorate.api.run_part import Accept, Show, refuse_cluster
from quorate.coordinator.places import Outcome
from quorate.core.errors import RequestError
from quorate.core.user_code import attached
from quorate.engines.in_process import InProcessEngine
from quorate.engines.local import ALLOCATOR, ENVIRONMENT
from quorate.observe.events import LogMessage
from quorate.observe.sinks import Sink
from quorate.spec.job import JobSpec, RingSpec
from quorate.spec.keys import AUTO_BATCH
from quorate.spec.resolved import ResolvedJob
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch, Supervisor

WEEK = 7 * 86400.0
# Only how the job runs: its bits are the same. A debugger may hold all threads for as long as a person thinks.
ALONE: dict[str, Any] = {
    "workers": 1,
    "min_workers": 1,
    "spares": 0,
    "loader_workers": 0,
    "capture": False,
    "failure_timeout": WEEK,
    "step_timeout": WEEK,
    "setup_timeout": None,
}


def run_here(launch: Launch, show: Show, accept: Accept, signals: Signals, **given: Any) -> Outcome:
    """Run a job with one worker, in this thread: a `Runner`. What is `given` is for its engine."""
    spec = launch.spec.model_copy(update=ALONE)
    launch = replace(launch, spec=spec, workers=1)
    show(LogMessage(level="info", message="debugging: one worker, in this process"))
    if missing := sorted(name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value):
        told = f"this process was started without what workers have in their environment ({', '.join(missing)}), so the"
        show(LogMessage(level="info", message=f"{told} bits may differ; `quorate train job.yaml --debug` has it"))
    engine = InProcessEngine(launch.run, launch.preparation, **given)
    supervisor = Supervisor(engine, launch, show, accept, signals)
    with attached(), _hurrying(signals), ThreadPoolExecutor(1, "supervisor") as pool:
        outcome = pool.submit(supervisor.run)
        engine.serve()
        return outcome.result()


def start_here(resolved: ResolvedJob, watch: Watch) -> Result:
    """Train a job in a new run folder, with one worker, in this process."""
    _refuse_what_needs_more(resolved.spec)

    def show(begun: RunStart) -> Sink:
        return watch(replace(begun, workers=1))

    return session.start(resolved, show, run_here)


def restart_as_worker() -> None:
    """Begin this command anew in the environment that workers have, since the bits depend on it; returns if it has that
    environment already, or if a debugger is attached, which would be lost."""
    is_debugged = sys.gettrace() is not None or "pydevd" in sys.modules
    if not is_debugged and not os.environ.items() >= ENVIRONMENT.items():
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_THREAD_LIMIT"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], ALLOCATOR | inherited | ENVIRONMENT)


def _refuse_what_needs_more(spec: JobSpec) -> None:
    refuse_cluster(spec, "a job is debugged")
    if not isinstance(spec.strategy, RingSpec):
        raise RequestError(
            f"a job is debugged in one process, and strategy: {spec.strategy.kind} needs several. "
            "Debug the task with --set strategy=ring."
        )
    if spec.batch_size == AUTO_BATCH:
        raise RequestError("batch_size: auto is found by other processes. Debug with a number: --set batch_size=32")


@contextlib.contextmanager
def _hurrying(signals: Signals) -> Iterator[None]:
    """The second Ctrl-C leaves the user's code, since there is no process to kill; a debugger's prompt, too."""
    before = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: Any) -> None:
        if callable(before):
            before(number, frame)
        if signals.at_once:
            raise bdb.BdbQuit

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

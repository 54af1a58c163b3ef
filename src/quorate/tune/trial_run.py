"""A trial as a run: an ordinary run folder, trained in a thread, and told evaluation by evaluation.

The folder is the truth. A trial whose run is there already is resumed, and one that is complete only tells what it has
recorded: nothing is trained twice, whoever was killed.
"""

import contextlib
import errno
import math
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.job import job_text
from quorate.api.known_results import known_run
from quorate.api.prints import Watch
from quorate.api.recorded_run import chosen_checkpoint, recorded_job
from quorate.api.result import Result
from quorate.api.run_part import Runner, Setup, run_on_engine
from quorate.api.tasks import TaskLocation
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import JobError, QuorateError, RunError
from quorate.core.failure import JobFailed
from quorate.core.runs_folder import is_run
from quorate.history.timeline import Timeline
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, RunBegan
from quorate.spec.changes import with_branch
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder, write_creation
from quorate.supervisor.signals import Signals, collecting_signals
from quorate.task.run_mode import PAUSED

STOPPING = "stopping"
"""A file of this name in the folder of trials asks all of them to stop."""
IN_ORDER, AT_ONCE = "in order", "at once"
"""What it says: whether they may save first."""
NO_SPACE = "no space"
"""How a run ends whose folder cannot be written: that is no fault of the trial, which goes on when there is room."""
BUSY = "busy"
"""How it ends where somebody else holds the run."""
GLANCE = 0.1
"""Seconds between two looks for that file."""
LOCK_PATIENCE = 60.0
"""Seconds for which a run may still be in use by a process that is being killed, here or on another host."""


def run_name(trial: int, branch: int = 0) -> str:
    """The run of a trial; of a population, after how many branches."""
    return f"trial-{trial:04d}" + (f"-b{branch}" if branch else "")


@dataclass(frozen=True)
class Plan:
    """What to train: the run, its job, and where it begins.

    `branch` is the run and the step whose checkpoint a new run begins from. Evaluations up to step `after` are known
    already. `until` is the step at which the run stands still until it is asked for more.
    """

    trials: Path
    run: str
    job: ResolvedJob
    branch: tuple[str, int] | None = None
    after: int = 0
    until: int | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.trials / self.run)


@dataclass(frozen=True)
class Report:
    """An evaluation of a trial, or how its run has ended: complete, interrupted, failed, without space, or busy where
    it was not even begun."""

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    ending: str = ""
    message: str = ""
    digest: str = ""
    seconds: float = 0.0


class RunBusyError(JobError):
    """Somebody else is still at work on the run of a trial: on a host that was cut off, say."""


class TrialRun:
    """One run after the other, in a thread that stays: warm processes end with the thread that has started them."""

    def __init__(self, runner: Runner = run_on_engine) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "trial")
        self._signals = Signals()
        self._training: Future[None] | None = None
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._plan: Plan | None = None
        self._told = 0

    def begin(self, plan: Plan) -> None:
        """Train according to a plan; whatever was trained before is stopped first."""
        self.stop()
        self._plan, self._told = plan, plan.after
        self._signals, self._reports = Signals(), queue.SimpleQueue()
        self._training = self._thread.submit(self._train, plan, self._signals, self._reports)

    def next(self) -> Report:
        """Wait for the next evaluation, or the end."""
        assert self._plan is not None, "nothing was begun"
        stopping = self._plan.trials / STOPPING
        while True:
            try:
                report = self._reports.get(timeout=GLANCE)
            except queue.Empty:
                self._heed(stopping)
                continue
            # What is redone after a checkpoint is told again, and is the same.
            if report.ending or report.step > self._told:
                self._told = max(self._told, report.step)
                return report

    def _heed(self, stopping: Path) -> None:
        with contextlib.suppress(OSError):
            asked = 2 if stopping.read_text() == AT_ONCE else 1
            self._signals.received.extend([signal.SIGINT] * (asked - len(self._signals.received)))

    def ask_to_stop(self) -> None:
        """Have the run end in order, with a checkpoint."""
        self._signals.received.append(signal.SIGINT)

    def stop(self) -> None:
        """The same, and wait for that."""
        if self._training is not None:
            self.ask_to_stop()
            self._training.result()
            self._training = None

    def close(self) -> None:
        self.stop()
        self._thread.shutdown()

    def _train(self, plan: Plan, signals: Signals, reports: "queue.SimpleQueue[Report]") -> None:
        try:
            ending = self._ending(plan, signals, reports)
        except RunBusyError as error:
            ending = Report(plan.after, ending=BUSY, message=error.message)
        except QuorateError as error:
            ending = Report(_steps_of(plan.folder), ending="failed", message=error.message)
        except Exception as error:  # told as the failure of one trial: a search goes on without it
            ending = Report(_steps_of(plan.folder), ending="failed", message=f"{type(error).__name__}: {error}")
        if ending is not None and ending.ending == "failed" and _is_full(ending.message):
            ending = replace(ending, ending=NO_SPACE)
        if ending is not None:
            reports.put(ending)

    def _ending(self, plan: Plan, signals: Signals, reports: "queue.SimpleQueue[Report]") -> Report | None:
        """How the run has ended; None where it stands still at the step of the plan."""
        run = plan.folder
        _await_lock(run, signals)
        if not is_run(run.path) and plan.branch is None and plan.until is None:
            self._take_known(plan, signals)
        known = is_run(run.path)
        saved = CheckpointFolder.at(run.checkpoints).list() if known else ()
        result = (run.whole_result() or {}) if known else {}
        reached = saved[-1].cursor.step if saved else 0
        is_over = result.get("status") in ("complete", "failed") and not _is_full(_failure_of(result))
        until = math.inf if plan.until is None else plan.until
        if known:
            told = Timeline.glance(run.events_file)
            for step, metrics in told.evaluations.items():
                if step <= until and (is_over or step <= reached):
                    reports.put(Report(step, metrics, told.total_steps))
        if (result.get("steps") or reached) > until or (reached == until and not is_over):
            return None
        if is_over:
            return _report_of(run, result)
        if signals.received or (plan.trials / STOPPING).exists():
            return Report(reached, ending="interrupted")
        with collecting_signals_into(signals):
            trained = self._start(plan, is_resumed=bool(saved), watch=lambda _: _Evaluations(reports.put))
        if trained.fields.get("ending") != PAUSED:
            return _report_of(run, trained.fields)
        if plan.until not in Timeline.glance(run.events_file).evaluations:
            return Report(
                trained.steps,
                ending="failed",
                message=f"there is no evaluation at step {plan.until}, where trials are compared: see evaluate.every",
            )
        return None

    def _take_known(self, plan: Plan, signals: Signals) -> None:
        """Where a run of this or another search was the same, the trial begins with what that one has trained."""
        known = None
        with collecting_signals_into(signals), contextlib.suppress(JobFailed):  # a signal, which is heeded below
            known = known_run(plan.job, plan.trials.parent.parent, self._runner, is_usual=True)
        if known is not None:
            shutil.rmtree(plan.folder.path, ignore_errors=True)
            _make(plan.folder, plan.job)
            known.take_over(plan.folder, plan.job)  # or nothing is left, and it is trained

    def _start(self, plan: Plan, is_resumed: bool, watch: Watch) -> Result:
        run = plan.folder
        if is_resumed:
            workers = Override("workers", plan.job.spec.workers, "search: trial.workers")
            return session.resume(
                plan.trials, run.name, {}, [workers], watch=watch, runner=self._runner, until=plan.until
            )
        # Without a checkpoint there is nothing to go on from, and nothing to lose.
        shutil.rmtree(run.path, ignore_errors=True)
        job, checkpoint = plan.job, None
        if plan.branch is not None:
            donor = RunFolder(plan.trials / plan.branch[0])
            recorded = recorded_job(donor).spec
            checkpoint = chosen_checkpoint(donor, recorded, plan.branch[1], job.spec.checkpoint)[1]
            job = with_branch(recorded, job, checkpoint.cursor.step)
        _make(run, job)
        setup = Setup(TaskLocation(job.spec.task), watch, self._runner, plan.until)
        return session.start_in(run, job, setup, checkpoint)


class _Evaluations:
    def __init__(self, tell: Callable[[Report], None]) -> None:
        self._tell = tell
        self._total: int | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self._total = event.total_steps
        if isinstance(event, EvaluationDone) and event.step is not None and event.metrics is not None:
            self._tell(Report(event.step, dict(event.metrics), self._total))

    def close(self) -> None: ...


@contextlib.contextmanager
def collecting_signals_into(signals: Signals) -> Iterator[None]:
    """Have the jobs of this thread stop when something is put into `signals`: in a thread they hear nothing else."""
    assert threading.current_thread() is not threading.main_thread()
    with collecting_signals() as heard:
        heard.received = signals.received
        yield


def _make(run: RunFolder, job: ResolvedJob) -> None:
    try:
        run.make()
        write_creation(run.path)
    except OSError as error:
        raise RunError(f"cannot make the run folder {run.path}: {error.strerror or error}.") from error
    run.write_job(job_text(job), is_private=session.is_private(job.spec))


def _await_lock(run: RunFolder, signals: Signals) -> None:
    """Wait for whoever is at work on the run: its driver was killed, and its processes end a moment later."""
    over = time.monotonic() + LOCK_PATIENCE
    while run.path.is_dir() and run.holder() is not None and not signals.received:
        if time.monotonic() > over:
            raise RunBusyError(f"run {run.name} is still in use by {run.holder()}.")

        time.sleep(GLANCE)


def _report_of(run: RunFolder, fields: dict[str, Any]) -> Report:
    ending = fields["status"] if fields["status"] in ("complete", "failed") else "interrupted"
    told = Timeline.glance(run.events_file)
    return Report(
        step=fields.get("steps") or 0,
        metrics=fields.get("final_metrics") or {},
        total_steps=told.total_steps,
        ending=ending,
        message=_failure_of(fields),
        digest=fields.get("weights_digest", ""),
        seconds=round(told.active_seconds, 3),
    )


def _failure_of(fields: dict[str, Any]) -> str:
    return str((fields.get("failure") or {}).get("message", ""))


def _is_full(message: str) -> bool:
    """Whether a failure is that of a disk; by its words, which are all that a run folder keeps of it."""
    return any(os.strerror(number) in message for number in (errno.ENOSPC, errno.EDQUOT))


def _steps_of(run: RunFolder) -> int:
    try:
        return Timeline.glance(run.events_file).position
    except QuorateError:
        return 0

"""A worker's life: build, register, meet the neighbours, train, report, leave."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import Foreign, search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.digests import content_digest
from quorate.core.errors import (
    CheckpointError,
    DivergedError,
    LinkError,
    OutOfMemory,
    QuorateError,
    ReplicasDiffer,
    WorkerUnfit,
)
from quorate.core.failure import Failure
from quorate.core.memory import is_shortage
from quorate.core.timing import Timing
from quorate.core.user_code import announcing, describe
from quorate.core.worker_status import DIVERGED, ENDED_WITH_THE_JOB, GAVE_UP, LEFT, WAITING, WorkerStatus
from quorate.data.fingerprint import fingerprint_in_child
from quorate.observe.events import LogMessage
from quorate.reduce.connect import Listeners
from quorate.spec.job import EarlyStopSpec, JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.training.activity import Activity
from quorate.training.checkpointer import Checkpointer
from quorate.training.device import CPU, canary, digests
from quorate.training.evaluation import sanity_check_evaluation
from quorate.training.progress import Progress
from quorate.training.replica import Replica, check_repeatable
from quorate.training.source import task_source
from quorate.training.task import Task, configure
from quorate.worker.assembly import SessionParts, build_samples, check_evaluable, evaluation_plan, saver_of
from quorate.worker.assignment import Assignment
from quorate.worker.coordinator_link import GrpcLink
from quorate.worker.heartbeats import PaceMeter
from quorate.worker.membership import Membership, Registration
from quorate.worker.membership_view import Dismissed, JobEnded
from quorate.worker.outbox import Backlog
from quorate.worker.same_data import check_same_data, data_facts
from quorate.worker.session import LoopTrainer, WorkerSession
from quorate.worker.status import BUILDING, RESTORING, StatusPage, status_file

log = logging.getLogger(__name__)

SAVING_PATIENCE = 5.0
"""Seconds that a worker which leaves gives to a checkpoint that is being saved."""
GLANCE = 0.05


def start_log(assignment: Assignment) -> None:
    """Log to standard error, which is the worker's file in the run folder."""
    level = assignment.job["log_level"].upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def print_at_once() -> None:
    """What a task prints is in the log when it is printed, not when a buffer is full or lost with the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)


class Worker:
    """One worker process, from its assignment to its exit code."""

    def __init__(self, assignment: Assignment, task_type: type[Task]) -> None:
        self._assignment = assignment
        self._task_type = task_type
        self._spec = JobSpec.model_validate(assignment.job)
        self._run = RunFolder(Path(assignment.run))
        self._page = StatusPage(status_file(self._run, assignment.slot))
        self._timing = Timing(self._spec.failure_timeout)
        self._saver: Checkpointer | None = None
        self._pace = PaceMeter()
        link = GrpcLink(assignment.coordinator, assignment.token)
        self._membership = Membership(link, self._timing, self._status, self._pace.take)
        self._backlog = Backlog(self._membership.publish, self._timing)
        self._hook = assignment.make_hook(self._page.write)
        self._write_status = self._page.write if self._hook is None else self._tell_hook
        stretch = None if self._hook is None else self._hook.stretch
        self._activity = Activity(self._write_status, self._page.write_samples, self._pace.add_step, stretch)

    def live(self) -> int:
        """Train, and tell the coordinator how it ended; the exit code of the process."""
        # A machine that is taken away warns first: the worker completes its step, and the others go on without it.
        signal.signal(signal.SIGTERM, lambda *_: self._membership.ask_to_leave())
        # Loaders are told to end by the same signal, and do.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        try:
            code = self._live()
            # After all is told: what ends a job is not kept back by a checkpoint that is being saved.
            self._close_saver()
            self._membership.flush_last()  # that this one was saved
            if code == LEFT and self._saver is not None and self._saver.divergence is not None:
                return self._report_error(self._saver.divergence)  # the last save of one that was let go has found it
            return code
        finally:
            self._membership.close()

    def _live(self) -> int:
        try:
            self._train()
            return 0
        except JobEnded as ended:
            return self._leave(ended)
        except Dismissed as reason:
            log.info("%s", reason)
            return LEFT
        except QuorateError as error:
            if self._membership.ended and isinstance(error, LinkError | WorkerUnfit):
                return self._leave(error)
            log.error("%s", error)
            return self._report_error(error)
        except Exception as error:
            # Not the user's doing: the whole traceback is for us.
            log.exception("unexpected error")
            return self._fail(error)

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close(SAVING_PATIENCE)

    def _leave(self, reason: QuorateError) -> int:
        log.info("the job has ended: %s", reason)
        self._membership.flush_last()
        return ENDED_WITH_THE_JOB

    def _give_up(self, reason: WorkerUnfit) -> int:
        # The coordinator adds where that was when it hears of the exit.
        self._membership.report_failure(Failure.of(reason).at(worker=self._assignment.slot))
        return GAVE_UP

    def _fail(self, error: Exception) -> int:
        if is_shortage(error):
            return self._give_up(OutOfMemory(f"there is not enough memory for it ({describe(error)})."))
        return self._report(
            Failure("InternalError", f"Quorate failed: {describe(error)}", traceback=traceback.format_exc())
        )

    def _report(self, failure: Failure) -> int:
        activity = self._activity
        placed = failure.at(
            worker=self._assignment.slot, lane=activity.lane, step=activity.step or None, phase=activity.phase
        )
        self._membership.report_failure(placed.at(message=_with_place(placed)))
        return failure.exit_code

    def _report_error(self, error: QuorateError) -> int:
        if isinstance(error, WorkerUnfit):
            return self._give_up(error)
        if not isinstance(error, ReplicasDiffer):
            return self._report(Failure.of(error))
        # What this worker holds must not be used any more; the job goes on from a checkpoint, if there is one.
        if self._assignment.checkpoint is None and not self._has_checkpoint():
            message = (
                f"{error} There is no checkpoint to go back to, so the job ends; `checkpoint.every` saves earlier."
            )
            return self._report(Failure.of(DivergedError(message)))
        self._report(Failure.of(error))
        return DIVERGED

    def _has_checkpoint(self) -> bool:
        """Whether there is one by now: the first may be on its way, and is sound if all its writers have agreed."""
        over = time.monotonic() + SAVING_PATIENCE
        folder = CheckpointFolder(self._run.checkpoints)
        while not (found := bool(folder.list())) and self._saver is not None and self._saver.may_commit:
            if time.monotonic() >= over:
                break
            time.sleep(GLANCE)
        return found

    def _status(self) -> WorkerStatus:
        status = self._page.status
        # Both grow by themselves, so their sum changes whenever the worker comes further.
        moves = self._page.moves + self._activity.moves
        return WorkerStatus(status.step, status.phase, moves, self._activity.waits_for)

    def _tell_hook(self, step: int, phase: str, lane: int | None = None) -> None:
        assert self._hook is not None
        self._page.write(step, phase, lane)
        self._hook.on_phase(step, phase, lane)

    def _train(self) -> None:
        with announcing(self._page.write_setup):
            parts, progress = self._build()
        if self._hook is not None:
            self._hook.on_built(parts.replica.state_tensors)
        listeners = Listeners.bind(self._assignment.network.address, shares_memory=self._spec.links == "auto")
        try:
            worker = self._membership.register(self._registration(parts, progress, listeners))
            self._write_status(progress.cursor.step, WAITING, None)
            self._run_session(parts, worker, progress, listeners)
        finally:
            listeners.close()

    def _run_session(self, parts: SessionParts, worker: int, progress: Progress, listeners: Listeners) -> None:
        self._saver = saver = saver_of(
            parts,
            self._assignment.mode,
            publish=self._membership.publish,
            check_lease=self._membership.check_lease,
            check_commit=self._membership.check_commit,
            flush_events=self._membership.flush,
            activity=self._activity,
            generation=lambda: self._membership.generation_id,
            restored=None if self._assignment.checkpoint is None else progress.cursor,
        )
        trainer = LoopTrainer(
            parts,
            worker,
            progress,
            listeners,
            self._membership,
            self._backlog,
            self._hook,
            self._activity,
            self._write_status,
            self._assignment,
            self._timing,
            saver,
        )
        WorkerSession(worker, trainer, self._membership, self._backlog, self._write_status).complete()

    def _build(self) -> tuple[SessionParts, Progress]:
        spec = self._spec
        self._write_status(0, BUILDING, None)
        self._activity.phase = BUILDING
        CPU.pin(spec.threads, spec.deterministic)
        task = self._configure()
        replica = Replica(task, spec, CPU)
        if self._assignment.workers == 1:
            # By a task of its own: what the first one keeps from building its model would hide the difference.
            check_repeatable(self._configure(), spec, replica)
        samples = build_samples(task, spec)
        if self._assignment.mode.evaluates_only:
            check_evaluable(samples)
        self._page.write_setup("fingerprint")
        environment = CPU.facts(spec.threads, spec.deterministic) | {
            "canary": canary(CPU),
            "task source": task_source(self._task_type).digest,
            "layout": content_digest(replica.layout().encode()),
            **data_facts(fingerprint_in_child(samples)),
        }
        if self._assignment.slot == 0 and self._assignment.mode.is_training:
            self._page.write_setup("metrics()")
            sanity_check_evaluation(task, replica, samples, evaluation_plan(spec, samples))
        folder = CheckpointFolder.of_job(self._run.checkpoints, spec.checkpoint)
        parts = SessionParts(spec, task, replica, samples, environment, folder)
        return parts, self._restore(parts)

    def _configure(self) -> Task:
        return configure(self._task_type, self._spec.params, self._assignment.job_source, self._spec.seed)

    def _restore(self, parts: SessionParts) -> Progress:
        if self._assignment.checkpoint is None:
            return Progress()
        self._write_status(0, RESTORING, None)
        path = Path(self._assignment.checkpoint)
        folder = CheckpointFolder(path.parent, cipher=parts.folder.cipher)
        info = next((info for info in folder.list() if info.path == path), None)
        if info is None and self._assignment.is_replacement:
            info = newest_instead(path, folder, self._run.checkpoints, partial(why_foreign, spec=self._spec))
        if info is None:
            raise CheckpointError(
                f"checkpoint {path} is not there any more: it was removed while this job was starting. Try again; "
                "`checkpoint.keep` says how many a running job keeps"
            )
        if self._assignment.mode.is_training:
            # Only now: no fact of the launcher tells what datasets() gives.
            self._check_data(parts, info)
        progress = _under(parts.layout.load(folder.load(info).encoded), self._spec.early_stop)
        # A branch may watch another metric, and has no checkpoint of what another run has evaluated.
        return progress if self._is_own(info) else replace(progress, best=None)

    def _is_own(self, info: CheckpointInfo) -> bool:
        return info.path.parent == self._run.checkpoints

    def _check_data(self, parts: SessionParts, info: CheckpointInfo) -> None:
        warning = check_same_data(
            self._run.name,
            info.manifest.environment,
            parts.environment,
            of_shards=bool(parts.samples.shards),
            is_branch=not self._is_own(info),
        )
        if warning is None:
            return
        log.warning("%s", warning)
        # All workers find the same, so one tells it.
        if self._assignment.slot == 0 and not self._assignment.is_replacement:
            self._membership.publish(LogMessage(level="warning", message=warning))

    def _registration(self, parts: SessionParts, progress: Progress, listeners: Listeners) -> Registration:
        return Registration(
            slot=self._assignment.slot,
            pid=os.getpid(),
            host=socket.gethostname(),
            ring_address=listeners.network.address,
            local_address=listeners.local_address,
            facts=parts.environment,
            tensors=digests(parts.replica.tensors(), parts.replica.device),
            cursor=progress.cursor,
        )


def newest_instead(gone: Path, folder: CheckpointFolder, own: Path, foreign: Foreign) -> CheckpointInfo:
    """Others have gone on and removed the checkpoint that was meant: what is newest now in the run's own is as good.

    Who finds none must not register as if there had never been one. It makes room for another, and the launcher looks
    again; if others hold the state by then, that one copies it.
    """
    newest = search_own(folder.search, foreign).newest if gone.parent == own else None
    if newest is None:
        raise LinkError(f"checkpoint {gone}, which this worker was to begin from, is not there any more")
    return newest


def _under(progress: Progress, early_stop: EarlyStopSpec | None) -> Progress:
    """A branch may have another patience, or none: what was an early stop before need not be one for it."""
    stopped = early_stop is not None and progress.waited >= early_stop.patience
    return replace(progress, early_stopped=stopped)


def _with_place(failure: Failure) -> str:
    """The sentence, led by where it happened if that is a place in the user's code."""
    if not failure.traceback and failure.lane is None:
        return failure.message
    place = {"worker": failure.worker, "lane": failure.lane, "step": failure.step}
    where = ", ".join(f"{name} {number}" for name, number in place.items() if number is not None)
    return f"{where}: {failure.message}"

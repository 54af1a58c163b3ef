"""A worker that ends in trouble: what it tells its coordinator, and the exit code of its process."""

import logging
import time
import traceback
from dataclasses import dataclass

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import (
    DivergedError,
    GpuLost,
    JobError,
    LanesDiffer,
    LinkError,
    OutOfMemory,
    QuorateError,
    ReplicasDiffer,
    ResidualsLost,
    WorkerUnfit,
)
from quorate.core.failure import Failure
from quorate.core.generation import DIVERGED, ENDED_WITH_THE_JOB, GAVE_UP
from quorate.core.machine import is_shortage, why_no_thread
from quorate.core.user_code import describe, is_attached
from quorate.replica.device import Device
from quorate.training.activity import Activity
from quorate.training.checkpointer import Checkpointer
from quorate.worker.assignment import Assignment
from quorate.worker.membership import Membership
from quorate.worker.membership_view import JobEnded

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which a first checkpoint that is being saved is waited for."""
GLANCE = 0.05


@dataclass
class Trouble:
    """`checkpointer` is None where what it would save is lost."""

    assignment: Assignment
    membership: Membership
    activity: Activity
    device: Device | None
    checkpointer: Checkpointer | None

    def told(self, error: Exception) -> int:
        """Tell what was raised; the exit code."""
        if isinstance(error, QuorateError):
            has_ended = self.membership.view.ended and isinstance(error, LinkError | WorkerUnfit)
            if has_ended or isinstance(error, JobEnded):
                log.info("the job has ended: %s", error)
                self.membership.flush_last()
                return ENDED_WITH_THE_JOB
            # In the process of the command that says it itself.
            log.log(logging.INFO if is_attached() else logging.ERROR, "%s", error)
            return self.report(self._gpu_lost(error) or error)
        # Not the user's doing: the whole traceback is for us.
        log.error("unexpected error", exc_info=error)
        unfit: QuorateError | None = self._gpu_lost(error)
        if is_shortage(error):
            unfit = OutOfMemory(f"there is not enough memory for it ({describe(error)}).")
        elif why := why_no_thread(error):
            unfit = JobError(why)
        if unfit is not None:
            return self.report(unfit)
        text = "".join(traceback.format_exception(error))
        return self._report(Failure("InternalError", f"Quorate failed: {describe(error)}", traceback=text))

    def _gpu_lost(self, error: Exception) -> GpuLost | None:
        """Whoever's code the error was raised in, it is nobody's there but of the GPU."""
        from quorate.core.gpus import cuda_error_of, describe_fault

        told = cuda_error_of(error, None if self.device is None else self.device.synchronize)
        if told is None:
            return None
        # What lies there cannot be saved any more, and nobody waits for it.
        self.checkpointer = None
        return GpuLost(describe_fault(told))

    def report(self, error: QuorateError) -> int:
        """Tell what has ended the worker; the exit code."""
        if isinstance(error, WorkerUnfit):
            # The coordinator adds where that was when it hears of the exit.
            self.membership.report_failure(Failure.of(error).at(worker=self.assignment.slot))
            return GAVE_UP
        if not isinstance(error, ReplicasDiffer):
            return self._report(Failure.of(error))
        # What this worker holds must not be used any more; the job goes on from a checkpoint, if there is one.
        # Where lanes differ there may be none that is right, and the job begins again.
        is_damage = not isinstance(error, ResidualsLost | LanesDiffer)
        if is_damage and self.assignment.checkpoint is None and not self._has_checkpoint():
            message = (
                f"{error} There is no checkpoint to go back to, so the job ends; `checkpoint.every` saves earlier."
            )
            return self._report(Failure.of(DivergedError(message)))
        self._report(Failure.of(error))
        return DIVERGED

    def _report(self, failure: Failure) -> int:
        """Tell it with its place; the sentence is led by that if it is one in the user's code."""
        activity, worker = self.activity, self.assignment.slot
        placed = failure.at(worker=worker, lane=activity.lane, step=activity.step or None, phase=activity.phase)
        if placed.traceback or placed.lane is not None:
            placed = placed.at(message=f"{placed.place_in_words}: {placed.message}")
        self.membership.report_failure(placed)
        return failure.exit_code

    def _has_checkpoint(self) -> bool:
        """Whether there is one by now: the first may be on its way, and is sound if all its writers have agreed."""
        over = time.monotonic() + PATIENCE
        folder = CheckpointFolder.at(self.assignment.stored.checkpoints)
        while not (found := bool(folder.list())) and self.checkpointer is not None and self.checkpointer.may_commit:
            if time.monotonic() >= over:
                break
            time.sleep(GLANCE)
        return found

"""A worker's way through the generations of its job."""

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import GenerationOver, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Generation
from quorate.core.timing import Timing
from quorate.core.worker_status import COPY, JOIN, REGROUP
from quorate.data.sampler import Source
from quorate.observe.events import StateCopied
from quorate.reduce.connect import Endpoint, Listeners
from quorate.reduce.reduction import Reduction
from quorate.strategies.kinds import Connection
from quorate.training.activity import Activity
from quorate.training.checkpointer import Checkpointer
from quorate.training.loop import Loop
from quorate.training.progress import Progress
from quorate.training.strategy import Save, StepRequest
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.worker.assembly import Hooks, SessionParts, assemble
from quorate.worker.assignment import Assignment, Tell, WorkerHook
from quorate.worker.backlog import Backlog
from quorate.worker.membership import Membership
from quorate.worker.state_copy import align

log = logging.getLogger(__name__)

GLANCE = 0.1
"""Seconds between two looks at whether a generation is over, for those who wait for its members."""


@dataclass
class WorkerSession:
    """Trains in one generation after the other, until one of them completes the job.

    What is built once stays; links, loaders and gradients are those of a generation. `progress` is what the worker
    holds: it is right also when a generation ends in the middle of a step.
    """

    ground: SessionParts
    worker: int
    progress: Progress
    listeners: Listeners
    membership: Membership
    backlog: Backlog
    hook: WorkerHook | None
    activity: Activity
    tell: Tell
    assignment: Assignment
    timing: Timing
    saver: Checkpointer
    _pace: "_Pace | None" = None

    def complete(self) -> None:
        """Go on until the job is complete."""
        generation = None
        while True:
            generation = self.membership.await_generation(after=generation)
            if self.hook is not None:
                self.hook.on_generation({member.worker for member in generation.members}, self._is_called)
            ended = self._take_part(generation)
            if ended.is_complete:
                return
            self._leave(generation, ended)

    def _take_part(self, generation: Generation) -> "_Ended":
        """Train in one generation.

        Whatever is the generation's own, its gradients above all, is gone when this returns and before anybody is told
        so: else the next generation would need the memory of two.
        """
        is_saved = False
        try:
            with contextlib.ExitStack() as stack:
                self._check_place(generation)
                loop = self._begin(generation, stack)
                # What it has copied is not its own work, and does not count for its speed.
                self._pace = self._pace or _Pace(self.progress)
                try:
                    ending = loop.run()
                finally:
                    self.progress, is_saved = loop.progress, loop.is_saved
                is_complete = ending is not None and self._completes(ending, self._pace)
                return _Ended(None, is_saved, is_complete)
        except LinkError as error:
            if self.membership.ended:
                raise
            log.info("generation %s is over for this worker: %s", generation.id, error)
            return _Ended(None if isinstance(error, GenerationOver) else Failure.of(error), is_saved)

    def _check_place(self, generation: Generation) -> None:
        """Refuse a generation that takes us to be elsewhere: it was formed by an earlier word of ours."""
        told = generation.members[generation.position(self.worker)].cursor
        step = self.progress.cursor.step
        if told != self.progress.cursor:
            raise GenerationOver(f"generation {generation.id} takes this worker to be at step {told.step}, not {step}")

    def _begin(self, generation: Generation, stack: contextlib.ExitStack) -> Loop:
        """Connect to the others, and have the state that they have; what is closed at its end goes on the stack."""
        if self.worker not in generation.behind:
            self.membership.hold_state()
        connection = self._connect(generation)
        stack.callback(connection.close)
        self.membership.close_when_over(generation, connection.links.close)
        # Or the one that closes would keep the links, and those the gradients.
        stack.callback(self.membership.close_when_over, generation, lambda: None)
        self._align(generation, connection.links)
        self.membership.hold_state()
        # Whoever has not done the step itself does what follows from it, such as an evaluation, at that step.
        self.activity.begin_step(self.progress.cursor.step)
        loop = assemble(
            self.ground,
            generation,
            self.worker,
            connection=connection,
            progress=self.progress,
            saver=self.saver,
            hooks=self._hooks(),
            mode=self.assignment.mode,
        )
        stack.callback(loop.close)
        return loop

    def _connect(self, generation: Generation) -> Connection:
        self.tell(generation.cursor.step, JOIN, None)
        credentials = Credentials(self.assignment.token, self.worker, generation.id)
        deadline, lease = self._while_it_lasts(self.timing.connect), self.membership.lease_remaining
        return self.ground.strategy.connect(
            Endpoint(generation, credentials, self.listeners, deadline, lease, self.timing.link_silence)
        )

    def _while_it_lasts(self, seconds: float) -> Deadline:
        """A deadline that also ends with the generation: whoever waits for one that has died waits in vain."""
        over = time.monotonic() + seconds

        def remaining() -> float:
            self.membership.check_lease()
            return min(over - time.monotonic(), GLANCE)

        return remaining

    def _align(self, generation: Generation, reduction: Reduction) -> None:
        if not generation.behind:
            return
        self.tell(generation.cursor.step, COPY, None)
        began = time.perf_counter()
        self.progress, size = align(
            generation, self.worker, reduction, self.ground.layout, self.progress, self.activity
        )
        if 0 in generation.members[generation.position(self.worker)].lanes:
            seconds = round(time.perf_counter() - began, 4)
            step, formed = self.progress.cursor.step, str(generation.id)
            self.backlog.tell(StateCopied(step=step, generation=formed, bytes=size, seconds=seconds))

    def _completes(self, ending: str, pace: "_Pace") -> bool:
        digest = self.ground.replica.weights_digest()
        evaluated = len(self.ground.samples.datasets.get(Source.VALIDATION, ()))
        result = _result(ending, digest, self.progress, pace.of(self.progress), evaluated)
        return self.membership.complete(digest, result)

    def _leave(self, generation: Generation, ended: "_Ended") -> None:
        self.tell(self.progress.cursor.step, REGROUP, None)
        # Whoever takes this state up, and did not come here by itself, could not tell how it came about.
        self.backlog.tell_kept()
        self.membership.tell_before_promise()
        self.membership.report_state(generation, self.progress.cursor, ended.symptom, is_saved=ended.is_saved)

    def _is_called(self) -> bool:
        """Whether this generation is to end at the next boundary. Raises when it has ended."""
        self.membership.check_lease()
        return self.membership.break_requested or self.membership.stop_requested is not None

    def _requested(self) -> StepRequest:
        """What the coordinator asks for at the next step boundary."""
        asked = self.membership
        save = Save.COMMIT if asked.save_requested else Save.BEGIN if asked.save_asked else Save.NONE
        return StepRequest(asked.stop_requested, save, asked.break_requested or asked.save_requested)

    def _hooks(self) -> Hooks:
        return Hooks(
            publish=self.backlog.tell,
            check_lease=self.membership.check_lease,
            activity=self.activity,
            requested=self._requested,
            save_begun=self.membership.save_begun,
            keep=self.backlog.keep,
        )


@dataclass(frozen=True)
class _Ended:
    """How a generation ended for a worker: by which broken link, if by one; whether its state is saved; and whether
    the job is complete with it."""

    symptom: Failure | None
    is_saved: bool
    is_complete: bool = False


class _Pace:
    """How many samples a second, from where it begins."""

    def __init__(self, progress: Progress) -> None:
        self._since, self._samples = time.perf_counter(), progress.samples

    def of(self, progress: Progress) -> float:
        seconds = time.perf_counter() - self._since
        return round((progress.samples - self._samples) / seconds, 1) if seconds > 0 else 0.0


def _result(ending: str, digest: str, progress: Progress, samples_per_second: float, validation: int) -> dict[str, Any]:
    best, bad = progress.best, {"training": progress.bad, "validation": progress.bad_evaluated}
    read = {"training_read": progress.samples + progress.bad, "validation_read": validation}
    return {
        "ending": ending,
        "steps": progress.cursor.step,
        "weights_digest": digest,
        "samples_per_second": samples_per_second,
        "final_metrics": progress.metrics,
        "ledger": str(progress.tally),
        "best": None if best is None else {"value": best.value, "step": best.step},
        **({"bad_samples": bad | read} if any(bad.values()) else {}),
    }

"""A worker's way through the generations of its job."""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from quorate.core.cursor import Cursor
from quorate.core.errors import GenerationOver, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Generation
from quorate.core.timing import Timing
from quorate.core.worker_status import COPY, JOIN, REGROUP
from quorate.data.sampler import Source
from quorate.observe.events import StateCopied
from quorate.reduce.connect import Endpoint, Listeners
from quorate.strategies.kinds import Connection as StrategyConnection
from quorate.training.activity import Activity
from quorate.training.checkpointer import Checkpointer
from quorate.training.progress import Progress
from quorate.training.strategy import NOTHING_ASKED, Save, StepRequest
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.worker.assembly import Hooks, SessionParts, assemble
from quorate.worker.assignment import Assignment, Tell, WorkerHook
from quorate.worker.membership import Membership
from quorate.worker.outbox import Backlog
from quorate.worker.state_copy import align

log = logging.getLogger(__name__)

GLANCE = 0.1
"""Seconds between two looks at whether a generation is over, for those who wait for its members."""


class Connection(Protocol):
    """What joins a worker to the other members of a generation."""

    def abort(self) -> None:
        """End every wait for the others: called from another thread, when the generation or the job is over."""
        ...

    def close(self) -> None:
        """Let go of all that is the generation's own."""
        ...


C = TypeVar("C", bound=Connection)


class Trainer(Protocol[C]):
    """What a worker does in its generations. Called by its session alone: connect, align, train, result.

    `cursor` is where that stands which it holds: it is right also when a generation ends in the middle of a step.
    `is_saved`: there is a checkpoint of it, of this generation.
    """

    @property
    def cursor(self) -> Cursor:
        """Where it stands."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether that is saved."""
        ...

    def connect(self, generation: Generation) -> C:
        """Find the other members."""
        ...

    def align(self, generation: Generation, connection: C) -> None:
        """Have whoever is behind take up the state of the donor."""
        ...

    def train(self, generation: Generation, connection: C) -> str | None:
        """Train until the job is done or shall stop, and say which; None if only the generation ends."""
        ...

    def result(self, ending: str) -> tuple[str, Mapping[str, Any]]:
        """The digest of the weights, and what to tell of the whole."""
        ...


@dataclass
class WorkerSession(Generic[C]):
    """Trains in one generation after the other, until one of them completes the job.

    What is built once stays; links, loaders and gradients are those of a generation.
    """

    worker: int
    trainer: Trainer[C]
    membership: Membership
    backlog: Backlog
    write_status: Tell

    def complete(self) -> None:
        """Go on until the job is complete."""
        generation = None
        while True:
            generation = self.membership.await_generation(after=generation)
            ended = self._take_part(generation)
            if ended.is_complete:
                return
            self._leave(generation, ended)

    def _take_part(self, generation: Generation) -> "_Ended":
        """Train in one generation.

        Whatever is the generation's own, its gradients above all, is gone when this returns and before anybody is told
        so: else the next generation would need the memory of two.
        """
        try:
            with contextlib.ExitStack() as stack:
                self._check_place(generation)
                if self.worker not in generation.behind:
                    self.membership.hold_state()
                connection = self.trainer.connect(generation)
                stack.callback(connection.close)
                self.membership.close_when_over(generation, connection.abort)
                # Or whoever hears of the end would keep the connection, and that the gradients.
                stack.callback(self.membership.close_when_over, generation, lambda: None)
                self.trainer.align(generation, connection)
                self.membership.hold_state()
                ending = self.trainer.train(generation, connection)
                is_complete = ending is not None and self.membership.complete(*self.trainer.result(ending))
                return _Ended(None, is_complete)
        except LinkError as error:
            if self.membership.ended:
                raise
            log.info("generation %s is over for this worker: %s", generation.id, error)
            return _Ended(None if isinstance(error, GenerationOver) else Failure.of(error))

    def _check_place(self, generation: Generation) -> None:
        """Refuse a generation that takes us to be elsewhere: it was formed by an earlier word of ours."""
        told, cursor = generation.members[generation.position(self.worker)].cursor, self.trainer.cursor
        if told != cursor:
            raise GenerationOver(
                f"generation {generation.id} takes this worker to be at step {told.step}, not {cursor.step}"
            )

    def _leave(self, generation: Generation, ended: "_Ended") -> None:
        self.write_status(self.trainer.cursor.step, REGROUP, None)
        # Whoever takes this state up, and did not come here by itself, could not tell how it came about.
        self.backlog.publish_kept()
        self.membership.flush_before_report()
        self.membership.report_state(generation, self.trainer.cursor, ended.symptom, is_saved=self.trainer.is_saved)


@dataclass(frozen=True)
class _Ended:
    """How a generation ended for a worker: by which broken link, if by one; and whether the job is complete with it."""

    symptom: Failure | None
    is_complete: bool = False


@dataclass
class LoopConnection:
    """The connection of a strategy in one generation, and what is to be closed with it."""

    strategy: StrategyConnection
    stack: contextlib.ExitStack

    def abort(self) -> None:
        """Close the links."""
        self.strategy.links.close()

    def close(self) -> None:
        """Close all."""
        self.stack.close()


@dataclass
class LoopTrainer:
    """Trains the task by the loop. `progress` is what the worker holds."""

    parts: SessionParts
    worker: int
    progress: Progress
    listeners: Listeners
    membership: Membership
    backlog: Backlog
    hook: WorkerHook | None
    activity: Activity
    write_status: Tell
    assignment: Assignment
    timing: Timing
    saver: Checkpointer
    is_saved: bool = False
    _pace: "_Pace | None" = None

    @property
    def cursor(self) -> Cursor:
        """Where it stands."""
        return self.progress.cursor

    def connect(self, generation: Generation) -> LoopConnection:
        """Connect to the others."""
        self.is_saved = False
        if self.hook is not None:
            self.hook.on_generation({member.worker for member in generation.members}, self._is_called)
        connection = self._connect(generation)
        stack = contextlib.ExitStack()
        stack.callback(connection.close)
        return LoopConnection(connection, stack)

    def train(self, generation: Generation, connection: LoopConnection) -> str | None:
        """Run the loop."""
        # Whoever has not done the step itself does what follows from it, such as an evaluation, at that step.
        self.activity.begin_step(self.progress.cursor.step)
        loop = assemble(
            self.parts,
            generation,
            self.worker,
            connection=connection.strategy,
            progress=self.progress,
            saver=self.saver,
            hooks=self._hooks(),
            mode=self.assignment.mode,
        )
        connection.stack.callback(loop.close)
        # What it has copied is not its own work, and does not count for its speed.
        self._pace = self._pace or _Pace(self.progress)
        try:
            ending = loop.run()
        finally:
            self.progress, self.is_saved = loop.progress, loop.is_saved
        return ending

    def _connect(self, generation: Generation) -> StrategyConnection:
        self.write_status(generation.cursor.step, JOIN, None)
        credentials = Credentials(self.assignment.token, self.worker, generation.id)
        deadline, lease = self._while_it_lasts(self.timing.connect), self.membership.lease_remaining
        return self.parts.strategy.connect(
            Endpoint(generation, credentials, self.listeners, deadline, lease, self.timing.link_silence)
        )

    def _while_it_lasts(self, seconds: float) -> Deadline:
        """A deadline that also ends with the generation: whoever waits for one that has died waits in vain."""
        over = time.monotonic() + seconds

        def remaining() -> float:
            self.membership.check_lease()
            return min(over - time.monotonic(), GLANCE)

        return remaining

    def align(self, generation: Generation, connection: LoopConnection) -> None:
        """Copy the state, or give it."""
        if not generation.behind:
            return
        self.write_status(generation.cursor.step, COPY, None)
        began = time.perf_counter()
        self.progress, size = align(
            generation, self.worker, connection.strategy.links, self.parts.layout, self.progress, self.activity
        )
        if 0 in generation.members[generation.position(self.worker)].lanes:
            seconds = round(time.perf_counter() - began, 4)
            step, formed = self.progress.cursor.step, str(generation.id)
            self.backlog.publish(StateCopied(step=step, generation=formed, bytes=size, seconds=seconds))

    def result(self, ending: str) -> tuple[str, dict[str, Any]]:
        """What a worker that is done tells."""
        assert self._pace is not None, "whoever is done has trained"
        digest = self.parts.replica.weights_digest()
        evaluated = len(self.parts.samples.datasets.get(Source.VALIDATION, ()))
        return digest, _result(ending, digest, self.progress, self._pace.of(self.progress), evaluated)

    def _is_called(self) -> bool:
        """Whether this generation is to end at the next boundary. Raises when it has ended."""
        self.membership.check_lease()
        return self.membership.break_requested or self.membership.stop_requested is not None

    def _requested(self) -> StepRequest:
        """What the coordinator asks for at the next step boundary."""
        asked = self.membership
        if not asked.is_asked:  # as at almost every step
            return NOTHING_ASKED
        save = Save.COMMIT if asked.save_requested else Save.BEGIN if asked.save_asked else Save.NONE
        return StepRequest(asked.stop_requested, save, asked.break_requested or asked.save_requested)

    def _hooks(self) -> Hooks:
        return Hooks(
            publish=self.backlog.publish,
            check_lease=self.membership.check_lease,
            activity=self.activity,
            requested=self._requested,
            save_begun=self.membership.save_begun,
            keep=self.backlog.keep,
        )


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

"""A worker's way through the generations of its job."""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.errors import GenerationOver, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import COPY, JOIN, REGROUP, Cursor, Generation
from quorate.core.spans import BUILD
from quorate.core.timing import Timing
from quorate.data.sampler import Source
from quorate.observe.events import StateCopied
from quorate.strategies.kinds import Connection
from quorate.task.progress import Progress
from quorate.training.activity import Activity, Tracer
from quorate.training.checkpointer import Checkpointer
from quorate.wire.handshake import Credentials
from quorate.worker.assembly import Assembly, Hooks, SessionParts
from quorate.worker.assignment import Assignment, Tell, WorkerHook
from quorate.worker.heartbeats import Backlog
from quorate.worker.membership import Membership

log = logging.getLogger(__name__)

DIGEST_INDEX = 13
"""Tells the digests of what members hold from what else is gathered."""

GLANCE = 0.1
"""Seconds between two looks at whether a generation is over, for those who wait for its members."""


class Trainer(Protocol):
    """What a worker does in its generations. Called by its session alone: connect, align, train, result.

    `cursor` says where that stands which it holds: right also when a generation ends in the middle of a step.
    `is_saved`: there is a checkpoint of it, of this generation. The links that `connect` gives join it to the other
    members: `abort`, called from another thread when the generation or the job is over, ends every wait for these, and
    `close` lets go of all that is the generation's own. `align` has whoever is behind take up the state of the donor.
    `train` says whether the job is done or shall stop; None if only the generation ends. `result` gives the digest of
    the weights, and what to tell of the whole.
    """

    @property
    def cursor(self) -> Cursor: ...

    @property
    def is_saved(self) -> bool: ...

    def connect(self, generation: Generation) -> Any: ...

    def align(self, generation: Generation, links: Any, /) -> None: ...

    def train(self, generation: Generation, links: Any, /) -> str | None: ...

    def result(self, ending: str) -> tuple[str, Mapping[str, Any]]: ...


@dataclass
class WorkerSession:
    """Trains in one generation after the other, until one of them completes the job.

    What is built once stays; links, loaders and gradients are those of a generation.
    """

    worker: int
    trainer: Trainer
    membership: Membership
    backlog: Backlog
    write_status: Tell

    def complete(self) -> None:
        generation, is_complete = None, False
        while not is_complete:
            generation = self.membership.await_generation(after=generation)
            log.info("takes part in generation %s", generation.id)
            symptom = None
            try:
                is_complete = self._take_part(generation)
            except LinkError as error:
                if self.membership.view.ended:
                    raise
                log.info("generation %s is over for this worker: %s", generation.id, error)
                symptom = None if isinstance(error, GenerationOver) else Failure.of(error)
            # Not within the handler: the traceback of the error keeps what was the generation's own.
            if not is_complete:
                self._leave(generation, symptom)

    def _take_part(self, generation: Generation) -> bool:
        """Train in one generation; whether the job is complete with it.

        Whatever is the generation's own, its gradients above all, is gone when this returns and before anybody is told
        so: else the next generation would need the memory of two.
        """
        view = self.membership.view
        told, cursor = generation.members[generation.position(self.worker)].cursor, self.trainer.cursor
        if told != cursor:  # it was formed by an earlier word of ours
            raise GenerationOver(
                f"generation {generation.id} takes this worker to be at step {told.step}, not {cursor.step}"
            )
        if self.worker not in generation.behind:
            view.hold_state()
        with contextlib.ExitStack() as stack:
            links = self.trainer.connect(generation)
            stack.callback(links.close)
            view.close_when_over(generation, links.abort)
            # Or whoever hears of the end would keep the links, and those the gradients.
            stack.callback(view.close_when_over, generation, lambda: None)
            self.trainer.align(generation, links)
            view.hold_state()
            ending = self.trainer.train(generation, links)
            return ending is not None and self.membership.complete(*self.trainer.result(ending))

    def _leave(self, generation: Generation, symptom: Failure | None) -> None:
        """Report where this worker stands; `symptom` is the broken link by which the generation ended for it."""
        self.write_status(self.trainer.cursor.step, REGROUP, None)
        # Whoever takes this state up, and did not come here by itself, could not tell how it came about.
        self.backlog.publish_kept()
        self.membership.flush_before_report()
        self.membership.report_state(generation, self.trainer.cursor, symptom, is_saved=self.trainer.is_saved)


class StrategyLinks(contextlib.ExitStack):
    """A strategy's connection in one generation; what is built on it is closed before it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.callback(connection.close)

    def abort(self) -> None:
        self.connection.links.close()


@dataclass
class LoopTrainer:
    """Trains the task by the loop. `progress` is what the worker holds."""

    parts: SessionParts
    progress: Progress
    listeners: Listeners
    membership: Membership
    backlog: Backlog
    hook: WorkerHook | None
    activity: Activity
    write_status: Tell
    assignment: Assignment
    timing: Timing
    checkpointer: Checkpointer
    tracer: Tracer | None = None
    is_saved: bool = False
    # When it began to train, and the samples of what it held then: what it has copied is not its own work.
    _began: tuple[float, int] | None = None
    _last_step_at: float = 0.0
    _digest: str = ""

    @property
    def cursor(self) -> Cursor:
        return self.progress.cursor

    def connect(self, generation: Generation) -> StrategyLinks:
        self.is_saved = False
        if self.hook is not None:
            self.hook.on_generation({member.worker for member in generation.members}, self._is_called)
        self.write_status(generation.cursor.step, JOIN, None)
        if self.tracer is not None:
            self.tracer.join(generation)
        over = time.monotonic() + self.timing.connect

        def remaining() -> float:
            # Whoever waits for one that has died waits in vain: the wait ends with the generation.
            self.membership.check_lease()
            return min(over - time.monotonic(), GLANCE)

        assignment = self.assignment
        credentials = Credentials(assignment.token, assignment.slot, generation.id, assignment.identity)
        # The host at the other end of a link acknowledges what comes, however busy the worker there is.
        lease, silence = self.membership.lease_remaining, self.timing.failure_timeout
        endpoint = Endpoint(generation, credentials, self.listeners, remaining, lease, silence)
        return StrategyLinks(self.parts.strategy.connect(endpoint))

    def align(self, generation: Generation, links: StrategyLinks) -> None:
        if not (generation.behind or generation.servers):
            return
        if self.tracer is not None:
            self.tracer.enter(COPY)
        self.write_status(generation.cursor.step, COPY, None)
        began, worker = time.perf_counter(), self.assignment.slot
        if generation.restored is not None:
            self.checkpointer.go_back(generation.cursor)
        self.progress, size = links.connection.align(self.progress, self.activity, self._hold)
        if 0 not in generation.members[generation.position(worker)].lanes:
            return
        if size:
            seconds = round(time.perf_counter() - began, 4)
            step, formed = self.progress.cursor.step, str(generation.id)
            self.backlog.publish(StateCopied(step=step, generation=formed, bytes=size, seconds=seconds))
        if (placed := links.connection.placed()) is not None:
            self.backlog.publish(placed)

    def _hold(self, progress: Progress) -> None:
        self.progress = progress

    def train(self, generation: Generation, links: StrategyLinks) -> str | None:
        # Whoever has not done the step itself does what follows from it, such as an evaluation, at that step.
        self.activity.begin_step(self.progress.cursor.step)
        if self.tracer is not None:
            self.tracer.enter(BUILD)
        track = self.parts.spec.track
        if track is not None and track.is_on and self.assignment.mode.is_training:
            self.membership.publish(links.connection.measure())
        run = self.assignment.stored
        if self.parts.spec.on_out_of_memory == "shrink":
            # One of the last generation may have agreed on it with somebody who is gone, and have told nobody else.
            self.progress = self.progress.knowing(run.read_micro_batches())
        hooks = Hooks(
            publish=self.backlog.publish,
            check_lease=self.membership.check_lease,
            activity=self.activity,
            requested=self.membership.requested,
            save_begun=self.membership.view.save_begun,
            keep=self.backlog.keep,
            tracer=self.tracer,
            keep_micro_batches=run.write_micro_batches,
            on_lane=None if self.hook is None else self.hook.on_lane,
        )
        loop = Assembly(
            self.parts, generation, self.assignment.slot, links.connection, self.progress, self.checkpointer, hooks
        ).loop()
        links.callback(loop.close)
        self._began = self._began or (time.perf_counter(), self.progress.samples)
        try:
            ending = loop.run()
            if ending is not None:
                gather = partial(links.connection.links.gather, generation.cursor.step, DIGEST_INDEX)
                self._digest = self.parts.layout.weights_digest(gather)
            return ending
        finally:
            self.progress, self.is_saved = loop.progress, loop.is_saved
            self._last_step_at = loop.last_step_at
            if self.tracer is not None:
                self.activity.spans = None
                self.tracer.end(self.progress.cursor.step)

    def result(self, ending: str) -> tuple[str, dict[str, Any]]:
        assert self._began is not None, "whoever is done has trained"
        progress, digest = self.progress, self._digest
        seconds, samples = self._last_step_at - self._began[0], progress.samples - self._began[1]
        best, bad = progress.best, {"training": progress.bad, "validation": progress.bad_evaluated}
        validation = len(self.parts.samples.datasets.get(Source.VALIDATION, ()))
        read = {"training_read": progress.samples + progress.bad, "validation_read": validation}
        scale, audits = self.parts.replica.loss_scale, self.parts.audits
        return digest, {
            "ending": ending,
            "steps": progress.cursor.step,
            "weights_digest": digest,
            "samples_per_second": round(samples / seconds, 1) if seconds > 0 else 0.0,
            "final_metrics": progress.metrics,
            "ledger": str(progress.tally),
            **({"audits": {"lanes": audits.done, "clean_until": audits.floor}} if audits.done else {}),
            **({} if scale is None else {"loss_scale": {"final": scale.value, "overflow_steps": progress.overflows}}),
            **({"micro_batches": progress.micro_batches} if progress.micro_batches else {}),
            **self._of_device(),
            "best": None if best is None else {"value": best.value, "step": best.step},
            **({"bad_samples": bad | read} if any(bad.values()) else {}),
        }

    def _of_device(self) -> dict[str, Any]:
        """How it was used, where much was chosen that the job does not say."""
        parts = self.parts
        if parts.replica.device.is_host:
            return {}
        most = parts.memory.look()
        memory = {} if most is None else {"device_memory": asdict(most)}
        return {
            "computed_by": parts.replica.what_runs(is_captured=parts.graphs is not None and parts.graphs.number > 0),
            **memory,
        }

    def _is_called(self) -> bool:
        """Whether this generation is to end at the next boundary. Raises when it has ended."""
        self.membership.check_lease()
        return self.membership.view.break_requested or self.membership.view.stop_requested is not None

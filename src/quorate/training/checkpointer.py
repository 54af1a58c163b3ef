"""Saves the state that all workers hold, beside the training and through all generations.

::

    loop      step 20 │ begin │ step 21: lanes … exchange │ settle │ apply │ step 22 …
    thread            └ copy ─ digest ────────────┘           └ write ─ sync ─ read back ─┐
    host of lane 0                                               all parts there ─ commit ─ retain ─ event

*Begin* asks everybody whether an earlier save is still running. *Settle* waits for the copy. The rest is up to the
`OngoingSave` of each worker: it leaves a voucher, with the digests and the outline of what it holds, beside its part in
the store, and whoever commits compares them first. Training waits for as little as that leaves: names and the copy.

A device that is not the host makes the copy itself, beside the next step, and holds back the update until it is whole:
then nobody waits. Where steps are read later than they are begun, it is a *draft*, begun with the step, and becomes a
save when that step is read.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.store import NoSpace
from quorate.checkpoint.tensor_file import TensorFile
from quorate.core.errors import CheckpointError, ReplicasDiffer
from quorate.core.generation import CHECKPOINT, DISK, Cursor, Phase
from quorate.observe.events import CheckpointFailed, CheckpointSkipped, LogMessage
from quorate.replica.device import CopyOut
from quorate.replica.state_layout import HeldState, StateLayout
from quorate.spec.job import CheckpointSpec
from quorate.task.progress import Progress
from quorate.training.activity import Activity, Tracer
from quorate.training.save import VOID, Draft, OngoingSave, SaveContext, SavePlan
from quorate.training.save_decisions import Answer, why_void
from quorate.training.strategy import Strategy

log = logging.getLogger(__name__)

LOOK = 0.1
"""Seconds between two looks at the lease, for who waits for a save."""
WORTH_TELLING = 5.0
"""Seconds for which training waits for an earlier save without a word."""
LEAVING = 1.0
"""Seconds for which whoever leaves a generation waits for a copy that is being made."""
HEADER = 2**20
"""Bytes that a part may have besides its tensors."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before a save that must not fail is tried again. All workers count alike, so all give up together."""


@dataclass(eq=False)
class Checkpointer:
    """A worker's saves, one at a time. The loop calls it, at the same points of the job on every worker.

    `check_lease` raises when this worker may act no longer: it is asked by whoever waits. `restored` is the checkpoint
    that the worker has loaded, which is whole for that reason.
    """

    context: SaveContext
    layout: StateLayout
    rules: CheckpointSpec
    job: dict[str, Any]
    environment: dict[str, str]
    check_lease: Callable[[], None]
    activity: Activity = field(default_factory=lambda: Activity(lambda *_: None))
    tracer: Tracer | None = None
    restored: Cursor | None = None

    def __post_init__(self) -> None:
        self._clock = self.context.clock
        # Numbers of workers are given again to those who replace them.
        self._identity = secrets.token_hex(8)
        self._latest: OngoingSave | None = None
        self._owes = False
        # The last copy that a device makes, and whether what changes the state waits there until it is whole.
        self._copying: CopyOut | None = None
        self._is_held_back = True
        self._known_whole = self.restored
        self._last_begun = self._clock()
        self._minutes = self.rules.minutes_between

    # --- through the generations

    def enter(self, strategy: Strategy, step: int) -> None:
        """A generation begins: give up what cannot be completed without those who are gone."""
        save = self._latest
        own = [self._identity, "" if save is None else save.plan.attempt.name]
        told = [json.loads(payload) for payload in strategy.gather(step, json.dumps(own).encode())]
        if save is None:
            return
        writers, progress = save.plan.writers, save.plan.progress
        # A generation may have ended when some knew what all had answered, and others did not: those never began it.
        present = {identity for identity, attempt in told if attempt == save.plan.attempt.name}
        waits = save.commits and not (save.done.is_set() or save.is_complete)
        if reason := why_void(
            writers,
            present,
            is_saved=writers[0] in present or (save.done.is_set() and self._is_listed(save)),
            delivered=self._delivered(save) if waits else range(len(writers)),
        ):
            self._void(save, reason)
        if step > progress.cursor.step and progress.is_best and not save.is_sound and not self._is_listed(save):
            # Training has gone on from the best state so far, so no later save makes up for it. Everybody who knows
            # says so, and the coordinator writes it down once.
            lost = "a worker was lost while it was written, so the best evaluation so far is not saved"
            self.context.publish(CheckpointFailed(step=progress.cursor.step, reason=lost))

    def go_back(self, cursor: Cursor) -> None:
        """All take up an older checkpoint: what was begun of a later state would be the newest, and the steps up to it
        have been taken back."""
        save = self._latest
        if save is not None and save.plan.progress.cursor > cursor and not save.done.is_set():
            self._void(save, "the job has gone back to an older checkpoint")

    def leave(self) -> None:
        """The generation is over, and the state may be replaced by another: the copy must be whole by then."""
        self._hold_back()
        save = self._latest
        if save is not None and not self.context.wait(save.copied, LEAVING):
            self._void(save, "its generation ended before it was copied")

    def close(self, patience: float) -> None:
        """This worker leaves for good: what others wait for is completed first, if that does not take too long."""
        running = self._running()
        if running is not None and not self.context.wait(running.done, patience):
            running.give_up("the worker leaves")

    @property
    def divergence(self) -> ReplicasDiffer | None:
        """That replicas were found to differ by the last save that was begun."""
        return None if self._latest is None else self._latest.divergence

    @property
    def may_commit(self) -> bool:
        """Whether a save was begun that may still become a checkpoint, here or elsewhere."""
        return self._latest is not None and self._latest.is_sound

    # --- when

    def is_wanted(self, *, by_time: bool) -> bool:
        """Whether one is to be begun that no step asks for: the time has come, or the last one came to nothing."""
        minutes = self._minutes if by_time else None
        return self._owes or (minutes is not None and self._clock() - self._last_begun >= 60 * minutes)

    def has_written(self, progress: Progress) -> bool:
        """Whether this worker has committed a checkpoint of this."""
        latest = self._latest
        return latest is not None and latest.info is not None and latest.plan.progress == progress

    # --- saving

    def prepare(self, progress: Progress, workers: int) -> None:
        """Have the memory for the copies ready before the first one is due. The fewer workers, the more each writes."""
        held = self.layout.state(progress)
        parts = self.layout.parts(held, workers)
        # Of what others alone hold, nothing is written here.
        tensors = held.encoded.tensors
        largest = max(TensorFile({n: tensors[n] for n in part if n in tensors}).size for part in parts)
        self.context.arena.reserve_in_background(largest + HEADER)

    def draft(self, progress: Progress) -> Draft | None:
        """Have the device copy the state of a lone worker after the last step that was begun; None where it cannot, or
        an earlier copy is still needed. One at a time: it becomes a save by `begin`, or is forgotten."""
        if self._running() is not None or (self._copying is not None and not self._copying.is_done()):
            return None
        held = self.layout.state(progress)
        (names,) = self.layout.parts(held, 1)
        draft = self._drafted(held, TensorFile({name: held.encoded.tensors[name] for name in names}))
        if draft is not None:
            self._owes, self._last_begun = False, self._clock()
        return draft

    def put_off(self) -> None:
        """A draft has come to nothing: save as soon as that is possible."""
        self._owes = True

    def begin(self, progress: Progress, strategy: Strategy, draft: Draft | None = None) -> None:
        """Begin to save this state, unless it is saved already or an earlier one is still being saved.

        The best evaluation so far waits for an earlier one in any case: no later save could make up for it. `draft` is
        a copy of this very state, of which only the progress was not known.
        """
        began = self._clock()
        self.settle()
        if self.rules.when_busy == "wait" or progress.is_best:
            self._wait_for_earlier(progress)
            self.settle()  # what was waited for may have found that replicas differ
        held = self.layout.state(progress) if draft is None else draft.held.at(progress)
        answers = self._ask_everyone(progress, held, strategy)
        # The one that commits has the first word, so all workers come to the same.
        if answers[0].is_saved or answers[0].failure:
            # Not at every step again: the next that is due tries again.
            self._owes, self._last_begun = False, self._clock()
        elif any(answer.is_busy for answer in answers):
            self._skip(progress, answers[0])
        else:
            self._start(progress, held, answers, strategy.worker, draft).added_s += self._clock() - began

    @property
    def is_settled(self) -> bool:
        """Whether the state may change."""
        latest = self._latest
        return self._is_held_back and (latest is None or (latest.copied.is_set() and latest.divergence is None))

    def settle_before(self) -> None:
        """Called before the state changes: the copy must be whole. Raises if replicas were found to differ."""
        if not self.is_settled:
            with self.activity.during(CHECKPOINT):
                self.settle()

    def settle(self) -> None:
        """The same, within the phase of a save."""
        self._hold_back()
        save = self._latest
        if save is None:
            return
        if not save.copied.is_set():
            began = self._clock()
            self._await(save, save.copied)
            save.added_s += self._clock() - began
        if save.divergence is not None:
            raise save.divergence

    def save(self, progress: Progress, strategy: Strategy) -> None:
        """Save this state now, and return when it is committed. All try again together before they give up."""
        for pause in (*PAUSES, None):
            self._finish()
            held = self.layout.state(progress)
            answers = self._ask_everyone(progress, held, strategy)
            if answers[0].is_saved:
                return
            failure = answers[0].failure
            if not failure:
                save = self._start(progress, held, answers, strategy.worker)
                self._finish()
                told = strategy.gather(progress.cursor.step, (save.failure or "").encode())
                failures = [payload.decode() for payload in told]
                # The first commits: whatever happened to the others, it is saved if that one says so.
                if not failures[0]:
                    return
                failure = next((each for each in failures if each and not each.startswith(VOID)), failures[0])
            if pause is None:
                raise CheckpointError(failure)
            message = f"the checkpoint of step {progress.cursor.step:,} is tried again in {pause:.0f} s: {failure}"
            log.warning("%s", message)
            if strategy.leads:
                self.context.publish(LogMessage(step=progress.cursor.step, level="warning", message=message))
            self._pause(pause)

    def _ask_everyone(self, progress: Progress, held: HeldState, strategy: Strategy) -> list[Answer]:
        latest = self._latest
        # First whether it is over: what its thread has left by then is there.
        is_busy = latest is not None and not latest.done.is_set()
        if latest is not None and latest.info is not None:
            cursor = latest.plan.progress.cursor
            self._known_whole = max(self._known_whole or cursor, cursor)
        answer = Answer(self._identity, is_busy=is_busy)
        if strategy.leads:
            answer = self._answer_as_committer(progress, held, answer)
        known = self._known_whole
        whole = None if known is None else (known.step, int(known.phase))
        lacked_space = latest is not None and latest.lacked_space
        answer = replace(answer, lacked_space=lacked_space, whole=whole)
        told = strategy.gather(progress.cursor.step, json.dumps(asdict(answer)).encode())
        answers = [Answer(**json.loads(payload)) for payload in told]
        # Who has committed it knows it first, and another may commit the next.
        for step, phase in (each.whole for each in answers if each.whole is not None):
            cursor = Cursor(step, Phase(phase))
            self._known_whole = max(self._known_whole or cursor, cursor)
        return answers

    def _answer_as_committer(self, progress: Progress, held: HeldState, answer: Answer) -> Answer:
        latest = self._latest
        # Whoever has only written a part of it does not know what became of it.
        if latest is not None and latest.is_sound and latest.commits and latest.plan.progress == progress:
            return Answer(self._identity, is_saved=True)
        if answer.is_busy:
            return answer
        try:
            with self.activity.waiting(DISK):
                needed = sum(tensor.nbytes for tensor in held.encoded.tensors.values())
                attempt = self.context.store.open(progress.cursor, needed)
        except CheckpointError as error:
            self.context.publish(CheckpointFailed(step=progress.cursor.step, reason=str(error)))
            if isinstance(error, NoSpace) and self.context.may_act():
                self._free_space(progress)
            return Answer(self._identity, failure=str(error))
        return Answer(self._identity, attempt=attempt.name)

    def _start(
        self,
        progress: Progress,
        held: HeldState,
        answers: Sequence[Answer],
        worker: int,
        draft: Draft | None = None,
    ) -> OngoingSave:
        writers = tuple(answer.identity for answer in answers)
        parts, position = self.layout.parts(held, len(writers)), writers.index(self._identity)
        names = parts[position] if position < len(parts) else ()
        file = TensorFile({name: held.encoded.tensors[name] for name in names}) if draft is None else draft.file
        draft = self._drafted(held, file) if draft is None else draft
        if draft is None or len(writers) > 1:
            held.device.synchronize()  # a thread reads what it gets
        best = None if progress.best is None else asdict(progress.best)
        # All that is known before the parts are written.
        cursor, known = progress.cursor, (self.job, self.environment, progress.metrics)
        manifest = Manifest(cursor.step, int(cursor.phase), "", (), held.encoded.skeleton, "", *known, best=best)
        attempt = self.context.store.open(cursor, file.tensor_bytes, answers[0].attempt)
        if position == 0 and any(answer.lacked_space for answer in answers) and self.context.may_act():
            # First of all: a writer that fails before would have the attempt given up, and nothing would go.
            self._free_space(progress)
        plan = SavePlan(progress, manifest, held, file, attempt, writers, len(parts), position, worker)
        self._owes = False
        self._last_begun = self._clock()
        # It is traced with the step that it follows.
        tracer = None if self.activity.spans is None else self.tracer
        spans = None if tracer is None else tracer.begin_save(cursor.step)
        self._latest = OngoingSave(plan, self.context, spans, draft)
        self.context.start(self._latest.run)
        return self._latest

    def _drafted(self, held: HeldState, file: TensorFile) -> Draft | None:
        if held.device.is_host or (placed := self.context.arena.places(file)) is None:
            return None
        content, tensors = placed
        copying = held.device.copy_out([(place, file.tensors[name]) for name, place in tensors.items()])
        if copying is None:
            return None
        self._copying, self._is_held_back = copying, False
        return Draft(held, file, content, tensors, copying)

    def _hold_back(self) -> None:
        if self._copying is not None and not self._is_held_back:
            self._is_held_back = True
            self._copying.hold_back()

    def _skip(self, progress: Progress, first: Answer) -> None:
        running = self._running()
        # The one that is being saved will do: it must not be asked for again at every step. One that is void will not.
        self._owes, self._last_begun = running is not None and not running.is_sound, self._clock()
        if first.identity != self._identity:
            return
        if first.attempt:
            self.context.store.open(progress.cursor, name=first.attempt).give_up()
        if not self._owes:
            reason = "the one before it is still being saved"
            self.context.publish(CheckpointSkipped(step=progress.cursor.step, reason=reason))

    def _free_space(self, progress: Progress) -> None:
        """Remove what retention would remove after this save; never the newest that is whole, nor the best. (The lease
        may come back while the save goes on; whether there is space enough is found by writing.)"""
        for info in self.context.remove_surplus(progress, self._known_whole, coming=progress.cursor):
            log.warning(
                "checkpoint %s was removed, to make room for that of step %d", info.path.name, progress.cursor.step
            )

    def _delivered(self, save: OngoingSave) -> set[int]:
        """Whose part and voucher are there, by position."""
        plan = save.plan
        try:
            return {*plan.attempt.written(), *range(plan.parts, len(plan.writers))} & set(plan.attempt.vouchers())
        except CheckpointError:
            return set()

    def _is_listed(self, save: OngoingSave) -> bool:
        try:
            return any(info.cursor == save.plan.progress.cursor for info in self.context.store.list())
        except CheckpointError as error:
            log.warning("it is not known whether step %d is saved: %s", save.plan.progress.cursor.step, error)
            return False

    def _running(self) -> OngoingSave | None:
        return None if self._latest is None or self._latest.done.is_set() else self._latest

    def _void(self, save: OngoingSave, reason: str) -> None:
        save.give_up(reason)
        if save.done.is_set():
            save.plan.attempt.give_up()
        self._owes = True

    # --- waiting

    def _wait_for_earlier(self, progress: Progress) -> None:
        """Training stands still meanwhile, so somebody should know what for."""
        running, over = self._running(), self._clock() + WORTH_TELLING
        if running is None:
            return
        began = running.plan.progress.cursor.step
        message = f"training waits for the checkpoint of step {began:,}, which is still being written"

        def tell_once() -> None:
            nonlocal over
            if self._clock() >= over:
                over = float("inf")
                skip = "set `checkpoint.when_busy: skip` to leave such saves out"
                why = "the best evaluation so far comes next" if progress.is_best else skip
                warning = f"{message} ({why})"
                self.context.publish(LogMessage(step=progress.cursor.step, level="warning", message=warning))

        self._await(running, running.done, tell_once)

    def _finish(self) -> None:
        """Until the last save has ended. Raises if replicas were found to differ."""
        if self._latest is not None:
            self._await(self._latest, self._latest.done)
            if self._latest.divergence is not None:
                raise self._latest.divergence

    def _await(self, save: OngoingSave, event: threading.Event, look: Callable[[], None] = lambda: None) -> None:
        """Say what is waited for, and that it comes further with each piece: a slow disk is not one that is stuck."""
        if event.is_set():
            return
        pieces = save.pieces
        with self.activity.waiting(save.waits_for):
            while not self.context.wait(event, LOOK):
                self.check_lease()
                look()
                self.activity.waits_for = save.waits_for
                if pieces != save.pieces:
                    pieces = save.pieces
                    self.activity.advance()

    def _pause(self, seconds: float) -> None:
        """Each look counts as progress: nobody hangs who waits on purpose, however short `step_timeout` is."""
        over, never = self._clock() + seconds, threading.Event()
        with self.activity.waiting("the next try"):
            while self._clock() < over:
                self.check_lease()
                self.activity.advance()
                self.context.wait(never, LOOK)

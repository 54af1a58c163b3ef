"""Saving the state that all workers hold: each compares its replica with the others and writes its part of it."""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quorate.checkpoint.attempt import Attempt
from quorate.checkpoint.division import divide
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.name import checkpoint_name
from quorate.checkpoint.tree import Encoded, encode
from quorate.core.errors import CheckpointError, ReplicasDiffer
from quorate.core.phases import DISK
from quorate.observe.events import CheckpointFailed, CheckpointSkipped, LogMessage
from quorate.spec.job import CheckpointSpec
from quorate.training.activity import Activity
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.saving import VOID, Assignment, Desk, Saving
from quorate.training.strategy import Strategy

log = logging.getLogger(__name__)

GLANCE = 0.1
WORTH_TELLING = 5.0
"""Seconds for which training waits for an earlier save without a word."""
LEAVING = 1.0
"""Seconds for which whoever leaves a generation waits for a copy that is being made."""
HEADER = 2**20
"""Bytes that a part may have besides its tensors."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before a save that must not fail is tried again. All workers count alike, so all give up together."""


@dataclass(frozen=True)
class Answer:
    """What a worker says before a save. That of the one that hosts lane 0 decides: it commits."""

    identity: str
    is_busy: bool
    is_saved: bool = False
    attempt: str = ""
    failure: str = ""


class Saver:
    """A worker's saves, one at a time, through all generations.

    `check_lease` raises when this worker may act no longer: it is asked by whoever waits.
    """

    def __init__(
        self,
        desk: Desk,
        rules: CheckpointSpec,
        job: dict[str, Any],
        environment: dict[str, str],
        *,
        check_lease: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        activity: Activity | None = None,
    ) -> None:
        self._desk = desk
        self._rules = rules
        self._job = job
        self._environment = environment
        self._check_lease = check_lease
        self._clock = clock
        self._activity = activity or Activity(lambda *_: None)
        # Numbers of workers are given again to those who replace them.
        self._identity = secrets.token_hex(8)
        self._latest: Saving | None = None
        self._owes = False
        self._last_begun = clock()

    # --- through the generations

    def enter(self, strategy: Strategy, step: int) -> None:
        """A generation begins: give up what cannot be completed without those who are gone."""
        present = {payload.decode() for payload in strategy.share(step, self._identity.encode())}
        latest = self._latest
        if latest is None:
            return
        assignment = latest.assignment
        if assignment.writers[0] not in present:
            # Also when our part is done: nobody else knows by now that it was not committed.
            if not (latest.done.is_set() and self._is_there(assignment)):
                self._void(latest, "the worker that commits it is gone")
        elif assignment.commits and not (latest.done.is_set() or latest.is_complete):
            delivered = _delivered(assignment)
            if not present.issuperset(w for i, w in enumerate(assignment.writers) if i not in delivered):
                self._void(latest, "a worker that writes a part of it is gone")
        if step > assignment.progress.cursor.step and assignment.progress.is_best and not latest.is_sound:
            self._tell_lost_best(latest)

    def _tell_lost_best(self, saving: Saving) -> None:
        """Training has gone on from the best state so far, so no later save makes up for it. Everybody who knows says
        so, and the coordinator writes it down once."""
        if not self._is_there(saving.assignment):
            reason = "a worker was lost while it was written, so the best evaluation so far is not saved"
            step = saving.assignment.progress.cursor.step
            self._desk.publish(CheckpointFailed(step=step, reason=reason))

    def leave(self) -> None:
        """The generation is over, and the state may be replaced by another: the copy must be whole by then."""
        if self._latest is not None and not self._latest.staged.wait(LEAVING):
            self._void(self._latest, "its generation ended before it was copied")

    def close(self, patience: float) -> None:
        """This worker leaves for good: what others wait for is completed first, if that does not take too long."""
        running = self._running()
        if running is not None and not running.done.wait(patience):
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
        minutes = self._rules.minutes_between if by_time else None
        return self._owes or (minutes is not None and self._clock() - self._last_begun >= 60 * minutes)

    def has_written(self, progress: Progress) -> bool:
        """Whether this worker has committed a checkpoint of this."""
        latest = self._latest
        return latest is not None and latest.info is not None and latest.assignment.progress == progress

    # --- saving

    def prepare(self, replica: Replica, workers: int) -> None:
        """Have the memory for the copies ready before the first one is due."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in replica.state_tensors().items()}
        largest = max(sum(sizes[name] for name in part) for part in divide(sizes, workers))
        self._desk.arena.reserve_in_background(largest + HEADER)

    def begin(self, replica: Replica, progress: Progress, strategy: Strategy) -> None:
        """Begin to save this state, unless it is saved already or an earlier one is still being saved.

        The best evaluation so far waits for an earlier one in any case: no later save could make up for it.
        """
        began = time.perf_counter()
        self.settle()
        if self._rules.when_busy == "wait" or progress.is_best:
            self._wait_for_earlier(progress)
            self.settle()  # what was waited for may have found that replicas differ
        answers = self._ask_everyone(replica, progress, strategy)
        if answers[0].is_saved or answers[0].failure:
            # Not at every step again: the next that is due tries again.
            self._owes, self._last_begun = False, self._clock()
        elif any(answer.is_busy for answer in answers):
            self._skip(progress, answers[0])
        else:
            saving = self._start(replica, progress, answers, strategy.worker)
            saving.added_s += time.perf_counter() - began

    @property
    def is_settled(self) -> bool:
        """Whether the state may change."""
        latest = self._latest
        return latest is None or (latest.staged.is_set() and latest.divergence is None)

    def settle(self) -> None:
        """Called before the state changes: the copy must be whole. Raises if replicas were found to differ."""
        latest = self._latest
        if latest is None:
            return
        if not latest.staged.is_set():
            began = time.perf_counter()
            self._await(latest, latest.staged)
            latest.added_s += time.perf_counter() - began
        if latest.divergence is not None:
            raise latest.divergence

    def save(self, replica: Replica, progress: Progress, strategy: Strategy) -> None:
        """Save this state now, and return when it is committed. All try again together before they give up."""
        for pause in (*PAUSES, None):
            self._await_done()
            self.settle()
            answers = self._ask_everyone(replica, progress, strategy)
            if answers[0].is_saved:
                return
            failure = answers[0].failure or self._save_once(replica, progress, strategy, answers)
            if not failure:
                return
            if pause is None:
                raise CheckpointError(failure)
            log.warning("the checkpoint is tried again in %.0f s: %s", pause, failure)
            self._pause(pause)

    def _save_once(
        self, replica: Replica, progress: Progress, strategy: Strategy, answers: Sequence[Answer]
    ) -> str | None:
        step = progress.cursor.step
        saving = self._start(replica, progress, answers, strategy.worker)
        self._await_done()
        self.settle()
        failures = [payload.decode() for payload in strategy.share(step, (saving.failure or "").encode())]
        # The first commits: whatever happened to the others, it is saved if that one says so.
        return failures[0] and next((told for told in failures if told and not told.startswith(VOID)), failures[0])

    def _ask_everyone(self, replica: Replica, progress: Progress, strategy: Strategy) -> list[Answer]:
        if 0 in strategy.hosted:
            answer = self._answer_as_committer(replica, progress)
        else:
            answer = Answer(self._identity, is_busy=self._running() is not None)
        told = strategy.share(progress.cursor.step, json.dumps(asdict(answer)).encode())
        return [Answer(**json.loads(payload)) for payload in told]

    def _answer_as_committer(self, replica: Replica, progress: Progress) -> Answer:
        latest = self._latest
        # Whoever has only written a part of it does not know what became of it.
        sound = latest.assignment if latest is not None and latest.is_sound else None
        if sound is not None and sound.commits and sound.progress == progress:
            return Answer(self._identity, is_busy=False, is_saved=True)
        if self._running() is not None:
            return Answer(self._identity, is_busy=True)
        try:
            with self._activity.waiting(DISK):
                attempt = Attempt.begin(self._desk.folder.folder, progress.cursor)
        except OSError as error:
            needed = sum(tensor.numel() * tensor.element_size() for tensor in replica.state_tensors().values())
            failure = str(self._desk.folder.explained(error, progress.cursor, needed))
            self._desk.publish(CheckpointFailed(step=progress.cursor.step, reason=failure))
            return Answer(self._identity, is_busy=False, failure=failure)
        return Answer(self._identity, is_busy=False, attempt=attempt.path.name)

    def _start(self, replica: Replica, progress: Progress, answers: Sequence[Answer], worker: int) -> Saving:
        encoded = encode({"replica": replica.state(), "progress": progress.to_dict()})
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in encoded.tensors.items()}
        writers = tuple(answer.identity for answer in answers)
        assignment = Assignment(
            progress,
            self._draft(progress, encoded),
            encoded,
            replica.state_tensors(),
            frozenset(name for name, _ in replica.tensors()),
            Attempt(self._desk.folder.folder / answers[0].attempt),
            writers,
            divide(sizes, len(writers)),
            writers.index(self._identity),
            worker,
        )
        self._latest = Saving(assignment, self._desk)
        self._owes = False
        self._last_begun = self._clock()
        self._latest.start()
        return self._latest

    def _draft(self, progress: Progress, encoded: Encoded) -> Manifest:
        """All that is known before the parts are written."""
        cursor, given = progress.cursor, (self._job, self._environment, progress.metrics)
        best = None if progress.best is None else asdict(progress.best)
        return Manifest(cursor.step, int(cursor.phase), "", (), encoded.skeleton, "", *given, best=best)

    def _skip(self, progress: Progress, first: Answer) -> None:
        running = self._running()
        # The one that is being saved will do: it must not be asked for again at every step. One that is void will not.
        self._owes, self._last_begun = running is not None and not running.is_sound, self._clock()
        if first.identity != self._identity:
            return
        if first.attempt:
            Attempt(self._desk.folder.folder / first.attempt).give_up()
        if not self._owes:
            reason = "the one before it is still being saved"
            self._desk.publish(CheckpointSkipped(step=progress.cursor.step, reason=reason))

    def _is_there(self, assignment: Assignment) -> bool:
        return (self._desk.folder.folder / checkpoint_name(assignment.progress.cursor)).is_dir()

    def _running(self) -> Saving | None:
        return None if self._latest is None or self._latest.done.is_set() else self._latest

    def _void(self, saving: Saving, why: str) -> None:
        saving.give_up(why)
        if saving.done.is_set():
            saving.assignment.attempt.give_up()
        self._owes = True

    def _wait_for_earlier(self, progress: Progress) -> None:
        """Training stands still meanwhile, so somebody should know what for."""
        running, over = self._running(), self._clock() + WORTH_TELLING
        if running is None:
            return
        began = running.assignment.progress.cursor.step
        message = f"training waits for the checkpoint of step {began:,}, which is still being written"

        def tell_once() -> None:
            nonlocal over
            if self._clock() >= over:
                over = float("inf")
                skip = "set `checkpoint.when_busy: skip` to leave such saves out"
                why = "the best evaluation so far comes next" if progress.is_best else skip
                step = progress.cursor.step
                self._desk.publish(LogMessage(step=step, level="warning", message=f"{message} ({why})"))

        self._await(running, running.done, tell_once)

    def _await_done(self) -> None:
        if self._latest is not None:
            self._await(self._latest, self._latest.done)

    def _await(self, saving: Saving, event: threading.Event, glance: Callable[[], None] = lambda: None) -> None:
        """Say what is waited for, and that it comes further with each piece: a slow disk is not one that is stuck."""
        pieces = saving.pieces
        with self._activity.waiting(saving.waits_for):
            while not event.wait(GLANCE):
                self._check_lease()
                glance()
                self._activity.waits_for = saving.waits_for
                if pieces != saving.pieces:
                    pieces = saving.pieces
                    self._activity.advance()

    def _pause(self, seconds: float) -> None:
        """Each look counts as progress: nobody hangs who waits on purpose, however short `step_timeout` is."""
        over = self._clock() + seconds
        with self._activity.waiting("the next try"):
            while self._clock() < over:
                self._check_lease()
                self._activity.advance()
                time.sleep(GLANCE)


def _delivered(assignment: Assignment) -> set[int]:
    """Whose part and voucher are there, by position."""
    try:
        written, vouched = assignment.attempt.written(), assignment.attempt.vouchers()
    except (CheckpointError, OSError):
        return set()
    without_part = range(len(assignment.parts), len(assignment.writers))
    return {*written, *without_part} & set(vouched)

"""One save on its way through one worker: copied, written and committed while training goes on.

What is done next is decided in `save_decisions`; here it is carried out, with a clock, threads and a store that a
simulator can replace by its own.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import Attempt, CheckpointStore, NoSpace, remove_surplus
from quorate.checkpoint.tensor_file import Arena, TensorFile
from quorate.checkpoint.tree import check_written
from quorate.core.digests import weights_digest
from quorate.core.errors import AttemptGone, CheckpointError, JobError, LinkError, QuorateError, ReplicasDiffer
from quorate.core.generation import Cursor, GenerationId
from quorate.core.spans import COMMIT, COPY, DIGEST, WRITE, SpanRecorder
from quorate.core.user_code import describe
from quorate.observe.event import Event
from quorate.observe.events import CheckpointFailed, CheckpointSaved
from quorate.replica.device import CPU, CopyOut, Device, digests
from quorate.replica.state_layout import HeldState
from quorate.storage.atomic import Buffer
from quorate.task.progress import Progress
from quorate.training.divergence import Voucher, divergence
from quorate.training.save_decisions import Action, SaveProgress, decide

log = logging.getLogger(__name__)

LOOK = 0.02
"""Seconds between two looks at what others do: their parts, the lease, the word of the coordinator."""
PIECE = 8 * 2**20
VOID = "it was given up: "
"""How the failure begins of a save that failed because of somebody else, who says why."""


def start_thread(work: Callable[[], None]) -> None:
    """A daemon: a worker that leaves in a hurry does not wait for its disk."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a worker share.

    `check_commit` raises where this worker may not act for its job; `flush_events` sends the events that are queued.
    `generation` is the one that this worker is in: whoever is of an older one than the last that has committed, and has
    not heard of it yet, does not commit any more. `clock`, `start` and `wait` are time and threads. `audited`, where
    there are audits, gives the step until which they have found every worker right, or None until that is known.
    """

    store: CheckpointStore
    retention: Retention | None
    publish: Callable[[Event], None]
    check_commit: Callable[[], None]
    flush_events: Callable[[], None] = lambda: None
    generation: Callable[[], GenerationId | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    start: Callable[[Callable[[], None]], None] = start_thread
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    arena: Arena = field(default_factory=Arena)
    audited: Callable[[], int | None] | None = None

    def remove_surplus(
        self, progress: Progress, newest_whole: Cursor | None, coming: Cursor | None = None
    ) -> tuple[CheckpointInfo, ...]:
        """Remove what retention does not keep, as far as this worker may; with audits that is also the newest
        checkpoint from before anything that they may still find to be wrong. With `coming`, what will be too much once
        that one is saved. The newest stays anyway: where it is the best only until the job is made longer, so does the
        one before."""
        audited, best = None if self.audited is None else self.audited(), progress.lasting_best or progress.best
        if self.retention is None or (self.audited is not None and audited is None):
            return ()
        retention, step = replace(self.retention, audited=audited), None if best is None else best.step
        try:
            return remove_surplus(self.store, retention, step, newest_whole, check=self.check_commit, coming=coming)
        except (CheckpointError, LinkError) as error:
            log.info("old checkpoints are left for now: %s", error)
            return ()

    def may_act(self) -> bool:
        """Whether this worker may act for its job now."""
        try:
            self.check_commit()
        except LinkError as error:
            log.debug("the checkpoint waits: %s", error)
            return False
        return True


@dataclass(frozen=True)
class SavePlan:
    """A save, and this worker's part in it. `writers` are the identities of those that take part, in lane order: the
    first commits. So many of them have a part to write; `file` is ours, without tensors where there is none for us.
    """

    progress: Progress
    manifest: Manifest
    held: HeldState
    file: TensorFile
    attempt: Attempt
    writers: tuple[str, ...]
    parts: int
    position: int
    worker: int


@dataclass(frozen=True)
class Draft:
    """A copy of the state that a device makes by itself: begun by whoever trains, before what it computes is known.

    `tensors` are those of `file`, where they lie in its `content`, once `copying` is done.
    """

    held: HeldState
    file: TensorFile
    content: memoryview
    tensors: dict[str, torch.Tensor]
    copying: CopyOut


@dataclass(frozen=True)
class SaveVoucher(Voucher):
    """What a writer leaves beside its part: the names of the tensors that it has written, how long its training waited,
    and the tree of what it holds, where nobody holds all of the state."""

    written: Sequence[str] = ()
    waited_s: float = 0.0
    outline: Any = None


class _GivenUp(Exception):  # noqa: N818 (a happening, not a mistake)
    """It is not to be completed, and why."""


class OngoingSave:
    """One save on its way through one worker: `run` in a thread of its own, or `advance` by whoever has the time.

    The loop waits for `copied` before it changes the state. The one that `commits` compares what all writers hold, and
    leaves in `divergence` that it is not the same.
    Whoever waits for it sees by `pieces`, which grows, that it comes further, and by `waits_for` what it stands at.
    """

    def __init__(
        self, plan: SavePlan, context: SaveContext, spans: SpanRecorder | None = None, draft: Draft | None = None
    ) -> None:
        self.plan = plan
        self._spans = spans
        self._draft = draft
        self.commits = plan.position == 0
        self.copied = threading.Event()
        self.done = threading.Event()
        self.is_complete = False
        self.divergence: ReplicasDiffer | None = None
        self.failure: str | None = None
        self.lacked_space = False
        self.info: CheckpointInfo | None = None
        self.digests: dict[str, str] = {}
        self.added_s = 0.0
        self._vouchers: Sequence[SaveVoucher] = ()
        self.pieces = 0
        self.waits_for = "a copy of the state"
        self._context = context
        self._is_shared = len(plan.writers) > 1
        if draft is not None and not self._is_shared:
            self.copied.set()  # the device takes care of it; of a shared one there is more to be digested
        self._given_up: str | None = None
        self._content: Iterator[Buffer] | None = None
        self._is_written = False
        self._began = context.clock()
        self._copied_s = self._written_s = 0.0
        self._acts: dict[Action, tuple[str, Callable[[], None]]] = {
            Action.COPY: (COPY, self._copy),
            Action.WRITE: (WRITE, self._write),
            Action.COMMIT: (COMMIT, self._commit),
        }

    @property
    def is_sound(self) -> bool:
        """Whether it is, or may still become, a checkpoint."""
        return self.failure is None and self._given_up is None

    def give_up(self, reason: str) -> None:
        """It shall not be committed. What is left of it goes as soon as the thread notices."""
        if self.info is None and self._given_up is None:
            self._given_up = reason

    def run(self) -> None:
        """From the copy to the end of it."""
        while not self.done.is_set():
            if self.advance() is Action.WAIT:
                self._context.wait(self.done, LOOK)

    def advance(self) -> Action:
        """Do what comes next, and say what it was; after the last, `done` is set."""
        try:
            decision = decide(self._progress())
            self.waits_for = decision.reason or self.waits_for
            if decision.action is Action.GIVE_UP:
                raise _GivenUp(decision.reason)
            name, act = self._acts.get(decision.action, ("", None))
            if act is not None:
                if self._spans is not None:
                    self._spans.enter(name, None)
                act()
                if self._spans is not None:
                    self._spans.leave()
            if decision.action is not Action.FINISH:
                return decision.action
        except (_GivenUp, AttemptGone) as reason:
            log.info("the checkpoint of step %d is void: %s", self.plan.progress.cursor.step, reason)
            self.failure = f"{VOID}{reason}"
            self.plan.attempt.give_up()
        except Exception as error:
            self._fail(error)
        # An optimizer may have let go of them meanwhile.
        for tensors in (self.plan.held.compared, self.plan.held.encoded.tensors, self.plan.file.tensors):
            tensors.clear()
        if self._spans is not None:
            self._spans.end()
        self.copied.set()
        self.done.set()
        return Action.FINISH

    def _progress(self) -> SaveProgress:
        plan = self.plan
        if self._given_up is None and self.commits and self._is_written and not self.is_complete:
            has_all = len(plan.attempt.written()) == plan.parts
            self.is_complete = has_all and (not self._is_shared or self._is_agreed())
        given_up = self._given_up
        return SaveProgress(
            self.commits,
            is_copied=self._content is not None,
            is_written=self._is_written,
            is_complete=self.is_complete,
            may_commit=given_up is None and self.is_complete and self._may_commit(),
            is_committed=self.info is not None,
            given_up=given_up,
        )

    def _is_agreed(self) -> bool:
        """Whether all writers have said what they hold, and it is the same: nothing else is committed."""
        vouchers = self.plan.attempt.vouchers()
        if len(vouchers) < len(self.plan.writers):
            return False
        self._vouchers = [SaveVoucher(**json.loads(content)) for _, content in sorted(vouchers.items())]
        for voucher in self._vouchers if not self.plan.held.is_whole else ():
            self.digests |= voucher.digests
        self.divergence = divergence(self.plan.progress.cursor.step, self._vouchers)
        if self.divergence is not None:
            self.give_up("the replicas differ")
        return self.divergence is None

    def _may_commit(self) -> bool:
        # Whoever goes on from this checkpoint does not pass through the steps before it: they must be told by now.
        try:
            self._context.flush_events()
        except LinkError as error:
            log.debug("the checkpoint waits: %s", error)
            return False
        except JobError as ended:
            # Its ledger would have a hole: whoever resumes from it does not pass through the steps before it.
            raise _GivenUp(f"{ended}; the steps before the checkpoint could not be recorded any more") from None
        return self._context.may_act()

    def _copy(self) -> None:
        """Into memory of our own; without that memory the state itself is written, and must not change meanwhile."""
        held, file = self.plan.held, self.plan.file
        if self._draft is None:
            staged = self._context.arena.stage(file)
        else:
            self._draft.copying.wait()
            staged = self._draft.content, self._draft.tensors
        # All of it by everybody, not only what we write: it tells whether the replicas are equal.
        compared = {name: each for name, each in held.compared.items() if self._is_shared or name in held.weights}
        if staged is None:
            log.warning("there is no memory for a copy of the state, so training waits for the checkpoint")
            self._digest(compared, held.device)
            self._content = self._pieces(file.chunks())
            return
        self._draft = None  # it refers to memory of the device
        content, tensors = staged
        copies = {_memory(tensor): tensors[name] for name, tensor in file.tensors.items()}
        copied = {name: copies[key] for name, tensor in compared.items() if (key := _memory(tensor)) in copies}
        # What others write must not change before it is digested; of what we write there is a copy, and training goes
        # on while that is.
        self._digest({name: each for name, each in compared.items() if name not in copied}, held.device)
        self.copied.set()
        self._copied_s = round(self._context.clock() - self._began, 4)
        self._digest(copied, CPU)
        self._content = self._pieces(iter((content,)))

    def _digest(self, tensors: dict[str, torch.Tensor], device: Device) -> None:
        if not tensors:
            return
        began = 0.0 if self._spans is None else self._spans.clock()
        self.digests |= digests(tensors.items(), device)
        if self._spans is not None:
            self._spans.add(DIGEST, began, self._spans.phase)

    def _pieces(self, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            view = memoryview(chunk)
            for begin in range(0, len(view), PIECE):
                self._check()
                self.pieces += 1
                yield view[begin : begin + PIECE]
        # Once more before the part gets its name: what is given up may have been overwritten while it was read.
        self._check()

    def _check(self) -> None:
        if self._given_up is not None:
            raise _GivenUp(self._given_up)

    def _write(self) -> None:
        plan = self.plan
        assert self._content is not None, "it is copied first"
        if self.commits and self._context.may_act():
            plan.attempt.sweep()
        if plan.position < plan.parts:
            plan.attempt.write(plan.position, plan.parts, self._content)
        if self._is_shared:
            progress = json.dumps(plan.progress.to_dict(), sort_keys=True)
            voucher = SaveVoucher(
                plan.worker,
                self.digests | {"progress": progress},
                is_partial=not plan.held.is_whole,
                settings=plan.held.settings,
                written=tuple(plan.file.tensors),
                waited_s=round(self.added_s, 4),
                outline=None if plan.held.is_whole else plan.held.encoded.skeleton,
            )
            plan.attempt.vouch(plan.position, json.dumps(asdict(voucher)).encode())
        self._is_written = True
        self._written_s = round(self._context.clock() - self._began, 4)
        self.copied.set()  # without memory for a copy only now

    def _commit(self) -> None:
        plan, context = self.plan, self._context
        weights = {name: digest for name, digest in self.digests.items() if name in plan.held.weights}
        if len(weights) != len(plan.held.weights):
            raise CheckpointError("the weights could not be digested")
        vouchers, manifest = self._vouchers, plan.manifest
        if not plan.held.is_whole and vouchers:
            from quorate.checkpoint.reshard import join_skeletons

            manifest = replace(manifest, skeleton=join_skeletons(voucher.outline for voucher in vouchers))
        check_written(manifest.skeleton, [voucher.written for voucher in vouchers] or [tuple(plan.file.tensors)])
        generation = context.generation()
        written_by = None if generation is None else (generation.incarnation, generation.number)
        manifest = replace(manifest, weights_digest=weights_digest(weights), generation=written_by)

        def check() -> None:
            self._check()
            context.check_commit()

        try:
            self.info = context.store.commit(plan.attempt.name, manifest, check)
        except LinkError as error:
            log.info("the checkpoint waits: %s", error)
            return
        seconds = round(context.clock() - self._began, 4)
        # What was committed is a checkpoint whatever comes of this; the next one removes what is too much.
        cursor = plan.progress.cursor
        context.remove_surplus(plan.progress, cursor)
        event = CheckpointSaved(
            step=cursor.step,
            path=str(self.info.path),
            bytes=self.info.bytes,
            seconds=seconds,
            copied_s=self._copied_s,
            written_s=self._written_s,
            added_s=round(max([self.added_s, *(voucher.waited_s for voucher in vouchers)]), 4),
            parts=plan.parts,
            audited=None if context.audited is None else context.audited(),
        )
        context.publish(event)

    def _fail(self, error: Exception) -> None:
        """Training goes on whatever it is; the space is given back, and the next save tries again."""
        step = self.plan.progress.cursor.step
        if not isinstance(error, QuorateError):
            log.exception("the checkpoint of step %d failed unexpectedly", step)
        self.failure = str(error) if isinstance(error, CheckpointError) else describe(error)
        self.lacked_space = isinstance(error, NoSpace)
        self.plan.attempt.give_up()
        self._context.publish(CheckpointFailed(step=step, reason=self.failure))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that show the same memory in the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

"""One save on its way through one worker: copied, written and committed while training goes on."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from quorate.checkpoint.arena import Arena
from quorate.checkpoint.attempt import Attempt, AttemptGone, Voucher
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import Encoded, decode
from quorate.checkpoint.verification import MANIFEST
from quorate.core.digests import weights_digest
from quorate.core.errors import CheckpointError, JobError, LinkError, QuorateError, ReplicasDiffer
from quorate.core.generation import GenerationId
from quorate.core.phases import DISK, OTHERS
from quorate.core.user_code import describe
from quorate.observe.event import Event
from quorate.observe.events import CheckpointFailed, CheckpointSaved
from quorate.storage.atomic import Buffer
from quorate.training.divergence import divergence
from quorate.training.progress import Progress
from quorate.training.tensors import digests

log = logging.getLogger(__name__)

GLANCE = 0.02
"""Seconds between two looks at what others do: their parts, the lease, the word of the coordinator."""
PIECE = 8 * 2**20
VOID = "it was given up: "
"""How the failure begins of a save that failed because of somebody else, who says why."""


@dataclass(frozen=True)
class Desk:
    """What all saves of a worker share.

    `check_commit` raises where this worker may not act for its job; `tell_all` sends the events that are queued.
    `generation` is the one that this worker is in: whoever is of an older one than the last that has committed, and has
    not heard of it yet, does not commit any more.
    """

    folder: CheckpointFolder
    retention: Retention | None
    publish: Callable[[Event], None]
    check_commit: Callable[[], None]
    tell_all: Callable[[], None]
    generation: Callable[[], GenerationId | None] = lambda: None
    arena: Arena = field(default_factory=Arena)


@dataclass(frozen=True)
class Assignment:
    """A save, and this worker's part in it.

    `writers` are the workers that take part, in their order; `index` is the part that is ours to write, if any is.
    """

    progress: Progress
    manifest: Manifest
    encoded: Encoded
    state: dict[str, torch.Tensor]
    weights: frozenset[str]
    attempt: Attempt
    writers: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    position: int
    worker: int

    @property
    def index(self) -> int | None:
        """Our part."""
        return self.position if self.position < len(self.parts) else None

    @property
    def commits(self) -> bool:
        """Whether it is ours to commit."""
        return self.position == 0

    @property
    def is_shared(self) -> bool:
        """Whether others take part."""
        return len(self.writers) > 1

    @property
    def file(self) -> TensorFile:
        """What we write."""
        names = self.parts[self.position] if self.index is not None else ()
        return TensorFile({name: self.encoded.tensors[name] for name in names})


class GivenUp(Exception):  # noqa: N818 (a happening, not a mistake)
    """It is not to be completed, and why."""


class Saving:
    """Runs in a thread of its own from `start` on. The loop waits for `staged` before it changes the state.

    Whoever waits for it sees by `pieces`, which grows, that it comes further, and by `waits_for` what it stands at.
    """

    def __init__(self, assignment: Assignment, desk: Desk) -> None:
        self.assignment = assignment
        self.staged = threading.Event()
        self.done = threading.Event()
        self.failure: str | None = None
        self.divergence: ReplicasDiffer | None = None
        self.is_complete = False
        self.info: CheckpointInfo | None = None
        self.digests: dict[str, str] = {}
        self.added_s = 0.0
        self.pieces = 0
        self.waits_for = "a copy of the state"
        self._desk = desk
        self._size = assignment.file.size
        self._began = time.perf_counter()
        self._copied_s = 0.0
        self._given_up: str | None = None
        self._digesting: threading.Thread | None = None

    def start(self) -> None:
        """Begin. A daemon: a worker that leaves in a hurry does not wait for its disk."""
        threading.Thread(target=self._run, name="saving", daemon=True).start()

    @property
    def is_sound(self) -> bool:
        """Whether it is, or may still become, a checkpoint."""
        return self.failure is None and self._given_up is None

    def give_up(self, reason: str) -> None:
        """It shall not be committed. What is left of it goes as soon as the thread notices."""
        if self.info is None and self._given_up is None:
            self._given_up = reason

    # --- in the thread

    def _run(self) -> None:
        try:
            self._write(self._staged_content())
            self.staged.set()  # without memory for a copy only now
            if self.assignment.commits:
                self._commit()
        except (GivenUp, AttemptGone) as reason:
            log.info("the checkpoint of step %d is void: %s", self.assignment.progress.cursor.step, reason)
            self.failure = f"{VOID}{reason}"
            self.assignment.attempt.give_up()
        except Exception as error:
            self._fail(error)
        finally:
            # An optimizer may have let go of them meanwhile.
            self.assignment.state.clear()
            self.assignment.encoded.tensors.clear()
            self.staged.set()
            self.done.set()

    def _staged_content(self) -> Iterator[Buffer]:
        """What goes into the file, from memory of our own; without that memory from the state itself, which must then
        not change before all is written."""
        assignment = self.assignment
        # All of it by everybody, not only what we write: it tells whether the replicas are equal.
        if assignment.is_shared:
            self.digests = digests(assignment.state.items())
        staged = self._desk.arena.stage(assignment.file)
        if staged is None:
            log.warning("there is no memory for a copy of the state, so training waits for the checkpoint")
            if not assignment.is_shared:
                self.digests = digests(assignment.state.items())
            return self._pieces(assignment.file.chunks())
        content, tensors = staged
        self.staged.set()
        self._copied_s = self._elapsed()
        if not assignment.is_shared:
            weights = decode(assignment.encoded.skeleton, tensors)["replica"]["tensors"]
            self._digesting = threading.Thread(target=self._digest, args=(weights,), name="digesting", daemon=True)
            self._digesting.start()
        return self._pieces(iter((content,)))

    def _digest(self, tensors: dict[str, torch.Tensor]) -> None:
        """Meanwhile: a thread that writes mostly waits for the disk."""
        self.digests = digests(tensors.items())

    def _pieces(self, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            view = memoryview(chunk)
            for begin in range(0, len(view), PIECE):
                self._check()
                self.pieces += 1
                yield view[begin : begin + PIECE]
        # Once more before the part gets its name: what is given up may have been overwritten while it was read.
        self._check()

    def _write(self, content: Iterator[Buffer]) -> None:
        self.waits_for = DISK
        assignment, folder = self.assignment, self._desk.folder
        if assignment.commits and self._may_act():
            folder.sweep(assignment.attempt)
        if assignment.index is not None:
            assignment.attempt.write(
                assignment.index, len(assignment.parts), content, digest=folder.digest, cipher=folder.cipher
            )
        self._check()
        if assignment.is_shared:
            progress = json.dumps(assignment.progress.to_dict(), sort_keys=True)
            voucher = Voucher(assignment.worker, self.digests | {"progress": progress})
            assignment.attempt.vouch(assignment.position, voucher)

    def _commit(self) -> None:
        assignment = self.assignment
        written_s = self._elapsed()
        self.waits_for = OTHERS
        self._await(lambda: len(assignment.attempt.written()) == len(assignment.parts))
        if assignment.is_shared:
            self._compare()
        self.is_complete = True  # from here on nobody else is needed
        self.info = self._committed()
        seconds = self._elapsed()
        self._prune()
        event = CheckpointSaved(
            step=assignment.progress.cursor.step,
            path=str(self.info.path),
            bytes=self.info.bytes,
            seconds=seconds,
            copied_s=self._copied_s,
            written_s=written_s,
            added_s=round(self.added_s, 4),
            parts=len(assignment.parts),
        )
        self._desk.publish(event)

    def _compare(self) -> None:
        """Nothing is committed that not all hold alike; the loop refuses to go on."""
        assignment = self.assignment
        self._await(lambda: len(assignment.attempt.vouchers()) == len(assignment.writers))
        self.divergence = divergence(assignment.progress.cursor.step, list(assignment.attempt.vouchers().values()))
        if self.divergence is not None:
            raise GivenUp("the replicas differ")
        assignment.attempt.drop_vouchers()

    def _committed(self) -> CheckpointInfo:
        assignment, desk = self.assignment, self._desk
        while True:
            self.waits_for = "leave of the coordinator to commit"
            # Whoever goes on from this checkpoint does not pass through the steps before it: they must be told by now.
            self._await(self._may_commit)
            self.waits_for = DISK
            try:
                return desk.folder.commit(assignment.attempt, self._manifest(), self._check_commit)
            except LinkError as error:
                log.info("the checkpoint waits: %s", error)
                (assignment.attempt.path / MANIFEST).unlink(missing_ok=True)
            except FileNotFoundError:
                assignment.attempt.check_there()
                raise

    def _prune(self) -> None:
        desk, best = self._desk, self.assignment.progress.best
        if desk.retention is None:
            return
        try:
            desk.folder.prune(desk.retention, None if best is None else best.step, check=desk.check_commit)
        except (CheckpointError, LinkError) as error:
            # What was committed is a checkpoint all the same; the next one removes what is too much.
            log.info("old checkpoints are left for now: %s", error)

    def _manifest(self) -> Manifest:
        if self._digesting is not None:
            self._digesting.join()
        weights = {name: digest for name, digest in self.digests.items() if name in self.assignment.weights}
        if len(weights) != len(self.assignment.weights):
            raise CheckpointError("the weights could not be digested")
        generation = self._desk.generation()
        written_by = None if generation is None else (generation.incarnation, generation.number)
        return replace(self.assignment.manifest, weights_digest=weights_digest(weights), generation=written_by)

    def _may_commit(self) -> bool:
        """Not between two generations, nor without a lease: it may come back, or all may be given up."""
        try:
            self._desk.tell_all()
        except LinkError as error:
            log.debug("the checkpoint waits: %s", error)
            return False
        except JobError:
            log.debug("the job has ended, which takes nothing back of what all have agreed on")
        return self._may_act()

    def _may_act(self) -> bool:
        try:
            self._desk.check_commit()
        except LinkError as error:
            log.debug("the checkpoint waits: %s", error)
            return False
        return True

    def _check_commit(self) -> None:
        self._check()
        self._desk.check_commit()

    def _await(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._check()
            time.sleep(GLANCE)

    def _check(self) -> None:
        if self._given_up is not None:
            raise GivenUp(self._given_up)

    def _fail(self, error: Exception) -> None:
        """Training goes on whatever it is; the space is given back, and the next save tries again."""
        cursor = self.assignment.progress.cursor
        if isinstance(error, OSError):
            error = self._desk.folder.explained(error, cursor, self._size)
        if not isinstance(error, QuorateError):
            log.exception("the checkpoint of step %d failed unexpectedly", cursor.step)
        self.failure = str(error) if isinstance(error, CheckpointError) else describe(error)
        self.assignment.attempt.give_up()
        self._desk.publish(CheckpointFailed(step=cursor.step, reason=self.failure))

    def _elapsed(self) -> float:
        return round(time.perf_counter() - self._began, 4)

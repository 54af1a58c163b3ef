"""What must hold at every moment of a simulated job, whatever happens to its processes and messages.

1. No two generations complete the same step with different results.
2. Every member that completed a step holds the digest that the undisturbed run has there.
3. Each (step, lane) contributes exactly once to the state.
4. When faults stop and enough workers exist, the job finishes.
5. A checkpoint is of a state that the undisturbed run passes through.
6. No worker completes a step or causes an outside effect after its lease ended, under an older generation, or after it
   has promised to take nothing more of its generation.
7. A block is with some server as long as fewer than `replicas` of them are gone since all held what they were to hold,
   and each block that a server holds has had each step applied once.
8. A sharded gang goes on where each part of its state is held by a member; or, only where there is no such cursor,
   from a checkpoint, or from the beginning with members that have just begun.
9. Who computes a lane wrongly is named, and nobody else; where two disagree, and the coordinator has heard of it, a
   third decides if one can come.

The referee sees what no process does: everybody's true state at the same time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quorate.core.failure import POISON_BATCH, Failure
from quorate.core.generation import Cursor, Generation, GenerationId, MeshShape, Role, common_cursor, name_of
from simulation.clock import VirtualClock
from simulation.task import Contribution, Course, Holding, undisturbed

EMPTY_AT_MOST = 5.0
"""Seconds after which a place without a process, in calm times, has been forgotten."""


class InvariantBroken(BaseException):
    """An invariant does not hold."""


class Watched(Protocol):
    """What the referee looks at in a worker."""

    pid: int
    slot: int
    place: str
    holding: Holding
    blocks: dict[int, int]
    is_server: bool
    is_alive: bool
    is_dirty: bool
    promised: GenerationId | None

    def lease_remaining(self) -> float:
        """Seconds for which it may act."""
        ...

    @property
    def has_heard_the_end(self) -> bool:
        """Whether it knows that the job is over: there is no later generation then, and what was agreed on holds."""
        ...


@dataclass(frozen=True)
class Commit:
    """A checkpoint, and the generation that was the last when it was written; `is_whole` until it cannot be read.

    `is_late`: where servers were lost, workers may complete it when the job has gone back already. That is a checkpoint
    as good as any, and nobody could have known of it.
    """

    holding: Holding
    during: GenerationId
    is_late: bool = False
    is_whole: bool = True


class Referee:
    """Follows a job and raises InvariantBroken at the first thing that must not happen."""

    def __init__(
        self, course: Course, clock: VirtualClock, *, has_poison: bool = False, mesh: MeshShape | None = None
    ) -> None:
        self._has_poison = has_poison
        self._mesh = mesh
        self._course = course
        self._clock = clock
        self._undisturbed = undisturbed(course)
        self._latest = GenerationId(0, 0)
        self._at_work: set[tuple[int, int]] = set()
        self._told: set[str] = set()
        self._empty: dict[int, float] = {}
        # By process, how many checkpoints there were when it was started.
        self._found: dict[int, int] = {}
        self._condemned: set[tuple[int, int]] = set()
        # By generation, the servers that hold what they are to hold; and the processes of the last in which all do.
        self._aligned: dict[GenerationId, set[int]] = {}
        self._keepers: frozenset[int] = frozenset()
        # Of a job with servers or a mesh: the furthest step of anybody since it has last gone back.
        self._goes_back = mesh is not None
        self._reached = 0
        self.commits: list[Commit] = []
        self.steps = 0
        self.copies = 0
        self.losses = 0
        self.generations = 0
        self.successions = 0
        self.audits = 0
        self.expects_third = False
        self._is_disputed = False

    # --- what bad processors and bad memory do

    def judged(self, generation: Generation, culprits: Collection[int], corrupt: Collection[int], alone: bool) -> None:
        """An audit has found these culprits; `alone`: nobody else was there to compute the lane in dispute."""
        self.differ(generation)
        self.audits += 1
        if not set(culprits) <= set(corrupt):
            self._break(9, f"{sorted(culprits)} are said to compute wrongly, and it is {sorted(corrupt)}")
        if alone and self.expects_third and self._is_disputed:
            self._break(9, "a worker goes on alone with a lane that two have disputed")
        self._is_disputed = False

    def hears_dispute(self) -> None:
        """The coordinator is told that two disagree on a lane, by the one that leaves."""
        self._is_disputed = True

    def differ(self, generation: Generation) -> None:
        """The replicas of a generation differ: nobody of it may take part again."""
        if generation.id == self._latest:
            self._condemned |= self._at_work

    # --- what the supervisor does

    def started(self, worker: Watched) -> None:
        """A process begins, in a place."""
        self._found[worker.pid] = len(self.commits)

    def spoilt(self, cursor: Cursor | None) -> None:
        """The newest checkpoint cannot be read any more."""
        self.commits = [replace(one, is_whole=one.is_whole and one.holding.cursor != cursor) for one in self.commits]

    # --- what the coordinator does

    def declared(self, generation: Generation, workers: Mapping[int, Watched]) -> None:
        """A generation begins; `workers` are the processes in their places."""
        if generation.id <= self._latest:
            self._break(6, f"generation {generation.id} is declared after {self._latest}")
        for member in generation.members:
            worker = workers.get(member.worker)
            if worker and worker.is_alive and not worker.is_dirty and worker.holding.cursor != member.cursor:
                self._break(
                    6,
                    f"generation {generation.id} begins while {name_of(member.worker)} stands at"
                    f" {_at(worker.holding.cursor)}, and it had promised {_at(member.cursor)}",
                )
        # What there was when somebody was started: whoever holds the state is past it, and whoever was started since
        # nobody does has it.
        found = max(
            (
                self._found.get(workers[one.worker].pid, 0)
                for one in generation.servers or generation.members
                if one.worker in workers
            ),
            default=0,
        )
        later = (one for one in self.commits if one.during < self._latest and not one.is_late)
        known = [*self.commits[:found], *later]
        self._goes_back = self._mesh is not None or bool(generation.servers)
        self._check_parts(generation, workers)
        if self._goes_back:
            self._reached = min(self._reached, generation.cursor.step)
        before = [one.holding.cursor.step for one in known if one.is_whole]
        # A worker may be left that was a step behind one which saved, and is gone.
        if generation.cursor.step < max(before, default=0) - 1:
            self._break(2, f"generation {generation.id} begins at {_at(generation.cursor)}, before a checkpoint")
        for member in generation.members:
            if (worker := workers.get(member.worker)) and (worker.slot, worker.pid) in self._condemned:
                self._break(2, f"{worker.place} (pid {worker.pid}) goes on although its replica may be wrong")
        self._latest = generation.id
        self._at_work = {(one.worker, workers[one.worker].pid) for one in generation.members if one.worker in workers}
        self.generations += 1

    def _check_parts(self, generation: Generation, workers: Mapping[int, Watched]) -> None:
        if self._mesh is None:
            return
        if [member.worker for member in generation.members] != list(range(self._mesh.size)):
            self._break(8, f"generation {generation.id} has not each worker of the mesh in its place")
        here = [one for slot, one in workers.items() if one.is_alive and (slot, one.pid) not in self._condemned]
        common = common_cursor((self._mesh.part(worker.slot), worker.holding.cursor) for worker in here)
        parts = {self._mesh.part(worker.slot) for worker in here}
        if common is not None and len(parts) == self._mesh.parts and common > generation.cursor:
            self._break(8, f"generation {generation.id} begins at {_at(generation.cursor)}, and all hold {_at(common)}")
        cursor, saved = generation.restored, {one.holding.cursor for one in self.commits}
        if cursor is None:
            return
        self.losses += 1
        if cursor != Cursor() and cursor not in saved:
            self._break(8, f"generation {generation.id} goes back to {_at(cursor)}, of which there is no checkpoint")
        if cursor == Cursor() and generation.behind:
            # Nobody keeps the state that the job began with: it would be over before its first step.
            self._break(
                8, f"generation {generation.id} begins again with {name_of(generation.behind[0])}, which cannot"
            )

    def succeeded(self) -> None:
        """A coordinator takes the place of another: what was told and not answered is told again."""
        self._told.clear()
        self.successions += 1

    def dismissed(self, worker: Watched, others: Iterable[Watched]) -> None:
        """A worker is let go: if it was at work, what it holds is saved, or held by one of these others.

        They may be dead, as long as nobody has been told.
        """
        if (worker.slot, worker.pid) not in self._at_work:
            return
        left = [other for other in others if other is not worker]
        if self._mesh is not None:
            cursor = worker.holding.cursor
            here = [one for one in (worker, *left) if one.is_alive and one.holding.cursor == cursor]
            parts = {self._mesh.part(one.slot) for one in here}
            if len(parts) < self._mesh.parts:
                return  # what it holds is of no use without the rest
            left = [other for other in left if self._mesh.part(other.slot) == self._mesh.part(worker.slot)]
        saved = [commit.holding.cursor.step for commit in self.commits]
        if worker.is_server and worker.holding.cursor.step > max(saved, default=0):
            held = {block for other in left for block in other.blocks}
            if lacking := sorted(worker.blocks.keys() - held):
                self._break(7, f"{worker.place} is let go with the blocks {lacking}, which nobody else holds")
        steps = [other.holding.cursor.step for other in left] + saved
        # Where a generation broke, it may be one step further than those who stay.
        if worker.holding.cursor.step > max(steps, default=0) + 1:
            self._break(2, f"{worker.place} is let go with {_at(worker.holding.cursor)}, which nobody else holds")

    def lost(self, message: str) -> None:
        """A loss is written down."""
        who = message.partition(" on host")[0]
        if who in self._told:
            self._break(6, f"a loss is recorded twice: {message}")
        self._told.add(who)

    def sees_empty(self, places: list[int]) -> None:
        """Nobody is in these places, in calm times, nor about to come."""
        self._empty = {place: self._empty.get(place, self._clock.now) for place in places}
        for place, since in self._empty.items():
            if self._clock.now - since > EMPTY_AT_MOST:
                self._break(4, f"the place of {name_of(place)} stays empty")

    def recorded(self, lines: Iterable[str]) -> None:
        """Events are written down."""
        for line in lines:
            if line in self._told:
                self._break(6, f"an event is recorded twice: {line}")
            self._told.add(line)

    def ended(self, failure: Failure | None, digest: str, ending: str) -> None:
        """The job is over, in the coordinator's eyes."""
        if failure is not None:
            # By min_workers a link that stays cut leaves no way out.
            hopeless = ("so the job is stopped", "leave fewer than min_workers", "none can be left out")
            if any(end in failure.message for end in hopeless):
                return
            if failure.kind == POISON_BATCH and self._has_poison:
                return
            self._break(4, f"the job ends with {failure.kind}: {failure.message}")
        elif ending == "complete" and self._has_poison:
            self._break(4, "the job is complete although a lane of it kills every worker")
        elif ending == "complete" and digest != self._undisturbed[max(self._undisturbed)]:
            self._break(2, f"the job is complete with {digest}, not with what the undisturbed run ends with")

    # --- what a worker does

    def begins(self, worker: Watched, generation: Generation) -> None:
        """A worker begins to train, after whoever was behind has copied."""
        if worker.holding.cursor != generation.cursor:
            self._break(
                1,
                f"{worker.place} begins in generation {generation.id} at {_at(worker.holding.cursor)},"
                f" and the generation at {_at(generation.cursor)}",
            )
        self._check_holding(worker)

    def aligned(self, worker: Watched, generation: Generation) -> None:
        """A member of a generation with servers holds what it is to hold."""
        self._check_blocks(worker)
        if worker.is_server:
            aligned = self._aligned.setdefault(generation.id, set())
            aligned.add(worker.slot)
            staying = {server.worker for server in generation.servers if server.role is Role.SERVER}
            if aligned >= staying and generation.id == self._latest:
                self._keepers = frozenset(pid for slot, pid in self._at_work if slot in staying)

    def lost_blocks(self, generation: Generation, workers: Mapping[int, Watched], replicas: int) -> None:
        """The members of a generation have found that a block is held by nobody."""
        self.losses += 1
        if generation.id != self._latest:
            return
        gone = self._keepers - {pid for _, pid in self._at_work}
        if len(gone) < min(replicas, len(self._keepers)):
            self._break(7, f"blocks are lost, and of {len(self._keepers)} servers {len(gone)} are gone ({replicas=})")

    def copied(self, worker: Watched) -> None:
        """A worker has taken up the state of a donor."""
        self.copies += 1
        self._check_holding(worker)

    def applies(
        self, worker: Watched, generation: Generation, sources: Sequence[GenerationId], parts: Sequence[Contribution]
    ) -> None:
        """A worker begins to change its state by a step, from contributions of these generations."""
        step = worker.holding.cursor.step + 1
        self._check_right(worker, generation, f"applies step {step}")
        if any(source != generation.id for source in sources):
            self._break(6, f"{worker.place} applies step {step} with a contribution of another generation")
        if sorted(lane for lane, _ in parts) != list(range(self._course.lanes)):
            lanes = sorted(lane for lane, _ in parts)
            self._break(3, f"{worker.place} applies step {step} with the lanes {lanes}")

    def completed(self, worker: Watched) -> None:
        """A worker has changed its state."""
        self.steps += 1
        self._reached = max(self._reached, worker.holding.cursor.step)
        self._check_holding(worker)

    def _check_blocks(self, worker: Watched) -> None:
        step = worker.holding.cursor.step
        if wrong := {block: version for block, version in worker.blocks.items() if version != step}:
            self._break(7, f"{worker.place} stands at step {step}, and its blocks at {wrong}")

    def committed(self, writer: Watched, holding: Holding) -> None:
        """A worker has made a checkpoint visible, which holds this. It may do so in a later generation than it was
        begun in, or between two: what all had agreed on stays true."""
        if writer.lease_remaining() <= 0 and not writer.has_heard_the_end:
            self._break(6, f"{writer.place} commits {_at(holding.cursor)} after its lease ended")
        expected = self._undisturbed.get(holding.cursor)
        if holding.digest != expected:
            self._break(5, f"the checkpoint of {_at(holding.cursor)} holds {holding.digest}, not {expected}")
        is_late = self._goes_back and holding.cursor.step > self._reached
        self.commits.append(Commit(holding, self._latest, is_late=is_late))

    def removed(self, writer: Watched, cursor: Cursor) -> None:
        """A worker has removed a checkpoint."""
        if writer.lease_remaining() <= 0 and not writer.has_heard_the_end:
            self._break(6, f"{writer.place} removes a checkpoint after its lease ended")
        newest = self.newest_checkpoint()
        if newest is not None and newest.cursor == cursor:
            self._break(5, f"{writer.place} removes the newest valid checkpoint, of {_at(cursor)}")
        self.spoilt(cursor)

    def newest_checkpoint(self) -> Holding | None:
        """What a worker that restores begins with."""
        return max(
            (commit.holding for commit in self.commits if commit.is_whole), key=lambda one: one.cursor, default=None
        )

    def gives_up(self, why: str) -> None:
        """The job has not ended in time."""
        self._break(4, why)

    def _check_right(self, worker: Watched, generation: Generation, what: str) -> None:
        if worker.lease_remaining() <= 0:
            self._break(6, f"{worker.place} {what} {-worker.lease_remaining():.3f} s after its lease ended")
        if generation.id < self._latest:
            self._break(6, f"{worker.place} {what} in generation {generation.id}, after {self._latest} began")
        if worker.promised is not None and generation.id <= worker.promised:
            self._break(6, f"{worker.place} {what} although it has promised to have left {generation.id}")

    def _check_holding(self, worker: Watched) -> None:
        holding = worker.holding
        expected = self._undisturbed.get(holding.cursor)
        if holding.digest != expected:
            self._break(
                2,
                f"{worker.place} holds {holding.digest} at {_at(holding.cursor)}, where the undisturbed run has"
                f" {expected}",
            )

    def _break(self, number: int, what: str) -> None:
        raise InvariantBroken(f"invariant {number}, at {self._clock.now:.4f} s: {what}")


def _at(cursor: Cursor) -> str:
    return f"step {cursor.step} ({cursor.phase.name.lower()})"

"""A worker of a simulation: the real session and membership; what is simulated is the training itself.

It trains as the loop does, with frames to the other members in place of gradients, and a chain of digests in place of
weights.
"""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from greenlet import GreenletExit

from quorate.checkpoint.retention import Retention
from quorate.core.digests import derive_seed, outvoted
from quorate.core.errors import LanesDiffer, LanesDisputed, LinkError, PeerLost, ReplicasDiffer, StateLost
from quorate.core.failure import Failure
from quorate.core.generation import (
    DIVERGED,
    ENDED_WITH_THE_JOB,
    GAVE_UP,
    LEFT,
    OTHERS,
    Cursor,
    Generation,
    GenerationId,
    Pace,
    Phase,
    Role,
    WorkerStatus,
    name_of,
)
from quorate.core.timing import Timing
from quorate.observe.events import StepCompleted
from quorate.spec.job import CheckpointSpec
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.audit import AuditNote, AuditPlan, AuditRecord, Doubt, LaneAudit, Outcome
from quorate.training.checkpointer import Checkpointer
from quorate.training.lane import LaneResult
from quorate.training.save import LOOK, SaveContext
from quorate.training.strategy import Agreement, Save, StepRequest
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import encode_cursor
from quorate.worker.heartbeats import Backlog
from quorate.worker.membership_view import Dismissed, JobEnded
from quorate.worker.session import WorkerSession
from quorate.worker.status import Status
from simulation.clock import Clock, Process
from simulation.invariants import Referee
from simulation.network import Network
from simulation.simulated_coordinator import SimulatedCoordinator
from simulation.simulated_disk import HeldLayout, SimulatedArena, SimulatedDisk, WorkerDisk
from simulation.simulated_faults import Scenario
from simulation.simulated_membership import Habits, SimulatedLink, SimulatedMembership
from simulation.simulated_memory import Segment, SimulatedMemory
from simulation.simulated_servers import Held, Pending, check_held, everything, placed_at, placement_of
from simulation.task import BEGINNING, Contribution, Course, Holding, apply_evaluation, apply_step, contribute
from simulation.threads import SimulatedRuntime

COMPLETE = "complete"
HANGS_FOR = 1000.0
SLOW = 4.0
SAVING_PATIENCE = 10.0
"""Seconds for which whoever leaves completes what it saves."""


@dataclass(frozen=True)
class Paces:
    """How long things take a worker, in seconds."""

    build: float = 0.15
    lane: float = 0.01
    apply: float = 0.006
    copy: float = 0.05
    write: float = 0.02


@dataclass(frozen=True)
class Frame:
    """What a member sends to the others: its part of one exchange. Lanes that lie in shared memory are not sent."""

    generation: GenerationId
    kind: str
    step: int
    worker: int
    parts: tuple[Contribution, ...] = ()
    holding: Holding | None = None
    request: StepRequest | None = None
    wants_answer: bool = False
    payload: bytes = b""
    digest: str = ""
    blocks: Held = field(default_factory=dict)
    audit: AuditNote | None = None


@dataclass
class Ground:
    """What all workers of a job share. `workers` holds, by place, the process that was started there last.

    Where they have no memory in common, they pass their frames round a ring.
    """

    course: Course
    referee: Referee
    workers: dict[int, "SimulatedWorker"]
    disk: SimulatedDisk
    rules: CheckpointSpec
    scenario: Scenario
    memory: SimulatedMemory | None = None
    paces: Paces = field(default_factory=Paces)
    corrupt: set[int] = field(default_factory=set)


@dataclass
class Surroundings:
    """What is around every worker of a simulation, and who wants to know what becomes of it."""

    network: Network
    coordinator: SimulatedCoordinator
    timing: Timing
    on_exit: Callable[["SimulatedWorker"], None]
    on_phase: Callable[["SimulatedWorker", str], None]
    trace: Callable[[str], None]
    habits: Habits = field(default_factory=Habits)


@dataclass(frozen=True)
class SimulatedConnection:
    """A worker's links to the other members of a generation."""

    worker: "SimulatedWorker"

    def abort(self) -> None:
        """Whoever waits for the others looks again."""
        self.worker.notify()

    def close(self) -> None:
        """The others read the end of the file."""
        self.worker.leave()
        self.worker.close_links()


@dataclass(frozen=True)
class SimulatedStrategy:
    """What the checkpointer asks of the strategy of a generation."""

    gathered: Callable[[bytes], tuple[bytes, ...]]
    worker: int
    hosted: range

    @property
    def leads(self) -> bool:
        return 0 in self.hosted

    def begin(self, step: int) -> None:
        """The worker itself trains."""

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        raise AssertionError("the worker itself trains")

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        return self.gathered(payload)

    def close(self) -> None:
        """The worker closes its links."""


class SimulatedWorker(Process):
    """One process in one place, from its start to its exit. It is what its session trains by."""

    def __init__(
        self,
        around: Surroundings,
        ground: Ground,
        clock: Clock,
        slot: int,
        pid: int,
        checkpoint: Path | None,
        chance: random.Random,
    ) -> None:
        super().__init__(clock, name_of(slot))
        self.slot = slot
        self.is_server = Role.of(slot) is Role.SERVER
        # Of a server: what it holds, what it is to hold from the first step on, and a step that it could complete.
        self.blocks: dict[int, int] = {}
        self._placed: frozenset[int] | None = None
        self._pending: Pending | None = None
        self.pid = pid
        self.holding = BEGINNING
        self._checkpoint = checkpoint
        self.exit_code: int | None = None
        self.phase = ""
        self.is_dirty = False
        self.promised: GenerationId | None = None
        self._around = around
        self._habits = around.habits
        self._network = around.network
        self._timing = around.timing
        self._ground = ground
        self._chance = chance
        self._is_flipped = False
        self.is_corrupt = False
        self._corrupt: Callable[[], int] | None = None
        self._audits = AuditRecord()
        self._audit: LaneAudit | None = None
        self._hangs = False
        self._lane: int | None = None
        self._steps_since = 0
        self.is_saved = False
        self._is_training = False
        self._gathers = 0
        # Links of the generation that it is in.
        self._in: Generation | None = None
        self._broken: list[int] = []
        self._segment: Segment | None = None
        self._frames: dict[tuple[GenerationId, str, int], dict[int, Frame]] = {}
        self._runtime = SimulatedRuntime(self)
        self._changed = self._runtime.condition()
        self._link = SimulatedLink(self, around.network, lambda: around.coordinator, self._runtime)
        self._slowness = SLOW if slot == ground.scenario.slow else 1.0
        self._membership = SimulatedMembership(
            self, self._link, around.timing, self._status, self._pace, self._runtime, around.habits
        )
        self._backlog = Backlog(self._membership.publish, around.timing)
        self._checkpointer: Checkpointer | None = None
        # Only what the checkpointer tells of: that it waits, for what, and that it comes further.
        self._activity = Activity(lambda *_: None)
        self._runtime.spawn("main", self._live)

    @property
    def address(self) -> str:
        """Where the others find it."""
        return f"host:{self.pid}"

    @property
    def last_status(self) -> Status | None:
        """What stands on its status page."""
        status = Status(self.holding.cursor.step + 1, self.phase)
        return status if self._lane is None else replace(status, lane=self._lane, epoch=0, samples=(1,), sample_count=1)

    def lease_remaining(self) -> float:
        """Seconds for which it may act, by itself and by what was granted to it."""
        return min(self._membership.lease_remaining(), self._link.leased_until - self.clock.now)

    @property
    def has_heard_the_end(self) -> bool:
        """Whether it knows that the job is over."""
        return self._membership.view.ended

    # --- what befalls it

    def flip(self) -> None:
        """A bit of what it holds flips, as bad memory does, when the next step begins that others can tell it by."""
        self._is_flipped = True

    def corrupt(self) -> None:
        """Compute every lane wrongly from the next step on, always alike or differently each time, where others can
        see it."""
        self.is_corrupt = not self.is_server

    def hang(self) -> None:
        """Come no further, with live heartbeats, from the next thing on that it is busy with."""
        self._hangs = True

    def ask_to_leave(self) -> None:
        """As SIGTERM does."""
        self._membership.ask_to_leave()

    def lose_calls(self, coordinator: SimulatedCoordinator) -> None:
        """The connection to a coordinator is broken."""
        self._link.lose_calls(coordinator)

    def lag_behind(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said only later."""
        self._link.lag_behind(coordinator)

    def lose_stream(self, coordinator: SimulatedCoordinator) -> None:
        """Read what a coordinator has said last; nothing more comes from it."""
        self._link.lose_stream(coordinator)

    def die(self) -> None:
        """Be killed: the kernel closes its sockets."""
        if self.is_alive:
            self._around.trace(f"{self.place} (pid {self.pid}) dies in {self.phase}")
            self._depart()

    def end(self) -> None:
        """The simulation is over: nothing of it stays behind."""
        super().die()
        self._runtime.end()

    def _exit(self, code: int) -> None:
        self._around.trace(f"{self.place} (pid {self.pid}) exits with code {code}")
        self.exit_code = code
        self._depart()

    def _depart(self) -> None:
        self.close_links()
        super().die()
        self._runtime.end()
        self._around.on_exit(self)

    # --- its life

    def _live(self) -> None:
        """As worker/process.py has it."""
        self._sleep("build", self._ground.paces.build)
        if self._checkpoint is not None:
            self.holding = self._ground.disk.restore(self._checkpoint) or BEGINNING
        if self.is_server:
            self.blocks = everything(self.holding)
        self._checkpointer = self._make_checkpointer()
        try:
            code = self._run_session()
            self._checkpointer.close(SAVING_PATIENCE)
            self._membership.flush_last()
            self._exit(code)
        except LanesDisputed as error:
            self._membership.report_failure(Failure.of(error).at(worker=self.slot))
            self._exit(GAVE_UP)
        except ReplicasDiffer as error:
            # Its word may be lost on the way; its exit code is told until it is heard.
            self._membership.report_failure(Failure.of(error))
            self._exit(DIVERGED)
        except LinkError as error:
            if not self._membership.view.ended:
                self._around.trace(f"{self.place} (pid {self.pid}) gives up: {error}")
                self._membership.report_failure(Failure.of(error))
            self._exit(ENDED_WITH_THE_JOB if self._membership.view.ended else 1)
            self._checkpointer.close(SAVING_PATIENCE)
            self._exit(ENDED_WITH_THE_JOB if self._membership.view.ended else 1)

    def _make_checkpointer(self) -> Checkpointer:
        """As worker/assembly.py does."""
        rules, membership = self._ground.rules, self._membership
        context = SaveContext(
            WorkerDisk(self._ground.disk, self, lambda: self._busy(self._ground.paces.write)),
            Retention(rules.keep, rules.keep_every),
            self._membership.publish,
            membership.check_commit,
            membership.flush,
            lambda: membership.view.generation_id,
            clock=self._runtime.now,
            start=self._start_save,
            wait=self._wait_for_save,
            arena=SimulatedArena(),
        )
        restored = self.holding.cursor if self._checkpoint is not None and self.holding is not BEGINNING else None
        layout = HeldLayout(lambda: self.holding)
        return Checkpointer(
            context,
            layout,
            rules,
            {},
            {},
            check_lease=membership.check_lease,
            activity=self._activity,
            restored=restored,
        )

    def _start_save(self, work: Callable[[], None]) -> None:
        self._runtime.spawn("checkpoint", work)

    def _wait_for_save(self, event: threading.Event, seconds: float) -> bool:
        over = self._runtime.now() + seconds
        while not event.is_set() and self._runtime.now() < over:
            self._runtime.sleep(min(LOOK, max(over - self._runtime.now(), 1e-9)))
        return event.is_set()

    def _busy(self, seconds: float) -> None:
        if self._hangs:
            self._runtime.sleep(HANGS_FOR)
        self._runtime.sleep(seconds * self._slowness * (0.5 + self._chance.random()))

    def leave(self) -> None:
        """Its generation is over for it."""
        if self._is_training and self._checkpointer is not None:
            self._is_training = False
            self._checkpointer.leave()

    def _run_session(self) -> int:
        self.enter("register")
        try:
            cursor = encode_cursor(self.holding.cursor)
            self._membership.register(
                pb.RegisterRequest(slot=self.slot, pid=self.pid, host="a", ring_address=self.address, cursor=cursor)
            )
            WorkerSession(self.slot, self, self._membership, self._backlog, self._write_status).complete()
        except Dismissed:
            return LEFT
        except JobEnded:
            self._membership.flush_last()
            return ENDED_WITH_THE_JOB
        return 0

    def _status(self) -> WorkerStatus:
        return WorkerStatus(self.holding.cursor.step + 1, self.phase, self._activity.moves, self._activity.waits_for)

    def _pace(self) -> Pace | None:
        """How long its own work takes it, of the steps since it was last asked."""
        steps, self._steps_since = self._steps_since, 0
        if not steps or self._in is None:
            return None
        paces, lanes = self._ground.paces, len(self._in.members[self._in.position(self.slot)].lanes)
        return Pace(steps, lanes, 0.0, paces.lane * self._slowness, paces.apply * self._slowness)

    def _write_status(self, step: int, phase: str, lane: int | None) -> None:
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Begin with something else."""
        self.phase = phase
        self._around.on_phase(self, phase)

    def notify(self) -> None:
        """Something has changed: whoever waits for it looks."""
        self._changed.notify_all()

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, seconds)

    def _sleep(self, phase: str, seconds: float) -> None:
        """Be busy for about so long."""
        self.enter(phase)
        self._busy(seconds)

    # --- what its session calls

    @property
    def cursor(self) -> Cursor:
        """Where it stands."""
        return self.holding.cursor

    def connect(self, generation: Generation) -> SimulatedConnection:
        """Find the others; who does not come in time is gone."""
        self._in, self._broken, self._gathers, self.is_saved = generation, [], 0, False
        self._forget_frames_before(generation.id)
        self.enter("join")
        over = self.clock.now + self._timing.connect
        missing = self._linked()
        while missing:
            if self.clock.now >= over:
                raise PeerLost(name_of(missing[0]), "it did not come")
            for peer in missing:
                self._send(peer, Frame(generation.id, "hello", 0, self.slot, wants_answer=True), is_connected=False)
            self._until(
                lambda: (
                    self._membership.is_over or len(self._received(generation.id, "hello", 0)) == len(self._linked())
                ),
                self._timing.connect / 8,
            )
            self._membership.check_generation()
            missing = [peer for peer in self._linked() if peer not in self._received(generation.id, "hello", 0)]
        memory = self._ground.memory
        self._segment = memory.segment(generation.id) if memory and len(generation.members) > 1 else None
        return SimulatedConnection(self)

    def align(self, generation: Generation, connection: SimulatedConnection) -> None:
        """Have whoever is behind take up the state of the donor."""
        if generation.servers:
            self._align_with_servers(generation)
            return
        if not generation.behind:
            return
        if self._ground.scenario.mesh is not None:
            self._align_part(generation, self._ground.scenario.mesh.part(self.slot))
            return
        donor = generation.members[generation.donor].worker
        if not self._habits.copies_from_the_furthest:
            donor = min(generation.members, key=lambda member: member.cursor).worker
        self.enter("copy")
        frame = Frame(generation.id, "copy", generation.cursor.step, self.slot, holding=self.holding)
        frames = self._exchange(frame)
        if self.slot not in generation.behind:
            return
        self.is_dirty = True
        self._sleep("copy", self._ground.paces.copy)
        self.holding = next(frame.holding for frame in frames if frame.worker == donor) or self.holding
        self.is_dirty = False
        self._around.trace(f"worker {self.slot} has copied step {self.holding.cursor.step} from worker {donor}")
        self._ground.referee.copied(self)

    def _align_part(self, generation: Generation, part: int) -> None:
        """Take up its part from one that holds it, or else from the checkpoint of the cursor."""
        self.enter("copy")
        assert self._checkpointer is not None, "it is made before the session"
        if generation.restored is not None:
            self._checkpointer.go_back(generation.cursor)
        frames = self._exchange(Frame(generation.id, "copy", generation.cursor.step, self.slot, holding=self.holding))
        if self.slot not in generation.behind:
            return
        donors = [generation.members[at].worker for at in generation.holders(part)]
        taken = next((frame.holding for frame in frames if frame.worker in donors), None)
        if taken is None:
            taken = self._ground.disk.restore_at(generation.cursor)
        if taken is None:
            raise StateLost(f"the checkpoint of step {generation.cursor.step} is no longer there.")
        self.is_dirty = True
        self._sleep("copy", self._ground.paces.copy)
        self.holding = taken
        self.is_dirty = False
        whose = f"worker {donors[0]}" if donors else "a checkpoint"
        self._around.trace(f"worker {self.slot} has taken up step {self.holding.cursor.step} from {whose}")
        self._ground.referee.copied(self)

    def _align_with_servers(self, generation: Generation) -> None:
        """As strategies/servers/align.py does: nothing is taken up before all have all."""
        step = generation.cursor.step
        self.enter("copy")
        pending = self._pending
        completes = pending is not None and pending.step == step == self.cursor.step + 1
        completes = completes and self._habits.completes_what_others_have
        own = {block: version + completes for block, version in self.blocks.items()}
        told = Frame(
            generation.id,
            "holdings",
            step,
            self.slot,
            holding=self.holding,
            blocks=own if completes or self.cursor.step == step else {},
        )
        frames = self._exchange(told)
        if completes and pending is not None:
            self.holding, self.blocks = apply_step(self.holding, pending.parts), own
            self._ground.referee.completed(self)
        try:
            check_held([frame.blocks for frame in frames], step)
        except StateLost:
            self._ground.referee.lost_blocks(generation, self._ground.workers, self._ground.scenario.replicas)
            raise
        placed = placed_at(placement_of(generation, self._ground.scenario.replicas), self.slot)
        if not self._habits.drops_no_block_before_all_have_theirs:
            self.blocks = {block: version for block, version in self.blocks.items() if block in placed}
        self._sleep("copy", self._ground.paces.copy)
        self._exchange(Frame(generation.id, "aligned", step, self.slot))
        self._pending = None
        if not completes and self.cursor.step != step and self._habits.drops_blocks_of_other_steps:
            self.blocks = {}
        if self.is_server:
            self._placed = placed
            self.blocks = {**self.blocks, **dict.fromkeys(placed, step)}
        if self.cursor != generation.cursor:
            donor = generation.members[generation.donor].worker
            self.holding = next(frame.holding for frame in frames if frame.worker == donor) or self.holding
            self._around.trace(f"{self.place} has copied step {self.holding.cursor.step} from {name_of(donor)}")
            self._ground.referee.copied(self)
        self._ground.referee.aligned(self, generation)

    def train(self, generation: Generation, connection: SimulatedConnection) -> str | None:
        """As the loop does; "complete", why it was asked to stop, or None."""
        assert self._checkpointer is not None, "it is made before the session"
        self._ground.referee.begins(self, generation)
        self._is_training = True
        lanes = generation.members[generation.position(self.slot)].lanes
        strategy = SimulatedStrategy(partial(self._gather, generation), self.slot, lanes)
        self._audit = self._audit_of(generation) if self._ground.scenario.is_audited else None
        try:
            return self._loop(generation, self._checkpointer, strategy)
        finally:
            self.is_saved = self._checkpointer.has_written(Progress(self.holding.cursor))

    def _loop(self, generation: Generation, checkpointer: Checkpointer, strategy: SimulatedStrategy) -> str | None:
        course = self._ground.course
        checkpointer.enter(strategy, self.cursor.step)
        self._evaluate_if_due(generation)
        if course.saves_at(self.cursor):
            self._begin_save(strategy)
        while self.cursor.step < course.steps:
            request = self._step(generation, checkpointer, strategy)
            if request.stop is not None:
                self._save(strategy)
                return request.stop
            self._evaluate_if_due(generation)
            if request.save is Save.COMMIT:
                self._save(strategy)
            elif request.save is Save.BEGIN or course.saves_at(self.cursor):
                self._begin_save(strategy)
            if request.leave:
                return None
        self._save(strategy)
        return COMPLETE

    def _begin_save(self, strategy: SimulatedStrategy) -> None:
        assert self._checkpointer is not None, "it is made before the session"
        self.enter("checkpoint")
        self._membership.view.save_begun()
        self._checkpointer.begin(Progress(self.cursor), strategy)

    def _save(self, strategy: SimulatedStrategy) -> None:
        assert self._checkpointer is not None, "it is made before the session"
        self.enter("checkpoint")
        self._membership.view.save_begun()
        self._checkpointer.save(Progress(self.cursor), strategy)

    def _gather(self, generation: Generation, payload: bytes) -> tuple[bytes, ...]:
        """Everybody's payload, in lane order."""
        self._gathers += 1
        with self._activity.waiting(OTHERS):
            frames = self._exchange(Frame(generation.id, "gather", self._gathers, self.slot, payload=payload))
        return tuple(frame.payload for frame in sorted(frames, key=lambda frame: generation.position(frame.worker)))

    def result(self, ending: str) -> tuple[str, dict[str, object]]:
        """What it holds, and how it ended."""
        self.enter("complete")
        return self.holding.digest, {"ending": ending, "steps": self.holding.cursor.step}

    def _step(self, generation: Generation, checkpointer: Checkpointer, strategy: SimulatedStrategy) -> StepRequest:
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        sound = self.holding
        if self.is_corrupt and self._corrupt is None:
            numbers = itertools.count() if self._chance.random() < 0.5 else itertools.repeat(0)
            self._corrupt = partial(next, numbers)
        if self._is_flipped and self._peers() and self._ground.referee.commits:
            self.holding = replace(sound, digest=f"{sound.digest}, but for a bit of worker {self.slot}")
        try:
            parts = self._compute(lanes)
            self._membership.check_lease()
            self.enter("exchange")
            request = self._request(checkpointer, strategy)
            note = self._note(step, lanes)
            digest = self.holding.digest
            own = Frame(generation.id, "step", step, self.slot, parts, request=request, digest=digest, audit=note)
            frames = self._exchange(own)
        except LinkError:
            # Nobody has seen the flip, and nobody may be left who could: that is not covered, so it comes another time.
            self.holding = sound
            raise
        self._compare(generation, frames)
        self._settle(generation, step, frames)
        summed = self._sum(frames)
        if self._segment is not None:
            # Nobody writes to its lanes again before everybody has read them.
            self._exchange(Frame(generation.id, "summed", step, self.slot))
        if generation.servers:
            self._agree_with_servers(generation, step, summed)
        checkpointer.settle()
        self._membership.check_lease()
        self._apply(generation, frames, summed)
        self._publish_values(generation, step)
        publish = self._backlog.publish if 0 in lanes else self._backlog.keep
        self._steps_since += 1
        publish(StepCompleted(step=step, time=self.clock.now, extra={"pid": self.pid}))
        return StepRequest.combine(frame.request for frame in frames if frame.request is not None)

    def _agree_with_servers(self, generation: Generation, step: int, parts: Sequence[Contribution]) -> None:
        """Servers have what they need, and know it of each other; a worker has the new values of each of them."""
        if self.is_server:
            if self._placed is not None:
                # All have taken up what they are to hold, or they would not have come to this step.
                self.blocks = {block: version for block, version in self.blocks.items() if block in self._placed}
                self._placed = None
            self._pending = Pending(step, tuple(parts))
        self._exchange(Frame(generation.id, "norms", step, self.slot))
        if not self.is_server:
            self._collect(generation.id, "values", step, [server.worker for server in generation.servers])

    def _publish_values(self, generation: Generation, step: int) -> None:
        if self.is_server:
            self._pending = None
            self.blocks = {block: version + 1 for block, version in self.blocks.items()}
            for worker in generation.workers:
                self._send(worker.worker, Frame(generation.id, "values", step, self.slot))

    def _compare(self, generation: Generation, frames: Sequence[Frame]) -> None:
        """As training/divergence.py does, of all of the state at each step."""
        found = outvoted({frame.worker: frame.digest for frame in frames})
        if found is not None:
            self._is_flipped = False
            self._ground.referee.differ(generation)
            raise ReplicasDiffer("the replicas differ", found[1])

    # --- audits, as training/hosted_lanes.py and strategies/agreement.py have them

    def _audit_of(self, generation: Generation) -> LaneAudit:
        """So often that of every worker a lane is audited at each step: nothing that is wrong is ever applied."""
        self._audits.clean.setdefault(self.slot, self.cursor.step)
        plan = AuditPlan(1, [(one.worker, one.lanes) for one in generation.workers], self.cursor.step + 1)
        own = generation.members[generation.position(self.slot)]

        def gather(step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
            frames = self._exchange(Frame(generation.id, f"audit {index}", step, self.slot, payload=payload))
            return tuple(frame.payload for frame in sorted(frames, key=lambda each: generation.position(each.worker)))

        def withdraw(after: int) -> None:
            assert self._checkpointer is not None, "it is made before the session"
            self._checkpointer.go_back(Cursor(after, Phase.EVALUATED))
            self._checkpointer.close(SAVING_PATIENCE)

        return LaneAudit(plan, own, generation.members, self._audits, gather, withdraw, self._outcome)

    def _part(self, lane: int) -> Contribution:
        """What it computes for a lane."""
        right = contribute(self.holding, lane)
        has_witness = self._in is not None and len(self._in.workers) > 1
        return right if self._corrupt is None or not has_witness else (lane, f"{right[1]}, wrong {self._corrupt()}")

    def _result(self, lane: int, content: str) -> LaneResult:
        return LaneResult(lane, 1, digests=(derive_seed(0, content),))

    def _outcome(self, lane: int) -> Outcome:
        self._sleep("compute", self._ground.paces.lane)
        return Outcome.of(self._result(*self._part(lane)), {})

    def _note(self, step: int, lanes: range) -> AuditNote | None:
        audit = self._audit
        if audit is None:
            return None
        for lane in audit.lanes(step):
            audit.see(lane, self._outcome(lane))
        results = [self._result(*self._parts[lane]) for lane in lanes]
        return audit.note(step, results, [{}] * len(results))

    def _settle(self, generation: Generation, step: int, frames: Sequence[Frame]) -> None:
        audit = self._audit
        if audit is None:
            return
        hosts = {member.worker for member in generation.workers}
        told = {frame.worker: frame.audit for frame in frames if frame.audit is not None and frame.worker in hosts}
        if (differing := audit.differing(step, told)) is None:
            return
        corrupt = {one.slot for one in self._ground.workers.values() if one.is_corrupt} | self._ground.corrupt
        self._ground.corrupt |= corrupt
        try:
            audit.settle(step, differing, told)
        except LanesDiffer as error:
            alone = len(told) == 1 and differing.step == step if isinstance(differing, Doubt) else False
            self._ground.referee.judged(generation, error.culprits, corrupt, alone)
            raise

    def _request(self, checkpointer: Checkpointer, strategy: SimulatedStrategy) -> StepRequest:
        """What it has been asked to do at the end of the step; all do it, or none."""
        asked = self._membership.view
        save = Save.COMMIT if asked.save_requested else Save.BEGIN if asked.save_asked else Save.NONE
        if save is Save.NONE and checkpointer.is_wanted(by_time=0 in strategy.hosted):
            save = Save.BEGIN
        return StepRequest(asked.stop_requested, save, asked.break_requested or asked.save_requested)

    def _compute(self, lanes: range) -> tuple[Contribution, ...]:
        """What these lanes contribute, as far as it is sent to the others."""
        parts = []
        self._parts: dict[int, Contribution] = {}
        for lane in lanes:
            self._membership.check_lease()
            self._lane = lane
            self._sleep("compute", self._ground.paces.lane)
            if (self.cursor.step + 1, lane) == self._ground.scenario.poison:
                self.die()
                raise GreenletExit
            self._lane = None
            part = self._parts[lane] = self._part(lane)
            if self._segment is None:
                parts.append(part)
            else:
                # The backward pass writes there as it goes. It does not ask whether that is still allowed.
                self._segment[lane] = part
        return tuple(parts)

    def _sum(self, frames: Sequence[Frame]) -> list[Contribution]:
        if self._segment is not None:
            return list(self._segment.values())
        return [part for frame in frames for part in frame.parts]

    def _apply(self, generation: Generation, frames: Sequence[Frame], parts: Sequence[Contribution]) -> None:
        self._ground.referee.applies(self, generation, [frame.generation for frame in frames], parts)
        self.is_dirty = True
        self.enter("apply")
        seconds = self._ground.paces.apply * (0.5 + self._chance.random())
        if self._habits.finishes_applying:
            self._runtime.sleep(seconds)
        else:
            self._apply_half(seconds)
        self.holding = apply_step(self.holding, parts)
        self.is_dirty = False
        self._ground.referee.completed(self)

    def _evaluate_if_due(self, generation: Generation) -> None:
        if self._ground.course.evaluates_at(self.holding.cursor):
            assert self._checkpointer is not None, "it is made before the session"
            self._checkpointer.settle()
            self.enter("evaluation")
            self._exchange(Frame(generation.id, "evaluation", self.holding.cursor.step, self.slot))
            self.holding = apply_evaluation(self.holding)
            self._ground.referee.completed(self)

    # --- mistakes, for those who have not the habits

    def break_promise(self, generation: Generation) -> None:
        """Still take the step that was under way, if its last frame comes."""
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        parts = tuple(contribute(self.holding, lane) for lane in lanes) if self._segment is None else ()
        frames = self._received(generation.id, "step", step)

        def is_latest() -> bool:
            return self._membership.view.generation_id == generation.id

        self._until(lambda: not is_latest() or len(frames) == len(self._peers()), 0.5)
        if self._peers() and is_latest() and len(frames) == len(self._peers()):
            whole = [Frame(generation.id, "step", step, self.slot, parts), *frames.values()]
            self._apply(generation, whole, self._sum(whole))

    def _apply_half(self, seconds: float) -> None:
        """Leave in the middle of an update when the generation is over, and count the step as done."""
        self._until(lambda: self._membership.is_over, seconds)
        if self._membership.is_over:
            self.holding = Holding(self.holding.cursor.trained(), f"half of what follows {self.holding.digest}")
            self.is_dirty = False
            self._membership.check_generation()

    # --- frames

    def _peers(self) -> list[int]:
        return [member.worker for member in self._in.members if member.worker != self.slot] if self._in else []

    def _linked(self) -> list[int]:
        """Its neighbours on the ring; all others where they share memory."""
        peers = self._peers()
        if self._in is None or self._is_meshed or len(peers) < 2:
            return peers
        return [self._next_on_ring(-1), self._next_on_ring(1)]

    @property
    def _is_meshed(self) -> bool:
        """Whether everybody sends to everybody: in shared memory, or where there are servers."""
        return self._ground.memory is not None or bool(self._in and self._in.servers)

    def _next_on_ring(self, direction: int) -> int:
        assert self._in is not None, "a worker has neighbours while it is in a generation"
        return self._in.members[(self._in.position(self.slot) + direction) % len(self._in.members)].worker

    def _received(self, generation: GenerationId, kind: str, step: int) -> dict[int, Frame]:
        return self._frames.setdefault((generation, kind, step), {})

    def _exchange(self, own: Frame) -> list[Frame]:
        """Have everybody's frame come to everybody; in lane order."""
        count = len(self._peers())
        self._membership.check_generation()
        frames = self._received(own.generation, own.kind, own.step)
        passed_on: set[int] = set()
        self._pass_on(own)
        while True:
            for frame in [frame for frame in frames.values() if frame.worker not in passed_on]:
                passed_on.add(frame.worker)
                if not self._is_meshed:
                    self._pass_on(frame)
            if len(frames) == count:
                break
            self._until(
                lambda: len(frames) > len(passed_on) or self._membership.is_over or bool(self._broken),
                max(self._membership.lease_remaining(), self._timing.heartbeat_every),
            )
            self._membership.check_generation()
            if len(frames) < count and self._broken:
                raise PeerLost(name_of(self._broken[0]), "the link is broken")
            self._membership.check_lease()
        # A frame is gone when it has been read.
        self._frames.pop((own.generation, own.kind, own.step), None)
        return sorted([own, *frames.values()], key=lambda frame: frame.worker)

    def _collect(self, generation: GenerationId, kind: str, step: int, senders: Sequence[int]) -> None:
        """Wait until something has come from each of these."""
        frames = self._received(generation, kind, step)
        while not frames.keys() >= set(senders):
            self._until(
                lambda: frames.keys() >= set(senders) or self._membership.is_over or bool(self._broken),
                max(self._membership.lease_remaining(), self._timing.heartbeat_every),
            )
            self._membership.check_generation()
            if self._broken and not frames.keys() >= set(senders):
                raise PeerLost(name_of(self._broken[0]), "the link is broken")
            self._membership.check_lease()
        self._frames.pop((generation, kind, step), None)

    def _pass_on(self, frame: Frame) -> None:
        """Send a frame to all others, or to the next on the ring unless it comes from there."""
        targets = self._peers() if self._is_meshed else self._linked()[-1:]
        for peer in targets:
            if peer == frame.worker:
                continue
            if peer in self._broken:
                raise PeerLost(name_of(peer), "the link is broken")
            self._send(peer, frame)

    def _send(self, peer: int, frame: Frame, *, is_connected: bool = True) -> None:
        target = self._ground.workers[peer]
        if self._in is not None and target.address != self._in.members[self._in.position(peer)].address:
            return  # another process has the place by now

        def on_loss() -> None:
            self.do(lambda: self._lose_link(frame.generation, peer))
            target.do(lambda: target._lose_link(frame.generation, self.slot))

        self._network.send(self, target, partial(target._receive, frame), on_loss if is_connected else None)

    def _receive(self, frame: Frame) -> None:
        generation = frame.generation
        if self._in is not None and generation < self._in.id:
            if self._habits.refuses_stale_frames or frame.worker not in self._peers():
                return
            generation = self._in.id
        if self.promised is not None and generation <= self.promised and self._habits.keeps_promises:
            return
        self._received(generation, frame.kind, frame.step).setdefault(frame.worker, frame)
        is_met = self._in is not None and self._in.id == generation and frame.worker in self._peers()
        if frame.wants_answer and is_met:
            self._send(frame.worker, Frame(generation, "hello", 0, self.slot), is_connected=False)
        self.notify()

    def _lose_link(self, generation: GenerationId, peer: int) -> None:
        if self._in is not None and self._in.id == generation and self.promised != generation:
            self._broken.append(peer)
            self.notify()

    def close_links(self) -> None:
        """The others read the end of the file, if it reaches them."""
        if self._in is None or not self.is_alive:
            return
        for peer in self._linked():
            target = self._ground.workers[peer]
            self._network.send(self, target, partial(target._lose_link, self._in.id, self.slot))

    def _forget_frames_before(self, generation: GenerationId) -> None:
        self._frames = {key: frames for key, frames in self._frames.items() if key[0] >= generation}

"""A worker of a simulation. It follows the protocol of worker/process.py and worker/membership.py step by step.

Its main thread is a generator that yields what it waits for; heartbeats and directives come beside it, as they do in a
real worker, where they have threads of their own. Its lease and its outbox are the real ones.
"""

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from quorate.coordinator.records import (
    Action,
    Completed,
    DeclareGeneration,
    EndJob,
    FailureReported,
    GrantLease,
    HeartbeatReceived,
    MembershipEvent,
    Place,
    Refuse,
    Registered,
    Regroup,
    StateReported,
    Welcome,
)
from quorate.core.errors import GenerationOver, LeaseExpired, LinkError, PeerLost
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.testing.clock import Process, VirtualClock
from quorate.testing.invariants import Referee
from quorate.testing.network import Network
from quorate.testing.simulated_coordinator import Directive, SimulatedCoordinator
from quorate.testing.task import BEGINNING, Contribution, Course, Holding, apply_evaluation, apply_step, contribute
from quorate.worker.lease import Lease
from quorate.worker.outbox import Outbox

Wait = tuple[float | None, bool]
"""Seconds to wait at most, and whether a change of anything ends it before."""
Turn = Generator[Wait, None, None]

BREAK = "break"
COMPLETE = "complete"


class _JobEnded(Exception):  # noqa: N818
    """The coordinator has ended the job, or does not want this worker."""


@dataclass(frozen=True)
class Habits:
    """What a sound worker does. Each habit that is missing is a mistake that the invariants must show."""

    checks_lease: bool = True
    keeps_promises: bool = True
    refuses_stale_frames: bool = True
    finishes_applying: bool = True
    copies_from_the_furthest: bool = True


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
    """What a member sends to the others: its part of one exchange."""

    generation: GenerationId
    kind: str
    step: int
    worker: int
    parts: tuple[Contribution, ...] = ()
    holding: Holding | None = None
    wish: str | None = None


@dataclass
class World:
    """What all workers of a simulation share."""

    clock: VirtualClock
    network: Network
    coordinator: SimulatedCoordinator
    referee: Referee
    course: Course
    timing: Timing
    workers: dict[int, "SimulatedWorker"]
    """By place, the process that was started there last."""
    on_exit: Callable[["SimulatedWorker"], None]
    on_phase: Callable[["SimulatedWorker", str], None]
    trace: Callable[[str], None]
    habits: Habits = field(default_factory=Habits)
    paces: Paces = field(default_factory=Paces)


class SimulatedWorker(Process):
    """One process in one place, from its start to its exit."""

    def __init__(self, world: World, slot: int, pid: int, holding: Holding | None, chance: random.Random) -> None:
        super().__init__(world.clock, f"worker {slot}")
        self.slot = slot
        self.pid = pid
        self.holding = holding or BEGINNING
        self.is_dirty = False
        self.promised: GenerationId | None = None
        self.exit_code: int | None = None
        self.phase = "build"
        self._world = world
        self._chance = chance
        self._network = world.network
        self._timing = world.timing
        self._lease = Lease(world.timing, world.clock.time)
        self._outbox = Outbox()
        self._address = f"host:{pid}"
        # What has been heard from the coordinator.
        self._generation: Generation | None = None
        self._over: GenerationId | None = None
        self._break_at: GenerationId | None = None
        self._stop: str | None = None
        self._end: EndJob | None = None
        self._stream = 0
        self._told = 0
        self._early: dict[int, Directive] = {}
        self._tell: Callable[[int, Directive], None] | None = None
        # Links of the generation that it is in.
        self._in: Generation | None = None
        self._broken: set[int] = set()
        self._frames: dict[tuple[GenerationId, str, int], dict[int, Frame]] = {}
        # The main thread.
        self._turn = 0
        self._wakes = False
        self._program = self._live()
        self.do(self._advance)

    def lease_remaining(self) -> float:
        """Seconds for which it may act."""
        return self._lease.remaining()

    def die(self) -> None:
        """Be killed: the kernel closes its sockets."""
        if self.is_alive:
            self._world.trace(f"worker {self.slot} (pid {self.pid}) dies in {self.phase}")
            super().die()
            self._depart()

    def _exit(self, code: int) -> None:
        self._world.trace(f"worker {self.slot} (pid {self.pid}) exits with code {code}")
        self.exit_code = code
        super().die()
        self._depart()

    def _depart(self) -> None:
        if self._tell is not None:
            self._world.coordinator.forget(self._tell)
        self._close_links()
        self._world.on_exit(self)

    # --- the main thread

    def _advance(self) -> None:
        """Let the main thread run until it waits again."""
        self._turn += 1
        try:
            seconds, self._wakes = next(self._program)
        except StopIteration:
            self._exit(0)
        except _JobEnded:
            self._exit(3)
        except LinkError as error:
            self._give_up(error)
        else:
            if seconds is not None:
                turn = self._turn
                self.after(seconds, lambda: self._advance() if turn == self._turn else None)

    def _notify(self) -> None:
        """Something has changed: whoever waits for it looks."""
        if self._wakes:
            self._wakes = False
            self._advance()

    def _give_up(self, error: LinkError) -> None:
        self._world.trace(f"worker {self.slot} (pid {self.pid}) gives up: {error}")
        self._tell_coordinator(FailureReported(self.slot, Failure.of(error)))
        self._exit(1)

    def _sleep(self, phase: str, seconds: float) -> Turn:
        """Be busy for about so long."""
        self._enter(phase)
        yield seconds * (0.5 + self._chance.random()), False

    def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> Turn:
        """Wait for a condition, or until the time is over."""
        over = None if seconds is None else self.clock.now + seconds
        while not condition():
            remaining = None if over is None else over - self.clock.now
            if remaining is not None and remaining <= 0:
                return
            yield remaining, True

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._world.on_phase(self, phase)

    # --- a worker's life

    def _live(self) -> Turn:
        yield from self._sleep("build", self._world.paces.build)
        yield from self._register()
        generation = None
        while True:
            generation = yield from self._await_generation(generation)
            self._in, self._broken = generation, set()
            self._forget_frames_before(generation.id)
            symptom = None
            try:
                yield from self._meet(generation)
                yield from self._align(generation)
                ending = yield from self._train(generation)
                if ending != BREAK and (yield from self._complete(generation, ending)):
                    return
            except LinkError as error:
                if self._end is not None:
                    raise _JobEnded from None
                symptom = None if isinstance(error, GenerationOver) else Failure.of(error)
                self._world.trace(f"worker {self.slot} leaves generation {generation.id}: {error}")
            self._close_links()
            yield from self._report_state(generation, symptom)

    def _register(self) -> Turn:
        self._enter("register")
        sent = self.clock.now
        event = Registered(self.slot, self.pid, "a", self._address, cursor=self.holding.cursor)
        answer = yield from self._call(event, self._timing.connect)
        if answer is None:
            raise LinkError("the coordinator does not answer")
        for action in answer:
            if isinstance(action, Refuse):
                raise _JobEnded
            if isinstance(action, Welcome):
                self._lease.renew(sent, action.lease)
        self._follow()
        self._beat()

    def _await_generation(self, after: Generation | None) -> Generator[Wait, None, Generation]:
        self._enter("wait")
        while True:
            if self._end is not None:
                raise _JobEnded
            if self._generation is not None and self._generation is not after:
                return self._generation
            self._check_coordinator()
            yield self._timing.heartbeat_every, True

    def _report_state(self, generation: Generation, symptom: Failure | None) -> Turn:
        self._enter("regroup")
        event = StateReported(self.slot, self.pid, generation.id, self.holding.cursor, symptom)
        self.promised = generation.id
        if not self._world.habits.keeps_promises:
            yield from self._break_promise(generation, event)
            return
        answer = yield from self._call_until_answered(event)
        if any(isinstance(action, Refuse) for action in answer):
            raise _JobEnded

    def _complete(self, generation: Generation, ending: str) -> Generator[Wait, None, bool]:
        self._check_lease()
        self._enter("complete")
        self._world.referee.says_finished(self, generation)
        result = {"ending": ending, "steps": self.holding.cursor.step}
        event = Completed(self.slot, self.holding.digest, result, self.pid)
        answer = yield from self._call_until_answered(event)
        if not answer and self._end is None:
            return False
        if self._end is not None or any(isinstance(action, EndJob) and action.failure for action in answer):
            raise _JobEnded
        return True

    # --- a generation

    def _meet(self, generation: Generation) -> Turn:
        """Find the others; who does not come in time is gone."""
        self._enter("join")
        over = self.clock.now + self._timing.connect
        while True:
            missing = [peer for peer in self._peers() if peer not in self._received(generation.id, "hello", 0)]
            if not missing:
                return
            if self.clock.now >= over:
                raise PeerLost(f"worker {missing[0]}", "it did not come")
            for peer in missing:
                self._send(peer, Frame(generation.id, "hello", 0, self.slot, wish="answer"), is_connected=False)
            yield from self._until(
                lambda: self._is_over() or len(self._received(generation.id, "hello", 0)) == len(self._peers()),
                self._timing.connect / 8,
            )
            self._check_links()

    def _align(self, generation: Generation) -> Turn:
        """Have whoever is behind take up the state of the donor."""
        if not generation.behind:
            return
        donor = generation.members[generation.donor].worker
        if not self._world.habits.copies_from_the_furthest:
            donor = min(generation.members, key=lambda member: member.cursor).worker
        self._enter("copy")
        frame = Frame(generation.id, "copy", generation.cursor.step, self.slot, holding=self.holding)
        frames = yield from self._exchange(frame)
        if self.slot not in generation.behind:
            return
        self.is_dirty = True
        yield from self._sleep("copy", self._world.paces.copy)
        self.holding = next(frame.holding for frame in frames if frame.worker == donor) or self.holding
        self.is_dirty = False
        self._world.trace(f"worker {self.slot} has copied step {self.holding.cursor.step} from worker {donor}")
        self._world.referee.copied(self)

    def _train(self, generation: Generation) -> Generator[Wait, None, str]:
        """As the loop does; "complete", why it was asked to stop, or BREAK."""
        course = self._world.course
        self._world.referee.begins(self, generation)
        self._saved: Holding | None = None
        yield from self._evaluate_if_due(generation)
        if course.saves_at(self.holding.cursor):
            yield from self._save(generation)
        while self.holding.cursor.step < course.steps:
            wish = yield from self._step(generation)
            if wish is not None and wish != BREAK:
                yield from self._save(generation)
                return wish
            yield from self._evaluate_if_due(generation)
            if course.saves_at(self.holding.cursor):
                yield from self._save(generation)
            if wish == BREAK:
                return BREAK
        yield from self._save(generation)
        return COMPLETE

    def _step(self, generation: Generation) -> Generator[Wait, None, str | None]:
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        self._check_lease()
        yield from self._sleep("compute", self._world.paces.lane * len(lanes))
        self._check_lease()
        self._enter("exchange")
        parts = tuple(contribute(self.holding, lane) for lane in lanes)
        wish = self._stop or (BREAK if self._break_at == generation.id else None)
        frames = yield from self._exchange(Frame(generation.id, "step", step, self.slot, parts, wish=wish))
        self._check_lease()
        yield from self._apply(generation, frames)
        self._outbox.put(Event("step", step, {"pid": self.pid}, time=self.clock.now))
        return next((frame.wish for frame in frames if frame.wish is not None), None)

    def _apply(self, generation: Generation, frames: Sequence[Frame]) -> Turn:
        parts = [part for frame in frames for part in frame.parts]
        self._world.referee.applies(self, generation, [frame.generation for frame in frames], parts)
        self.is_dirty = True
        self._enter("apply")
        seconds = self._world.paces.apply * (0.5 + self._chance.random())
        if self._world.habits.finishes_applying:
            yield seconds, False
        else:
            yield from self._apply_half(seconds)
        self.holding = apply_step(self.holding, parts)
        self.is_dirty = False
        self._world.referee.completed(self)

    def _evaluate_if_due(self, generation: Generation) -> Turn:
        if self._world.course.evaluates_at(self.holding.cursor):
            self._enter("evaluation")
            yield from self._exchange(Frame(generation.id, "evaluation", self.holding.cursor.step, self.slot))
            self.holding = apply_evaluation(self.holding)
            self._world.referee.completed(self)

    def _save(self, generation: Generation) -> Turn:
        """All compare what they hold; the one that hosts lane 0 writes."""
        if self._saved == self.holding:
            return
        self._enter("checkpoint")
        yield from self._exchange(Frame(generation.id, "share", self.holding.cursor.step, self.slot))
        self._saved = self.holding
        if generation.members[0].worker == self.slot:
            yield from self._sleep("checkpoint", self._world.paces.write)
            self._check_lease()
            self._world.referee.commits_checkpoint(self, generation)

    # --- mistakes, for those who have not the habits

    def _break_promise(self, generation: Generation, event: StateReported) -> Turn:
        """Report, and still take the step that was under way if its last frame comes."""
        self._tell_coordinator(event)
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        parts = tuple(contribute(self.holding, lane) for lane in lanes)
        frames = self._received(generation.id, "step", step)
        yield from self._until(lambda: self._generation is not generation or len(frames) == len(self._peers()), 0.5)
        if self._generation is generation and len(frames) == len(self._peers()):
            own = Frame(generation.id, "step", step, self.slot, parts)
            yield from self._apply(generation, [own, *frames.values()])
        yield from self._call_until_answered(event)

    def _apply_half(self, seconds: float) -> Turn:
        """Leave in the middle of an update when the generation is over, and count the step as done."""
        yield from self._until(self._is_over, seconds)
        if self._is_over():
            self.holding = Holding(self.holding.cursor.trained(), f"half of what follows {self.holding.digest}")
            self.is_dirty = False
            self._check_links()

    # --- leases

    def _check_coordinator(self) -> None:
        if self._lease.remaining() <= 0 and self._world.habits.checks_lease:
            raise LeaseExpired("the coordinator has not answered for too long")

    def _check_lease(self) -> None:
        if self._end is not None:
            raise _JobEnded
        self._check_coordinator()
        self._check_links()

    def _is_over(self) -> bool:
        return self._end is not None or (self._in is not None and self._over == self._in.id)

    def _check_links(self) -> None:
        """Raise when a link is closed, by whoever has closed it."""
        if self._end is not None:
            raise _JobEnded
        if self._is_over():
            raise GenerationOver(f"generation {self._over} is over")

    # --- frames

    def _peers(self) -> list[int]:
        return [member.worker for member in self._in.members if member.worker != self.slot] if self._in else []

    def _received(self, generation: GenerationId, kind: str, step: int) -> dict[int, Frame]:
        return self._frames.setdefault((generation, kind, step), {})

    def _exchange(self, own: Frame) -> Generator[Wait, None, list[Frame]]:
        """Send to all others and hear from all others; everybody's frame, in lane order."""
        peers = self._peers()
        self._check_links()
        for peer in peers:
            if peer in self._broken:
                raise PeerLost(f"worker {peer}", "the link is broken")
            self._send(peer, own)
        frames = self._received(own.generation, own.kind, own.step)

        def has_come() -> bool:
            return len(frames) == len(peers) or self._is_over() or bool(self._broken)

        while len(frames) < len(peers):
            yield from self._until(has_come, max(self._lease.remaining(), self._timing.heartbeat_every))
            self._check_links()
            if len(frames) < len(peers) and self._broken:
                raise PeerLost(f"worker {min(self._broken)}", "the link is broken")
            self._check_coordinator()
        # A frame is gone when it has been read.
        self._frames.pop((own.generation, own.kind, own.step), None)
        return sorted([own, *frames.values()], key=lambda frame: frame.worker)

    def _send(self, peer: int, frame: Frame, *, is_connected: bool = True) -> None:
        target = self._world.workers[peer]

        def on_loss() -> None:
            self.do(lambda: self._lose_link(frame.generation, peer))
            target.do(lambda: target._lose_link(frame.generation, self.slot))

        deliver = lambda: target._receive(frame)  # noqa: E731
        self._network.send(self, target, deliver, on_loss if is_connected else None)

    def _receive(self, frame: Frame) -> None:
        generation = frame.generation
        if self._in is not None and generation < self._in.id:
            if self._world.habits.refuses_stale_frames or frame.worker not in self._peers():
                return
            generation = self._in.id
        if self.promised is not None and generation <= self.promised and self._world.habits.keeps_promises:
            return
        self._received(generation, frame.kind, frame.step).setdefault(frame.worker, frame)
        is_met = self._in is not None and self._in.id == generation and frame.worker in self._peers()
        if frame.kind == "hello" and frame.wish == "answer" and is_met:
            self._send(frame.worker, Frame(generation, "hello", 0, self.slot), is_connected=False)
        self._notify()

    def _lose_link(self, generation: GenerationId, peer: int) -> None:
        if self._in is not None and self._in.id == generation and self.promised != generation:
            self._broken.add(peer)
            self._notify()

    def _close_links(self) -> None:
        """The others read the end of the file, if it reaches them."""
        if self._in is None:
            return
        generation = self._in.id
        for peer in self._peers():
            target = self._world.workers[peer]
            self._network.send(
                self, target, lambda target=target: target._lose_link(generation, self.slot)  # type: ignore[misc]
            )

    def _forget_frames_before(self, generation: GenerationId) -> None:
        self._frames = {key: frames for key, frames in self._frames.items() if key[0] >= generation}

    # --- calls

    def _tell_coordinator(self, event: MembershipEvent, answer: Callable[[Sequence[Action]], None] | None = None) -> None:
        """Make a call; it is answered, sooner or later, if neither it nor the answer is lost."""
        coordinator = self._world.coordinator

        def reply(actions: Sequence[Action]) -> None:
            if answer is not None:
                self._network.send(coordinator, self, lambda: answer(actions))

        serve = coordinator.complete if isinstance(event, Completed) else coordinator.hear
        self._network.send(self, coordinator, lambda: serve(event, reply))

    def _call(self, event: MembershipEvent, seconds: float) -> Generator[Wait, None, Sequence[Action] | None]:
        """The answer to a call, or None after so many seconds."""
        answers: list[Sequence[Action]] = []

        def heed(actions: Sequence[Action]) -> None:
            answers.append(actions)
            self._notify()

        self._tell_coordinator(event, heed)
        yield from self._until(lambda: bool(answers) or self._end is not None, seconds)
        return answers[0] if answers else None

    def _call_until_answered(self, event: MembershipEvent) -> Generator[Wait, None, Sequence[Action]]:
        while True:
            answer = yield from self._call(event, self._timing.failure_timeout)
            if answer is not None:
                return answer
            if self._end is not None:
                raise _JobEnded
            self._check_coordinator()
            yield self._timing.heartbeat_every, False

    # --- the heartbeat thread

    def _beat(self) -> None:
        """Send a heartbeat, and the next one when it is answered, or has gone unanswered for too long."""
        sent = self.clock.now
        batch = self._outbox.next_batch()
        generation = self._generation.id if self._generation else GenerationId(0, 0)
        place = Place(self.holding.cursor.step + 1, self.phase)
        event = HeartbeatReceived(self.slot, generation, batch.sequence, place, tuple(batch.lines), self.pid)
        is_over: list[bool] = []

        def next_one(seconds: float) -> None:
            is_over.append(True)
            self.after(seconds, self._beat)

        def heed(actions: Sequence[Action]) -> None:
            for action in actions:
                if isinstance(action, GrantLease):
                    self._lease.renew(sent, action.seconds)
            if not is_over:
                self._outbox.answered()
                next_one(self._timing.heartbeat_every)
            self._notify()

        self._tell_coordinator(event, heed)
        self.after(self._timing.lease / 2, lambda: next_one(self._timing.heartbeat_every) if not is_over else None)

    # --- the follow thread

    def _follow(self) -> None:
        """Ask for all that was declared, from the beginning; a message that is lost breaks the connection."""
        self._stream += 1
        self._told, self._early = 0, {}
        stream, coordinator = self._stream, self._world.coordinator
        if self._tell is not None:
            coordinator.forget(self._tell)

        def break_off() -> None:
            self.do(lambda: self._break_off(stream))

        def tell(index: int, directive: Directive) -> None:
            self._network.send(coordinator, self, lambda: self._hear(stream, index, directive), break_off)

        self._tell = tell
        self._network.send(self, coordinator, lambda: self._begin_stream(stream, tell), break_off)

    def _begin_stream(self, stream: int, tell: Callable[[int, Directive], None]) -> None:
        if stream == self._stream and self.is_alive:
            self._world.coordinator.forget(tell)
            self._world.coordinator.follow(tell)

    def _break_off(self, stream: int) -> None:
        if stream == self._stream:
            self._stream += 1
            self.after(self._timing.heartbeat_every, self._follow)

    def _hear(self, stream: int, index: int, directive: Directive) -> None:
        """A connection keeps the order of what is said."""
        if stream != self._stream or index < self._told:
            return
        self._early[index] = directive
        while self._told in self._early:
            self._told += 1
            self._heed(self._early.pop(self._told - 1))
        self._notify()

    def _heed(self, directive: Directive) -> None:
        match directive:
            case DeclareGeneration(generation):
                self._adopt(generation)
            case Regroup(generation_id, at_boundary):
                if at_boundary:
                    self._break_at = generation_id
                else:
                    self._over = generation_id
            case EndJob():
                self._end = directive
                self._lease.end()
            case _:
                self._stop = directive.reason

    def _adopt(self, generation: Generation) -> None:
        is_ours = any((member.worker, member.address) == (self.slot, self._address) for member in generation.members)
        if is_ours and (self._generation is None or generation.id > self._generation.id):
            self._generation = generation

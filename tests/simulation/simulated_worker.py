"""A worker of a simulation: it lives through generations as worker/process.py does, and trains as the loop does."""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quorate.coordinator.actions import EndJob
from quorate.coordinator.events import Completed, StateReported
from quorate.core.digests import outvoted
from quorate.core.errors import GenerationOver, LinkError, PeerLost, ReplicasDiffer
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId
from quorate.observe.events import StepCompleted
from simulation.clock import Clock
from simulation.invariants import Referee
from simulation.simulated_membership import JobOver, SimulatedMember, Surroundings, Turn, Wait
from simulation.simulated_memory import Segment, SimulatedMemory
from simulation.task import BEGINNING, Contribution, Course, Holding, apply_evaluation, apply_step, contribute

BREAK = "break"
SAVE_AND_BREAK = "save and break"
COMPLETE = "complete"


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
    wish: str | None = None
    digest: str = ""


@dataclass
class Ground:
    """What all workers of a job share. `workers` holds, by place, the process that was started there last.

    Where they have no memory in common, they pass their frames round a ring.
    """

    course: Course
    referee: Referee
    workers: dict[int, "SimulatedWorker"]
    memory: SimulatedMemory | None = None
    paces: Paces = field(default_factory=Paces)


class SimulatedWorker(SimulatedMember):
    """One process in one place, from its start to its exit."""

    def __init__(
        self,
        around: Surroundings,
        ground: Ground,
        clock: Clock,
        slot: int,
        pid: int,
        holding: Holding | None,
        chance: random.Random,
    ) -> None:
        self.is_dirty = False
        self.promised: GenerationId | None = None
        self._ground = ground
        self._chance = chance
        # What this generation has saved, and what this worker has written of it.
        self._saved: Holding | None = None
        self._written: Holding | None = None
        # Links of the generation that it is in.
        self._in: Generation | None = None
        self._broken: list[int] = []
        self._segment: Segment | None = None
        self._frames: dict[tuple[GenerationId, str, int], dict[int, Frame]] = {}
        super().__init__(around, clock, slot, pid, holding or BEGINNING)

    def _live(self) -> Turn:
        yield from self._sleep("build", self._ground.paces.build)
        yield from self._register()
        generation = None
        while True:
            generation = yield from self._await_generation(generation)
            self._in, self._broken = generation, []
            self._forget_frames_before(generation.id)
            symptom, self._written = None, None
            try:
                if self.slot not in generation.behind:
                    self._view.hold()
                yield from self._meet(generation)
                yield from self._align(generation)
                self._view.hold()
                ending = yield from self._train(generation)
                if ending != BREAK and (yield from self._complete(generation, ending)):
                    return
            except LinkError as error:
                if self._view.ended:
                    raise JobOver from None
                symptom = None if isinstance(error, GenerationOver) else Failure.of(error)
                self._around.trace(f"worker {self.slot} leaves generation {generation.id}: {error}")
            self._close_links()
            yield from self._report_state(generation, symptom)

    def _report_state(self, generation: Generation, symptom: Failure | None) -> Turn:
        self._enter("regroup")
        is_saved = self._written == self.holding
        event = StateReported(self.slot, self.pid, generation.id, self.holding.cursor, symptom, is_saved)
        self._view.leave(self.holding.cursor)
        self.promised = generation.id
        if not self._habits.keeps_promises:
            yield from self._break_promise(generation, event)
            return
        reply = yield from self._call_until_answered(event)
        while reply.is_recall:
            returned: list[bool] = []
            self._present_again(reply, lambda returned=returned: self._note(returned))  # type: ignore[misc]
            yield from self._until(lambda returned=returned: bool(returned))  # type: ignore[misc]
            self._check_coordinator_returns()
            yield self._timing.heartbeat_every, False
            reply = yield from self._call_until_answered(event)
        if reply.is_refusal:
            raise JobOver

    def _note(self, what: list[bool]) -> None:
        what.append(True)
        self._notify()

    def _complete(self, generation: Generation, ending: str) -> Generator[Wait, None, bool]:
        self._enter("complete")
        result = {"ending": ending, "steps": self.holding.cursor.step}
        event = Completed(self.slot, self.holding.digest, result, self.pid, generation.id)
        reply = yield from self._call_until_answered(event)
        if not reply.actions and not self._view.ended:
            return False
        if self._view.ended or any(isinstance(action, EndJob) and action.failure for action in reply.actions):
            raise JobOver
        return True

    def _sleep(self, phase: str, seconds: float) -> Turn:
        """Be busy for about so long."""
        self._enter(phase)
        yield seconds * (0.5 + self._chance.random()), False

    # --- a generation

    def _meet(self, generation: Generation) -> Turn:
        """Find the others; who does not come in time is gone."""
        self._enter("join")
        over = self.clock.now + self._timing.connect
        missing = self._linked()
        while missing:
            if self.clock.now >= over:
                raise PeerLost(f"worker {missing[0]}", "it did not come")
            for peer in missing:
                self._send(peer, Frame(generation.id, "hello", 0, self.slot, wish="answer"), is_connected=False)
            yield from self._until(
                lambda: self._is_over() or len(self._received(generation.id, "hello", 0)) == len(self._linked()),
                self._timing.connect / 8,
            )
            self._check_links()
            missing = [peer for peer in self._linked() if peer not in self._received(generation.id, "hello", 0)]
        memory = self._ground.memory
        self._segment = memory.segment(generation.id) if memory and len(generation.members) > 1 else None

    def _align(self, generation: Generation) -> Turn:
        """Have whoever is behind take up the state of the donor."""
        if not generation.behind:
            return
        donor = generation.members[generation.donor].worker
        if not self._habits.copies_from_the_furthest:
            donor = min(generation.members, key=lambda member: member.cursor).worker
        self._enter("copy")
        frame = Frame(generation.id, "copy", generation.cursor.step, self.slot, holding=self.holding)
        frames = yield from self._exchange(frame)
        if self.slot not in generation.behind:
            return
        self.is_dirty = True
        yield from self._sleep("copy", self._ground.paces.copy)
        self.holding = next(frame.holding for frame in frames if frame.worker == donor) or self.holding
        self.is_dirty = False
        self._around.trace(f"worker {self.slot} has copied step {self.holding.cursor.step} from worker {donor}")
        self._ground.referee.copied(self)

    def _train(self, generation: Generation) -> Generator[Wait, None, str]:
        """As the loop does; "complete", why it was asked to stop, or BREAK."""
        course = self._ground.course
        self._ground.referee.begins(self, generation)
        self._saved = None
        yield from self._evaluate_if_due(generation)
        if course.saves_at(self.holding.cursor):
            yield from self._save(generation)
        while self.holding.cursor.step < course.steps:
            wish = yield from self._step(generation)
            if wish not in (None, BREAK, SAVE_AND_BREAK):
                yield from self._save(generation)
                return str(wish)
            yield from self._evaluate_if_due(generation)
            if course.saves_at(self.holding.cursor) or wish == SAVE_AND_BREAK:
                yield from self._save(generation)
            if wish is not None:
                return BREAK
        yield from self._save(generation)
        return COMPLETE

    def _step(self, generation: Generation) -> Generator[Wait, None, str | None]:
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        sound = self.holding
        if self._is_flipped and self._peers() and self._ground.referee.commits:
            self.holding = replace(sound, digest=f"{sound.digest}, but for a bit of worker {self.slot}")
        try:
            parts = yield from self._compute(lanes)
            self._check_lease()
            self._enter("exchange")
            own = Frame(generation.id, "step", step, self.slot, parts, wish=self._wish(), digest=self.holding.digest)
            frames = yield from self._exchange(own)
        except LinkError:
            # Nobody has seen the flip, and nobody may be left who could: that is not covered, so it comes another time.
            self.holding = sound
            raise
        self._compare(generation, frames)
        summed = self._sum(frames)
        if self._segment is not None:
            # Nobody writes to its lanes again before everybody has read them.
            yield from self._exchange(Frame(generation.id, "summed", step, self.slot))
        self._check_lease()
        yield from self._apply(generation, frames, summed)
        self._publish(StepCompleted(step=step, time=self.clock.now, extra={"pid": self.pid}))
        return _strongest([frame.wish for frame in frames])

    def _compare(self, generation: Generation, frames: Sequence[Frame]) -> None:
        """As training/divergence.py does, of all of the state at each step."""
        found = outvoted({frame.worker: frame.digest for frame in frames})
        if found is not None:
            self._is_flipped = False
            self._ground.referee.differ(generation)
            raise ReplicasDiffer("the replicas differ", found[1])

    def _wish(self) -> str | None:
        """What it has been asked to do at the end of the step; all do it, or none."""
        standing = self._view
        if standing.stop or standing.save_requested:
            return standing.stop or SAVE_AND_BREAK
        return BREAK if standing.break_requested else None

    def _compute(self, lanes: range) -> Generator[Wait, None, tuple[Contribution, ...]]:
        """What these lanes contribute, as far as it is sent to the others."""
        parts = []
        for lane in lanes:
            self._check_lease()
            yield from self._sleep("compute", self._ground.paces.lane)
            part = contribute(self.holding, lane)
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

    def _apply(self, generation: Generation, frames: Sequence[Frame], parts: Sequence[Contribution]) -> Turn:
        self._ground.referee.applies(self, generation, [frame.generation for frame in frames], parts)
        self.is_dirty = True
        self._enter("apply")
        seconds = self._ground.paces.apply * (0.5 + self._chance.random())
        if self._habits.finishes_applying:
            yield seconds, False
        else:
            yield from self._apply_half(seconds)
        self.holding = apply_step(self.holding, parts)
        self.is_dirty = False
        self._ground.referee.completed(self)

    def _evaluate_if_due(self, generation: Generation) -> Turn:
        if self._ground.course.evaluates_at(self.holding.cursor):
            self._enter("evaluation")
            yield from self._exchange(Frame(generation.id, "evaluation", self.holding.cursor.step, self.slot))
            self.holding = apply_evaluation(self.holding)
            self._ground.referee.completed(self)

    def _save(self, generation: Generation) -> Turn:
        """All compare what they hold; the one that hosts lane 0 writes."""
        if self._saved == self.holding:
            return
        self._enter("checkpoint")
        yield from self._exchange(Frame(generation.id, "share", self.holding.cursor.step, self.slot))
        self._saved = self.holding
        if generation.members[0].worker == self.slot:
            yield from self._sleep("checkpoint", self._ground.paces.write)
            self._check_lease()
            self._ground.referee.commits_checkpoint(self, generation)
            self._written = self.holding

    # --- mistakes, for those who have not the habits

    def _break_promise(self, generation: Generation, event: StateReported) -> Turn:
        """Report, and still take the step that was under way if its last frame comes."""
        self._ask(event, self._timing.failure_timeout)
        step = self.holding.cursor.step + 1
        lanes = generation.members[generation.position(self.slot)].lanes
        parts = tuple(contribute(self.holding, lane) for lane in lanes) if self._segment is None else ()
        frames = self._received(generation.id, "step", step)

        def is_latest() -> bool:
            return self._view.generation_id == generation.id

        yield from self._until(lambda: not is_latest() or len(frames) == len(self._peers()), 0.5)
        if self._peers() and is_latest() and len(frames) == len(self._peers()):
            whole = [Frame(generation.id, "step", step, self.slot, parts), *frames.values()]
            yield from self._apply(generation, whole, self._sum(whole))
        yield from self._call_until_answered(event)

    def _apply_half(self, seconds: float) -> Turn:
        """Leave in the middle of an update when the generation is over, and count the step as done."""
        yield from self._until(self._is_over, seconds)
        if self._is_over():
            self.holding = Holding(self.holding.cursor.trained(), f"half of what follows {self.holding.digest}")
            self.is_dirty = False
            self._check_links()

    # --- leases

    def _check_lease(self) -> None:
        self._check_links()
        self._check_coordinator()

    def _check_links(self) -> None:
        """Raise when a link is closed, by whoever has closed it."""
        self._view.check()

    # --- frames

    def _peers(self) -> list[int]:
        return [member.worker for member in self._in.members if member.worker != self.slot] if self._in else []

    def _linked(self) -> list[int]:
        """Its neighbours on the ring; all others where they share memory."""
        peers = self._peers()
        if self._in is None or self._ground.memory is not None or len(peers) < 2:
            return peers
        return [self._next_on_ring(-1), self._next_on_ring(1)]

    def _next_on_ring(self, direction: int) -> int:
        assert self._in is not None, "a worker has neighbours while it is in a generation"
        return self._in.members[(self._in.position(self.slot) + direction) % len(self._in.members)].worker

    def _received(self, generation: GenerationId, kind: str, step: int) -> dict[int, Frame]:
        return self._frames.setdefault((generation, kind, step), {})

    def _exchange(self, own: Frame) -> Generator[Wait, None, list[Frame]]:
        """Have everybody's frame come to everybody; in lane order."""
        count = len(self._peers())
        self._check_links()
        frames = self._received(own.generation, own.kind, own.step)
        passed_on: set[int] = set()
        self._pass_on(own)
        while True:
            for frame in [frame for frame in frames.values() if frame.worker not in passed_on]:
                passed_on.add(frame.worker)
                if self._ground.memory is None:
                    self._pass_on(frame)
            if len(frames) == count:
                break
            yield from self._until(
                lambda: len(frames) > len(passed_on) or self._is_over() or bool(self._broken),
                max(self._lease.remaining(), self._timing.heartbeat_every),
            )
            self._check_links()
            if len(frames) < count and self._broken:
                raise PeerLost(f"worker {self._broken[0]}", "the link is broken")
            self._check_coordinator()
        # A frame is gone when it has been read.
        self._frames.pop((own.generation, own.kind, own.step), None)
        return sorted([own, *frames.values()], key=lambda frame: frame.worker)

    def _pass_on(self, frame: Frame) -> None:
        """Send a frame to all others, or to the next on the ring unless it comes from there."""
        targets = self._peers() if self._ground.memory is not None else self._linked()[-1:]
        for peer in targets:
            if peer == frame.worker:
                continue
            if peer in self._broken:
                raise PeerLost(f"worker {peer}", "the link is broken")
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
        if frame.kind == "hello" and frame.wish == "answer" and is_met:
            self._send(frame.worker, Frame(generation, "hello", 0, self.slot), is_connected=False)
        self._notify()

    def _lose_link(self, generation: GenerationId, peer: int) -> None:
        if self._in is not None and self._in.id == generation and self.promised != generation:
            self._broken.append(peer)
            self._notify()

    def _close_links(self) -> None:
        """The others read the end of the file, if it reaches them."""
        if self._in is None:
            return
        for peer in self._linked():
            target = self._ground.workers[peer]
            self._network.send(self, target, partial(target._lose_link, self._in.id, self.slot))

    def _forget_frames_before(self, generation: GenerationId) -> None:
        self._frames = {key: frames for key, frames in self._frames.items() if key[0] >= generation}


def _strongest(wishes: Sequence[str | None]) -> str | None:
    """As training/strategy.py has it: end the job before anything else, and rather save than not."""
    stops = [wish for wish in wishes if wish not in (None, BREAK, SAVE_AND_BREAK)]
    return next((wish for wish in (*stops, SAVE_AND_BREAK, BREAK) if wish in wishes), None)

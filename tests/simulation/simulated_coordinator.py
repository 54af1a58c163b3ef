"""The coordinator of a simulation: the real `decide`, with a simulated service around it that can be cut short."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quorate.coordinator.actions import Action, DeclareGeneration, EndJob, Expel, RecordEvents, RecordLoss, RecordResize
from quorate.coordinator.events import MembershipEvent, Tick
from quorate.coordinator.service import Directives, directive_of
from quorate.coordinator.states import Decision, Ended, JobSettings, Recalling, State, Training
from quorate.core.errors import ReplicasDiffer
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import encode_failure
from simulation.clock import Clock, Process

Decide = Callable[[State, MembershipEvent, float], Decision]
Answer = Callable[[Sequence[Action]], None]
Tell = Callable[[pb.Directive], None]

TICKS_PER_TIMEOUT = 20


@dataclass(frozen=True)
class News:
    """What the supervisor is told: whom to kill, which places to fill and how, how many workers there are to be."""

    expelled: tuple[tuple[int, int], ...] = ()
    vacant: tuple[int, ...] = ()
    restore: bool = False
    workers: int = 0
    has_ended: bool = False


@dataclass
class EventLog:
    """What the coordinators of a job have written down, and survives them."""

    has_begun: bool = False
    is_condemned: bool = False
    end: EndJob | None = None

    def write(self, action: Action) -> None:
        """Add what was decided."""
        if isinstance(action, DeclareGeneration):
            self.has_begun, self.is_condemned = True, False
        elif isinstance(action, RecordLoss):
            self.is_condemned = self.is_condemned or action.failure.kind == ReplicasDiffer.__name__
        elif isinstance(action, EndJob):
            self.end = self.end or action


class Onlooker(Protocol):
    """Who follows what a coordinator decides."""

    def sees_decision(self, decision: Decision) -> bool:
        """Something was decided; whether the coordinator dies while it carries it out."""
        ...

    def sees_written(self, state: State, action: Action) -> None:
        """An action was written down."""
        ...

    def sees_news(self, coordinator: "SimulatedCoordinator") -> None:
        """There is something for the supervisor to do."""
        ...


@dataclass
class Office:
    """What a coordinator is given by whoever starts it. `chance` decides how much of its last decision is done."""

    clock: Clock
    settings: JobSettings
    decide: Decide
    event_log: EventLog
    onlooker: Onlooker
    chance: random.Random = field(default_factory=lambda: random.Random(0))


class SimulatedCoordinator(Process):
    """Turns calls into events, keeps what it has declared, and wakes those who wait for it."""

    def __init__(self, office: Office, state: State) -> None:
        super().__init__(office.clock, "coordinator")
        self.state = state
        self.incarnation = office.settings.incarnation
        self.is_outcome_known = False
        self._office = office
        self._directives = Directives()
        self._followers: list[Tell] = []
        self._waiting: list[Callable[[pb.CompleteReply | None], None]] = []
        if isinstance(state, Ended):
            self._declare_end(state)
        self.after(self._tick_every, self._tick)

    @property
    def _tick_every(self) -> float:
        return self._office.settings.timing.failure_timeout / TICKS_PER_TIMEOUT

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return isinstance(self.state, Ended)

    @property
    def news(self) -> News:
        """What there is to do for the supervisor, until it is done."""
        if isinstance(self.state, Ended):
            return News(has_ended=True)
        members = self.state.members
        lost = {worker for worker, _ in members.expelled}
        vacant = () if members.stop is not None else tuple(sorted(members.awaited - lost))
        return News(tuple(sorted(members.expelled)), vacant, not members.has_state, members.wanted)

    def hear(self, event: MembershipEvent, answer: Answer | None = None) -> None:
        """A call arrives."""
        decision = self._office.decide(self.state, event, self.clock.now)
        self.state = decision.state
        if self._office.onlooker.sees_decision(decision):
            self._die_at_work(decision, answer)
            return
        for action in decision.actions:
            self._write_down(action)
        for told in self._declare(decision):
            for tell in self._followers:
                tell(told)
        if answer is not None:
            answer(decision.actions)
        if any(isinstance(action, Expel | RecordResize) for action in decision.actions):
            self._office.onlooker.sees_news(self)
        self._answer_those_who_wait()

    def _die_at_work(self, decision: Decision, answer: Answer | None) -> None:
        """Die having written down a part of what was decided, or all of it and told only some of it."""
        chance = self._office.chance
        actions = decision.actions
        written = len(actions) if chance.random() < 0.7 else chance.randint(0, len(actions))
        for action in actions[:written]:
            self._write_down(action)
        if written == len(actions):
            told = self._declare(decision)
            tells_all = chance.random() < 0.3
            for tell in self._followers:
                for directive in told if tells_all else told[: chance.randint(0, len(told))]:
                    tell(directive)
            if answer is not None and chance.random() < 0.5:
                answer(actions)
        self.die()

    def _write_down(self, action: Action) -> None:
        self._office.event_log.write(action)
        self._office.onlooker.sees_written(self.state, action)

    def _declare(self, decision: Decision) -> list[pb.Directive]:
        told = [
            directive
            for action in decision.actions
            if (directive := directive_of(action, self.incarnation)) is not None
        ]
        for directive in told:
            self._directives.add(directive)
        if isinstance(self.state, Ended) and any(isinstance(action, EndJob) for action in decision.actions):
            told.append(self._declare_end(self.state))
        return told

    def _declare_end(self, state: Ended) -> pb.Directive:
        end = pb.Directive(end=pb.EndDirective(failure=encode_failure(state.failure)))
        self._directives.add(end)
        return end

    def complete(self, event: MembershipEvent, answer: Callable[[pb.CompleteReply | None], None]) -> None:
        """A worker is done; it is answered when the job is over, or when there is another generation to come.

        With None where it is to ask again: its generation may go on, once everybody has come back.
        """
        self._waiting.append(answer)
        self.hear(event)

    def follow(self, tell: Tell) -> None:
        """Tell all that was declared so far and matters still, and then what is declared."""
        for _, directive in self._directives.after(0):
            tell(directive)
        self._followers.append(tell)

    def forget(self, tell: Tell) -> None:
        """Its connection is gone."""
        if tell in self._followers:
            self._followers.remove(tell)

    def _answer_those_who_wait(self) -> None:
        if isinstance(self.state, Training):
            return
        reply = None if isinstance(self.state, Recalling) else pb.CompleteReply(regroup=True)
        if isinstance(self.state, Ended):
            reply = pb.CompleteReply(failure=encode_failure(self.state.failure))
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(reply)

    def _tick(self) -> None:
        if self.has_ended and self.is_outcome_known:
            return
        self.after(self._tick_every, self._tick)
        if not self.has_ended:
            self.hear(Tick())
        if self.is_alive and (self.has_ended or self.news.expelled or self.news.vacant):
            self._office.onlooker.sees_news(self)


def events_in(action: Action) -> list[str]:
    """The events that an action writes down."""
    return list(action.lines) if isinstance(action, RecordEvents) else []

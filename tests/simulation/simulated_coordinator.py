"""The coordinator of a simulation: the real `decide`, with a simulated service around it that can be cut short."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import Action, MembershipEvent, Tick
from quorate.coordinator.places import News, news_of, wakes
from quorate.coordinator.service import Directives, directive_of, end_directive
from quorate.coordinator.states import Decision, Ended, JobSettings, Recalling, State, Training
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed
from quorate.observe.jsonl import JsonlSink
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import encode_failure
from simulation.clock import Clock, Process

Decide = Callable[[State, MembershipEvent, float], Decision]
Answer = Callable[[Sequence[Action]], None]
Tell = Callable[[pb.Directive], None]

TICKS_PER_TIMEOUT = 20


class MemorySink(JsonlSink):
    """What the coordinators of a job have written down, and survives them."""

    def __init__(self) -> None:
        super().__init__(Path("events.jsonl"))
        self.lines: list[str] = []
        self.has_begun = False

    def handle(self, event: Event) -> None:
        self.has_begun = self.has_begun or isinstance(event, GenerationFormed)
        super().handle(event)

    def append(self, line: str) -> None:
        self.lines.append(line)


class Onlooker(Protocol):
    """Who follows what a coordinator decides."""

    def sees_decision(self, decision: Decision) -> bool:
        """Something was decided; whether the coordinator dies while it carries it out."""
        ...

    def sees_written(self, state: State, action: Action) -> None:
        """An action was written down."""
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
        self._looking: list[Callable[[], bool]] = []
        if isinstance(state, Ended):
            self._directives.add(end_directive(state.failure))
        self.after(self._tick_every, self._tick)

    @property
    def _tick_every(self) -> float:
        return self._office.settings.timing.failure_timeout / TICKS_PER_TIMEOUT

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return isinstance(self.state, Ended)

    def tell_news(
        self, processes: Collection[tuple[int, int]], workers: int, timeout: float, answer: Callable[[News], None]
    ) -> None:
        """Tell a supervisor what there is to know for it, at once or when there is something, or after the timeout."""
        answered: list[bool] = []

        def look(*, is_over: bool = False) -> bool:
            news = news_of(self.state, processes, self.clock.now)
            if not answered and (is_over or news.is_new_to(workers)):
                answered.append(True)
                answer(news)
            return bool(answered)

        def give_up() -> None:
            look(is_over=True)

        if not look():
            self._looking.append(look)
            self.after(timeout, give_up)

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
        if wakes(event, decision):
            self._looking = [look for look in self._looking if not look()]
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
        self._office.event_log.record(action)
        self._office.onlooker.sees_written(self.state, action)

    def _declare(self, decision: Decision) -> list[pb.Directive]:
        told = [
            directive
            for action in decision.actions
            if (directive := directive_of(action, self.incarnation)) is not None
        ]
        for directive in told:
            self._directives.add(directive)
        return told

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

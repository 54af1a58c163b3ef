"""The coordinator of a simulation: the real `decide`, with a simulated service around it."""

from collections.abc import Callable, Sequence

from quorate.coordinator.records import (
    Action,
    Decision,
    DeclareGeneration,
    Ended,
    EndJob,
    Expel,
    MembershipEvent,
    RecordEvents,
    Regroup,
    RelayStop,
    State,
    Terms,
    Tick,
    Training,
)
from quorate.testing.clock import Process, VirtualClock

Decide = Callable[[State, MembershipEvent, float], Decision]
Answer = Callable[[Sequence[Action]], None]
Directive = DeclareGeneration | Regroup | RelayStop | EndJob

TICKS_PER_TIMEOUT = 20


class SimulatedCoordinator(Process):
    """Turns calls into events, keeps what it has declared, and wakes those who wait for it."""

    def __init__(
        self, clock: VirtualClock, state: State, terms: Terms, decide: Decide, on_decision: Callable[[Decision], None]
    ) -> None:
        super().__init__(clock, "coordinator")
        self.state = state
        self.directives: list[Directive] = []
        self._terms = terms
        self._decide = decide
        self._on_decision = on_decision
        self._followers: list[Callable[[int, Directive], None]] = []
        self._waiting: list[Answer] = []
        self.on_expel: Callable[[], None] = lambda: None
        self._tick()

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return isinstance(self.state, Ended)

    @property
    def expelled(self) -> list[tuple[int, int]]:
        """Processes that count as lost and have not been reaped."""
        return [] if isinstance(self.state, Ended) else sorted(self.state.crew.expelled)

    def hear(self, event: MembershipEvent, answer: Answer | None = None) -> None:
        """A call arrives."""
        decision = self._decide(self.state, event, self.clock.now)
        self.state = decision.state
        for action in decision.actions:
            if isinstance(action, Directive):
                self.directives.append(action)
                for follow in self._followers:
                    follow(len(self.directives) - 1, action)
        self._on_decision(decision)
        if answer is not None:
            answer(decision.actions)
        if any(isinstance(action, Expel) for action in decision.actions):
            self.on_expel()
        self._answer_those_who_wait()

    def complete(self, event: MembershipEvent, answer: Answer) -> None:
        """A worker is done; it is answered when the job is over, or when there is another generation to come."""
        self._waiting.append(answer)
        self.hear(event)

    def follow(self, tell: Callable[[int, Directive], None]) -> None:
        """Tell all that was declared so far, and then what is declared."""
        for index, directive in enumerate(self.directives):
            tell(index, directive)
        self._followers.append(tell)

    def forget(self, tell: Callable[[int, Directive], None]) -> None:
        """Its connection is gone."""
        if tell in self._followers:
            self._followers.remove(tell)

    def _answer_those_who_wait(self) -> None:
        if isinstance(self.state, Training):
            return
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer([action for action in self.directives if isinstance(action, EndJob)])

    def _tick(self) -> None:
        if not self.has_ended:
            self.after(self._terms.timing.failure_timeout / TICKS_PER_TIMEOUT, self._tick)
            self.hear(Tick())
            if self.expelled:  # told until they have been reaped
                self.on_expel()


def events_in(decision: Decision) -> list[str]:
    """The events that a decision has written down."""
    return [line for action in decision.actions if isinstance(action, RecordEvents) for line in action.lines]

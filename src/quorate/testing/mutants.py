"""Mistakes that a membership protocol can be built with. The simulator must show each of them."""

from dataclasses import dataclass, field, replace

from quorate.coordinator.membership import decide
from quorate.coordinator.records import Completed, Decision, Ended, MembershipEvent, State, StateReported
from quorate.core.generation import GenerationId
from quorate.testing.simulated_coordinator import Decide
from quorate.testing.simulated_membership import Habits


@dataclass(frozen=True)
class Mutant:
    """How the workers and the coordinator of a simulation behave."""

    name: str
    habits: Habits = field(default_factory=Habits)
    decide: Decide = decide


def decide_without_fencing(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take what a worker says for a word of the generation that is at work, whichever it is of."""
    if isinstance(event, StateReported | Completed) and not isinstance(state, Ended):
        crew = state.crew
        event = replace(event, generation=GenerationId(crew.terms.incarnation, crew.generations))
    return decide(state, event, now)


SOUND = Mutant("sound")

MUTANTS = (
    Mutant("no lease check", Habits(checks_lease=False)),
    Mutant("a state report that is not kept as a promise", Habits(keeps_promises=False)),
    Mutant("a stale frame accepted", Habits(refuses_stale_frames=False)),
    Mutant("a dirty donor", Habits(finishes_applying=False)),
    Mutant("a donor that is behind", Habits(copies_from_the_furthest=False)),
    Mutant("no fencing", decide=decide_without_fencing),
)

"""Mistakes that a membership protocol can be built with. The simulator must show each of them."""

from dataclasses import dataclass, field, replace

from quorate.coordinator.events import (
    Completed,
    DeclareGeneration,
    ExitReported,
    FailureReported,
    MembershipEvent,
    Registered,
    Regroup,
    StateReported,
)
from quorate.coordinator.membership import decide
from quorate.coordinator.states import Decision, Ended, Recalling, State, Training
from quorate.core.errors import LanesDiffer, ReplicasDiffer
from quorate.core.generation import DIVERGED, Generation, GenerationId
from simulation.simulated_coordinator import Decide
from simulation.simulated_membership import Habits


@dataclass(frozen=True)
class Mutant:
    """How the workers and the coordinator of a simulation behave."""

    name: str
    habits: Habits = field(default_factory=Habits)
    decide: Decide = decide
    counts_incarnations: bool = True


def decide_without_fencing(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take what a worker says for a word of the generation that is at work, whichever it is of."""
    if isinstance(event, StateReported | Completed) and not isinstance(state, Ended):
        members = state.members
        event = replace(event, generation=GenerationId(members.settings.incarnation, members.generations))
    return decide(state, event, now)


def decide_by_the_first(state: State, event: MembershipEvent, now: float) -> Decision:
    """After another coordinator, take all to stand where the one stands that was the first to come back."""
    decision = decide(state, event, now)
    after = decision.state
    is_declared = any(isinstance(action, DeclareGeneration) for action in decision.actions)
    if not is_declared or not isinstance(after, Training) or after.generation.id.incarnation == 1:
        return decision
    positions = after.generation.members
    by_worker = {member.worker: member for member in positions}
    first = next(by_worker[known.worker] for known in after.members.enrolled if known.worker in by_worker)
    wrong = Generation(after.generation.id, tuple(replace(member, cursor=first.cursor) for member in positions))
    actions = tuple(
        DeclareGeneration(wrong) if isinstance(action, DeclareGeneration) else action for action in decision.actions
    )
    members = replace(after.members, cursor=first.cursor)
    return replace(decision, state=replace(after, generation=wrong, members=members), actions=actions)


def decide_to_let_go(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take everything for saved: those who want to leave do, also where nobody else holds the state."""
    if isinstance(event, StateReported):
        event = replace(event, is_saved=True)
    decision = decide(state, event, now)
    actions = tuple(replace(one, saves=False) if isinstance(one, Regroup) else one for one in decision.actions)
    return replace(decision, actions=actions)


def decide_from_nothing(state: State, event: MembershipEvent, now: float) -> Decision:
    """Let whoever is here begin, also from nothing: whoever was to bring the checkpoint may not come any more."""
    if not isinstance(state, Ended):
        anybody = frozenset(known.worker for known in state.members.enrolled)
        event_of = {event.worker} if isinstance(event, Registered) else set()
        state = replace(state, members=replace(state.members, founders=anybody | event_of))
    return decide(state, event, now)


def decide_without_restoring(state: State, event: MembershipEvent, now: float) -> Decision:
    """Have replacements begin from nothing, also where nobody is left to copy from."""
    decision = decide(state, event, now)
    if isinstance(decision.state, Ended):
        return decision
    members = decision.state.members
    refills = dict.fromkeys(members.awaited, (now, False))
    return replace(decision, state=replace(decision.state, members=replace(members, refills=refills)))


def decide_before_the_copy(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take who is in a generation for one that holds its state, also before it has copied that."""
    decision = decide(state, event, now)
    after = decision.state
    is_declared = any(isinstance(action, DeclareGeneration) for action in decision.actions)
    if not is_declared or not isinstance(after, Training):
        return decision
    enrolled = tuple(replace(known, has_trained=known.within is not None) for known in after.members.enrolled)
    return replace(decision, state=replace(after, members=replace(after.members, enrolled=enrolled)))


def decide_as_at_the_beginning(state: State, event: MembershipEvent, now: float) -> Decision:
    """After another coordinator, take a job of which nobody is left that was in a generation for one that begins."""
    if isinstance(state, Recalling) and state.newest is None:
        state = replace(state, members=replace(state.members, generations=0))
    return decide(state, event, now)


def decide_to_go_on(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take a worker that ends because replicas, or lanes, differ for one that has died: those who are left go on."""
    kinds = (ReplicasDiffer.__name__, LanesDiffer.__name__)
    if isinstance(event, FailureReported) and event.failure.kind in kinds:
        return Decision(state, (), "ignored")
    if isinstance(event, ExitReported) and event.exit_code == DIVERGED:
        event = replace(event, exit_code=1)
    return decide(state, event, now)


def decide_without_a_third(state: State, event: MembershipEvent, now: float) -> Decision:
    """Have the one that is left of two who disagree on a lane go on alone."""
    if not isinstance(state, Ended):
        state = replace(state, members=replace(state.members, disputed=None))
    return decide(state, event, now)


def decide_without_handing_over(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take a server that leaves for one that has handed over what it holds."""
    if not isinstance(state, Ended):
        enrolled = tuple(replace(known, has_retired=known.is_server) for known in state.members.enrolled)
        state = replace(state, members=replace(state.members, enrolled=enrolled))
    return decide(state, event, now)


SOUND = Mutant("sound")

MUTANTS = (
    Mutant("no lease check", Habits(checks_lease=False)),
    Mutant("a state report that is not kept as a promise", Habits(keeps_promises=False)),
    Mutant("a stale frame accepted", Habits(refuses_stale_frames=False)),
    Mutant("a dirty donor", Habits(finishes_applying=False)),
    Mutant("a donor that is behind", Habits(copies_from_the_furthest=False)),
    Mutant("no fencing", decide=decide_without_fencing),
    Mutant(
        "a shared segment reused without reaping its old writer",
        Habits(takes_fresh_memory=False, kills_the_expelled=False),
    ),
    Mutant("a rebuild from the first worker to report", decide=decide_by_the_first),
    Mutant("an incarnation used again", counts_incarnations=False),
    Mutant("a late word of an earlier coordinator heeded", Habits(ignores_late_words=False)),
    Mutant("a view of the membership without its check of incarnations", Habits(checks_incarnations=False)),
    Mutant("a worker deaf to the coordinator that it has come back to", Habits(goes_by_who_recalls=False)),
    Mutant("the only holder of the state let go", decide=decide_to_let_go),
    Mutant("a generation founded from nothing", decide=decide_from_nothing),
    Mutant("a replacement that does not restore", decide=decide_without_restoring),
    Mutant("a state counted before it is copied", decide=decide_before_the_copy),
    Mutant("a next coordinator that begins anew", decide=decide_as_at_the_beginning),
    Mutant("a generation whose replicas differ goes on", decide=decide_to_go_on),
    Mutant("a lane in dispute that no third computes", decide=decide_without_a_third),
)

WITH_SERVERS = (
    Mutant("a server let go before it has handed over", decide=decide_without_handing_over),
    Mutant("a server that does not complete what others have", Habits(completes_what_others_have=False)),
    Mutant("blocks of another step taken for those of this one", Habits(drops_blocks_of_other_steps=False)),
    Mutant("a block dropped before all have theirs", Habits(drops_no_block_before_all_have_theirs=False)),
)
"""Mistakes that only a job with servers can show."""

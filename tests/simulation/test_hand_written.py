"""Schedules written by hand: sound jobs get through them, and what each is there for happens."""

from dataclasses import replace

import pytest

from quorate.coordinator.events import DeclareGeneration, MembershipEvent
from quorate.coordinator.membership import decide
from quorate.coordinator.states import Decision, Ended, State, Training
from quorate.worker.membership_view import MembershipView
from simulation.hand_written import SCHEDULES, SEEDS
from simulation.mutants import SOUND, Mutant
from simulation.simulation import Simulation, Verdict

ALONE, ALONE_WITH_ANOTHER = "left out and alone", "left out and alone with a new coordinator"


def simulate(name: str, seed: int, mutant: Mutant = SOUND) -> Verdict:
    return Simulation(seed, mutant, given=SCHEDULES[name], traces=True).run()


def decide_as_if_nobody_was_left_out(state: State, event: MembershipEvent, now: float) -> Decision:
    """Take whoever is left out of a generation for one that holds the state still."""
    decision = decide(state, event, now)
    after = decision.state
    is_declared = any(isinstance(action, DeclareGeneration) for action in decision.actions)
    if not is_declared or not isinstance(after, Training) or isinstance(state, Ended):
        return decision
    held = {known.worker for known in state.members.enrolled if known.has_trained}
    enrolled = tuple(
        replace(known, has_trained=known.has_trained or known.worker in held) for known in after.members.enrolled
    )
    return replace(decision, state=replace(after, members=replace(after.members, enrolled=enrolled)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sound_job_gets_through(name: str, seed: int) -> None:
    verdict = simulate(name, seed)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert sum("fault: " in line for line in verdict.trace) == len(SCHEDULES[name].faults)


@pytest.mark.parametrize("name", [ALONE, ALONE_WITH_ANOTHER])
def test_one_is_left_out_before_the_others_die(name: str) -> None:
    trace = simulate(name, SEEDS[0]).trace
    left_out = next(number for number, line in enumerate(trace) if "so worker 1 is left out" in line)
    deaths = [number for number, line in enumerate(trace) if "fault: kill" in line]
    assert left_out < min(deaths)


def test_who_was_left_out_and_goes_on_from_what_it_holds_is_seen() -> None:
    mistaken = Mutant("who was left out holds the state", decide=decide_as_if_nobody_was_left_out)
    broken = [simulate(ALONE, seed, mistaken).broken for seed in SEEDS]
    assert all(why is not None and "before a checkpoint" in why for why in broken)


def test_who_was_left_out_and_says_that_it_holds_the_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = MembershipView._adopt

    def adopt_and_hold(view: MembershipView, generation: object) -> None:
        held = view.present(0).has_trained
        adopt(view, generation)  # type: ignore[arg-type]
        if held:
            view.hold_state()

    monkeypatch.setattr(MembershipView, "_adopt", adopt_and_hold)
    broken = [simulate(ALONE_WITH_ANOTHER, seed).broken for seed in SEEDS]
    assert all(why is not None and "before a checkpoint" in why for why in broken)

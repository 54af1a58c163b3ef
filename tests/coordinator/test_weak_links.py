"""A link that fails twice between two live workers: they are kept apart, or one of them is left out for a while."""

from dataclasses import replace

import pytest

from coordinator.played import (
    SETTINGS,
    Timed,
    beats_until,
    completed,
    declared,
    heartbeat,
    killed,
    kinds,
    last_of,
    messages_of,
    play,
    registered,
    reported,
    training,
    workers_of,
)
from quorate.coordinator.events import EndJob, Regroup, StopRequested, Tick
from quorate.coordinator.membership import decide
from quorate.coordinator.states import Decision, Ended, Forming, JobSettings, State, Training, WeakLink
from quorate.coordinator.weak_links import FORGIVEN_AFTER
from quorate.core.errors import GenerationOver, LinkError, PeerLost
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, GenerationId

TWO = replace(SETTINGS, workers=2)
FOUR = replace(SETTINGS, workers=4)


def broken(peer: int) -> Failure:
    return Failure.of(PeerLost(f"worker {peer} (10.0.0.{peer}:4000)", "end of file"))


def after_failures(
    state: State, *links: tuple[int, int], now: float = 1.0, step: int = 16, advance: int = 0
) -> Decision:
    """One generation after the other breaks at one of these links, and everybody turns out to be alive."""
    for count, (one, other) in enumerate(links):
        assert isinstance(state, Training)
        decision = fail(state, one, other, now + count, step + count * advance)
        state = decision.state
    return decision


def fail(state: Training, one: int, other: int, now: float, step: int) -> Decision:
    """The two tell of each other, one of them is heard first, and the others leave when they are told."""
    number = state.generation.id.number
    members = workers_of(state.generation)
    symptoms = {one: broken(other), other: broken(one)}
    assert symptoms.keys() <= set(members)
    order = [one, *(worker for worker in members if worker != one)]
    return last_of(state, *((now, reported(worker, step, number, symptoms.get(worker))) for worker in order))


def warnings_of(decision: Decision) -> list[str]:
    return messages_of(decision.actions)


def links_of(decision: Decision) -> dict[tuple[int, int], int]:
    assert isinstance(decision.state, Training | Forming)
    return {link.pair: link.times for link in decision.state.members.links}


# --- which link it is


def test_a_symptom_names_the_worker_at_the_other_end() -> None:
    assert broken(12).peer == 12
    assert Failure.of(PeerLost("worker 3 (this host)", "it cannot be reached")).peer == 3
    # A link that this side has closed is none that failed; nor is the coordinator a worker.
    assert Failure.of(PeerLost("worker 3", PeerLost.CLOSED_HERE)).peer is None
    assert Failure.of(PeerLost("the coordinator", "end of file")).peer is None
    for error in (LinkError("worker 3 does not answer"), GenerationOver("generation 3.1 is over")):
        assert Failure.of(error).peer is None


def test_one_failure_changes_nothing_but_is_remembered() -> None:
    decision = after_failures(training(FOUR), (0, 1))
    assert workers_of(declared(decision)) == [0, 1, 2, 3]
    assert warnings_of(decision) == []
    assert links_of(decision) == {(0, 1): 1}


def test_both_ends_count_once() -> None:
    for first in ((0, 1), (1, 0)):
        assert links_of(after_failures(training(FOUR), first)) == {(0, 1): 1}


def test_of_several_symptoms_the_pair_that_names_each_other_counts() -> None:
    """Worker 3 has lost its link to worker 0, which had closed it because of worker 1; and it is heard first."""
    decision = last_of(
        training(FOUR),
        (1.0, reported(3, symptom=broken(0))),
        (1.0, reported(0, symptom=broken(1))),
        (1.0, reported(1, symptom=broken(0))),
        (1.0, reported(2, symptom=broken(3))),
    )
    assert links_of(decision) == {(0, 1): 1}


def test_where_no_two_name_each_other_the_first_symptom_counts() -> None:
    decision = last_of(
        training(FOUR),
        (1.0, reported(2, symptom=Failure.of(PeerLost("worker 3", PeerLost.CLOSED_HERE)))),
        (1.0, reported(1, symptom=broken(2))),
        (1.0, reported(0, symptom=broken(1))),
        (1.0, reported(3)),
    )
    assert links_of(decision) == {(1, 2): 1}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_loss_explains_the_links_that_broke_with_it(is_late: bool) -> None:
    """Also those of which one hears later: a neighbour of the dead closes its other links too."""
    words: list[Timed] = [
        (1.0, reported(0, symptom=broken(3))),
        (1.0, reported(2, symptom=broken(0))),
        (1.0, reported(3, symptom=broken(0))),
    ]
    words.insert(0 if is_late else 1, (1.0, killed(1)))
    assert links_of(last_of(training(FOUR), *words)) == {}


def test_who_is_lost_takes_its_links_along() -> None:
    once = after_failures(training(FOUR), (0, 1), (2, 3))
    assert links_of(once) == {(0, 1): 1, (2, 3): 1}
    lost = play(once.state, (4.0, killed(1)), *((4.0, reported(worker, 16, 3)) for worker in (0, 2, 3)))
    assert links_of(lost[-1]) == {(2, 3): 1}
    # The one in its place has links of its own.
    joined = play(
        lost[-1].state, (5.0, registered(1, life=1)), *((5.0, reported(worker, 17, 4)) for worker in (0, 2, 3))
    )
    assert workers_of(declared(joined[-1])) == [0, 1, 2, 3]


def test_a_link_that_was_well_for_long_is_forgiven() -> None:
    limit = FORGIVEN_AFTER * SETTINGS.timing.failure_timeout
    state = after_failures(training(FOUR), (0, 1)).state
    assert isinstance(state, Training)
    assert links_of(fail(state, 0, 1, 1.0 + limit, 900)) == {(0, 1): 2}
    assert links_of(fail(state, 0, 1, 1.1 + limit, 900)) == {(0, 1): 1}


# --- apart


def test_two_workers_whose_link_failed_twice_are_neighbours_no_longer() -> None:
    decision = after_failures(training(FOUR), (0, 1), (1, 0))
    generation = declared(decision)
    assert [(member.worker, list(member.lanes)) for member in generation.members] == [
        (0, [0, 1]),
        (2, [2, 3]),
        (1, [4, 5]),
        (3, [6, 7]),
    ]
    assert warnings_of(decision) == [
        "the link between worker 0 (pid 4710 on host a) and worker 1 (pid 4711 on host a) has failed 2 times although"
        " both are alive: hosting is re-ordered so that they are not neighbours (the ring is 0, 2, 1, 3)."
    ]
    assert "hosting is re-ordered so that they are not neighbours" in decision.reason
    # For as long as they are remembered, and without a word.
    later = after_failures(decision.state, (2, 3), now=90.0, step=50)
    assert workers_of(declared(later)) == [0, 2, 1, 3]
    assert warnings_of(later) == []


def test_who_keeps_losing_each_other_without_being_neighbours_does_not_stay_together() -> None:
    """Where everybody is linked to everybody, as in shared memory, the order is no help."""
    decision = after_failures(training(FOUR), (0, 1), (0, 1), (0, 1))
    assert workers_of(declared(decision)) == [0, 2, 3]
    (warning,) = warnings_of(decision)
    assert "has failed 3 times although both are alive: it fails also where they are not neighbours" in warning
    assert warning.endswith("so worker 1 is left out for 20.0 s.")


def test_links_that_fail_one_after_the_other_never_end_the_job() -> None:
    """The links between {0, 1} and {2, 3} are cut: no step is ever completed until the two sides are apart."""
    state: State = training(FOUR)
    for count in range(40):
        assert isinstance(state, Training), count
        ring = workers_of(state.generation)
        crossing = next(
            (
                (one, ring[index - 1])
                for index, one in enumerate(ring)
                if len({one // 2, ring[index - 1] // 2}) == 2 and len(ring) > 1
            ),
            None,
        )
        if crossing is None:
            break
        state = fail(state, *crossing, 1.0 + count, 16).state
    assert isinstance(state, Training)
    assert {worker // 2 for worker in workers_of(state.generation)} in ({0}, {1})
    assert len(state.generation.members) == 2


# --- left out


@pytest.mark.parametrize("workers", [2, 3])
def test_where_all_are_neighbours_the_higher_numbered_is_left_out(workers: int) -> None:
    decision = after_failures(training(replace(SETTINGS, workers=workers)), (0, 1), (0, 1))
    generation = declared(decision)
    assert workers_of(generation) == [worker for worker in range(workers) if worker != 1]
    assert sorted(lane for member in generation.members for lane in member.lanes) == list(range(8))
    assert warnings_of(decision) == [
        "the link between worker 0 (pid 4710 on host a) and worker 1 (pid 4711 on host a) has failed 2 times although"
        " both are alive: they cannot but be neighbours, so worker 1 is left out for 10.0 s."
    ]


def left_out(settings: JobSettings = TWO) -> Training:
    """Worker 1 is out of the third generation, since 2.0."""
    state = after_failures(training(settings), (0, 1), (0, 1)).state
    assert isinstance(state, Training)
    assert 1 not in workers_of(state.generation)
    return state


def test_who_is_left_out_lives_on_and_holds_nobody_up() -> None:
    *heard, last = play(left_out(), *beats_until(11.75, 0, 1, since=2.0))
    assert {type(decision.state) for decision in heard} == {Training}
    assert not any(kinds(decision.actions) not in ([], ["GrantLease"]) for decision in (*heard, last))
    ended = decide(last.state, completed(0), 11.8)
    assert isinstance(ended.state, Ended)
    assert ended.state.failure is None


def test_it_is_let_in_again_at_a_boundary_when_its_time_is_over() -> None:
    decisions = play(left_out(), *beats_until(14.0, 0, 1, since=2.0))
    calls = [decision for decision in decisions if "Regroup" in kinds(decision.actions)]
    assert [decision.actions for decision in calls] == [(Regroup(GenerationId(3, 3), at_boundary=True),)]
    assert "worker 1 (its link between workers 0 and 1 has rested 10.0 s)" in calls[0].reason

    formed = last_of(decisions[-1].state, (14.0, reported(0, 40, 3)))
    generation = declared(formed)
    assert workers_of(generation) == [0, 1]
    # What it holds is old by now.
    assert generation.behind == (1,)
    (warning,) = warnings_of(formed)
    assert warning.endswith("worker 1 was left out for that, and is let in again as a trial.")
    assert "worker 0 (pid 4710 on host a) and worker 1 (pid 4711 on host a)" in warning


def test_a_trial_that_fails_doubles_the_time() -> None:
    state: Training = left_out()
    now, spans = 2.0, list[float]()
    for step in (1000, 2000, 3000):
        since = now
        while not state.is_called:
            assert now - since < 100
            now += 0.25
            decision = last_of(state, *train_on(now))
            assert isinstance(decision.state, Training)
            state = decision.state
        spans.append(now - since)
        trial = decide(state, reported(0, step, state.generation.id.number), now)
        assert workers_of(declared(trial)) == [0, 1]
        assert isinstance(trial.state, Training)
        failed = fail(trial.state, 0, 1, now, step)
        assert workers_of(declared(failed)) == [0]
        assert isinstance(failed.state, Training)
        state = failed.state
    assert spans == [10.0, 20.0, 40.0]


def train_on(now: float) -> list[Timed]:
    """Everybody is heard, and the job advances."""
    beats: list[Timed] = [(now, heartbeat(worker, round(now * 100), step=round(now * 4))) for worker in (0, 1)]
    return [*beats, (now, Tick())]


def test_a_trial_that_holds_keeps_it_in() -> None:
    called = last_of(left_out(), *beats_until(12.0, 0, 1, since=2.0))
    formed = last_of(called.state, (12.0, reported(0, 40, 3)))
    later = play(formed.state, *beats_until(40.0, 0, 1, since=12.0))
    assert not any("Regroup" in kinds(decision.actions) for decision in later)
    assert isinstance(later[-1].state, Training)


def test_it_is_let_in_at_once_when_the_other_end_is_replaced() -> None:
    lost = last_of(left_out(replace(SETTINGS, workers=3)), (3.0, killed(0)), (3.0, reported(2, 20, 3)))
    generation = declared(lost)
    assert (workers_of(generation), generation.behind) == ([1, 2], (1,))


def test_who_is_further_than_all_others_is_not_left_out() -> None:
    """They would have to do again what it has done, or begin anew."""
    state = after_failures(training(TWO), (0, 1)).state
    *_, decision = play(state, (2.0, reported(0, 16, 2, broken(1))), (2.0, reported(1, 17, 2, broken(0))))
    generation = declared(decision)
    assert (workers_of(generation), generation.cursor) == ([1], Cursor(17))
    assert warnings_of(decision)[0].endswith("so worker 0 is left out for 10.0 s.")


def test_what_one_holds_that_was_left_out_is_not_the_state_of_the_job() -> None:
    """The others have gone on, and may have saved: a new process begins from the newest checkpoint."""
    lost = decide(left_out(), killed(0), 9.0)
    assert isinstance(lost.state, Forming)
    assert [action.restore for action in lost.actions if hasattr(action, "restore")] == [True]
    formed = decide(lost.state, registered(0, life=1, cursor=Cursor(90)), 9.5)
    generation = declared(formed)
    assert (workers_of(generation), generation.cursor, generation.behind) == ([0, 1], Cursor(90), (1,))


def test_the_death_of_one_that_is_left_out_disturbs_nobody() -> None:
    state = left_out()
    dead = decide(state, killed(1), 3.0)
    assert isinstance(dead.state, Training)
    assert dead.state.generation is state.generation
    assert kinds(dead.actions) == ["WorkerLost", "Refill"]
    assert dead.state.members.links == ()


def test_nobody_is_let_in_again_while_the_job_stops() -> None:
    decisions = play(left_out(), (2.1, StopRequested("interrupted")), *beats_until(14.0, 0, 1, since=2.1))
    assert not any("Regroup" in kinds(decision.actions) for decision in decisions)


# --- min_workers


def test_nobody_is_left_out_whom_min_workers_needs_and_the_end_says_so() -> None:
    settings = replace(TWO, min_workers=2)
    twice = after_failures(training(settings), (0, 1), (0, 1))
    assert workers_of(declared(twice)) == [0, 1]
    (warning,) = warnings_of(twice)
    assert warning.endswith("to leave one out would leave fewer than min_workers (2), so it is tried as it is.")

    # The first of them had advanced.
    last = after_failures(training(settings), *[(0, 1)] * (2 + int(settings.timing.storm)))
    assert isinstance(last.state, Ended)
    assert last.state.failure is not None
    assert last.state.failure.message == (
        "links between the workers broke 31 times in a row, for 30 s, without a completed step, and no"
        " process was found dead: worker 1 (10.0.0.1:4000) is gone: end of file; to leave one out would leave fewer"
        " than min_workers (2)."
    )
    assert last.state.failure.peer is None
    assert [type(action) for action in last.actions] == [EndJob]


def test_a_stop_needs_no_min_workers() -> None:
    state = after_failures(training(replace(TWO, min_workers=2)), (0, 1)).state
    state = decide(state, StopRequested("interrupted"), 1.5).state
    assert isinstance(state, Training)
    assert workers_of(declared(fail(state, 0, 1, 2.0, 16))) == [0]


def test_links_that_fail_now_and_then_are_avoided_and_the_job_goes_on() -> None:
    decision = after_failures(training(replace(TWO, min_workers=2)), *[(0, 1)] * 20, advance=1)
    assert isinstance(decision.state, Training)
    assert decision.state.members.links == (WeakLink((0, 1), 20, 20.0),)
    assert decide(decision.state, Tick(), 20.25).actions == ()

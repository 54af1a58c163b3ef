"""Spares, leaving workers and another number of workers, played to the pure membership."""

from dataclasses import replace

import pytest

from coordinator.played import (
    SETTINGS,
    Timed,
    declared,
    exited,
    heartbeat,
    killed,
    last_of,
    pid_of,
    play,
    registered,
    reported,
    training,
    types_of,
    workers_of,
)
from quorate.coordinator.events import (
    Dismiss,
    HeartbeatReceived,
    Refill,
    Refuse,
    Registered,
    Regroup,
    RelaySave,
    ResizeRequested,
    SaveRequested,
    StateReported,
    StopRequested,
)
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import State, Training
from quorate.core.generation import GenerationId
from quorate.observe.events import Resized, WorkerLost

WITH_SPARE = replace(SETTINGS, spares=1)
ALONE = replace(SETTINGS, workers=1)
FIRST, SECOND = GenerationId(3, 1), GenerationId(3, 2)


def leaving(worker: int, sequence: int = 5) -> HeartbeatReceived:
    return replace(heartbeat(worker, sequence), is_leaving=True)


def saved(worker: int, step: int, generation: int = 1) -> StateReported:
    return replace(reported(worker, step, generation), is_saved=True)


def with_spare() -> State:
    """Three at work, and one that stands by."""
    return last_of(start(WITH_SPARE, 0.0), *((0.0, registered(worker)) for worker in range(4))).state


class TestSpares:
    def test_one_that_stands_by_disturbs_nobody(self) -> None:
        decision = decide(training(WITH_SPARE), registered(3), 1.0)
        assert Regroup not in types_of(decision)
        assert isinstance(decision.state, Training)
        assert workers_of(decision.state.generation) == [0, 1, 2]

    def test_it_steps_in_at_once_for_a_lost_one(self) -> None:
        decisions = play(with_spare(), (1.0, killed(1)), (1.1, reported(0)), (1.1, reported(2)))
        formed = declared(decisions[-1])
        assert workers_of(formed) == [0, 2, 3]
        assert formed.behind == (3,), "it copies the state, and nobody has to be let in later"

    def test_the_replacement_stands_by_next(self) -> None:
        state = last_of(with_spare(), (1.0, killed(1)), (1.1, reported(0)), (1.1, reported(2))).state
        decision = decide(state, registered(1, life=1), 2.0)
        assert Regroup not in types_of(decision)

    def test_nobody_waits_for_a_spare_at_the_start(self) -> None:
        decision = last_of(start(WITH_SPARE, 0.0), *((0.0, registered(worker)) for worker in (0, 1, 3)))
        assert workers_of(declared(decision)) == [0, 1, 3]


class TestLeaving:
    def test_it_completes_its_step_and_the_others_go_on_without_it(self) -> None:
        decisions = play(
            training(), (1.0, leaving(1)), (1.1, reported(0, 17)), (1.1, reported(1, 17)), (1.1, reported(2, 17))
        )
        assert Regroup(FIRST, at_boundary=True) in decisions[0].actions
        assert Dismiss(1, pid_of(1)) in decisions[-1].actions
        formed = declared(decisions[-1])
        assert (workers_of(formed), formed.cursor.step, formed.behind) == ([0, 2], 17, ())

    def test_its_exit_is_no_loss_and_its_place_is_filled(self) -> None:
        state = last_of(training(), (1.0, leaving(1)), *((1.1, reported(worker, 17)) for worker in range(3))).state
        decision = decide(state, exited(1, 0), 1.2)
        assert types_of(decision) == [Refill]
        joined = decide(decision.state, registered(1, life=1), 2.0)
        assert Regroup(SECOND, at_boundary=True) in joined.actions

    def test_saying_it_again_changes_nothing(self) -> None:
        state = decide(training(), leaving(1), 1.0).state
        assert decide(state, leaving(1, sequence=6), 1.1).actions == decide(state, heartbeat(1, 6), 1.1).actions

    def test_one_that_dies_before_it_could_leave_is_a_loss(self) -> None:
        state = decide(training(), leaving(1), 1.0).state
        assert WorkerLost in types_of(decide(state, killed(1), 1.1))

    def test_whoever_leaves_alone_saves_first_and_another_goes_on_from_there(self) -> None:
        first = decide(training(ALONE), leaving(0), 1.0)
        assert Regroup(FIRST, at_boundary=True, saves=True) in first.actions
        gone = decide(first.state, saved(0, 17), 1.1)
        assert Dismiss(0, pid_of(0)) in gone.actions
        decision = decide(gone.state, exited(0, 0), 1.2)
        assert decision.actions == (Refill(0, 0.0, restore=True),)

    def test_without_a_checkpoint_nobody_goes_who_alone_holds_the_state(self) -> None:
        first = decide(training(ALONE), leaving(0), 1.0)
        decision = decide(first.state, reported(0, 17), 1.1)
        assert Dismiss not in types_of(decision)
        assert workers_of(declared(decision)) == [0]
        assert decision.actions[-1] == Regroup(SECOND, at_boundary=True, saves=True)

    def test_where_all_leave_they_save_together(self) -> None:
        decisions = play(training(), *((1.0, leaving(worker)) for worker in range(3)))
        assert [action.saves for one in decisions for action in one.actions if isinstance(action, Regroup)] == [
            False,
            False,
            True,
        ]
        reports = [(1.1, saved(0, 17)), (1.1, reported(1, 17)), (1.1, reported(2, 17))]
        gone = last_of(decisions[-1].state, *reports)
        assert types_of(gone) == [Dismiss] * 3

    def test_a_spare_that_leaves_is_let_go_at_once(self) -> None:
        decision = decide(with_spare(), leaving(3), 1.0)
        assert Regroup not in types_of(decision)
        assert Dismiss(3, pid_of(3)) in decision.actions

    def test_one_that_is_ahead_stays_until_the_others_have_what_it_has(self) -> None:
        # A loss has ended the generation, and the one that is leaving had completed the step alone.
        events: list[Timed] = [(1.0, leaving(1)), (1.1, killed(2)), (1.2, reported(1, 18)), (1.2, reported(0, 17))]
        decision = last_of(training(), *events)
        assert Dismiss not in types_of(decision)
        formed = declared(decision)
        assert (workers_of(formed), formed.cursor.step, formed.behind) == ([0, 1], 18, (0,))


class TestResizing:
    def test_more_are_awaited_and_let_in_at_a_boundary(self) -> None:
        grown = decide(training(), ResizeRequested(5), 1.0)
        assert grown.actions == (Resized(before=3, workers=5, time=1.0),)
        assert grown.state.members.awaited == {3, 4}  # type: ignore[union-attr]
        assert Regroup(FIRST, at_boundary=True) in decide(grown.state, registered(3), 2.0).actions

    def test_fewer_go_on_from_the_next_boundary(self) -> None:
        decisions = play(training(), (1.0, ResizeRequested(1)), *((1.1, reported(worker, 17)) for worker in range(3)))
        assert decisions[0].actions == (Resized(before=3, workers=1, time=1.0), Regroup(FIRST, at_boundary=True))
        assert workers_of(declared(decisions[-1])) == [0]
        assert [one for one in decisions[-1].actions if isinstance(one, Dismiss)] == [
            Dismiss(1, pid_of(1)),
            Dismiss(2, pid_of(2)),
        ]
        left = decide(decisions[-1].state, exited(2, 0), 1.2)
        assert left.actions == (), "nobody takes a place that is no more"

    def test_one_that_dies_in_a_place_that_is_no_more_is_not_replaced(self) -> None:
        state = decide(training(), ResizeRequested(2), 1.0).state
        decision = decide(state, killed(2), 1.1)
        assert WorkerLost in types_of(decision)
        assert Refill not in types_of(decision)

    def test_there_and_back_before_anybody_came(self) -> None:
        state = last_of(training(), (1.0, ResizeRequested(5)), (1.1, ResizeRequested(3))).state
        assert state.members.awaited == frozenset()  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("before", "workers", "why"),
        [
            ([], 0, "it has 8 lanes, so 1 to 8 are possible"),
            ([], 9, "it has 8 lanes, so 1 to 8 are possible"),
            ([(0.5, StopRequested("interrupted"))], 2, "it is stopping"),
        ],
    )
    def test_what_cannot_be_is_refused(self, before: list[Timed], workers: int, why: str) -> None:
        decision = last_of(training(), *before, (1.0, ResizeRequested(workers)))
        (refusal,) = decision.actions
        assert isinstance(refusal, Refuse)
        assert why in refusal.failure.message

    def test_not_below_the_fewest_that_the_user_allows(self) -> None:
        (refusal,) = decide(training(replace(SETTINGS, min_workers=2)), ResizeRequested(1), 1.0).actions
        assert isinstance(refusal, Refuse)
        assert "min_workers is 2" in refusal.failure.message

    def test_not_where_another_number_computes_something_else(self) -> None:
        together = training(replace(SETTINGS, is_fixed=True))
        (refusal,) = decide(together, ResizeRequested(4), 1.0).actions
        assert isinstance(refusal, Refuse)
        assert "the job cannot have 4 workers: batch norm takes the statistics of all 3" in refusal.failure.message
        assert decide(together, ResizeRequested(3), 1.0).actions == ()

    def test_a_place_that_does_not_exist_is_refused_until_it_does(self) -> None:
        newcomer: Registered = registered(3)
        assert types_of(decide(training(), newcomer, 1.0)) == [Refuse]
        grown = decide(training(), ResizeRequested(4), 1.0).state
        assert Refuse not in types_of(decide(grown, newcomer, 1.1))


class TestWishesForACheckpoint:
    def test_the_generation_at_work_is_told_and_nothing_changes(self) -> None:
        state = training()
        decision = decide(state, SaveRequested("a"), 1.0)
        assert decision.actions == (RelaySave(FIRST, "a"),)
        assert decision.state == state

    def test_a_job_that_stops_saves_as_well(self) -> None:
        stopping = decide(training(), StopRequested("interrupted"), 1.0).state
        assert decide(stopping, SaveRequested("a"), 1.1).actions == (RelaySave(FIRST, "a"),)

    def test_between_two_generations_it_has_to_be_asked_for_again(self) -> None:
        forming = last_of(training(), (1.0, killed(1))).state
        decision = decide(forming, SaveRequested("a"), 1.1)
        assert (decision.state, decision.actions) == (forming, ())
        assert "to be requested again" in decision.reason

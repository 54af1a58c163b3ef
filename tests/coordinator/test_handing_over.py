"""Whoever leaves hands over first, and nobody goes on from less than the job has: played to the pure membership."""

from dataclasses import replace

from coordinator.played import (
    FIRST,
    PEER_LOST,
    SETTINGS,
    Timed,
    asked_to_leave,
    declared,
    heartbeat,
    killed,
    last_of,
    messages_of,
    of_kind,
    pid_of,
    play,
    registered,
    reported,
    training,
    types_of,
    workers_of,
)
from quorate.coordinator.events import (
    DeclareGeneration,
    Dismiss,
    ExitReported,
    Expel,
    Refill,
    Refuse,
    Regroup,
    ResizeRequested,
    StateReported,
    StopRequested,
    Tick,
    Welcome,
)
from quorate.coordinator.forming import succeed
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Decision, Ended, Handover, Training
from quorate.core.generation import Cursor, GenerationId, Position, WorkerStatus
from quorate.observe.events import WorkerLost

ALONE = replace(SETTINGS, workers=1, spares=1)


def with_spare() -> Training:
    """Worker 0 trains alone, and worker 1 is its spare."""
    state = last_of(start(ALONE, 0.0), (0.0, registered(0)), (0.0, registered(1))).state
    assert isinstance(state, Training)
    return state


def left(worker: int) -> ExitReported:
    return ExitReported(worker, pid_of(worker), "a", 0, None, WorkerStatus())


def test_a_spare_does_not_begin_anew_while_somebody_brings_the_checkpoint() -> None:
    decision = decide(with_spare(), killed(0), 1.0)
    assert Refill(0, 0.0, restore=True) in decision.actions
    assert DeclareGeneration not in types_of(decision), "the spare holds just a beginning"
    formed = declared(decide(decision.state, registered(0, life=1, cursor=Cursor(12)), 2.0))
    assert (formed.cursor, workers_of(formed)) == (Cursor(12), [0]), "whoever has most, not whoever was here first"


def test_those_who_stay_copy_from_one_that_leaves() -> None:
    state = with_spare()
    asked = decide(state, asked_to_leave(0), 1.0)
    assert Regroup(FIRST, at_boundary=True, saves=True) in asked.actions
    promised = decide(asked.state, replace(reported(0, step=17), is_saved=True), 1.1)
    formed = declared(promised)
    assert (workers_of(formed), formed.behind) == ([0, 1], (1,))
    both = [(1.2, StateReported(worker, pid_of(worker), formed.id, Cursor(18))) for worker in (0, 1)]
    after = last_of(promised.state, *both)
    assert Dismiss(0, pid_of(0)) in after.actions
    assert workers_of(declared(after)) == [1]


def test_nobody_is_let_go_before_all_have_left_the_generation() -> None:
    state = training()
    asked = decide(state, asked_to_leave(1), 1.0)
    decisions = play(asked.state, *[(1.1, reported(worker, step=17)) for worker in (1, 0, 2)])
    assert [Dismiss in types_of(decision) for decision in decisions] == [False, False, True]


def test_a_newcomer_that_is_behind_the_checkpoint_makes_room_for_one_that_is_not() -> None:
    pair = replace(SETTINGS, workers=2)
    state = last_of(training(pair), (1.0, killed(0)), (1.1, reported(1, step=17))).state
    # Worker 0 is on its way when the job shrinks to one worker, and worker 1, which has the state, must leave.
    shrunk = decide(state, ResizeRequested(1), 1.2)
    second = GenerationId(3, 2)
    saved = StateReported(1, pid_of(1), second, Cursor(19), is_saved=True)
    gone = last_of(shrunk.state, (1.3, saved), (1.4, left(1)))
    came = decide(gone.state, registered(0, life=1), 2.0)
    assert Expel(0, pid_of(0, life=1)) in came.actions
    assert DeclareGeneration not in types_of(came)
    reaped = decide(came.state, killed(0, life=1), 2.1)
    assert Refill(0, 0.0, restore=True) in reaped.actions
    assert WorkerLost not in types_of(reaped)
    # If the checkpoint cannot be read, an older one has to do: it is not tried for ever.
    formed = declared(decide(reaped.state, registered(0, life=2, cursor=Cursor(9)), 3.0))
    assert formed.cursor == Cursor(9)


def test_a_broken_link_with_one_that_has_left_is_not_blamed() -> None:
    pair = replace(SETTINGS, workers=2)
    state = decide(training(pair), asked_to_leave(1), 1.0).state
    symptom = replace(reported(0, step=17), symptom=replace(PEER_LOST, peer=1))
    formed = declared(last_of(state, (1.1, symptom), (1.1, reported(1, step=17))))
    assert workers_of(formed) == [0]


def test_one_whose_place_is_no_more_comes_back_to_the_next_coordinator_and_leaves_as_it_should() -> None:
    before = training(replace(SETTINGS, workers=2)).generation
    handover = Handover(frozenset((worker, pid_of(worker)) for worker in range(2)), frozenset())
    state = succeed(replace(SETTINGS, incarnation=4, workers=1), handover, 100.0)
    back = [registered(worker, position=Position(before, has_left=False, has_trained=True)) for worker in range(2)]
    decisions = play(state, (100.1, back[1]), (100.1, back[0]))
    assert [types_of(decision)[0] for decision in decisions] == [Welcome, Welcome]
    assert Regroup(before.id, at_boundary=True) in decisions[-1].actions
    assert types_of(decide(state, registered(2), 100.1)) == [Refuse]


# --- nobody begins from nothing


PAIR = replace(SETTINGS, workers=2)


def with_newcomer_alone() -> Decision:
    """Worker 0 died, its replacement was built while worker 1 held the state, and worker 1 has died since."""
    first = play(training(PAIR), (1.0, killed(0)), (1.1, reported(1, step=17)), (1.2, killed(1)))
    assert Refill(0, 0.0, restore=False) in first[0].actions
    assert Refill(1, 0.0, restore=True) in first[2].actions
    came = decide(first[-1].state, registered(0, life=1), 2.0)
    assert DeclareGeneration not in types_of(came), "worker 1 brings the checkpoint"
    return came


def test_a_newcomer_without_state_does_not_begin_anew_when_the_place_of_who_was_to_restore_is_removed() -> None:
    shrunk = decide(with_newcomer_alone().state, ResizeRequested(1), 2.1)
    assert DeclareGeneration not in types_of(shrunk)
    assert Expel(0, pid_of(0, life=1)) in shrunk.actions
    assert any("newest checkpoint" in message for message in messages_of(shrunk.actions, "info"))
    late = decide(shrunk.state, registered(1, life=1, cursor=Cursor(16)), 2.2)
    assert types_of(late) == [Refuse], "its place is no more"
    reaped = decide(late.state, killed(0, life=1), 2.3)
    assert Refill(0, 0.0, restore=True) in reaped.actions
    formed = decide(reaped.state, registered(0, life=2, cursor=Cursor(16)), 3.0)
    assert declared(formed).cursor == Cursor(16)
    assert messages_of(formed.actions) == []


def test_where_no_checkpoint_exists_the_job_begins_again_and_says_so() -> None:
    formed = decide(with_newcomer_alone().state, registered(1, life=1), 2.1)
    assert declared(formed).cursor == Cursor()
    (told,) = messages_of(formed.actions)
    assert "there is no checkpoint" in told


def test_a_generation_that_ends_before_its_first_step_is_not_told_as_a_new_beginning() -> None:
    decisions = play(training(PAIR), (1.0, killed(0)), (1.1, reported(1, step=0)))
    assert declared(decisions[-1]).cursor == Cursor()
    assert messages_of(decisions[-1].actions) == []


def test_a_stop_while_nobody_holds_the_state_ends_the_job_as_it_was_saved() -> None:
    stopped = decide(with_newcomer_alone().state, StopRequested("interrupted"), 2.1)
    assert stopped.state == Ended(None, {"ending": "interrupted"}, heard={0: 0})


def test_what_was_found_before_somebody_held_the_state_again_is_out_of_date() -> None:
    """Worker 0 looked for a checkpoint while nobody had come back yet; worker 1 came, trained, saved, and is gone."""
    before = training(PAIR).generation
    handover = Handover(frozenset((worker, pid_of(worker)) for worker in range(2)), frozenset())
    state = succeed(replace(PAIR, incarnation=4), handover, 100.0)
    gone = decide(state, killed(0), 100.1)
    assert Refill(0, 0.0, restore=True) in gone.actions
    held = Position(before, Cursor(17), has_left=False, has_trained=True)
    back = last_of(gone.state, (100.2, registered(1, position=held)))
    promised = StateReported(1, pid_of(1), before.id, Cursor(19))
    alone = last_of(back.state, (100.3, promised), (100.4, killed(1)), (100.5, registered(0, life=1)))
    assert DeclareGeneration not in types_of(alone)
    shrunk = decide(alone.state, ResizeRequested(1), 100.6)
    assert Expel(0, pid_of(0, life=1)) in shrunk.actions


def test_the_next_coordinator_has_somebody_look_for_the_checkpoint_again() -> None:
    handover = Handover(frozenset({(0, pid_of(0, life=1))}), frozenset({1}))
    state = succeed(replace(PAIR, incarnation=4), handover, 100.0)
    waiting = registered(0, life=1, position=Position())
    both = last_of(state, (100.1, waiting), (100.2, registered(1, life=1)))
    assert Expel(0, pid_of(0, life=1)) in both.actions, "both may have been started while others held the state"
    reaped = decide(both.state, killed(0, life=1), 100.3)
    assert Refill(0, 0.0, restore=True) in reaped.actions
    assert declared(decide(reaped.state, registered(0, life=2, cursor=Cursor(16)), 100.4)).cursor == Cursor(16)


def test_before_the_first_generation_the_next_coordinator_begins_with_whoever_is_there() -> None:
    handover = Handover(frozenset({(0, pid_of(0))}), frozenset({1}), has_begun=False)
    state = succeed(replace(PAIR, incarnation=4), handover, 100.0)
    formed = last_of(state, (100.1, registered(0, position=Position())), (100.2, registered(1)))
    assert declared(formed).cursor == Cursor()
    assert messages_of(formed.actions) == []


def test_a_donor_that_dies_leaves_nobody_who_begins_from_less_than_the_checkpoint() -> None:
    state = last_of(training(PAIR), (1.0, killed(0)), (1.1, reported(1, step=17)), (1.2, registered(0, life=1))).state
    second = declared(decide(state, reported(1, step=18, generation=2), 1.3))
    copying = decide(state, reported(1, step=18, generation=2), 1.3).state
    lost = decide(copying, killed(1), 1.4)
    assert Refill(1, 0.0, restore=True) in lost.actions
    halfway = StateReported(0, pid_of(0, life=1), second.id, Cursor())
    waits = decide(lost.state, halfway, 1.5)
    assert DeclareGeneration not in types_of(waits)
    formed = declared(decide(waits.state, registered(1, life=1, cursor=Cursor(16)), 2.0))
    assert (formed.cursor, formed.behind) == (Cursor(16), (0,))


def test_where_all_are_expelled_whoever_follows_looks_for_the_checkpoint() -> None:
    state = training(PAIR)
    for now in (2.0, 4.0):
        state = decide(state, Tick(), now).state  # type: ignore[assignment]
    lost = play(state, (5.0, Tick()), (5.1, Tick()), (5.2, killed(0)), (5.3, killed(1)))
    assert of_kind(Expel | Refill, *lost) == [
        *(Expel(worker, pid_of(worker)) for worker in range(2)),
        *(Refill(worker, 0.0, restore=True) for worker in range(2)),
    ]
    came = play(lost[-1].state, *((6.0, registered(worker, life=1, cursor=Cursor(16))) for worker in range(2)))
    assert DeclareGeneration not in types_of(came[0])
    assert declared(came[1]).cursor == Cursor(16)


def test_min_workers_is_not_waited_for_by_those_who_only_hand_over() -> None:
    """Three are needed, and nobody comes to the place of one that leaves: the last holder would wait without end."""
    settings = replace(SETTINGS, min_workers=3)
    gone: list[Timed] = [
        (1.0, killed(0)),
        (1.1, replace(heartbeat(1), is_leaving=True)),
        (1.2, reported(1)),
        (1.2, replace(heartbeat(2), is_leaving=True)),
        (1.3, reported(2)),
    ]
    alone = last_of(training(settings), *gone)
    assert workers_of(declared(alone)) == [1, 2], "they save what only they hold"
    *_, broken = play(
        alone.state,
        (1.5, registered(0, life=1)),
        (1.6, replace(reported(1, 17, generation=2), is_saved=True)),
        (1.7, reported(2, 17, generation=2)),
    )
    copying = declared(broken)
    assert (workers_of(copying), copying.behind) == ([0, 1], (0,)), "one has come that can copy it"
    done = play(broken.state, (2.0, reported(0, 18, generation=3, life=1)), (2.1, reported(1, 18, generation=3)))
    assert {Dismiss(1, pid_of(1)), Dismiss(2, pid_of(2))} <= {
        action for each in (broken, *done) for action in each.actions
    }
    assert "min_workers is 3" in done[-1].reason

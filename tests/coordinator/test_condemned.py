"""Replicas that differ: nobody of the generation is trusted, all are replaced, and go on from a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.played import (
    FIRST,
    PEER_LOST,
    SETTINGS,
    Timed,
    completed,
    declared,
    exited,
    heartbeat,
    killed,
    last_of,
    of_kind,
    pid_of,
    play,
    registered,
    reported,
    training,
    workers_of,
)
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import (
    DeclareGeneration,
    EndJob,
    Expel,
    FailureReported,
    Refill,
    Regroup,
    ResizeRequested,
    StopRequested,
)
from quorate.coordinator.forming import succeed
from quorate.coordinator.losses import MOST_DIVERGED
from quorate.coordinator.membership import start
from quorate.coordinator.states import Decision, Ended, Forming, Handover
from quorate.core.failure import Failure
from quorate.core.generation import DIVERGED, Cursor, GenerationId, Position
from quorate.observe.events import RolledBack, WorkerLost
from quorate.observe.jsonl import JsonlSink


def differing(by: int, *culprits: int, generation: GenerationId = FIRST, life: int = 0) -> FailureReported:
    failure = Failure("ReplicasDiffer", "The replicas differ after step 16.", worker=by, step=17, culprits=culprits)
    return FailureReported(by, failure, pid_of(by, life), generation)


def losses(decision: Decision) -> dict[int, str]:
    found = of_kind(WorkerLost, decision)
    return {lost.worker: lost.message or "" for lost in found if lost.worker is not None}


def rollbacks(decision: Decision) -> list[int | None]:
    return [action.step for action in of_kind(RolledBack, decision)]


def expelled(decision: Decision) -> list[int]:
    return [action.worker for action in of_kind(Expel, decision)]


def reaped(workers: Sequence[int], now: float, life: int = 0) -> list[Timed]:
    return [(now, exited(worker, DIVERGED, life=life)) for worker in workers]


def back(workers: Sequence[int], now: float, life: int, step: int = 10) -> list[Timed]:
    return [(now, registered(worker, life=life, cursor=Cursor(step))) for worker in workers]


def test_all_are_replaced_and_the_culprit_is_named() -> None:
    decision = last_of(training(), (1.0, differing(0, 2)))
    assert isinstance(decision.state, Forming)
    assert expelled(decision) == [0, 1, 2]
    assert list(losses(decision)) == [2]
    assert "worker 2 (pid 4712 on host a) holds wrong bits" in losses(decision)[2]
    assert Regroup(FIRST, at_boundary=False) in decision.actions


@pytest.mark.parametrize(("kind", "stays"), [("ReplicasDiffer", True), ("LanesDiffer", False)])
def test_where_lanes_differ_nobody_keeps_what_was_restored_from_a_checkpoint(kind: str, stays: bool) -> None:
    late = registered(2, life=1, cursor=Cursor(10))
    state = last_of(training(), (1.0, killed(2)), (1.0, reported(0)), (1.0, reported(1)), (1.1, late)).state
    assert not isinstance(state, Ended)
    assert state.members.find(2) is not None
    wrong = replace(differing(0, 1).failure, kind=kind)
    within = state.members.enrolled[0].within or FIRST
    decision = last_of(state, (1.2, FailureReported(0, wrong, pid_of(0), within)))
    assert (2 not in expelled(decision)) == stays, decision


def test_without_a_majority_each_may_be_wrong() -> None:
    decision = last_of(training(replace(SETTINGS, workers=2)), (1.0, differing(1)))
    assert expelled(decision) == [0, 1]
    assert all("may hold wrong bits" in message for message in losses(decision).values())
    assert sorted(losses(decision)) == [0, 1]


def test_what_the_others_tell_of_the_same_changes_nothing() -> None:
    first, *later = play(training(), (1.0, differing(0, 2)), (1.0, differing(1, 2)), (1.0, differing(2, 2)))
    assert all(decision.actions == () and decision.state == first.state for decision in later)


def test_who_has_left_the_generation_already_is_replaced_too() -> None:
    decision = last_of(training(), (1.0, reported(1, symptom=PEER_LOST)), (1.0, differing(0, 2)))
    assert expelled(decision) == [0, 1, 2]


def test_a_worker_that_ends_for_it_without_a_word_tells_it_by_its_exit_code() -> None:
    decision = last_of(training(), (1.0, exited(0, DIVERGED)))
    assert expelled(decision) == [1, 2], "the first is gone already"
    assert sorted(losses(decision)) == [0, 1, 2]
    assert [refill.worker for refill in of_kind(Refill, decision)] == [0], "nobody tells of its end again"
    *_, formed = play(decision.state, *reaped((1, 2), 1.1), *back((0, 1, 2), 2.0, life=1))
    assert workers_of(declared(formed)) == [0, 1, 2]


def test_of_a_coordinator_that_has_just_taken_over_nobody_is_believed_either() -> None:
    taken_over = succeed(
        SETTINGS, Handover(frozenset((worker, pid_of(worker)) for worker in range(3)), frozenset()), 1.0
    )
    decision = last_of(taken_over, (1.0, exited(0, DIVERGED)))
    assert expelled(decision) == [1, 2]
    assert sorted(losses(decision)) == [0, 1, 2]
    assert [refill.worker for refill in of_kind(Refill, decision)] == [0]


def test_one_that_was_let_go_finds_it_in_its_last_save() -> None:
    leaving = replace(heartbeat(2), is_leaving=True)
    state = last_of(training(), (1.0, leaving), *((1.1, reported(worker)) for worker in range(3))).state
    assert not isinstance(state, Ended)
    assert state.members.dismissed == {(2, pid_of(2))}
    decision = last_of(state, (1.2, exited(2, DIVERGED)))
    assert expelled(decision) == [0, 1]


def test_who_was_left_out_after_it_had_trained_gives_its_state_to_nobody() -> None:
    # A spare since the job was made smaller: what it holds has the wrong gradients in it as well.
    settings = replace(SETTINGS, spares=1, workers=3)
    events: list[Timed] = [(0.0, registered(worker)) for worker in range(4)]
    state = last_of(start(settings, 0.0), *events).state
    smaller: list[Timed] = [(1.0, ResizeRequested(2)), *((1.1, reported(worker, step=16)) for worker in range(3))]
    at_work = last_of(state, *smaller)
    assert workers_of(declared(at_work)) == [0, 1]
    decision = last_of(at_work.state, (2.0, differing(0, generation=GenerationId(3, 2))))
    assert expelled(decision) == [0, 1, 2]


def test_the_next_coordinator_knows_of_it_and_turns_those_away_who_come_back() -> None:
    present = frozenset((worker, pid_of(worker)) for worker in range(3))
    taken_over = succeed(SETTINGS, Handover(present, frozenset(), is_condemned=True), 1.0)
    generation = training().generation
    position = Position(generation, Cursor(16), has_left=True, has_trained=True)
    decisions = play(taken_over, *((1.1, registered(worker, position=position)) for worker in range(3)))
    assert [worker for decision in decisions for worker in expelled(decision)] == [0, 1, 2]
    *_, formed = play(decisions[-1].state, *reaped((0, 1, 2), 1.2), *back((0, 1, 2), 2.0, life=1))
    assert declared(formed).cursor == Cursor(10)
    assert rollbacks(formed) == [10]


def test_what_was_written_of_it_is_recalled_until_a_generation_has_begun(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    event_log = EventLog(sink)

    def recalled() -> bool:
        return EventLog(JsonlSink(tmp_path / "events.jsonl")).recall(0).is_condemned

    event_log.record(DeclareGeneration(training().generation))
    assert not recalled()
    event_log.publish(WorkerLost(cause="ReplicasDiffer", message="they differ", worker=2))
    event_log.publish(WorkerLost(cause="WorkerLost", message="killed", worker=1))
    assert recalled()
    event_log.record(DeclareGeneration(training().generation))
    assert not recalled()
    sink.close()


def test_all_begin_again_from_the_checkpoint_and_what_was_told_since_is_told_again() -> None:
    condemned = last_of(training(), (1.0, differing(0, 2)))
    gone = play(condemned.state, *reaped((0, 1, 2), 1.1))
    ordered = [refill for decision in gone for refill in of_kind(Refill, decision)]
    assert [(refill.worker, refill.restore) for refill in ordered] == [(0, True), (1, True), (2, True)]
    formed = play(gone[-1].state, *back((0, 1, 2), 2.0, life=1))
    generation = declared(formed[-1])
    assert (workers_of(generation), generation.cursor) == ([0, 1, 2], Cursor(10))
    assert rollbacks(formed[-1]) == [10]


def test_nothing_is_told_again_after_a_usual_loss() -> None:
    died = play(training(), *((1.0, killed(worker)) for worker in range(3)))
    formed = last_of(died[-1].state, *back((0, 1, 2), 2.0, life=1))
    assert rollbacks(formed) == []


def test_different_weights_in_the_end_are_the_same_case() -> None:
    decision = last_of(training(), (1.0, completed(0)), (1.0, completed(1)), (1.0, completed(2, "e")))
    assert expelled(decision) == [0, 1, 2]
    assert "worker 0 has d, worker 1 has d, worker 2 has e" in losses(decision)[2]
    assert list(losses(decision)) == [2]


def test_again_and_again_without_getting_any_further_ends_the_job() -> None:
    state = last_of(training(), (1.0, differing(0, 2))).state
    for life in range(1, MOST_DIVERGED + 2):
        gone = play(state, *reaped((0, 1, 2), 1.1, life=life - 1))
        formed = play(gone[-1].state, *back((0, 1, 2), 2.0, life=life))
        generation = declared(formed[-1]).id
        decision = last_of(formed[-1].state, (3.0, differing(0, 2, generation=generation, life=life)))
        state = decision.state
        assert isinstance(state, Ended) == (life == MOST_DIVERGED + 1), life
    assert any(isinstance(action, EndJob) for action in decision.actions)
    assert isinstance(state, Ended)
    assert state.failure is not None
    assert "in a row without any progress" in state.failure.message


def test_a_job_that_is_stopping_ends_without_the_wrong_state() -> None:
    last = last_of(training(), (0.5, StopRequested("interrupted")), (1.0, differing(0, 2)), *reaped((0, 1, 2), 1.1))
    assert isinstance(last.state, Ended)
    assert last.state.failure is None


def not_applied(by: int) -> FailureReported:
    failure = Failure("UserCodeError", f"worker {by}, step 17: no (in optimizer.step())", by, step=17, phase="apply")
    return FailureReported(by, failure, pid_of(by), FIRST)


def test_a_step_that_only_one_cannot_apply_shows_that_its_replica_differs() -> None:
    accused, exit_, promise = play(
        training(), (1.0, not_applied(0)), (1.1, exited(0, 1)), (1.2, reported(1, step=17, symptom=PEER_LOST))
    )
    assert accused.actions == ()
    assert "no (in optimizer.step())" in losses(exit_)[0]
    assert expelled(promise) == [1, 2]
    assert "Worker 0 could not apply step 17, and worker 1 could" in losses(promise)[1]


def test_so_it_is_if_the_others_have_left_before_it_is_told() -> None:
    decision = last_of(training(), (1.0, reported(1, step=17, symptom=PEER_LOST)), (1.1, not_applied(0)))
    assert expelled(decision) == [0, 1, 2]
    assert list(losses(decision)) == [0]


def test_a_step_that_two_cannot_apply_ends_the_job_with_their_error() -> None:
    last = last_of(training(), (1.0, not_applied(0)), (1.1, not_applied(2)))
    assert isinstance(last.state, Ended)
    assert last.state.failure is not None
    assert "no (in optimizer.step())" in last.state.failure.message


def test_one_that_could_not_apply_a_step_which_nobody_else_has_is_lost_like_any_other() -> None:
    *_, last = play(
        training(), (1.0, not_applied(0)), (1.1, exited(0, 1)), *((1.2, reported(worker)) for worker in (1, 2))
    )
    assert workers_of(declared(last)) == [1, 2]


def test_alone_it_ends_the_job_at_once() -> None:
    last = last_of(training(replace(SETTINGS, workers=1)), (1.0, not_applied(0)))
    assert isinstance(last.state, Ended)

"""Replicas that differ: nobody of the generation is trusted, all are replaced, and go on from a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace

from coordinator.played import (
    FIRST,
    PEER_LOST,
    TERMS,
    Timed,
    completed,
    declared,
    exited,
    killed,
    last_of,
    pid_of,
    play,
    registered,
    reported,
    training,
    workers_of,
)
from quorate.coordinator.actions import EndJob, Expel, RecordLoss, RecordRollback, Refill, Regroup
from quorate.coordinator.decision import Decision
from quorate.coordinator.events import FailureReported, StopRequested
from quorate.coordinator.forming import MOST_DIVERGED
from quorate.coordinator.states import Ended, Forming
from quorate.core.cursor import Cursor
from quorate.core.exit_codes import DIVERGED
from quorate.core.failure import Failure
from quorate.core.generation import GenerationId


def differing(by: int, *culprits: int, generation: GenerationId = FIRST, life: int = 0) -> FailureReported:
    failure = Failure("ReplicasDiffer", "The replicas differ after step 16.", worker=by, step=17, culprits=culprits)
    return FailureReported(by, failure, pid_of(by, life), generation)


def losses(decision: Decision) -> dict[int, str]:
    found = (action.failure for action in decision.actions if isinstance(action, RecordLoss))
    return {failure.worker: failure.message for failure in found if failure.worker is not None}


def expelled(decision: Decision) -> list[int]:
    return [action.worker for action in decision.actions if isinstance(action, Expel)]


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


def test_without_a_majority_each_may_be_wrong() -> None:
    decision = last_of(training(replace(TERMS, workers=2)), (1.0, differing(1)))
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
    assert expelled(decision) == [0, 1, 2]


def test_all_begin_again_from_the_checkpoint_and_what_was_told_since_is_told_again() -> None:
    condemned = last_of(training(), (1.0, differing(0, 2)))
    gone = play(condemned.state, *reaped((0, 1, 2), 1.1))
    refills = [action for decision in gone for action in decision.actions if isinstance(action, Refill)]
    assert [(refill.worker, refill.restore) for refill in refills] == [(0, True), (1, True), (2, True)]
    formed = play(gone[-1].state, *back((0, 1, 2), 2.0, life=1))
    generation = declared(formed[-1])
    assert (workers_of(generation), generation.cursor) == ([0, 1, 2], Cursor(10))
    assert RecordRollback(10) in formed[-1].actions


def test_nothing_is_told_again_after_a_usual_loss() -> None:
    died = play(training(), *((1.0, killed(worker)) for worker in range(3)))
    formed = last_of(died[-1].state, *back((0, 1, 2), 2.0, life=1))
    assert not [action for action in formed.actions if isinstance(action, RecordRollback)]


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
    assert "without the job getting any further" in state.failure.message


def test_a_job_that_is_stopping_ends_without_the_wrong_state() -> None:
    last = last_of(training(), (0.5, StopRequested("interrupted")), (1.0, differing(0, 2)), *reaped((0, 1, 2), 1.1))
    assert isinstance(last.state, Ended)
    assert last.state.failure is None

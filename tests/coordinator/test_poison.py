"""A step that kills every worker that takes it: the job ends after a few, and names the samples."""

import signal
from dataclasses import replace

import pytest

from coordinator.played import SETTINGS, pid_of, registered, reported, training
from quorate.coordinator.events import ExitReported, Reading, Tick
from quorate.coordinator.membership import decide
from quorate.coordinator.stall import FATAL
from quorate.coordinator.states import Ended, Forming, State, Training
from quorate.core.generation import Cursor, GenerationId, WorkerStatus

ONE = replace(SETTINGS, workers=1)
SAMPLES = tuple(range(100, 164))
READING = Reading(lane=5, epoch=2, samples=SAMPLES, count=64)


def died(
    life: int,
    step: int = 17,
    phase: str = "compute",
    reading: Reading | None = READING,
    number: int | None = signal.SIGSEGV,
    worker: int = 0,
) -> ExitReported:
    code = 0 if number is None else None
    return ExitReported(worker, pid_of(worker, life), "a", code, number, WorkerStatus(step, phase), reading)


def lives(*deaths: ExitReported) -> State:
    """A job of one worker that begins again after each of these deaths."""
    state: State = training(ONE)
    for life, death in enumerate(deaths):
        state = decide(state, death, 1.0 + life).state
        if isinstance(state, Ended):
            return state
        state = decide(state, registered(0, life + 1), 1.5 + life).state
    return state


def test_the_third_death_in_the_same_lane_of_the_same_step_ends_the_job_and_names_the_samples() -> None:
    ways = [signal.SIGSEGV, None, signal.SIGABRT]
    assert isinstance(lives(*(died(life, number=ways[life]) for life in range(FATAL - 1))), Training)
    state = lives(*(died(life, number=ways[life]) for life in range(FATAL)))
    assert isinstance(state, Ended)
    failure = state.failure
    assert failure is not None
    assert (failure.kind, failure.step, failure.lane, failure.phase) == ("PoisonBatch", 17, 5, "compute")
    assert failure.samples == SAMPLES
    assert failure.is_repeatable
    assert failure.message.startswith("step 17 (epoch 2) kills every worker that takes its lane 5: worker 0 (pid 4710")
    for word in ("was killed by SIGSEGV", "(code 0)", "was killed by SIGABRT", "samples 100, 101", "(64 in all)"):
        assert word in failure.message


def test_of_very_many_samples_only_the_first_are_known() -> None:
    state = lives(*(died(life, reading=Reading(0, 0, tuple(range(512)), 4096)) for life in range(FATAL)))
    assert isinstance(state, Ended)
    assert state.failure is not None
    assert "(4096 in all), of which failure.samples in result.json lists the first" in state.failure.message


@pytest.mark.parametrize(
    "between",
    [
        died(2, step=18),
        died(2, step=16),
        died(2, phase="exchange"),
        died(2, phase="evaluation", reading=None),
        died(2, reading=None),
        died(2, reading=Reading(lane=4)),
    ],
    ids=["later step", "earlier step", "exchange", "evaluation", "no lane", "another lane"],
)
def test_deaths_elsewhere_are_no_poison(between: ExitReported) -> None:
    deaths = [died(0), died(1), between]
    assert isinstance(lives(*deaths), Training)


def test_deaths_in_several_lanes_of_one_step_count_for_each() -> None:
    """Where a step kills in every lane, those who share it die by turns."""
    other = Reading(lane=1)
    deaths = [died(0), died(1, reading=other), died(2), died(3, reading=other)]
    assert isinstance(lives(*deaths), Training)
    ended = lives(*deaths, died(4))
    assert isinstance(ended, Ended)
    assert ended.failure is not None
    assert ended.failure.kind == "PoisonBatch"


def test_a_step_that_somebody_has_completed_is_no_poison() -> None:
    two = replace(SETTINGS, workers=2)
    state: State = training(two)
    for life in range(FATAL + 1):
        # Worker 0 dies at step 17; worker 1 turns out to have completed it, and they go on.
        state = decide(state, died(life), 1.0 + life).state
        assert isinstance(state, Forming), life
        within = GenerationId(3, state.members.generations)
        state = decide(state, reported(1, 17, within.number), 1.1 + life).state
        assert isinstance(state, Training)
        assert state.members.victims == ()
        state = decide(state, registered(0, life + 1), 1.2 + life).state
        state = decide(state, reported(1, 17, within.number + 1), 1.3 + life).state
        assert isinstance(state, Training)
        assert state.generation.cursor == Cursor(17)


def test_who_is_silent_has_not_died_of_its_samples() -> None:
    state = decide(training(ONE), died(0), 1.0).state
    state = decide(state, registered(0, 1), 1.5).state
    assert isinstance(state, Training)
    assert len(state.members.victims) == 1
    for now in (2.0, 4.0, 6.0, 6.6):
        state = decide(state, Tick(), now).state
    assert not isinstance(state, Ended)
    assert state.members.victims == ()


def test_who_begins_again_from_a_checkpoint_does_not_get_a_new_budget() -> None:
    """Two workers die one after the other: each time the second has completed a step, which is no new one."""
    state: State = training(replace(SETTINGS, workers=2))
    for life in range(20):
        for worker in (0, 1):
            death = died(life, phase="evaluation", reading=None, worker=worker)
            state = decide(state, death, 1.0 + life).state
            if isinstance(state, Ended):
                assert state.failure is not None
                assert "without a completed step in between" in state.failure.message
                return
            if worker == 0:
                state = decide(state, reported(1, 1, state.members.generations, life=life), 1.1 + life).state
                assert isinstance(state, Training)
                assert state.generation.cursor == Cursor(1)
        for worker in (0, 1):
            state = decide(state, registered(worker, life + 1), 1.5 + life).state
        assert isinstance(state, Training)
        assert state.generation.cursor == Cursor(0)
    raise AssertionError("they die for ever")

"""Sharded gangs: who stands where, which part of the state is held, and when all go back to a checkpoint."""

import random
from dataclasses import replace

import pytest

from coordinator.played import (
    PEER_LOST,
    SETTINGS,
    all_report,
    asked_to_leave,
    completed,
    declared,
    exited,
    forms,
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
    workers_of,
)
from quorate.coordinator.events import (
    Dismiss,
    ExitReported,
    Expel,
    FailureReported,
    MembershipEvent,
    Refill,
    Refuse,
    Regroup,
    ResizeRequested,
    StopRequested,
)
from quorate.coordinator.forming import succeed
from quorate.coordinator.membership import decide, start
from quorate.coordinator.places import news_of, wakes
from quorate.coordinator.states import Ended, Forming, Handover, JobSettings, State, Training
from quorate.core.failure import Failure
from quorate.core.generation import LEFT, Cursor, GenerationId, MeshShape, Pace, Position, WorkerStatus
from quorate.observe.events import Resized, RolledBack


def meshed(replicate: int = 1, shard: int = 1, tensor: int = 1, lanes: int = 4) -> JobSettings:
    mesh = MeshShape(replicate, shard, tensor)
    return replace(SETTINGS, lanes=lanes, workers=mesh.size, mesh=mesh)


SHARDED, REPLICATED = meshed(shard=2), meshed(replicate=2, shard=2)


def vacant(state: State, *processes: int) -> dict[int, bool]:
    """Which places are to be filled, by the word of a supervisor that has these; and whether from a checkpoint."""
    news = news_of(state, {(worker, pid_of(worker)) for worker in processes}, 9.0)
    return {worker: vacancy.restore for worker, vacancy in news.vacant.items()}


# --- who stands where


def test_a_mesh_begins_in_full_and_each_stands_in_the_place_of_its_number() -> None:
    settings = meshed(replicate=2, shard=1, tensor=2)
    decisions = play(start(settings, 0.0), *((0.0, registered(worker)) for worker in (3, 1, 0, 2)))
    assert [forms(decision) for decision in decisions] == [False, False, False, True]
    formed = declared(decisions[-1])
    assert workers_of(formed) == [0, 1, 2, 3]
    assert [list(member.lanes) for member in formed.members] == [[0, 1], [], [2, 3], []]
    assert [member.part for member in formed.members] == [0, 1, 0, 1]
    assert (formed.lanes, formed.restored) == (4, None)


def test_a_replacement_has_the_place_of_the_one_that_it_replaces() -> None:
    decisions = play(training(REPLICATED), (1.0, killed(1)), *all_report((0, 2, 3)), (2.0, registered(1, life=1)))
    assert not any(map(forms, decisions[:-1])), "a mesh is there in full, or not at all"
    assert Refill(1, 0.0, restore=False) in decisions[0].actions
    formed = declared(decisions[-1])
    assert (workers_of(formed), formed.cursor, formed.behind) == ([0, 1, 2, 3], Cursor(16), (1,))
    assert formed.holders(1) == (3,)


def test_another_number_of_workers_is_refused_with_what_to_do() -> None:
    decision = decide(training(REPLICATED), ResizeRequested(2), 1.0)
    (refusal,) = of_kind(Refuse, decision)
    assert "4 workers (replicate 2 × shard 2)" in refusal.failure.message
    assert "resume" in refusal.failure.message
    assert not of_kind(Resized, decision)


def test_a_bad_link_is_named_and_tried_as_it_is_until_the_job_is_given_up() -> None:
    state: State = training(meshed(shard=4))
    told: list[str] = []
    for generation in range(1, 12):
        now = 10.0 * generation
        failure = replace(PEER_LOST, peer=1)
        decisions = play(
            state,
            (now, replace(reported(0, 16, generation), symptom=failure)),
            *all_report((1, 2, 3), 16, generation, now),
        )
        state = decisions[-1].state
        told += messages_of(action for decision in decisions for action in decision.actions)
        if isinstance(state, Ended):
            break
        assert workers_of(declared(decisions[-1])) == [0, 1, 2, 3]
    assert isinstance(state, Ended)
    assert state.failure is not None
    assert "each worker of a sharded gang has its place" in state.failure.message
    assert any("failed 2 times" in message and "tried as it is" in message for message in told)


def test_who_tells_of_no_lane_is_judged_by_those_that_it_computes() -> None:
    state: State = training(meshed(shard=2, tensor=2))
    told: list[str] = []
    for sequence in range(1, 60):
        for worker in range(4):
            pace = Pace(1, 2, 0.0, 0.5 if worker == 1 else 0.1, 0.0)
            beat = replace(heartbeat(worker, sequence), pace=pace)
            decision = decide(state, beat, 0.1 * sequence)
            state = decision.state
            told += messages_of(decision.actions)
    (message,) = told
    assert "worker 1" in message
    assert "lanes 0 to 1" in message
    assert "balance" not in message


def test_initial_weights_are_compared_between_those_who_hold_the_same_part() -> None:
    begun = last_of(start(REPLICATED, 0.0), (0.0, registered(0)), (0.0, registered(1, tensors={"w": "2"}))).state
    assert isinstance(begun, Forming)
    differs = decide(begun, registered(2, tensors={"w": "3"}), 0.0)
    assert isinstance(differs.state, Ended)
    assert "worker 2 built other initial weights than worker 0" in differs.reason


def test_what_one_cannot_apply_is_no_proof_against_its_part() -> None:
    state = training(SHARDED)
    failure = Failure("ValueError", "no", step=17, phase="apply", worker=0)
    assert isinstance(decide(state, FailureReported(0, failure, pid_of(0)), 1.0).state, Ended)


# --- a part is lost


def test_a_lost_part_takes_all_back_to_the_checkpoint_that_the_replacement_has_found() -> None:
    lost, report = play(training(SHARDED), (1.0, killed(1)), *all_report((0,), 17))
    assert not vacant(lost.state, 0), "worker 0 may still save"
    assert wakes(reported(0), report)
    assert vacant(report.state, 0) == {1: True}
    formed = decide(report.state, registered(1, life=1, cursor=Cursor(12)), 2.0)
    generation = declared(formed)
    assert (generation.restored, generation.behind) == (Cursor(12), (0,))
    assert [event.step for event in of_kind(RolledBack, formed)] == [12]


def test_without_a_checkpoint_who_has_trained_makes_room_and_all_begin_anew() -> None:
    """Nobody keeps the initial weights, so that a generation with a survivor would be over at once."""
    decisions = play(training(SHARDED), (1.0, killed(1)), *all_report((0,), 17), (2.0, registered(1, life=1)))
    assert not any(map(forms, decisions))
    assert of_kind(Expel, *decisions) == [Expel(0, pid_of(0))], "who has just begun may stay"
    gone = decide(decisions[-1].state, killed(0), 2.1)
    assert Refill(0, 0.0, restore=True) in gone.actions
    after = decide(gone.state, registered(0, life=1), 3.0)
    generation = declared(after)
    assert (generation.restored, generation.behind) == (Cursor(), ())
    assert any("restarts at step 1" in message for message in messages_of(after.actions))


def test_a_checkpoint_that_is_found_after_all_is_taken_up() -> None:
    """A save of the last generation may come to its end after others have looked for one."""
    lost = play(training(SHARDED), (1.0, killed(1)), *all_report((0,), 17), (2.0, registered(1, life=1)))
    again = play(lost[-1].state, (2.1, killed(0)), (3.0, registered(0, life=1, cursor=Cursor(12))))
    generation = declared(again[-1])
    assert (generation.restored, generation.behind) == (Cursor(12), (1,))


def test_where_a_checkpoint_is_gone_after_all_nobody_stays() -> None:
    lost = Failure("StateLost", "a part of the state is lost, and there is no checkpoint of step 12.")
    decisions = play(gone_back(), (2.1, reported(0, 17, 2, lost)))
    gone = {(one.worker, one.pid) for one in of_kind(Expel, *decisions)}
    assert gone == {(0, pid_of(0)), (1, pid_of(1, 1))}
    after = play(
        decisions[-1].state,
        (2.2, killed(0)),
        (2.2, killed(1, life=1)),
        (3.0, registered(0, life=1)),
        (3.0, registered(1, life=2)),
    )
    generation = declared(after[-1])
    assert (generation.cursor, generation.behind) == (Cursor(), ())


def test_with_a_replica_of_it_no_step_is_done_again() -> None:
    decisions = play(
        training(REPLICATED),
        (1.0, killed(1)),
        *all_report((0,), 17),
        *all_report((2, 3), 16),
        (2.0, registered(1, life=1)),
    )
    generation = declared(decisions[-1])
    assert (generation.cursor, generation.restored) == (Cursor(16), None), "part 1 is held at step 16 alone"
    assert generation.behind == (0, 1), "worker 0 has completed a step of which the other part is gone"
    assert (generation.holders(0), generation.holders(1)) == ((2,), (3,))
    assert not of_kind(RolledBack, *decisions)


def test_parts_at_different_steps_are_no_state() -> None:
    """Worker 0 has completed the step, worker 1 has not, and neither can go where the other is."""
    apart = play(training(SHARDED), *all_report((0,), 17), *all_report((1,), 16))
    assert not any(map(forms, apart))
    assert of_kind(Expel, *apart) == [Expel(0, pid_of(0))], "another in its place looks for the newest checkpoint"
    gone = decide(apart[-1].state, killed(0), 1.2)
    assert Refill(0, 0.0, restore=True) in gone.actions
    generation = declared(decide(gone.state, registered(0, life=1, cursor=Cursor(12)), 2.0))
    assert (generation.restored, generation.behind) == (Cursor(12), (1,))


def test_a_replica_that_stands_a_step_behind_is_no_checkpoint() -> None:
    """The cursor of a survivor is not that of a checkpoint, whatever the minimum is."""
    reports = (*all_report((0, 2), 17), *all_report((1,), 16))
    decisions = play(training(REPLICATED), (1.0, killed(3)), *reports, (2.0, registered(3, life=1)))
    assert Refill(3, 0.0, restore=False) in decisions[0].actions, "replicas seemed to hold all"
    assert of_kind(Expel, *decisions) == [Expel(3, pid_of(3, 1))], "it holds nothing, and has no checkpoint"
    gone = decide(decisions[-1].state, killed(3, life=1), 2.1)
    assert Refill(3, 0.0, restore=True) in gone.actions
    generation = declared(decide(gone.state, registered(3, life=2, cursor=Cursor(12)), 3.0))
    assert (generation.restored, generation.behind) == (Cursor(12), (0, 1, 2))


def test_of_two_checkpoints_that_were_found_the_newer_is_taken() -> None:
    decisions = play(training(meshed(shard=3, lanes=3)), (1.0, killed(1)), (1.0, killed(2)), *all_report((0,), 25))
    assert vacant(decisions[-1].state, 0) == {1: True, 2: True}
    both = play(
        decisions[-1].state,
        (2.0, registered(1, life=1, cursor=Cursor(10))),
        (2.1, registered(2, life=1, cursor=Cursor(20))),
    )
    generation = declared(both[-1])
    assert (generation.restored, generation.behind) == (Cursor(20), (0, 1))


def gone_back() -> Training:
    """Worker 0 stands at step 17, and is to take up the checkpoint of step 12 that worker 1 has brought."""
    state = last_of(
        training(SHARDED), (1.0, killed(1)), *all_report((0,), 17), (2.0, registered(1, life=1, cursor=Cursor(12)))
    ).state
    assert isinstance(state, Training)
    return state


def test_a_generation_that_breaks_before_all_are_back_is_followed_by_one_that_goes_back_as_well() -> None:
    """Worker 0 has not taken the checkpoint up, so that what it holds is of no use."""
    left = play(
        gone_back(),
        (2.1, replace(reported(0, 17, 2), has_trained=False, symptom=PEER_LOST)),
        (2.1, reported(1, 12, 2, life=1)),
    )
    generation = declared(left[-1])
    assert (generation.restored, generation.behind) == (Cursor(12), (0,))
    assert not of_kind(Expel, *left)


def test_one_that_has_come_as_far_as_before_holds_the_state() -> None:
    left = play(
        gone_back(),
        (5.0, replace(reported(0, 17, 2), symptom=PEER_LOST)),
        (5.0, reported(1, 17, 2, life=1)),
    )
    generation = declared(left[-1])
    assert (generation.restored, generation.cursor, generation.behind) == (None, Cursor(17), ())


def test_what_was_found_before_the_job_went_on_is_no_checkpoint() -> None:
    """Both have trained on since step 12, and stand apart: the newest checkpoint is to be looked for again."""
    left = play(gone_back(), (5.0, reported(0, 26, 2)), (5.0, reported(1, 25, 2, life=1)))
    assert not any(map(forms, left))
    assert of_kind(Expel, *left) == [Expel(0, pid_of(0))]


# --- leaving, stopping, successors


def test_who_leaves_with_the_only_copy_of_a_part_saves_first_and_no_step_is_lost() -> None:
    leaving = decide(training(SHARDED), asked_to_leave(1), 1.0)
    assert Regroup(GenerationId(3, 1), at_boundary=True, saves=True) in leaving.actions
    saved = play(leaving.state, *((1.1, replace(reported(worker, 18), is_saved=True)) for worker in (0, 1)))
    assert of_kind(Dismiss, *saved) == [Dismiss(1, pid_of(1))]
    left = last_of(saved[-1].state, (1.2, exited(1, LEFT))).state
    assert vacant(left, 0) == {1: True}
    generation = declared(decide(left, registered(1, life=1, cursor=Cursor(18)), 2.0))
    assert (generation.cursor, generation.behind) == (Cursor(18), ())


def test_who_leaves_with_a_part_that_another_holds_just_leaves() -> None:
    leaving = decide(training(REPLICATED), asked_to_leave(1), 1.0)
    assert Regroup(GenerationId(3, 1), at_boundary=True) in leaving.actions
    left = play(leaving.state, *all_report(range(4), 18), (1.2, exited(1, LEFT)), (2.0, registered(1, life=1)))
    assert of_kind(Dismiss, *left) == [Dismiss(1, pid_of(1))]
    generation = declared(left[-1])
    assert (generation.cursor, generation.behind, generation.restored) == (Cursor(18), (1,), None)


def test_a_generation_that_breaks_before_the_save_of_who_leaves_is_followed_by_another_with_it() -> None:
    leaving = decide(training(SHARDED), asked_to_leave(1), 1.0)
    again = play(leaving.state, *all_report((0, 1), 18))
    generation = declared(again[-1])
    assert workers_of(generation) == [0, 1]
    assert Regroup(generation.id, at_boundary=True, saves=True) in again[-1].actions


def test_a_mesh_that_stops_is_filled_to_save_what_it_holds() -> None:
    stopping = play(training(REPLICATED), (1.0, StopRequested("it is enough")), (1.1, killed(1)))
    state = last_of(stopping[-1].state, *all_report((0, 2, 3), now=1.2)).state
    assert isinstance(state, Forming)
    assert vacant(state, 0, 2, 3) == {1: False}
    assert declared(decide(state, registered(1, life=1), 2.0)).cursor == Cursor(16)


def test_a_mesh_that_stops_and_has_lost_a_part_goes_no_further() -> None:
    stopping = play(training(SHARDED), (1.0, StopRequested("it is enough")), (1.1, killed(1)), *all_report((0,)))
    assert stopping[-1].state == Ended(None, {"ending": "it is enough"}, heard={0: 0})


def test_a_mesh_whose_replacements_die_does_not_stop_for_ever() -> None:
    state = last_of(
        training(REPLICATED), (1.0, StopRequested("enough")), (1.1, killed(1)), *all_report((0, 2, 3))
    ).state
    for life in range(1, 20):
        if isinstance(state, Ended):
            break
        state = decide(state, killed(1, status=WorkerStatus(), life=life), 2.0 + life).state
    assert isinstance(state, Ended)


def test_a_successor_goes_by_what_each_says_that_it_holds() -> None:
    generation = gone_back().generation
    handover = Handover(frozenset({(0, pid_of(0)), (1, pid_of(1, 1))}), frozenset())
    state = succeed(replace(SHARDED, incarnation=4), handover, 3.0)
    unaligned = Position(generation, Cursor(17), has_left=True, has_trained=False)
    back = Position(generation, Cursor(12), has_left=True, has_trained=True)
    decisions = play(state, (3.1, registered(0, position=unaligned)), (3.1, registered(1, life=1, position=back)))
    assert not any(map(forms, decisions)), "nobody has looked for the newest checkpoint"
    assert of_kind(Expel, *decisions) == [Expel(0, pid_of(0))]


def test_a_job_is_done_when_all_of_the_mesh_are() -> None:
    state = training(SHARDED)
    assert isinstance(last_of(state, (1.0, completed(0)), (1.0, completed(1))).state, Ended)


# --- whoever is killed, and whatever was saved


@pytest.mark.parametrize("seed", range(200))
def test_no_generation_begins_with_a_part_that_nobody_holds_unless_all_take_up_a_checkpoint(seed: int) -> None:
    """Kills of any subset, again and again; survivors stand at the step before or after the one that was cut short."""
    chance = random.Random(seed)
    mesh = MeshShape(chance.randint(1, 2), chance.randint(1, 3), chance.randint(1, 2))
    state: State = training(replace(SETTINGS, lanes=mesh.groups, workers=mesh.size, mesh=mesh))
    lives, checkpoint = dict.fromkeys(range(mesh.size), 0), 0
    for round_ in range(1, 4):
        assert isinstance(state, Training)
        generation, now = state.generation, 10.0 * round_
        assert workers_of(generation) == list(range(mesh.size))
        step = generation.cursor.step + chance.randint(0, 3)
        if step > checkpoint and chance.random() < 0.5:
            checkpoint = step
        dead = {worker for worker in lives if chance.random() < 0.4}
        held = {worker: step + chance.randint(0, 1) for worker in lives if worker not in dead}
        events = [killed(worker, life=lives[worker]) for worker in sorted(dead)]
        reports = [reported(worker, at, generation.id.number, life=lives[worker]) for worker, at in held.items()]
        everything: list[MembershipEvent] = [*events, *reports]
        chance.shuffle(everything)
        for event in everything:
            state = decide(state, event, now).state
        state = _filled(state, lives, Cursor(checkpoint), now)
        assert isinstance(state, Training), "a generation begins"
        holders = [{at for worker, at in held.items() if mesh.part(worker) == part} for part in range(mesh.parts)]
        if common := set.intersection(*holders):
            assert (state.generation.restored, state.generation.cursor) == (None, Cursor(max(common))), (
                "no step is lost"
            )
        else:
            assert state.generation.restored == Cursor(checkpoint)


def _filled(state: State, lives: dict[int, int], checkpoint: Cursor, now: float) -> State:
    """With a process in every place that the coordinator wants to be filled, until a generation begins."""
    for _ in range(2 * len(lives)):
        if not isinstance(state, Forming):
            break
        for worker, pid in sorted(state.members.expelled):
            state = decide(state, ExitReported(worker, pid, "a", None, 9, WorkerStatus()), now).state
        assert isinstance(state, Forming)
        here = {known.process for known in state.members.enrolled}
        for worker, vacancy in news_of(state, here, now + 60.0).vacant.items():
            lives[worker] += 1
            cursor = checkpoint if vacancy.restore else Cursor()
            state = decide(state, registered(worker, lives[worker], cursor=cursor), now).state
    return state

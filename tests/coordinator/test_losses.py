"""A lost worker costs a generation and not the job: every rule of it, played to the pure membership."""

import re
import signal
from dataclasses import replace

import pytest

from coordinator.played import (
    FIRST,
    PEER_LOST,
    SETTINGS,
    Timed,
    beats_until,
    completed,
    declared,
    exited,
    forming,
    heartbeat,
    killed,
    kinds,
    last_of,
    message_of,
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
    EndJob,
    ExitReported,
    Expel,
    FailureReported,
    GrantLease,
    MembershipEvent,
    Refill,
    Refuse,
    Regroup,
    RelayStop,
    StopRequested,
    Tick,
    Welcome,
)
from quorate.coordinator.forming import MOST_FUTILE
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Decision, Ended, Forming, State, Training
from quorate.core.failure import Failure
from quorate.core.generation import (
    ENDED_FOR_A_STOP,
    ENDED_WITH_ITS_GROUP,
    GAVE_UP,
    LEFT,
    LOST_WITH_ITS_HOST,
    Cursor,
    GenerationId,
    WorkerStatus,
)
from quorate.observe.events import WorkerLost

SECOND = GenerationId(3, 2)
TWO = replace(SETTINGS, workers=2, lanes=2)


def loss_of(decision: Decision) -> WorkerLost:
    """The one loss that a decision records."""
    loss: WorkerLost
    (loss,) = of_kind(WorkerLost, decision)
    return loss


def told_of(decision: Decision) -> str:
    """The sentence that tells of a loss."""
    return loss_of(decision).message or ""


def refill_of(decision: Decision) -> Refill:
    """The one place that a decision has filled."""
    found: Refill
    (found,) = of_kind(Refill, decision)
    return found


def second_generation(step: int = 16) -> State:
    """Worker 1 was killed in the first generation; 0 and 2 go on in the second."""
    return last_of(training(), (1.0, killed(1)), (1.0, reported(0, step)), (1.0, reported(2, step))).state


# --- a death


def test_a_death_in_training_ends_the_generation_and_fills_the_place() -> None:
    decision = decide(training(), killed(1), 2.0)

    assert isinstance(decision.state, Forming)
    assert kinds(decision.actions) == ["WorkerLost", "Regroup", "Refill"]
    _, regroup, refill = decision.actions
    assert regroup == Regroup(FIRST, at_boundary=False)
    assert refill == Refill(1, 0.0, restore=False)
    assert "workers 0, 2 must leave the last generation first" in decision.reason


def test_a_group_that_ends_as_one_is_lost_once_and_all_go_on_from_the_checkpoint() -> None:
    first, second, third = play(
        training(), (2.0, killed(1)), (2.1, exited(0, ENDED_WITH_ITS_GROUP)), (2.2, exited(2, ENDED_WITH_ITS_GROUP))
    )
    assert kinds(first.actions) == ["WorkerLost", "Regroup", "Refill"]
    assert second.actions == (Refill(0, 0.0, restore=False),)
    assert third.actions == (Refill(2, 0.0, restore=True),), "nobody is left to copy from"


def test_what_an_engine_says_of_a_lost_worker_is_no_exit_code_of_a_process() -> None:
    # A task may call os._exit() with any number up to 255.
    assert min(ENDED_WITH_ITS_GROUP, LOST_WITH_ITS_HOST, ENDED_FOR_A_STOP) > 255


def test_of_one_that_the_launcher_has_ended_for_a_stop_the_kernel_is_not_suspected() -> None:
    (decision,) = play(training(), (1.0, exited(1, ENDED_FOR_A_STOP)))
    assert "was stopped (SIGSTOP), and ended for that by the launcher," in told_of(decision)
    assert "kernel" not in told_of(decision)


def test_the_survivors_go_on_with_all_lanes_from_where_the_furthest_stands() -> None:
    _, waiting, formed = play(training(), (1.0, killed(1)), (1.1, reported(2, 17)), (1.2, reported(0, 16)))

    assert isinstance(waiting.state, Forming)
    generation = declared(formed)
    assert generation.id == SECOND
    assert [(member.worker, list(member.lanes)) for member in generation.members] == [
        (0, [0, 1, 2, 3]),
        (2, [4, 5, 6, 7]),
    ]
    assert (generation.cursor, generation.donor, generation.behind) == (Cursor(17), 1, (0,))


@pytest.mark.parametrize(
    ("exit_report", "sentence"),
    [
        (killed(1), "worker 1 (pid 4711 on host a) was killed by SIGKILL at step 17 while in exchange."),
        (killed(1, signal.SIGSEGV), "was killed by SIGSEGV at step 17 while in exchange. That is a crash in native"),
        (killed(1, 63), "worker 1 (pid 4711 on host a) was killed by signal 63 at step 17 while in exchange."),
        (exited(1, 3), "worker 1 (pid 4711 on host a) exited with code 3 at step 17 while in exchange."),
        (exited(1, 0), "worker 1 (pid 4711 on host a) exited before the job was complete (code 0) at step 17"),
        # The status page may be behind the heartbeat, and it may never have been written.
        (killed(1, status=WorkerStatus(15, "apply")), "was killed by SIGKILL at step 16 while in compute."),
        (killed(1, status=WorkerStatus(16, "apply")), "was killed by SIGKILL at step 16 while in apply."),
        (killed(1, status=WorkerStatus()), "was killed by SIGKILL at step 16 while in compute."),
    ],
)
def test_a_death_is_told_in_one_sentence(exit_report: ExitReported, sentence: str) -> None:
    loss = loss_of(last_of(training(), (1.0, heartbeat(1)), (2.0, exit_report)))
    assert sentence in (loss.message or "")
    assert (loss.cause, loss.worker) == ("WorkerLost", 1)
    assert loss.step is not None


def test_memory_is_named_as_the_likely_cause_of_a_kill() -> None:
    assert "memory runs out" in told_of(decide(training(), killed(1), 1.0))


def test_an_end_that_is_told_twice_is_counted_once() -> None:
    first, again = play(training(), (1.0, killed(1)), (1.1, killed(1)))
    assert again.state == first.state
    assert again.actions == ()
    late = play(again.state, (1.2, registered(1, life=1)), (1.3, killed(1)))[-1]
    assert late.actions == ()


# --- silence


def test_silence_counts_as_a_loss_after_failure_timeout_and_not_before() -> None:
    *before, last = beats_until(5.0, 0, 1)
    assert isinstance(last_of(training(), *before).state, Training)
    decision = last_of(training(), *before, last)

    assert isinstance(decision.state, Forming)
    # Its place is filled when it has been reaped: until then it may still write somewhere.
    assert kinds(decision.actions) == ["WorkerLost", "Expel", "Regroup"]
    assert decision.actions[1:] == (Expel(2, 4712), Regroup(FIRST, at_boundary=False))
    loss = loss_of(decision)
    assert loss.detect_s == 5.0
    assert loss.message == (
        "worker 2 (pid 4712 on host a) has sent no heartbeat for 5.0 s (failure_timeout: 5.0);"
        " last seen when it registered."
    )


def test_the_others_go_on_before_the_silent_one_is_reaped_and_its_place_is_filled_after() -> None:
    silent = last_of(training(), *beats_until(5.0, 0, 1)).state
    *_, formed = play(silent, (5.1, reported(0)), (5.1, reported(1)))
    assert workers_of(declared(formed)) == [0, 1]

    reaped = decide(formed.state, killed(2), 5.2)
    assert reaped.actions == (Refill(2, 0.0, restore=False),)
    assert isinstance(reaped.state, Training)
    assert decide(reaped.state, registered(2, life=1), 6.0).actions[0] == Welcome(2, 4.0)


def test_who_counts_as_lost_can_change_nothing_any_more() -> None:
    silent = last_of(training(), *beats_until(5.0, 0, 1)).state
    for event, is_refused in (
        (heartbeat(2, 99, events=("{}",)), False),
        (completed(2), False),
        (reported(2, 400), True),
        (registered(2), True),
    ):
        decision = decide(silent, event, 5.1)
        assert decision.state == silent
        assert [type(action) for action in decision.actions] == ([Refuse] if is_refused else [])


def test_silence_tells_the_last_word() -> None:
    events = [(0.0, heartbeat(2, 1, step=17)), *beats_until(5.0, 0, 1)]
    loss = loss_of(last_of(training(), *events))
    assert (loss.message or "").endswith("last seen at step 17, compute.")


def test_a_pause_of_the_coordinator_loses_nobody() -> None:
    held_up = decide(training(), beats_until(0.25)[0][1], 60.0)
    assert isinstance(held_up.state, Training)
    assert "held up for 60.0 s" in held_up.reason
    assert isinstance(last_of(held_up.state, *beats_until(64.75, since=60.0)).state, Training)
    assert isinstance(last_of(held_up.state, *beats_until(65.0, since=60.0)).state, Forming)


# --- promises


def test_a_broken_link_waits_for_its_cause_and_tells_how_long_that_took() -> None:
    suspected, left, lost = play(
        training(), (1.0, reported(0, symptom=PEER_LOST)), (1.1, reported(2)), (1.25, killed(1))
    )
    assert suspected.actions == (Regroup(FIRST, at_boundary=False),)
    assert isinstance(left.state, Forming)
    assert loss_of(lost).detect_s == 0.25
    assert workers_of(declared(lost)) == [0, 2]


def test_a_link_that_broke_between_live_workers_costs_a_generation_and_nobody() -> None:
    *_, formed = play(training(), (1.0, reported(0, symptom=PEER_LOST)), (1.1, reported(1)), (1.2, reported(2)))
    assert workers_of(declared(formed)) == [0, 1, 2]


def test_a_promise_is_kept_so_a_second_word_changes_nothing() -> None:
    first, again = play(training(), (1.0, reported(0, 16)), (1.1, reported(0, 17)))
    assert isinstance(again.state, Forming)
    assert (again.state, again.actions) == (first.state, ())


def test_a_state_report_of_an_older_generation_changes_nothing() -> None:
    state = second_generation()
    late = decide(state, reported(0, 17, generation=1), 2.0)
    assert (late.state, late.actions) == (state, ())
    unborn = decide(state, reported(0, 17, generation=3), 2.0)
    assert (unborn.state, unborn.actions) == (state, ())


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("life", [0, 2])
def test_a_state_report_of_an_unknown_process_is_refused(life: int, is_replaced: bool) -> None:
    """One that is dead, and one that never came; also when another has the place by now."""
    state = second_generation()
    if is_replaced:
        state = decide(state, registered(1, life=1), 2.0).state
    decision = decide(state, reported(1, 30, generation=2, life=life), 3.0)
    assert decision.state == state
    (refusal,) = decision.actions
    assert isinstance(refusal, Refuse)
    assert "counts as lost" in refusal.failure.message


def test_the_next_generation_begins_only_when_everybody_has_promised() -> None:
    events: list[MembershipEvent] = [reported(0), reported(2), killed(1)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]):
        *waiting, last = play(training(), *((1.0, events[index]) for index in order))
        assert {type(decision.state) for decision in waiting} == {Forming}
        assert workers_of(declared(last)) == [0, 2]


def test_a_second_loss_while_forming_just_leaves_one_fewer() -> None:
    *_, last = play(training(), (1.0, killed(1)), (1.1, reported(0)), (1.2, killed(2)))
    assert workers_of(declared(last)) == [0]
    assert [type(action) for action in last.actions][:2] == [WorkerLost, Refill]


@pytest.mark.parametrize("kind", ["LinkError", "PeerLost", "FrameError", "LeaseExpired", "GenerationOver"])
def test_who_gives_up_for_a_symptom_is_lost_when_it_exits_with_its_last_words(kind: str) -> None:
    told, lost = play(training(), (1.0, FailureReported(0, replace(PEER_LOST, kind=kind))), (1.1, exited(0, 1)))
    assert (type(told.state), told.actions) == (Training, ())
    assert told_of(lost).endswith(f"Its last message: {PEER_LOST.message}")


@pytest.mark.parametrize("kind", ["HelperLost", "OutOfMemory"])
@pytest.mark.parametrize("has_joined", [True, False])
def test_who_gives_up_is_lost_with_the_reason_that_it_has_told(kind: str, has_joined: bool) -> None:
    why = Failure(kind, "its loader process 17 was killed by SIGKILL. It is often memory.", worker=1)
    state = training() if has_joined else start(SETTINGS, 0.0)
    told, lost = play(state, (1.0, FailureReported(1 if has_joined else None, why)), (1.1, exited(1, GAVE_UP)))
    assert (type(told.state), told.actions) == (type(state), ())
    message = told_of(lost)
    assert re.fullmatch(rf"worker 1 \(pid \d+ on host a\) gave up.*: {re.escape(why.message)}", message)
    assert ("before it had joined" in message) is not has_joined
    assert any(isinstance(action, Refill) and action.worker == 1 for action in lost.actions)
    assert told_of(last_of(lost.state, (1.2, exited(1, 1, life=1)))).endswith("may say why.")


def test_what_a_process_tells_after_its_end_is_not_taken_for_the_last_words_of_the_next() -> None:
    late = FailureReported(1, replace(PEER_LOST, worker=1), pid_of(1))
    state = last_of(training(), (1.0, exited(1, 1)), (1.1, late), (1.2, registered(1, life=1))).state
    message = told_of(last_of(state, (1.3, exited(1, 1, life=1))))
    assert PEER_LOST.message not in message


@pytest.mark.parametrize("kind", ["InternalError", "UserCodeError", "LeaseExpired", "ReplicasDiffer"])
@pytest.mark.parametrize("fate", ["expelled", "reaped", "dismissed"])
def test_what_a_process_fails_on_that_was_given_up_is_ignored(kind: str, fate: str) -> None:
    """One that was stopped for too long wakes before it is killed, and finds that everything is gone."""
    state = last_of(training(), *beats_until(5.0, 0, 2)).state if fate == "expelled" else training()
    if fate == "reaped":
        state = last_of(state, (1.0, killed(1))).state
    if fate == "dismissed":
        assert isinstance(state, Training)
        state = replace(state, members=replace(state.members, dismissed=frozenset({(1, pid_of(1))})))
    assert not isinstance(state, Ended)
    assert (1, pid_of(1)) in getattr(state.members, fate)
    decision = decide(state, FailureReported(1, Failure(kind, "no such file"), pid_of(1), FIRST), 5.1)
    assert (decision.state, decision.actions) == (state, ())
    assert "its report is ignored" in decision.reason


# --- a place whose processes give up


def joins_and_gives_up(state: State, now: float, life: int, step: int = 17) -> Decision:
    """Worker 1 is let in at a boundary, and cannot go on in the step after it; the others can."""
    assert isinstance(state, Training)
    number = state.generation.id.number
    others: list[Timed] = [(now, reported(worker, step - 1, number)) for worker in (0, 2)]
    why = Failure("OutOfMemory", "there is no memory for its gradients.", worker=1)
    joined = last_of(state, (now, registered(1, life=life)), *others)
    assert workers_of(declared(joined)) == [0, 1, 2]
    gone = replace(exited(1, GAVE_UP, life), status=WorkerStatus(step, "join"))
    return last_of(joined.state, (now, FailureReported(1, why, pid_of(1, life))), (now, gone))


def test_a_place_whose_processes_give_up_is_filled_later_and_later_although_the_others_advance() -> None:
    state, step, after, warnings = second_generation(), 17, [], []
    for life in range(1, 10):
        lost = joins_and_gives_up(state, float(life), life, step)
        after.append(refill_of(lost).after)
        warnings += messages_of(lost.actions)
        assert isinstance(lost.state, Forming)
        number = lost.state.members.generations
        state = last_of(lost.state, *((float(life), reported(worker, step, number)) for worker in (0, 2))).state
        step += 1
    assert after == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    (warning,) = warnings
    assert warning.startswith("3 processes in a row have failed in the place of worker 1, none with a completed step")
    assert "there is no memory for its gradients. The next is started in 2 s" in warning
    assert "`quorate resize RUN 2`" in warning


def test_one_that_has_completed_a_step_is_the_first_to_give_up() -> None:
    first = joins_and_gives_up(second_generation(), 1.0, 1)
    promised = last_of(first.state, (1.0, reported(0, 17, 3)), (1.0, reported(2, 17, 3)))
    joined = last_of(promised.state, (2.0, registered(1, life=2)), (2.0, reported(0, 18, 4)), (2.0, reported(2, 18, 4)))
    at_step_20 = ExitReported(1, pid_of(1, 2), "a", GAVE_UP, None, WorkerStatus(20, "compute"))
    assert refill_of(last_of(joined.state, (3.0, at_step_20))).after == 0.0
    before = ExitReported(1, pid_of(1, 2), "a", GAVE_UP, None, WorkerStatus(19, "compute"))
    assert refill_of(last_of(joined.state, (3.0, before))).after == 1.0
    # Or it completes its steps in a generation before that in which it gives up.
    regrouped = last_of(joined.state, *((3.0, reported(w, 30, 5, life=2 * (w == 1))) for w in range(3)))
    assert workers_of(declared(regrouped)) == [0, 1, 2]
    later = ExitReported(1, pid_of(1, 2), "a", GAVE_UP, None, WorkerStatus(31, "compute"))
    assert refill_of(last_of(regrouped.state, (3.0, later))).after == 0.0


# --- one that was killed and does not end


def test_a_process_that_does_not_end_is_told_now_and_then_while_the_others_train() -> None:
    state = last_of(training(), *beats_until(5.0, 0, 2)).state
    state = last_of(state, (5.0, reported(0)), (5.0, reported(2))).state
    assert isinstance(state, Training)
    told = []
    for number in range(1, 4000):
        now = 5.0 + number
        beats = [
            (now, replace(heartbeat(w, 1000 + number), status=WorkerStatus(16 + number, "compute"))) for w in (0, 2)
        ]
        decision = last_of(state, *beats, (now, Tick()))
        state = decision.state
        told += [(number, message) for message in messages_of(decision.actions)]
    assert isinstance(state, Training), "the others need nobody"
    assert [number for number, _ in told] == [6, 16, 46, 136, 406, 1216, 3646]
    assert told[0][1] == (
        "worker 1 (pid 4711) was to be killed 5 s ago and is not known to have ended, so nobody can take its place. Its"
        " host cannot be reached, or it waits in the kernel, for a disk or a network file system that does not answer."
    )


@pytest.mark.parametrize(("step_timeout", "seconds"), [(None, 1800), (60.0, 60), (8.0, 10)])
def test_where_nobody_can_go_on_without_it_the_job_is_given_up(step_timeout: float | None, seconds: int) -> None:
    settings = replace(SETTINGS, step_timeout=step_timeout, min_workers=3)
    state = last_of(training(settings), *beats_until(5.0, 0, 2)).state
    state = last_of(state, (5.0, reported(0)), (5.0, reported(2))).state
    assert isinstance(state, Forming)
    number = 0
    while not isinstance(state, Ended) and number < 2000:
        number += 1
        now = 5.0 + number
        state = last_of(state, *((now, heartbeat(w, 1000 + number)) for w in (0, 2)), (now, Tick())).state
    assert isinstance(state, Ended)
    assert number == seconds + 1
    assert state.failure is not None
    assert (state.failure.kind, state.failure.worker) == ("WorkerLost", 1)
    assert "is not known to have ended" in state.failure.message
    assert "step_timeout (" in state.failure.message
    assert state.failure.message.endswith("so the job is stopped.")


# --- an older process of the same place


def test_heartbeats_of_an_older_process_of_the_same_place_get_no_lease() -> None:
    state = decide(second_generation(), registered(1, life=1), 2.0).state
    old = decide(state, heartbeat(1, 99, events=("{}",)), 2.1)
    assert (old.state, old.actions) == (state, ())
    assert decide(state, heartbeat(1, 1, life=1), 2.1).actions == (GrantLease(1, 4.0),)


def test_a_registration_that_arrives_after_the_death_of_its_process_takes_no_place() -> None:
    dead_early = decide(start(SETTINGS, 0.0), killed(1), 1.0)
    late = decide(dead_early.state, registered(1), 1.1)
    assert late.state == dead_early.state
    (refusal,) = late.actions
    assert isinstance(refusal, Refuse)
    assert "it counts as lost and was replaced" in refusal.failure.message
    assert decide(late.state, registered(1, life=1), 1.2).actions == (Welcome(1, 4.0),)


# --- newcomers


def test_a_newcomer_is_let_in_at_a_boundary_and_copies_what_it_lacks() -> None:
    joined = decide(second_generation(), registered(1, life=1), 2.0)
    assert joined.actions == (Welcome(1, 4.0), Regroup(SECOND, at_boundary=True))
    assert isinstance(joined.state, Training)

    *_, formed = play(joined.state, (2.1, reported(0, 21, generation=2)), (2.1, reported(2, 21, generation=2)))
    generation = declared(formed)
    assert workers_of(generation) == [0, 1, 2]
    assert (generation.id, generation.cursor, generation.behind) == (GenerationId(3, 3), Cursor(21), (1,))


def test_a_newcomer_that_dies_does_not_disturb_the_generation_at_work() -> None:
    state = decide(second_generation(), registered(1, life=1), 2.0).state
    assert isinstance(state, Training)
    dead = decide(state, killed(1, life=1), 2.1)
    assert isinstance(dead.state, Training)
    assert dead.state.generation is state.generation
    assert kinds(dead.actions) == ["WorkerLost", "Refill"]


def test_newcomers_that_die_again_and_again_come_more_slowly_and_never_end_the_job() -> None:
    state = second_generation()
    pauses = []
    for life in range(1, 60):
        dead = decide(state, killed(1, life=life), 2.0 + life)
        pauses.append(refill_of(dead).after)
        assert isinstance(dead.state, Training)
        state = dead.state
    assert pauses[:2] == [0.0, 0.0]
    assert sorted(pauses) == pauses
    assert pauses[-1] == 5.0
    # The workers at work have lost nothing meanwhile, and their own losses count from the beginning.
    lost = decide(state, killed(2), 90.0)
    assert isinstance(lost.state, Forming)


def test_a_newcomer_that_comes_while_the_others_regroup_is_let_in_at_once() -> None:
    state = forming((1.0, killed(1)), (1.1, reported(0)))
    *_, formed = play(state, (1.2, registered(1, life=1)), (1.3, reported(2)))
    assert workers_of(declared(formed)) == [0, 1, 2]


# --- nobody is left


def test_when_nobody_has_the_state_all_begin_together_from_a_checkpoint() -> None:
    first, second = play(training(TWO), (1.0, killed(0)), (1.1, killed(1)))
    assert refill_of(first) == Refill(0, 0.0, restore=False)
    assert refill_of(second) == Refill(1, 0.0, restore=True)
    assert isinstance(second.state, Forming)

    # The one that was on its way already begins at nothing, and copies from the one that has restored.
    early, formed = play(second.state, (2.0, registered(0, life=1)), (3.0, registered(1, life=1, cursor=Cursor(10))))
    assert isinstance(early.state, Forming)
    assert "1 of 2 workers are here" in early.reason
    generation = declared(formed)
    assert (workers_of(generation), generation.cursor, generation.behind) == ([0, 1], Cursor(10), (0,))


def test_a_newcomer_whose_donor_dies_before_it_has_copied_holds_nothing() -> None:
    alone = last_of(training(TWO), (1.0, killed(0)), (1.0, reported(1, 100)), (2.0, registered(0, life=1))).state
    copying = last_of(alone, (2.1, reported(1, 101, generation=2)))
    assert declared(copying).behind == (0,)

    dead, left = play(copying.state, (2.2, killed(1)), (2.3, reported(0, 0, generation=3, life=1)))
    assert refill_of(dead) == Refill(1, 0.0, restore=True)
    assert isinstance(left.state, Forming), "it would begin from nothing, although there may be a checkpoint"
    formed = decide(left.state, registered(1, life=1, cursor=Cursor(90)), 3.0)
    assert declared(formed).cursor == Cursor(90)


def test_a_newcomer_that_has_copied_goes_on_alone_when_its_donor_dies() -> None:
    alone = last_of(training(TWO), (1.0, killed(0)), (1.0, reported(1, 100)), (2.0, registered(0, life=1))).state
    copying = last_of(alone, (2.1, reported(1, 101, generation=2)))
    *_, formed = play(copying.state, (2.2, killed(1)), (2.3, reported(0, 101, generation=3, life=1)))
    assert (workers_of(declared(formed)), declared(formed).cursor) == ([0], Cursor(101))


def test_who_is_one_step_behind_still_holds_the_state_when_its_donor_dies() -> None:
    regrouped = last_of(training(TWO), (1.0, reported(0, 17, symptom=PEER_LOST)), (1.0, reported(1, 16)))
    assert declared(regrouped).behind == (1,)
    *_, formed = play(regrouped.state, (1.1, killed(0)), (1.2, reported(1, 16, generation=2)))
    assert declared(formed).cursor == Cursor(16)


def test_with_too_few_workers_training_waits() -> None:
    settings = replace(SETTINGS, min_workers=3)
    *_, waiting = play(training(settings), (1.0, killed(1)), (1.1, reported(0)), (1.1, reported(2)))
    assert isinstance(waiting.state, Forming)
    assert "2 workers are here, and min_workers is 3" in waiting.reason
    assert workers_of(declared(decide(waiting.state, registered(1, life=1), 2.0))) == [0, 1, 2]


@pytest.mark.parametrize("min_workers", [1, 3])
def test_a_replacement_is_waited_for_without_end_where_the_job_cannot_go_on_without_it(min_workers: int) -> None:
    state: State = forming((1.0, killed(1)), settings=replace(SETTINGS, min_workers=min_workers))
    *_, last = play(state, (1.0, reported(0)), (1.0, reported(2)), *beats_until(200.0, 0, 2, since=1.0))
    assert isinstance(last.state, Training if min_workers == 1 else Forming)


# --- the end


def test_who_was_done_when_another_was_lost_is_needed_once_more() -> None:
    done, lost, late = play(training(), (1.0, completed(0)), (1.1, killed(1)), (1.2, completed(0)))
    assert isinstance(done.state, Training)
    assert isinstance(lost.state, Forming)
    assert (late.state, late.actions) == (lost.state, ())

    *_, formed = play(late.state, (1.3, reported(0, 20)), (1.3, reported(2, 20)))
    assert isinstance(formed.state, Training)
    assert formed.state.completed == ()
    *_, ended = play(formed.state, (1.4, completed(0)), (1.4, completed(2)))
    assert isinstance(ended.state, Ended)
    assert ended.state.failure is None


def test_a_late_word_that_one_was_done_in_an_earlier_generation_counts_for_nothing() -> None:
    state = second_generation()
    late = decide(state, replace(completed(0, "old"), generation=FIRST), 2.0)
    assert (late.state, late.actions) == (state, ())
    *_, ended = play(state, *((2.0, replace(completed(worker), generation=SECOND)) for worker in (0, 2)))
    assert isinstance(ended.state, Ended)


def test_a_death_of_one_who_was_done_leaves_the_others_to_complete_the_job() -> None:
    lost = last_of(training(), (1.0, completed(1)), (1.1, exited(1, 0)))
    assert "exited before the job was complete" in told_of(lost)
    *_, formed = play(lost.state, (1.2, reported(0)), (1.2, reported(2)))
    assert workers_of(declared(formed)) == [0, 2]


def test_while_a_job_stops_nobody_is_replaced() -> None:
    stop, lost = play(training(), (1.0, StopRequested("interrupted")), (1.1, killed(1)))
    assert kinds(lost.actions) == ["WorkerLost", "Regroup"]
    *_, formed = play(lost.state, (1.2, reported(0)), (1.2, reported(2)))
    assert workers_of(declared(formed)) == [0, 2]
    assert isinstance(stop.state, Training)


def test_while_a_job_stops_a_silent_worker_is_killed_and_not_replaced() -> None:
    silent = last_of(training(), (0.0, StopRequested("interrupted")), *beats_until(5.0, 0, 1))
    assert kinds(silent.actions) == ["WorkerLost", "Expel", "Regroup"]
    reaped = decide(silent.state, killed(2), 5.1)
    assert reaped.actions == ()
    assert isinstance(reaped.state, Forming)
    assert not reaped.state.members.awaited


def test_a_stop_does_not_wait_for_more_workers() -> None:
    settings = replace(SETTINGS, min_workers=3)
    events: list[Timed] = [
        (1.0, StopRequested("interrupted")),
        (1.1, killed(1)),
        (1.2, reported(0)),
        (1.2, reported(2)),
    ]
    assert workers_of(declared(last_of(training(settings), *events))) == [0, 2]


def test_a_job_that_loses_everybody_while_it_stops_is_stopped() -> None:
    *_, last = play(training(TWO), (1.0, StopRequested("interrupted")), (1.1, killed(0)), (1.2, killed(1)))
    assert last.state == Ended(None, {"ending": "interrupted"}, heard={1: 0})
    assert last.actions[-1] == EndJob(None, "", {"ending": "interrupted"})


def test_a_stop_when_everybody_is_lost_needs_nobody() -> None:
    *_, last = play(training(TWO), (1.0, killed(0)), (1.1, killed(1)), (1.2, StopRequested("interrupted")))
    assert last.state == Ended(None, {"ending": "interrupted"})
    assert last.actions == (RelayStop("interrupted"), EndJob(None, "", {"ending": "interrupted"}))


def test_a_place_whose_vacancy_was_not_heard_before_the_stop_is_not_waited_for() -> None:
    before: list[Timed] = [(1.0, registered(0)), (1.0, registered(1)), (1.1, killed(2))]
    waiting = last_of(start(SETTINGS, 0.0), *before, (1.2, StopRequested("interrupted")))
    assert isinstance(waiting.state, Forming)
    assert isinstance(decide(waiting.state, killed(2), 1.3).state, Ended)


def test_a_newcomer_without_the_state_does_not_begin_anew_while_the_job_stops() -> None:
    newcomer = last_of(training(TWO), (1.0, killed(0)), (1.0, reported(1, 100)), (2.0, registered(0, life=1))).state
    *_, last = play(newcomer, (2.1, StopRequested("interrupted")), (2.2, killed(1)))
    assert last.state == Ended(None, {"ending": "interrupted"}, heard={0: 0, 1: 0})


def test_a_newcomer_whose_donor_dies_while_the_job_stops_does_not_begin_anew() -> None:
    newcomer = last_of(training(TWO), (1.0, killed(0)), (1.0, reported(1, 100)), (2.0, registered(0, life=1))).state
    copying = last_of(newcomer, (2.1, StopRequested("interrupted")), (2.1, reported(1, 101, generation=2))).state
    dead, left = play(copying, (2.2, killed(1)), (2.3, reported(0, 0, generation=3, life=1)))
    assert isinstance(dead.state, Forming), "it may have copied"
    assert left.state == Ended(None, {"ending": "interrupted"}, heard={0: 0})


def test_a_place_that_is_still_to_be_filled_does_not_hold_up_a_stop() -> None:
    """Worker 2 dies while it is being built and the job stops: the others are not made to wait for it."""
    events: list[Timed] = [
        (1.0, registered(0)),
        (1.0, registered(1)),
        (1.1, StopRequested("interrupted")),
        (1.2, killed(2)),
    ]
    assert last_of(start(SETTINGS, 0.0), *events).state == Ended(None, {"ending": "interrupted"}, heard={0: 0, 1: 0})


# --- giving up


def test_a_death_before_registration_is_told_and_the_place_filled() -> None:
    decision = decide(start(SETTINGS, 0.0), exited(2, 1), 1.0)
    assert kinds(decision.actions) == ["WorkerLost", "Refill"]
    message = told_of(decision)
    assert message.startswith("worker 2 (pid 4712 on host a) exited with code 1 at step 17 while in exchange before it")


def die_again_and_again(state: State, *, life: int = 1) -> tuple[Ended, list[float]]:
    """Kill one process after the other in the place of worker 0 until the job ends; and how long each is waited for."""
    pauses: list[float] = []
    while not isinstance(state, Ended):
        decision = decide(state, killed(0, life=life), 10.0)
        pauses += [refill.after for refill in of_kind(Refill, decision)]
        state, life = decision.state, life + 1
    return state, pauses


def test_a_job_that_cannot_start_is_given_up_soon() -> None:
    begun = start(SETTINGS, 0.0)
    ended, pauses = die_again_and_again(begun)
    assert len(pauses) == 3
    assert ended.failure is not None
    assert "It is the last of 4 workers that were lost without a completed step in between" in ended.failure.message
    assert "quorate resume" not in ended.failure.message, "whether there is a checkpoint is for the launcher to say"


def test_a_job_whose_workers_die_without_a_step_is_given_up_with_more_and_more_patience() -> None:
    left = last_of(training(TWO), (1.0, killed(0)), (1.1, killed(1))).state
    assert isinstance(left, Forming)
    ended, pauses = die_again_and_again(left)
    # Two of them were lost before.
    assert len(pauses) == 2 * left.members.wanted + 3 - 2
    assert pauses[:4] == [1.0, 2.0, 4.0, 5.0]
    assert set(pauses[3:]) == {5.0}
    assert ended.failure is not None


def test_a_step_forgives_all_deaths() -> None:
    state: State = training(TWO)
    for life in range(40):
        step, now = 10 * life, float(life)
        lost = last_of(state, (now, killed(0, life=life)), (now, reported(1, step, generation=2 * life + 1)))
        assert refill_of(play(state, (now, killed(0, life=life)))[0]).after == 0.0
        joined = decide(lost.state, registered(0, life=life + 1), now)
        state = decide(joined.state, reported(1, step + 1, generation=2 * life + 2), now).state
        assert isinstance(state, Training), life


def break_links(times: int, state: State, advance: int = 0, apart: float = 10.0) -> Decision:
    for count in range(1, times + 1):
        events = [(apart * count, reported(worker, 16 + count * advance, count, PEER_LOST)) for worker in range(3)]
        decision = last_of(state, *events)
        state = decision.state
    return decision


def test_links_that_break_again_and_again_without_a_loss_end_the_job() -> None:
    # The first advances, since it brought the job to step 16.
    assert isinstance(break_links(1 + MOST_FUTILE, training(), apart=60.0).state, Training)
    last = break_links(2 + MOST_FUTILE, training())
    assert isinstance(last.state, Ended)
    assert last.state.failure is not None
    assert last.state.failure.message == (
        "links between the workers broke 4 times in a row, for 30 s, without a completed step, and no"
        " process was found dead: worker 1 (10.0.0.2:4000) is gone: end of file."
    )


def test_links_that_break_now_and_then_cost_generations_only() -> None:
    assert isinstance(break_links(20, training(), advance=1).state, Training)


def test_links_that_break_many_times_in_a_short_storm_cost_generations_only() -> None:
    assert isinstance(break_links(100, training(), apart=0.29).state, Training)
    assert isinstance(break_links(100, training(), apart=0.31).state, Ended)


def test_a_loss_explains_the_broken_links_before_it() -> None:
    broken = break_links(1 + MOST_FUTILE, training()).state
    lost = last_of(broken, (41.0, killed(1)), (41.0, reported(0, 16, 5)), (41.0, reported(2, 16, 5)))
    assert workers_of(declared(lost)) == [0, 2]


def test_a_user_error_ends_the_job_while_it_regroups() -> None:
    message = message_of((2.0, FailureReported(0, Failure("UserCodeError", "no"))), state=forming((1.0, killed(1))))
    assert message == "no"


def test_a_task_that_ends_with_the_code_of_one_that_leaves_is_given_up_like_any_other() -> None:
    events: list[Timed] = [(0.1, exited(0, LEFT, life=life)) for life in range(4)]
    assert isinstance(last_of(start(SETTINGS, 0.0), *events).state, Ended)


def test_where_two_dispute_a_lane_the_one_that_is_left_waits_for_another() -> None:
    state = training(replace(SETTINGS, workers=2))
    why = Failure("LanesDisputed", "lane 3 was computed to other bits", worker=1)
    told, gone, alone = play(
        state, (1.0, FailureReported(1, why, pid_of(1))), (1.1, exited(1, GAVE_UP)), (1.2, reported(0))
    )
    assert isinstance(told.state, Training)
    assert [refill.worker for refill in gone.actions if isinstance(refill, Refill)] == [1]
    assert isinstance(alone.state, Forming)
    assert "another worker must come" in alone.reason
    generation = declared(last_of(alone.state, (2.0, registered(1, life=1))))
    assert workers_of(generation) == [0, 1]
    stopping = last_of(alone.state, (2.0, StopRequested("stop")))
    assert not isinstance(stopping.state, Forming), "to stop, one is enough"
    formed = last_of(alone.state, (2.0, registered(1, life=1))).state
    again = last_of(formed, (2.1, killed(1, life=1)), (2.2, reported(0, generation=2)))
    assert "another worker must come" in again.reason, "nobody has settled it yet"

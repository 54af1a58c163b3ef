"""Servers in a generation: awaited, lost, let go and replaced, as the pure membership decides it."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from coordinator.played import (
    FIRST,
    PEER_LOST,
    SETTINGS,
    Timed,
    all_report,
    asked_to_leave,
    beats_until,
    completed,
    declared,
    exited,
    forms,
    killed,
    kinds,
    last_of,
    messages_of,
    of_kind,
    pid_of,
    play,
    registered,
    reported,
    workers_of,
)
from quorate.coordinator.events import (
    Dismiss,
    Expel,
    FailureReported,
    Refill,
    Refuse,
    Regroup,
    ResizeRequested,
    StateReported,
    StopRequested,
)
from quorate.coordinator.forming import succeed, take_over
from quorate.coordinator.membership import decide, start
from quorate.coordinator.places import news_of
from quorate.coordinator.states import Decision, Ended, Handover, JobSettings, Recollection, State, Training
from quorate.core.errors import PeerLost
from quorate.core.failure import Failure
from quorate.core.generation import LEFT, Cursor, Generation, GenerationId, Position, Role, server_id
from quorate.observe.events import Resized, RolledBack, WorkerLost

SERVED = replace(SETTINGS, workers=2, servers=2)
A, B, C = map(server_id, range(3))
EVERYBODY = (0, 1, A, B)
LOST = Failure("StateLost", "nobody holds 3 of 10 parameters any more: server 1 is lost, and replicas is 1.")


def serving_job(settings: JobSettings = SERVED) -> Training:
    """Everybody is in the first generation, since the time 0."""
    places = (*range(settings.workers + settings.spares), *map(server_id, range(settings.servers)))
    state = last_of(start(settings, 0.0), *((0.0, registered(place)) for place in places)).state
    assert isinstance(state, Training)
    return state


def saved(members: Iterable[int], step: int, generation: int = 1, now: float = 1.1) -> list[Timed]:
    return [(now, replace(reported(member, step, generation), is_saved=True)) for member in members]


def roles_of(generation: Generation) -> dict[int, Role]:
    return {member.worker: member.role for member in generation.members}


# --- who is there, and who is lost


def test_servers_are_awaited_at_the_start_and_stand_behind_the_workers() -> None:
    decisions = play(start(SERVED, 0.0), *((0.0, registered(place)) for place in (B, 1, 0, A)))
    assert [forms(decision) for decision in decisions] == [False, False, False, True]
    formed = declared(decisions[-1])
    assert workers_of(formed) == [0, 1, A, B]
    assert [len(member.lanes) for member in formed.members] == [4, 4, 0, 0]
    assert roles_of(formed) == {0: Role.WORKER, 1: Role.WORKER, A: Role.SERVER, B: Role.SERVER}


def test_a_process_without_a_place_is_refused_by_its_name() -> None:
    decision = decide(serving_job(), registered(C), 1.0)
    (refusal,) = of_kind(Refuse, decision)
    assert "server 2" in refusal.failure.message
    assert "2 servers" in refusal.failure.message
    assert "100000" not in refusal.failure.message


def test_without_a_lost_server_the_others_go_on_at_once_and_its_place_is_filled() -> None:
    lost, *reports = play(serving_job(), (1.0, killed(B)), *all_report((0, 1, A)))
    assert Refill(B, 0.0, restore=False) in lost.actions
    formed = declared(reports[-1])
    assert (workers_of(formed), formed.cursor) == ([0, 1, A], Cursor(16))
    back = play(reports[-1].state, (2.0, registered(B, life=1)), *all_report((0, 1, A), 20, 2, 2.1))
    assert Regroup(GenerationId(3, 2), at_boundary=True) in back[0].actions
    again = declared(back[-1])
    assert (workers_of(again), again.behind) == ([0, 1, A, B], (B,))


def test_with_the_last_server_the_state_is_gone_and_its_successor_brings_the_checkpoint() -> None:
    settings = replace(SERVED, servers=1)
    decisions = play(serving_job(settings), (1.0, killed(A)), *all_report((0, 1), 25))
    assert Refill(A, 0.0, restore=True) in decisions[0].actions
    assert not any(map(forms, decisions)), "workers hold only what they have pulled"
    formed = decide(decisions[-1].state, registered(A, life=1, cursor=Cursor(20)), 2.0)
    generation = declared(formed)
    assert generation.cursor == Cursor(20)
    assert generation.behind == (0, 1), "they are ahead, and take up what the server has"
    assert [action.step for action in of_kind(RolledBack, formed)] == [20]
    assert messages_of(formed.actions) == []


def test_without_a_checkpoint_it_begins_again_and_says_so() -> None:
    settings = replace(SERVED, servers=1)
    decisions = play(serving_job(settings), (1.0, killed(A)), *all_report((0, 1), 25), (2.0, registered(A, life=1)))
    assert declared(decisions[-1]).cursor == Cursor()
    (told,) = messages_of(decisions[-1].actions)
    assert "there is no checkpoint: it restarts at step 1" in told


def test_a_worker_does_not_found_a_job_whose_servers_are_gone() -> None:
    """Worker 1 is started from the checkpoint. The server was ordered while worker 1 may still have saved another one,
    so that it makes room for one that looks again."""
    settings = replace(SERVED, servers=1)
    gone = play(serving_job(settings), (1.0, killed(0)), *all_report((1, A)), (1.2, registered(0, life=1)))
    second = play(gone[-1].state, *all_report((1, A), 17, 2), (1.3, killed(A)))
    assert Refill(A, 0.0, restore=True) in second[-1].actions
    third = GenerationId(3, 3)
    rest = [StateReported(member, pid_of(member, life), third, Cursor(18)) for member, life in ((1, 0), (0, 1))]
    both = play(second[-1].state, *((1.4, report) for report in rest), (1.5, killed(1)))
    assert Refill(1, 0.0, restore=True) in both[-1].actions
    came = decide(both[-1].state, registered(1, life=1, cursor=Cursor(10)), 2.0)
    assert not forms(came), "no server is here"
    late = decide(came.state, registered(A, life=1, cursor=Cursor(10)), 2.1)
    assert Expel(A, pid_of(A, 1)) in late.actions
    again = play(late.state, (2.2, killed(A, life=1)), (2.3, registered(A, life=2, cursor=Cursor(15))))
    assert declared(again[-1]).cursor == Cursor(15)


def test_a_lost_worker_is_replaced_beside_servers_and_copies_from_them() -> None:
    decisions = play(serving_job(), (1.0, killed(0)), *all_report((1, A, B)))
    assert workers_of(declared(decisions[-1])) == [1, A, B]
    again = play(decisions[-1].state, (1.2, registered(0, life=1)), *all_report((1, A, B), 18, 2))
    assert declared(again[-1]).behind == (0,)


def test_all_workers_may_go_while_servers_hold_the_state() -> None:
    decisions = play(serving_job(), (1.0, killed(0)), (1.0, killed(1)), *all_report((A, B)))
    assert of_kind(Refill, *decisions) == [Refill(worker, 0.0, restore=False) for worker in (0, 1)]
    assert not forms(decisions[-1])
    formed = declared(decide(decisions[-1].state, registered(0, life=1), 2.0))
    assert (workers_of(formed), formed.cursor, formed.behind) == ([0, A, B], Cursor(16), (0,))


def test_min_workers_counts_no_servers() -> None:
    settings = replace(SERVED, min_workers=2)
    decisions = play(serving_job(settings), (1.0, killed(0)), *all_report((1, A, B)))
    assert not forms(decisions[-1])
    assert "1 workers are here, and min_workers is 2" in decisions[-1].reason
    assert forms(decide(decisions[-1].state, registered(0, life=1), 2.0))


def test_spares_take_the_places_of_workers_only() -> None:
    settings = replace(SERVED, spares=1)
    decisions = play(serving_job(settings), (1.0, killed(B)), *all_report((0, 1, A)))
    assert workers_of(declared(decisions[-1])) == [0, 1, A]
    worker = play(serving_job(settings), (1.0, killed(1)), *all_report((0, A, B)))
    assert workers_of(declared(worker[-1])) == [0, 2, A, B]


def test_a_silent_server_is_expelled_and_the_others_go_on() -> None:
    *_, lost = play(serving_job(), *beats_until(5.0, 0, 1, A))
    assert Expel(B, pid_of(B)) in lost.actions
    (told,) = of_kind(WorkerLost, lost)
    assert told.message is not None
    assert told.message.startswith("server 1 (pid")
    formed = last_of(lost.state, *all_report((0, 1, A), now=5.1))
    assert workers_of(declared(formed)) == [0, 1, A]


def test_the_job_is_done_when_servers_are_too() -> None:
    *before, last = play(serving_job(), *((1.0, completed(member)) for member in (0, 1, A)), (1.0, completed(B, "own")))
    assert all(isinstance(decision.state, Training) for decision in before)
    assert isinstance(last.state, Ended)
    assert last.state.failure is None, "what a server holds is a part, and its digest another"


def test_what_a_server_cannot_apply_ends_the_job_with_its_error() -> None:
    failure = Failure("UserCodeError", "server 0, step 17: no (in optimizer.step())", A, step=17, phase="apply")
    decisions = play(
        serving_job(), (1.0, reported(B, 17, symptom=PEER_LOST)), (1.1, FailureReported(A, failure, pid_of(A), FIRST))
    )
    assert isinstance(decisions[-1].state, Ended)
    assert decisions[-1].state.failure is not None
    assert "optimizer.step()" in decisions[-1].state.failure.message


# --- a server that leaves


def test_a_server_that_leaves_takes_part_once_more_and_goes_after_a_step() -> None:
    asked = decide(serving_job(), asked_to_leave(B), 1.0)
    assert Regroup(FIRST, at_boundary=True) in asked.actions
    handing_over = last_of(asked.state, *all_report(EVERYBODY, 17))
    formed = declared(handing_over)
    assert roles_of(formed)[B] is Role.RETIRING
    assert Regroup(formed.id, at_boundary=True) in handing_over.actions
    assert Dismiss(B, pid_of(B)) not in handing_over.actions
    after = last_of(handing_over.state, *all_report(EVERYBODY, 18, 2, 1.2))
    assert Dismiss(B, pid_of(B)) in after.actions
    assert workers_of(declared(after)) == [0, 1, A]
    gone = decide(after.state, exited(B, LEFT), 1.3)
    assert Refill(B, 0.0, restore=False) in gone.actions
    assert not of_kind(WorkerLost, gone)


def test_it_is_kept_where_the_generation_breaks_before_a_step() -> None:
    asked = last_of(serving_job(), (1.0, asked_to_leave(B)), *all_report(EVERYBODY, 17))
    broken = play(asked.state, (1.2, killed(0)), *all_report((1, A, B), 17, 2, 1.3))
    assert not of_kind(Dismiss, *broken)
    assert roles_of(declared(broken[-1]))[B] is Role.RETIRING
    after = last_of(broken[-1].state, *all_report((1, A, B), 18, 3, 1.4))
    assert Dismiss(B, pid_of(B)) in after.actions


def test_one_that_leaves_before_it_has_anything_goes_at_once() -> None:
    state = last_of(serving_job(), (1.0, killed(B)), *all_report((0, 1, A)), (1.2, registered(B, life=1))).state
    asked = decide(state, replace(asked_to_leave(B), pid=pid_of(B, 1)), 1.3)
    assert Dismiss(B, pid_of(B, 1)) in asked.actions


def test_where_the_other_dies_meanwhile_it_serves_on_until_that_is_saved() -> None:
    asked = last_of(serving_job(), (1.0, asked_to_leave(B)), *all_report(EVERYBODY, 17))
    alone = play(asked.state, (1.2, killed(A)), *all_report((0, 1, B), 17, 2, 1.3))
    formed = declared(alone[-1])
    assert roles_of(formed) == {0: Role.WORKER, 1: Role.WORKER, B: Role.SERVER}
    assert Regroup(formed.id, at_boundary=True, saves=True) in alone[-1].actions
    over = play(alone[-1].state, *saved((0, 1, B), 18, 3, 1.4))
    assert Dismiss(B, pid_of(B)) in over[-1].actions


def test_where_all_servers_leave_they_save_and_go() -> None:
    asked = play(serving_job(), (1.0, asked_to_leave(A)), (1.0, asked_to_leave(B)))
    assert Regroup(FIRST, at_boundary=True, saves=True) in asked[1].actions
    gone = play(asked[1].state, *saved(EVERYBODY, 17))
    assert set(of_kind(Dismiss, gone[-1])) == {Dismiss(server, pid_of(server)) for server in (A, B)}
    assert not any(map(forms, gone))
    back = play(gone[-1].state, (1.3, exited(A, LEFT)), (1.3, exited(B, LEFT)))
    assert of_kind(Refill, *back) == [Refill(server, 0.0, restore=True) for server in (A, B)]
    again = play(back[-1].state, *((2.0, registered(server, life=1, cursor=Cursor(17))) for server in (A, B)))
    assert declared(again[-1]).cursor == Cursor(17)


def test_if_they_could_not_save_they_try_again() -> None:
    asked = play(serving_job(), (1.0, asked_to_leave(A)), (1.0, asked_to_leave(B)), *all_report(EVERYBODY, 17))
    formed = declared(asked[-1])
    assert Regroup(formed.id, at_boundary=True, saves=True) in asked[-1].actions


def test_everybody_who_is_asked_to_leave_saves_first_and_nobody_is_waited_for() -> None:
    asked = play(serving_job(), *((1.0, asked_to_leave(member)) for member in EVERYBODY))
    assert Regroup(FIRST, at_boundary=True, saves=True) in asked[-1].actions
    gone = play(asked[-1].state, *saved(EVERYBODY, 17))
    assert set(of_kind(Dismiss, *gone)) == {Dismiss(member, pid_of(member)) for member in EVERYBODY}


def test_workers_that_leave_lead_the_servers_to_their_save() -> None:
    asked = play(serving_job(), *((1.0, asked_to_leave(member)) for member in EVERYBODY), *all_report(EVERYBODY, 17))
    assert workers_of(declared(asked[-1])) == list(EVERYBODY), "what they hold is not saved yet"


def test_servers_that_leave_after_the_workers_wait_for_others_to_save_with() -> None:
    workers = play(serving_job(), (1.0, asked_to_leave(0)), (1.0, asked_to_leave(1)), *all_report(EVERYBODY, 17))
    servers = play(workers[-1].state, (1.2, asked_to_leave(A)), (1.2, asked_to_leave(B)))
    assert not of_kind(Dismiss, *servers)
    fresh = play(servers[-1].state, (1.3, exited(0, LEFT)), (1.4, registered(0, life=1)))
    assert Refill(0, 0.0, restore=False) in fresh[0].actions
    formed = declared(fresh[1])
    assert workers_of(formed) == [0, A, B]
    assert Regroup(formed.id, at_boundary=True, saves=True) in fresh[1].actions


# --- another number of servers


def test_more_servers_are_awaited_and_let_in_at_a_step_boundary() -> None:
    grown = decide(serving_job(), ResizeRequested(servers=3), 1.0)
    (told,) = of_kind(Resized, grown)
    assert (told.workers, told.servers) == (2, 3)
    assert "3 servers instead of 2" in grown.reason
    came = play(grown.state, (1.5, registered(C)), *all_report(EVERYBODY, 17, now=1.6))
    assert Regroup(FIRST, at_boundary=True) in came[0].actions
    formed = declared(came[-1])
    assert (workers_of(formed), formed.behind) == ([0, 1, A, B, C], (C,))


def test_fewer_servers_hand_over_before_the_last_ones_go() -> None:
    settings = replace(SERVED, servers=3)
    shrunk = decide(serving_job(settings), ResizeRequested(servers=1), 1.0)
    assert Regroup(FIRST, at_boundary=True) in shrunk.actions
    handing_over = last_of(shrunk.state, *all_report((*EVERYBODY, C), 17))
    assert roles_of(declared(handing_over))[B] is roles_of(declared(handing_over))[C] is Role.RETIRING
    after = last_of(handing_over.state, *all_report((*EVERYBODY, C), 18, 2, 1.2))
    assert set(of_kind(Dismiss, after)) == {Dismiss(server, pid_of(server)) for server in (B, C)}
    gone = play(after.state, (1.3, exited(B, LEFT)), (1.3, exited(C, LEFT)))
    assert not of_kind(Refill, *gone)


@pytest.mark.parametrize(
    ("settings", "asked", "why"),
    [
        (SERVED, ResizeRequested(servers=0), "0 servers: it has 2 servers, and 1 is the minimum"),
        (SETTINGS, ResizeRequested(servers=1), "1 servers: only `strategy: parameter-server` has servers"),
        (SERVED, ResizeRequested(workers=9, servers=1), "9 workers and 1 servers: it has 8 lanes"),
    ],
)
def test_a_number_that_cannot_be_is_refused(settings: JobSettings, asked: ResizeRequested, why: str) -> None:
    decision = decide(serving_job(settings), asked, 1.0)
    assert kinds(decision.actions) == ["Refuse"]
    assert why in decision.reason


def test_workers_and_servers_are_changed_together() -> None:
    decision = decide(serving_job(), ResizeRequested(workers=3, servers=1), 1.0)
    assert "3 workers instead of 2 and 1 server instead of 2" in decision.reason
    same = decide(serving_job(), ResizeRequested(servers=2), 1.0)
    assert (same.actions, same.reason) == ((), "the job has 2 servers already")


# --- a part of the state that nobody holds any more


def without_replicas() -> Decision:
    """Server 1 has died, and the others have found together that nobody holds its blocks."""
    second = last_of(serving_job(), (1.0, killed(B)), *all_report((0, 1, A), 25))
    assert declared(second).cursor == Cursor(25)
    return decide(second.state, reported(0, 25, 2, LOST), 1.2)


def test_lost_blocks_send_the_servers_back_to_the_checkpoint_and_workers_stay() -> None:
    first = without_replicas()
    assert of_kind(Expel, first) == [Expel(A, pid_of(A))]
    (told,) = messages_of(first.actions)
    assert told == f"{LOST.message} All go back to the newest checkpoint."
    others = play(first.state, (1.2, reported(1, 25, 2, LOST)), (1.3, killed(A)))
    assert Refill(A, 0.0, restore=True) in others[-1].actions
    assert not of_kind(WorkerLost | Expel, *others)
    assert messages_of(action for one in others for action in one.actions) == []
    back = play(others[-1].state, *((2.0, registered(server, life=1, cursor=Cursor(20))) for server in (A, B)))
    formed = declared(back[-1])
    assert (formed.cursor, formed.behind) == (Cursor(20), (0, 1))
    assert [action.step for action in of_kind(RolledBack, back[-1])] == [20]


def test_what_the_server_itself_tells_late_is_nobodys_word() -> None:
    first = without_replicas()
    late = decide(first.state, reported(A, 25, 2, LOST), 1.3)
    assert kinds(late.actions) == ["Refuse"]
    assert late.state == first.state


def test_one_that_came_before_the_loss_was_known_does_not_found_the_job() -> None:
    """It was built while server 0 held the state, so that it has not looked for a checkpoint."""
    second = last_of(serving_job(), (1.0, killed(B)), *all_report((0, 1, A), 25), (1.1, registered(B, life=1)))
    gone = play(
        second.state,
        (1.2, reported(A, 25, 2, LOST)),
        *((1.2, reported(worker, 25, 2, LOST)) for worker in (0, 1)),
        (1.3, killed(A)),
        (2.0, registered(A, life=1, cursor=Cursor(20))),
    )
    assert declared(gone[-1]).cursor == Cursor(20)


def test_without_a_checkpoint_lost_blocks_take_the_job_back_to_its_first_step() -> None:
    gone = play(without_replicas().state, (1.2, reported(1, 25, 2, LOST)), (1.3, killed(A)))
    back = play(gone[-1].state, *((2.0, registered(server, life=1)) for server in (A, B)))
    assert declared(back[-1]).cursor == Cursor()
    assert any("it restarts at step 1" in message for message in messages_of(back[-1].actions))


def test_a_job_that_stops_ends_as_it_was_saved_when_blocks_are_lost() -> None:
    stopping = last_of(serving_job(), (0.5, StopRequested("interrupted")), (1.0, killed(B)), *all_report((0, 1, A), 25))
    over = play(stopping.state, *all_report((0, 1), 25, 2, 1.2, LOST), (1.3, killed(A)))
    assert isinstance(over[-1].state, Ended)
    assert over[-1].state.failure is None


def test_blocks_that_are_lost_again_and_again_without_a_step_end_the_job() -> None:
    state: State = without_replicas().state
    for life in range(20):
        # Server 1 dies in every generation before its first step, and takes its blocks with it.
        number = state.members.generations if not isinstance(state, Ended) else 0
        gone = play(state, (2.0, reported(1, 0, number, LOST)), (2.0, killed(A, life=life)))
        back = play(gone[-1].state, *((2.1, registered(server, life=life + 1)) for server in (A, B)))
        if any(isinstance(decision.state, Ended) for decision in back):
            break
        third = declared(back[-1]).id.number
        lost = play(
            back[-1].state,
            (2.2, killed(B, life=life + 1)),
            *((2.3, reported(worker, 0, third)) for worker in (0, 1)),
            (2.3, reported(A, 0, third, life=life + 1)),
            (2.4, reported(0, 0, third + 1, LOST)),
        )
        state = lost[-1].state
        if isinstance(state, Ended):
            break
    else:
        pytest.fail("it never ends")


# --- stopping


def test_a_stop_while_servers_hold_the_state_and_no_worker_is_left_does_not_wait_for_ever() -> None:
    decisions = play(
        serving_job(), (0.5, StopRequested("terminated")), (1.0, killed(0)), (1.0, killed(1)), *all_report((A, B))
    )
    assert isinstance(decisions[-1].state, Ended)
    assert decisions[-1].state.result == {"ending": "terminated"}


def test_a_stop_has_a_worker_started_that_leads_the_servers_to_their_save() -> None:
    """Ordered before the stop was asked for, and not started yet: nobody else could save what they hold."""
    lost = [*((1.0, killed(one)) for one in (0, 1, B)), *all_report((A,))]
    decisions = play(serving_job(), *lost, (1.2, StopRequested("terminated")))
    told = news_of(decisions[-1].state, {(A, pid_of(A))}, 1.3)
    assert list(told.vacant) == [0, 1]
    led = decide(decisions[-1].state, registered(0, life=1), 2.0)
    assert workers_of(declared(led)) == [0, A]
    assert not news_of(led.state, {(A, pid_of(A)), (0, pid_of(0, 1))}, 2.1).vacant


def test_a_stop_goes_on_with_the_servers_that_are_left() -> None:
    decisions = play(serving_job(), (0.5, StopRequested("terminated")), (1.0, killed(B)), *all_report((0, 1, A)))
    assert workers_of(declared(decisions[-1])) == [0, 1, A]
    assert not of_kind(Refill, *decisions)


# --- another coordinator


def taken_over(generation: Generation, settings: JobSettings = SERVED, **recalled: int) -> State:
    present = frozenset((member.worker, pid_of(member.worker)) for member in generation.members)
    known = Recollection(None, None, True, **recalled)  # type: ignore[arg-type]
    return take_over(replace(settings, incarnation=4), Handover(present, frozenset()), known, 100.0)


def come_back(generation: Generation, *, step: int | None = None) -> list[Timed]:
    """All its members come back to another coordinator: still in it, or having left it at a step."""
    position = Position(generation, Cursor(step or 0), has_left=step is not None, has_trained=True)
    return [(100.1, registered(member.worker, position=position)) for member in generation.members]


def test_the_next_coordinator_goes_on_with_all_that_are_at_work() -> None:
    generation = serving_job().generation
    decisions = play(taken_over(generation), *come_back(generation))
    assert isinstance(decisions[-1].state, Training)
    assert decisions[-1].state.generation == generation


def test_the_next_coordinator_forms_with_servers_behind_the_workers() -> None:
    generation = serving_job().generation
    formed = declared(last_of(taken_over(generation), *come_back(generation, step=17)))
    assert (workers_of(formed), formed.cursor) == (list(EVERYBODY), Cursor(17))


def test_the_next_coordinator_knows_how_many_servers_were_asked_for() -> None:
    generation = serving_job().generation
    decisions = play(taken_over(generation, servers=1), *come_back(generation))
    assert Regroup(generation.id, at_boundary=True) in decisions[-1].actions, "server 1 is to leave"
    more = play(taken_over(generation, servers=3), *come_back(generation), (100.2, registered(C)))
    assert Regroup(generation.id, at_boundary=True) in more[-1].actions


def test_the_next_coordinator_ends_a_generation_in_which_a_server_hands_over() -> None:
    """The word that it ends at the next step boundary may have been the last of the coordinator before."""
    leaving = last_of(serving_job(), (1.0, asked_to_leave(B)), *all_report(EVERYBODY, 17))
    generation = declared(leaving)
    decisions = play(taken_over(generation), *come_back(generation), (100.2, asked_to_leave(B, 9)))
    assert Regroup(generation.id, at_boundary=True) in [action for one in decisions for action in one.actions]
    reports = [(100.3, StateReported(one, pid_of(one), generation.id, Cursor(18))) for one in EVERYBODY]
    after = last_of(decisions[-1].state, *reports)
    assert Dismiss(B, pid_of(B)) in after.actions
    assert workers_of(declared(after)) == [0, 1, A]


def test_a_server_that_does_not_come_back_is_lost() -> None:
    generation = serving_job().generation
    handover = Handover(frozenset((one, pid_of(one)) for one in EVERYBODY), frozenset())
    state = succeed(replace(SERVED, incarnation=4), handover, 100.0)
    back = [event for event in come_back(generation, step=17) if event[1].worker != B]  # type: ignore[union-attr]
    gone = play(state, *back, (100.2, killed(B)))
    assert workers_of(declared(gone[-1])) == [0, 1, A]


# --- links


def broken_link(one: int, other: int, generation: int, step: int = 16) -> list[Timed]:
    """The link between two fails, everybody is alive and stands at the same step."""
    symptoms = {one: replace(PEER_LOST, peer=other), other: replace(PEER_LOST, peer=one)}
    return [(1.0 + generation, reported(member, step, generation, symptoms.get(member))) for member in EVERYBODY]


def test_a_worker_whose_link_to_a_server_fails_twice_is_left_out() -> None:
    decisions = play(serving_job(), *broken_link(1, A, 1), *broken_link(1, A, 2))
    formed = declared(decisions[-1])
    assert workers_of(formed) == [0, A, B]
    (told,) = messages_of(decisions[-1].actions)
    assert "worker 1 (pid" in told
    assert "server 0 (pid" in told
    assert "everybody needs every server, so worker 1 is left out" in told


def test_a_link_between_servers_is_tried_as_it_is() -> None:
    decisions = play(serving_job(), *broken_link(A, B, 1), *broken_link(A, B, 2))
    assert workers_of(declared(decisions[-1])) == list(EVERYBODY)
    (told,) = messages_of(decisions[-1].actions)
    assert "everybody needs every server, so it is tried as it is" in told


def test_a_server_is_named_as_the_other_end_of_a_link() -> None:
    assert PeerLost("server 1 (this host)", "end of file").worker == B
    assert PeerLost("worker 1 (this host)", "end of file").worker == 1
    assert PeerLost("server 1", PeerLost.CLOSED_HERE).worker is None

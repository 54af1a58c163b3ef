"""A coordinator that takes the place of another, played to the pure membership."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.played import (
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
    types_of,
    workers_of,
)
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import (
    DeclareGeneration,
    Expel,
    GrantLease,
    Recall,
    Refill,
    Refuse,
    Registered,
    Regroup,
    StateReported,
    StopRequested,
    Tick,
    Welcome,
)
from quorate.coordinator.forming import succeed, take_over
from quorate.coordinator.membership import decide
from quorate.coordinator.service import CoordinatorService
from quorate.coordinator.states import (
    Ended,
    Forming,
    Handover,
    JobSettings,
    Recalling,
    Recollection,
    State,
    Training,
)
from quorate.core.failure import Failure
from quorate.core.generation import LEFT, Cursor, Generation, GenerationId, Position
from quorate.observe.events import RunFailed, RunFinished, WorkerLost, read_event
from quorate.observe.jsonl import JsonlSink
from quorate.wire.proto import coordinator_pb2 as pb

NEXT: JobSettings = replace(SETTINGS, incarnation=4)
EVERYBODY = frozenset((worker, pid_of(worker)) for worker in range(3))


def before() -> Generation:
    """The generation that is at work when its coordinator dies."""
    state = training()
    assert isinstance(state, Training)
    return state.generation


def later(step: int, *, without: int | None = None) -> Generation:
    """One that the coordinator before has formed last."""
    first = before()
    members = tuple(replace(one, cursor=Cursor(step)) for one in first.members if one.worker != without)
    return Generation(GenerationId(3, 2), members)


def back(worker: int, position: Position) -> Registered:
    return registered(worker, position=position)


def at_work(worker: int, generation: Generation | None = None) -> Registered:
    return back(worker, Position(generation or before(), has_left=False, has_trained=True))


def waiting(worker: int, step: int, *, has_trained: bool = True) -> Registered:
    return back(worker, Position(before(), Cursor(step), has_left=True, has_trained=has_trained))


def taking_over(handover: Handover | None = None) -> Recalling:
    return succeed(NEXT, handover or Handover(EVERYBODY, frozenset()), now=100.0)


def test_whoever_is_at_work_goes_on_as_if_nothing_had_happened() -> None:
    decisions = play(taking_over(), *[(100.1, at_work(worker)) for worker in range(3)])
    assert [types_of(decision) for decision in decisions] == [[Welcome]] * 3
    state = decisions[-1].state
    assert isinstance(state, Training)
    assert state.generation == before()


def test_a_worker_that_it_does_not_know_is_asked_to_come_back() -> None:
    state = taking_over()
    for event in (heartbeat(1), reported(1)):
        decision = decide(state, event, 100.1)
        assert (decision.state, decision.actions) == (state, (Recall(1),))
    known = decide(state, at_work(1), 100.1).state
    assert GrantLease in types_of(decide(known, heartbeat(1), 100.2))
    assert types_of(decide(known, at_work(1), 100.3)) == [Welcome], "the answer may have been lost"


def test_nobody_is_decided_about_before_everybody_is_back() -> None:
    decision = last_of(taking_over(), (100.1, at_work(0)), (100.1, waiting(1, 17)))
    assert isinstance(decision.state, Recalling)
    assert DeclareGeneration not in types_of(decision)


def test_no_place_is_filled_before_everybody_is_back_and_then_it_is_at_once(tmp_path: Path) -> None:
    """Or one would be started from a checkpoint, although those who come back hold the state."""

    async def ask() -> None:
        service = CoordinatorService(NEXT, EventLog(JsonlSink(tmp_path / "e")), taking_over())
        service.apply(killed(2))
        processes = [pb.Process(slot=worker, pid=pid_of(worker)) for worker in range(2)]
        reply = await service.Outcome(pb.OutcomeRequest(timeout=0.01, processes=processes), None)
        assert not reply.vacant
        service.apply(waiting(0, 17))
        asked = asyncio.create_task(service.Outcome(pb.OutcomeRequest(timeout=60.0, processes=processes), None))
        await asyncio.sleep(0.01)
        service.apply(waiting(1, 17))
        reply = await asyncio.wait_for(asked, 60.0)
        assert [(vacancy.slot, vacancy.restore) for vacancy in reply.vacant] == [(2, False)]

    asyncio.run(ask())


def test_a_generation_that_only_some_have_heard_of_is_over() -> None:
    # The one before had declared it, and told worker 0 alone.
    decision = last_of(taking_over(), (100.1, at_work(0, later(17))), (100.1, waiting(1, 17)), (100.1, waiting(2, 16)))
    assert isinstance(decision.state, Forming)
    assert decision.actions == (Welcome(2, NEXT.timing.lease), Regroup(GenerationId(3, 2), at_boundary=False))
    formed = declared(last_of(decision.state, (100.2, reported(0, step=17, generation=2))))
    assert formed.id == GenerationId(4, 3)
    assert (formed.cursor, formed.behind) == (Cursor(17), (2,)), "the most advanced, not the first to come back"


def test_members_of_an_older_generation_leave_it_too() -> None:
    decision = last_of(
        taking_over(),
        (100.1, at_work(0, later(17, without=2))),
        (100.1, at_work(1, later(17, without=2))),
        (100.1, at_work(2)),
    )
    # Worker 2 was given up by the one before, and is alive: it leaves what is over, and is let in at a boundary.
    assert isinstance(decision.state, Training)
    assert decision.state.generation == later(17, without=2)
    assert decision.actions[1:] == (
        Regroup(GenerationId(3, 1), at_boundary=False),
        Regroup(GenerationId(3, 2), at_boundary=True),
    )
    promised = decide(decision.state, reported(2, step=16), 100.2)
    assert isinstance(promised.state, Training)


def test_one_that_was_reaped_meanwhile_is_lost_at_once() -> None:
    decisions = play(taking_over(), (100.1, at_work(0)), (100.1, at_work(1)), (100.2, killed(2)))
    assert [kind for kind in types_of(decisions[-1]) if kind in (WorkerLost, Refill, Regroup)] == [
        WorkerLost,
        Refill,
        Regroup,
    ]
    formed = declared(last_of(decisions[-1].state, (100.3, reported(0)), (100.3, reported(1))))
    assert workers_of(formed) == [0, 1]


def test_one_that_the_coordinator_before_has_let_go_is_no_loss() -> None:
    pair = later(17, without=2)
    events: list[Timed] = [(100.1, at_work(0, pair)), (100.1, at_work(1, pair)), (100.2, exited(2, LEFT))]
    decision = play(taking_over(), *events)[-1]
    assert WorkerLost not in types_of(decision)
    assert isinstance(decision.state, Training)
    assert Refill in types_of(decision)


def test_nobody_else_is_lost_before_the_failure_timeout_and_then_is_killed_first() -> None:
    state: State = last_of(taking_over(), (100.1, at_work(0)), (100.1, at_work(1))).state
    for now in (101.0, 102.0, 103.0, 104.0):
        decision = play(state, (now, heartbeat(0, int(now))), (now, heartbeat(1, int(now))), (now, Tick()))[-1]
        assert decision.actions == ()
        state = decision.state
    decision = decide(state, Tick(), 105.0)
    assert Expel(2, pid_of(2)) in decision.actions
    assert "did not come back within 5.0 s" in decision.reason
    assert Refill not in types_of(decision), "until it has been reaped it may still write somewhere"
    assert Refill in types_of(decide(decision.state, killed(2), 105.1))


def test_one_that_comes_too_late_is_refused() -> None:
    state = last_of(taking_over(), (100.1, at_work(0)), (100.1, at_work(1)), (100.2, killed(2))).state
    assert types_of(decide(state, at_work(2), 100.3)) == [Refuse]
    stranger = replace(at_work(2), pid=1)
    assert types_of(decide(taking_over(), stranger, 100.1)) == [Refuse]


def test_one_that_was_still_being_built_comes_back_as_one_that_is_new() -> None:
    # The supervisor cannot know whether it had registered with the coordinator before.
    pair = frozenset((worker, pid_of(worker)) for worker in range(2))
    state = last_of(
        taking_over(Handover(pair, frozenset({2}))),
        *((100.1, at_work(worker, later(17, without=2))) for worker in range(2)),
    ).state
    assert isinstance(state, Training)
    assert decide(state, heartbeat(2), 100.2).actions == (Recall(2),)
    decision = decide(state, back(2, Position()), 100.3)
    assert Regroup(GenerationId(3, 2), at_boundary=True) in decision.actions


def test_a_newcomer_that_was_on_its_way_is_let_in_at_a_boundary() -> None:
    handover = Handover(frozenset((worker, pid_of(worker)) for worker in range(2)), frozenset({2}))
    pair = later(17, without=2)
    decisions = play(
        taking_over(handover), (100.1, registered(2, life=1)), (100.1, at_work(0, pair)), (100.1, at_work(1, pair))
    )
    assert isinstance(decisions[-1].state, Training)
    assert Regroup(pair.id, at_boundary=True) in decisions[-1].actions


def test_before_the_first_generation_it_forms_it() -> None:
    at_the_start = Position()
    handover = Handover(EVERYBODY, frozenset(), has_begun=False)
    decision = last_of(taking_over(handover), *[(100.1, back(worker, at_the_start)) for worker in range(3)])
    formed = declared(decision)
    assert (formed.id, workers_of(formed)) == (GenerationId(4, 1), [0, 1, 2])


def test_everybody_may_have_died_with_it() -> None:
    decisions = play(taking_over(), *[(100.1, killed(worker)) for worker in range(3)])
    assert all(action.restore for action in of_kind(Refill, *decisions))
    restored = [(101.0, registered(worker, life=1, cursor=Cursor(12))) for worker in range(3)]
    formed = declared(last_of(decisions[-1].state, *restored))
    assert formed.cursor == Cursor(12)


def test_who_is_done_completes_in_the_next_generation() -> None:
    decision = decide(taking_over(), completed(0), 100.1)
    assert isinstance(decision.state, Recalling)
    state = last_of(taking_over(), *[(100.1, waiting(worker, 17)) for worker in range(3)]).state
    assert isinstance(state, Training)
    assert state.generation.cursor == Cursor(17)


def test_a_stop_is_heeded_once_everybody_is_back() -> None:
    state = last_of(taking_over(), (100.1, at_work(0)), (100.1, at_work(1)), (100.1, StopRequested("interrupted")))
    later_on = decide(state.state, at_work(2), 100.2).state
    assert isinstance(later_on, Training)
    assert later_on.members.stop == "interrupted"


@pytest.mark.parametrize("failure", [None, Failure("UserCodeError", "no", worker=1, step=17, phase="compute")])
def test_an_end_that_was_written_down_is_the_end(failure: Failure | None) -> None:
    end = RunFinished(weights_digest="d", result={"steps": 17}) if failure is None else RunFailed.of(failure)
    told = read_event(end.to_json())
    assert isinstance(told, RunFinished | RunFailed)
    ended = take_over(SETTINGS, Handover(frozenset(), frozenset()), Recollection(told, None, True), 1.0)
    assert isinstance(ended, Ended)
    assert ended.failure == failure
    assert ended.result == ({} if failure else {"steps": 17})


def test_a_newcomer_that_comes_back_does_not_pass_for_one_that_holds_the_state() -> None:
    # It had joined the generation and copied nothing yet when the coordinator died; then those who held the state do.
    members = tuple(replace(one, cursor=Cursor(0 if one.worker == 2 else 500)) for one in before().members)
    young = Generation(GenerationId(3, 5), members)
    newcomer = back(2, Position(young, Cursor(), has_left=False, has_trained=False))
    told = StateReported(2, pid_of(2), young.id, Cursor())
    decisions = play(taking_over(), (100.1, newcomer), (100.2, told), (100.3, killed(0)), (100.3, killed(1)))
    refills = of_kind(Refill, *decisions)
    assert refills[-1].restore, "nobody holds the state: it is in the newest checkpoint"


def test_a_pause_of_the_coordinator_itself_costs_nobody_the_time_to_come_back() -> None:
    decisions = play(taking_over(), (100.2, Tick()), (109.0, Tick()), (109.2, Tick()))
    assert all(decision.actions == () for decision in decisions)


def test_places_that_are_no_more_are_not_awaited() -> None:
    two = replace(NEXT, workers=2)
    state = succeed(two, Handover(frozenset(), frozenset({0, 1, 2})), now=100.0)
    assert state.members.awaited == {0, 1}


def test_a_death_while_workers_come_back_explains_the_links_that_broke() -> None:
    lost = Failure("PeerLost", "worker 2 is gone", worker=0, peer=2)
    events: list[Timed] = [
        (100.1, at_work(0)),
        (100.1, at_work(1)),
        (100.2, killed(2)),
        (100.3, reported(0, symptom=lost)),
        (100.3, reported(1, symptom=lost)),
    ]
    state = play(taking_over(), *events)[-1].state
    assert isinstance(state, Training)
    assert state.members.links == ()


def test_one_that_was_let_go_and_presents_itself_all_the_same_is_no_loss() -> None:
    everybody: list[Timed] = [(100.1, at_work(worker)) for worker in range(3)]
    decision = play(taking_over(), *everybody, (100.2, exited(2, LEFT)))[-1]
    assert WorkerLost not in types_of(decision)
    assert Regroup(before().id, at_boundary=False) in decision.actions

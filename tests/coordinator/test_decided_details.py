"""Small things that a decision has to get right, each in the state that shows it."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.played import FIRST, PEER_LOST, SETTINGS, heartbeat, killed, pid_of, registered, reported, training
from quorate.coordinator.autopsy import autopsy_of_exit, autopsy_of_futility
from quorate.coordinator.events import (
    Dismiss,
    ExitReported,
    Expel,
    FailureReported,
    HeartbeatReceived,
    Reading,
    Regroup,
    ResizeRequested,
    StopRequested,
    Tick,
)
from quorate.coordinator.forming import succeed
from quorate.coordinator.losses import condemn
from quorate.coordinator.membership import decide
from quorate.coordinator.places import must_hand_over, taking_part
from quorate.coordinator.reports import join_difference
from quorate.coordinator.speed import (
    CAUGHT_UP,
    FAR_BEHIND,
    LEAST_EXCESS,
    LEAST_STEPS,
    LEAST_WORK,
    find_better_sharing,
    judge,
)
from quorate.coordinator.stall import FATAL, find_poison, find_stall, stall_limit, with_victim
from quorate.coordinator.states import (
    Decision,
    Ended,
    Enrolled,
    Forming,
    Handover,
    Measured,
    Members,
    Recalling,
    State,
    Suspicion,
    Training,
    Unended,
    Victim,
    WeakLink,
)
from quorate.coordinator.weak_links import are_neighbours, blame_link, line_up
from quorate.core.failure import Failure
from quorate.core.generation import GAVE_UP, OTHERS, Cursor, Generation, GenerationId, Pace, Position, WorkerStatus

NEXT = replace(SETTINGS, incarnation=4)
WAITS = WorkerStatus(17, "exchange", waits_for=OTHERS)


def enrolled(worker: int, **changes: Any) -> Enrolled:
    """A worker that stands ready, with just a beginning."""
    return replace(Enrolled(registered(worker), heard=1.0, cursor=Cursor(), moved=1.0), **changes)


def holder(worker: int, step: int = 16, **changes: Any) -> Enrolled:
    """One that holds the state of the job."""
    return enrolled(worker, has_trained=True, cursor=Cursor(step), **changes)


def between(*known: Enrolled, **changes: Any) -> Forming:
    """A job between two generations, at the time 1, with these workers."""
    members = Members(SETTINGS, ticked=1.0, wanted=3, enrolled=known, generations=1)
    return Forming(replace(members, **changes), since=1.0)


def knowing(state: Any, **changes: Any) -> Any:
    """The same with other members' facts."""
    return replace(state, members=replace(state.members, **changes))


def members_of(state: State) -> Members:
    assert not isinstance(state, Ended)
    return state.members


def told(worker: int, sequence: int, status: WorkerStatus, pace: Pace | None = None) -> HeartbeatReceived:
    return HeartbeatReceived(worker, FIRST, sequence, status, pid=pid_of(worker), pace=pace)


def said(decision: Decision) -> dict[str, int | None]:
    """What is told by a decision, and of which step."""
    return {
        action.message: action.step
        for action in decision.actions
        if hasattr(action, "message") and hasattr(action, "step")
    }


class TestFounders:
    """Who has looked for the newest checkpoint since nobody holds the state."""

    @pytest.mark.parametrize(
        ("lost", "founders"),
        [
            pytest.param(enrolled(1), {0, 1}, id="just a beginning"),
            pytest.param(enrolled(1, within=FIRST), {1}, id="out of a generation: it may have saved"),
            pytest.param(holder(1), {1}, id="the state"),
        ],
    )
    def test_stay_only_when_who_is_lost_cannot_have_saved_since(self, lost: Enrolled, founders: set[int]) -> None:
        state = between(enrolled(0), lost, founders=frozenset({0}), awaited=frozenset({2}))
        assert members_of(decide(state, killed(1), 2.0).state).founders == founders

    def test_stay_when_one_dies_on_its_way_to_a_new_coordinator_that_nobody_missed(self) -> None:
        state = succeed(NEXT, Handover(frozenset({(0, pid_of(0))}), frozenset({1, 2})), 0.0)
        state = knowing(state, founders=frozenset({1}))
        after = decide(state, killed(2), 1.0).state
        assert isinstance(after, Recalling)
        assert members_of(after).founders == {1, 2}
        missed = decide(state, killed(0), 1.0).state
        assert members_of(missed).founders == {0}


class TestWhoLeaves:
    @pytest.mark.parametrize(("symptoms", "left"), [(((1, 0),), 0), (((1, 0), (0, 2)), 1), (((0, 1),), 0)])
    def test_is_not_suspected_any_more(self, symptoms: tuple[tuple[int, int], ...], left: int) -> None:
        heard = tuple(PEER_LOST.at(worker=worker, peer=peer) for worker, peer in symptoms)
        known = (holder(0), holder(1), enrolled(2))
        settings = replace(SETTINGS, min_workers=3)
        state = between(*known, suspicion=Suspicion(heard, 1.0), settings=settings, ring=(0, 1, 2))
        leaving = replace(heartbeat(1), is_leaving=True)
        decision = decide(state, leaving, 2.0)
        assert Dismiss(1, pid_of(1)) in decision.actions
        suspicion = members_of(decision.state).suspicion
        assert (len(suspicion.symptoms) if suspicion else 0) == left


class TestWhatAPhaseTook:
    def test_is_counted_in_a_generation_and_not_when_that_is_over(self) -> None:
        state = decide(training(), told(0, 1, WorkerStatus(17, "compute")), 1.0).state
        after = decide(state, told(0, 2, WorkerStatus(17, "apply")), 2.0).state
        assert members_of(after).took == {"compute": 1.0}
        over = decide(state, reported(1), 1.5).state
        assert isinstance(over, Forming)
        after = decide(over, told(0, 2, WorkerStatus(17, "apply")), 2.0).state
        assert members_of(after).took == {}

    @pytest.mark.parametrize(
        ("before", "status"),
        [
            pytest.param(WAITS, WorkerStatus(17, "apply"), id="waited for the others"),
            pytest.param(WorkerStatus(17, "compute"), WorkerStatus(17, "regroup"), id="broken off"),
            pytest.param(WorkerStatus(17, ""), WorkerStatus(17, "apply"), id="in no phase"),
        ],
    )
    def test_is_not_counted_where_it_says_nothing_of_the_work(self, before: WorkerStatus, status: WorkerStatus) -> None:
        state = decide(training(), told(0, 1, before), 1.0).state
        after = decide(state, told(0, 2, status), 2.0).state
        assert members_of(after).took == {}
        known = members_of(after).find(0)
        assert known is not None
        assert (known.status, known.moved) == (status, 2.0)

    @pytest.mark.parametrize(("ticked", "counts"), [(0.5, True), (0.25, False)])
    def test_is_not_counted_while_the_coordinator_itself_was_held_up(self, ticked: float, counts: bool) -> None:
        state = knowing(training(), ticked=ticked)
        state_then = decide(state, told(0, 1, WorkerStatus(17, "compute")), 1.0).state
        after = decide(state_then, told(0, 2, WorkerStatus(17, "apply")), 3.0).state
        assert bool(members_of(after).took) is counts

    def test_of_a_spare_says_nothing(self) -> None:
        state = knowing(training(), wanted=3)
        spare = enrolled(3, status=WorkerStatus(0, "compute"))
        state = knowing(state, enrolled=(*state.members.enrolled, spare))
        after = decide(state, told(3, 1, WorkerStatus(0, "apply")), 2.0).state
        assert members_of(after).took == {}

    def test_of_meeting_the_others_does_not_raise_the_limit(self) -> None:
        members = replace(training().members, took={"exchange": 1000.0, "compute": 5.0})
        assert stall_limit(members) == stall_limit(replace(members, took={"compute": 5.0}))
        assert stall_limit(replace(members, took={"compute": 1000.0})) > stall_limit(members)


def test_a_worker_that_tells_its_pace_is_where_it_says() -> None:
    status = WorkerStatus(40, "apply")
    after = decide(training(), told(0, 1, status, Pace(20, 3, 0.001, 0.02, 0.002)), 2.0).state
    known = members_of(after).find(0)
    assert known is not None
    assert (known.status, known.moved) == (status, 2.0)
    assert known.measured is not None


@pytest.mark.parametrize(("own", "counted"), [(FAR_BEHIND * 0.25, LEAST_STEPS), (FAR_BEHIND * 0.25 - 2**-20, 0)])
def test_who_is_just_twice_as_slow_is_slow(own: float, counted: int) -> None:
    others = [enrolled(worker, measured=Measured(Pace(20, 1, 0.0, 0.25, 0.0))) for worker in (1, 2)]
    members = between(enrolled(0), *others).members
    judged, _ = judge(members, enrolled(0), range(1), Pace(LEAST_STEPS, 1, 0.0, own, 0.0))
    assert judged.measured is not None
    assert judged.measured.slow_steps == counted


def test_who_was_behind_for_long_enough_to_the_moment_is_told() -> None:
    others = [enrolled(worker, measured=Measured(Pace(20, 1, 0.0, 2**-7, 0.0))) for worker in (1, 2)]
    members = between(enrolled(0), *others).members
    assert LEAST_WORK == 2.0
    _, sentence = judge(members, enrolled(0), range(1), Pace(32, 1, 0.0, 2**-4, 0.0))
    assert "is slow in compute" in sentence
    _, sentence = judge(members, enrolled(0), range(1), Pace(31, 1, 0.0, 2**-4, 0.0))
    assert sentence == ""


@pytest.mark.parametrize(("own", "is_reported"), [(CAUGHT_UP * 0.25, True), (CAUGHT_UP * 0.25 - 2**-20, False)])
def test_who_is_still_half_as_slow_again_has_not_recovered(own: float, is_reported: bool) -> None:
    others = [enrolled(worker, measured=Measured(Pace(20, 1, 0.0, 0.25, 0.0))) for worker in (1, 2)]
    slow = enrolled(0, measured=Measured(Pace(20, 1, 0.0, 1.0, 0.0), is_reported=True))
    many = 100_000  # steps, beside which those before do not count
    judged, _ = judge(between(slow, *others).members, slow, range(1), Pace(many, 1, 0.0, own, 0.0))
    assert judged.measured is not None
    assert judged.measured.is_reported is is_reported


def test_a_pace_that_is_no_news_is_not_talked_of() -> None:
    event = told(0, 1, WorkerStatus(40, "apply"), Pace(20, 3, 0.001, 0.02, 0.002))
    assert decide(training(), event, 2.0).reason == "worker 0 is alive"


class TestTakingPart:
    def test_those_who_have_most_to_begin_with(self) -> None:
        known = (enrolled(0), enrolled(1, cursor=Cursor(8)), enrolled(2, cursor=Cursor(8)))
        assert [one.worker for one in taking_part(between(*known, wanted=2).members)] == [1, 2]

    def test_those_at_work_by_their_numbers_however_far_they_are(self) -> None:
        known = (holder(0, 15), holder(1, 16), enrolled(2, cursor=Cursor(99)))
        assert [one.worker for one in taking_part(between(*known, wanted=1).members)] == [0]


def test_as_many_workers_as_there_are_is_no_change() -> None:
    assert decide(training(), ResizeRequested(3), 2.0).actions == ()


class TestDivergence:
    DIFFER = Failure("ReplicasDiffer", "they differ.")

    def test_of_a_generation_that_is_no_more_is_no_news(self) -> None:
        state = training()
        for stale in (
            FailureReported(0, self.DIFFER, pid_of(0), GenerationId(3, 0)),
            FailureReported(0, self.DIFFER, 1, FIRST),
        ):
            decision = decide(state, stale, 2.0)
            assert (decision.state, decision.actions) == (state, ())
        assert decide(state, FailureReported(0, self.DIFFER, pid_of(0), FIRST), 2.0).actions != ()


def shared(first: int, paces: tuple[float, float], formed: float = 0.0) -> Training:
    """Two workers that share eight lanes by speed, in a generation since a time: the first hosts so many."""
    settings = replace(SETTINGS, workers=2, balance="speed")
    state = training(settings)
    lanes = (range(first), range(first, 8))
    generation = Generation(
        FIRST, tuple(replace(one, lanes=own) for one, own in zip(state.generation.members, lanes, strict=True))
    )
    known = tuple(
        replace(one, measured=Measured(Pace(100, len(own), 0.0, pace, 0.0)))
        for one, own, pace in zip(state.members.enrolled, lanes, paces, strict=True)
    )
    return replace(state, generation=generation, members=replace(state.members, enrolled=known, formed=formed))


class TestBetterSharing:
    def test_is_worth_it_from_a_fifth_on(self) -> None:
        assert find_better_sharing(shared(5, (1.0, 1.0)), 100, 100.0) != "", "four lanes instead of five"
        assert find_better_sharing(shared(4, (1.0, 1.0)), 100, 100.0) == ""

    def test_is_not_sought_too_early(self) -> None:
        state = shared(6, (1.0, 1.0), formed=10.0)
        assert find_better_sharing(state, 100, 14.75) == ""
        assert find_better_sharing(state, 100, 15.0) != ""


class TestStragglers:
    def others(self, *paces: Pace) -> list[Enrolled]:
        return [enrolled(worker, measured=Measured(pace)) for worker, pace in enumerate(paces, start=1)]

    def test_of_five_milliseconds_a_step_matter_also_beside_workers_that_take_no_time(self) -> None:
        members = between(enrolled(0), *self.others(Pace(20, 1, 0.0, 0.0, 0.0))).members
        judged, sentence = judge(members, enrolled(0), range(1), Pace(1000, 1, 0.0, LEAST_EXCESS, 0.0))
        assert judged.measured is not None
        assert judged.measured.slow_steps == 1000
        assert "longer than those of the others" in sentence

    def test_that_are_done_with_the_others_are_not_waited_for(self) -> None:
        members = between(enrolled(0), *self.others(Pace(20, 2, 0.0, 0.25, 0.0))).members
        _, sentence = judge(members, enrolled(0), range(1), Pace(20, 1, 0.0, 0.5, 0.0))
        assert sentence != ""
        assert "who wait for it" not in sentence
        _, sentence = judge(members, enrolled(0), range(1), Pace(20, 1, 0.0, 0.625, 0.0))
        assert "who wait for it" in sentence


class TestBeforeTheFirstGeneration:
    def test_a_stop_waits_for_those_who_are_here_and_not_for_nobody(self) -> None:
        here = between(enrolled(0), generations=0)
        assert isinstance(decide(here, StopRequested("interrupted"), 2.0).state, Training)
        deserted = between(generations=0)
        assert isinstance(decide(deserted, StopRequested("interrupted"), 2.0).state, Ended)
        on_the_way = between(generations=0, awaited=frozenset({0}))
        assert isinstance(decide(on_the_way, StopRequested("interrupted"), 2.0).state, Forming)


def test_a_generation_that_is_at_work_is_not_waited_for() -> None:
    reason = decide(training(), StopRequested("interrupted"), 2.0).reason
    assert reason == "stop at the next step boundary: interrupted"


def test_what_a_process_tells_that_has_no_place_is_kept_for_nobody() -> None:
    event = FailureReported(None, Failure("LinkError", "cut off"), 99)
    assert members_of(decide(training(), event, 2.0).state).last_words == {}


def test_a_suspicion_counts_from_when_the_coordinator_goes_on() -> None:
    suspicion = Suspicion((PEER_LOST.at(worker=0),), 1.0)
    after = decide(between(holder(0, within=FIRST), holder(1), suspicion=suspicion), Tick(), 20.0).state
    assert members_of(after).suspicion == replace(suspicion, since=20.0)
    assert members_of(decide(between(holder(0, within=FIRST)), Tick(), 20.0).state).suspicion is None


def test_a_link_is_blamed_only_for_what_nobody_died_of() -> None:
    suspicion = Suspicion((PEER_LOST.at(worker=0, peer=1), PEER_LOST.at(worker=1, peer=0)), 1.0)
    failed = between(holder(0), holder(1), ring=(0, 1), suspicion=suspicion).members
    assert blame_link(failed)[1] is not None
    assert blame_link(replace(failed, is_explained=True))[1] is None
    assert blame_link(replace(failed, suspicion=None))[1] is None


class TestHandingOver:
    def test_where_there_is_one_lane_a_checkpoint_is_enough(self) -> None:
        known = (holder(0, is_leaving=True, is_saved=True), enrolled(1))
        assert must_hand_over(between(*known).members)
        assert not must_hand_over(between(*known, settings=replace(SETTINGS, lanes=1)).members)

    def test_whoever_holds_the_state_counts_while_others_have_not_told_how_far_they_are(self) -> None:
        leaving = holder(0, 16, is_leaving=True, within=FIRST)
        assert not must_hand_over(between(leaving, holder(1, 10)).members)
        assert must_hand_over(between(replace(leaving, within=None), holder(1, 10)).members)


def test_who_is_turned_away_is_not_missed_any_more() -> None:
    present = frozenset({(0, pid_of(0)), (1, pid_of(1))})
    state = succeed(NEXT, Handover(present, frozenset({2}), is_condemned=True), 0.0)
    event = registered(0, position=Position(training().generation, has_left=True, has_trained=True))
    decision = decide(state, event, 1.0)
    assert Expel(0, pid_of(0)) in decision.actions
    assert isinstance(decision.state, Recalling)
    assert decision.state.missing == {(1, pid_of(1))}
    last = decide(decision.state, registered(1, position=event.position), 1.0).state
    assert isinstance(last, Forming)


@pytest.mark.parametrize(("step", "exit_code"), [(0, 2), (7, 1)])
def test_workers_that_differ_before_the_first_step_were_asked_for_wrongly(step: int, exit_code: int) -> None:
    first = registered(0, cursor=Cursor(step))
    difference = join_difference(registered(1, cursor=Cursor(step), tensors={"w": "2"}), first, first)
    assert difference is not None
    assert difference.exit_code == exit_code


def test_a_stall_is_told_of_the_step_of_who_holds_it_up() -> None:
    known = [replace(one, status=WorkerStatus(17, "compute")) for one in training().members.enrolled]
    stall = find_stall(knowing(training(), enrolled=tuple(known)), 10_000.0)
    assert stall is not None
    assert stall.step == 17
    phases = ("data", "compute", "evaluation")
    known = [replace(one, status=WorkerStatus(17, phase)) for one, phase in zip(known, phases, strict=True)]
    stall = find_stall(knowing(training(), enrolled=tuple(known)), 10_000.0)
    assert stall is not None
    assert "in the task's own code" in stall.message


class TestComingBackLate:
    """A worker that the next coordinator has given up on, and nobody has taken its place yet."""

    def late(self, position: Position) -> tuple[object, ...]:
        state = succeed(NEXT, Handover(frozenset({(0, pid_of(0))}), frozenset({1, 2})), 0.0)
        at_work = Position(training().generation, Cursor(16), has_left=True, has_trained=True)
        back = decide(state, registered(0, position=at_work), 1.0).state
        assert isinstance(back, Training)
        return decide(back, registered(1, position=position), 2.0).actions

    def test_ends_the_generation_that_it_still_is_in(self) -> None:
        position = Position(training().generation, Cursor(16), has_left=False, has_trained=True)
        assert Regroup(FIRST, at_boundary=False) in self.late(position)

    def test_but_none_where_it_has_left_it_or_was_in_none(self) -> None:
        for position in (
            Position(training().generation, Cursor(16), has_left=True, has_trained=True),
            Position(None, Cursor(), has_left=True, has_trained=False),
        ):
            regroups = [action for action in self.late(position) if isinstance(action, Regroup)]
            assert [one.at_boundary for one in regroups] == [True]


class TestALossExplainsBrokenLinks:
    """Of the generation that ended, and not of one to come: a spare's death explains nothing."""

    @pytest.mark.parametrize(
        ("state", "explains"),
        [
            pytest.param(training(), True, id="of a member"),
            pytest.param(between(holder(0), holder(1), holder(2, within=FIRST)), True, id="between two generations"),
        ],
    )
    def test_of_a_worker_that_took_part(self, state: State, explains: bool) -> None:
        assert members_of(decide(state, killed(1), 2.0).state).is_explained is explains

    def test_not_of_a_spare(self) -> None:
        state = training(replace(SETTINGS, spares=1))
        state = knowing(state, enrolled=(*state.members.enrolled, enrolled(3)))
        assert not members_of(decide(state, killed(3), 2.0).state).is_explained


def test_a_process_that_does_not_end_is_told_to_the_moment_and_then_later() -> None:
    state = knowing(training(), ticked=9.0, expelled=frozenset({(7, 70)}))
    state = knowing(state, unended={(7, 70): Unended(4.0, 10.0)})
    beats = [replace(known, heard=9.9, moved=9.9) for known in state.members.enrolled]
    state = knowing(state, enrolled=tuple(beats))
    decision = decide(state, Tick(), 10.0)
    (message,) = said(decision)
    assert "was to be killed 6 s ago and is not known to have ended" in message
    assert members_of(decision.state).unended[(7, 70)].tell_at == 10.0 + 2 * 6.0
    assert decide(state, Tick(), 9.95).actions == ()


class TestPlacesThatGaveUp:
    @pytest.mark.parametrize(("step", "left"), [(16, {1: 2}), (17, {})])
    def test_lack_nothing_once_a_step_is_completed(self, step: int, left: dict[int, int]) -> None:
        state = knowing(training(), given_up={1: 2}, cursor=Cursor(16))
        after = decide(state, reported(1, step), 2.0).state
        assert members_of(after).given_up == left

    def test_who_gave_up_for_a_symptom_is_no_victim_of_its_samples(self) -> None:
        reading = Reading(lane=0, epoch=0, samples=(1,), count=1)
        plain = ExitReported(0, pid_of(0), "a", 1, None, WorkerStatus(17, "compute"), reading)
        known = enrolled(0)
        assert with_victim((), plain, known, "") != ()
        assert with_victim((), plain, known, "PeerLost: worker 1") == ()
        assert with_victim((), replace(plain, exit_code=GAVE_UP), known, "the loader died") != ()

    def test_what_it_says_is_the_reason_and_of_others_their_last_words(self) -> None:
        report = ExitReported(0, pid_of(0), "a", GAVE_UP, None, WorkerStatus(17, "compute"))
        gave_up = autopsy_of_exit(report, enrolled(0), "no memory.").message
        assert gave_up.endswith(": no memory.")
        assert "last words" not in gave_up
        other = autopsy_of_exit(replace(report, exit_code=1), enrolled(0), "no memory.").message
        assert other.endswith(" Its last message: no memory.")


class TestBadLinks:
    def test_who_is_left_out_already_stays_out(self) -> None:
        """All three are neighbours. Worker 1 has been out so far, and worker 2 has the higher number."""
        link = WeakLink((1, 2), 2, failed=1.0)
        known = tuple(holder(worker) for worker in range(3))
        members = between(*known, links=(link,), ring=(0, 2)).members
        assert set(line_up(members, 2.0).left_out) == {1}
        assert set(line_up(replace(members, ring=(0, 1, 2)), 2.0).left_out) == {2}

    def test_that_no_order_helps_against_cost_one_of_the_two_also_beside_others(self) -> None:
        hopeless = WeakLink((0, 1), 2, failed=1.0, apart_helps=False)
        helped = WeakLink((2, 3), 2, failed=1.0)
        known = tuple(holder(worker) for worker in range(5))
        members = between(*known, wanted=5, links=(hopeless, helped), ring=(0, 1, 2, 3, 4)).members
        chosen = line_up(members, 2.0)
        assert set(chosen.left_out) == {1}
        assert not are_neighbours((2, 3), chosen.ring)
        # Long after, it need not be shunned, but to keep them apart costs nothing.
        old = replace(helped, failed=-1000.0)
        chosen = line_up(replace(members, links=(hopeless, old)), 2.0)
        assert set(chosen.left_out) == {1}
        assert not are_neighbours((2, 3), chosen.ring)

    def test_of_which_one_is_left_out_are_treated(self) -> None:
        """Three workers, all linked to all: breaks for nothing are forgotten with the one that is left out."""
        symptoms = (PEER_LOST.at(worker=0, peer=1), PEER_LOST.at(worker=1, peer=0))
        state = between(
            *(holder(0), holder(1), holder(2, within=FIRST)),
            suspicion=Suspicion(symptoms, 1.0),
            ring=(0, 1, 2),
            links=(WeakLink((0, 1), 1, 0.5, apart_helps=False),),
            furthest=Cursor(16),
            cursor=Cursor(16),
            futile=1,
        )
        after = decide(state, reported(2), 2.0).state
        assert isinstance(after, Training)
        assert [member.worker for member in after.generation.members] == [0, 2]
        assert after.members.futile == 0

    @pytest.mark.parametrize("apart_helps", [True, False])
    def test_that_no_order_helps_against_are_not_treated_by_one(self, apart_helps: bool) -> None:
        """Four workers on a ring, of whom nobody may be left out: links that break for nothing are counted."""
        settings = replace(SETTINGS, workers=4, min_workers=4)
        known = tuple(holder(worker) for worker in range(3))
        symptoms = (PEER_LOST.at(worker=0, peer=1), PEER_LOST.at(worker=1, peer=0))
        state = between(
            *known,
            holder(3, within=FIRST),
            settings=settings,
            wanted=4,
            suspicion=Suspicion(symptoms, 1.0),
            ring=(0, 1, 2, 3),
            links=(WeakLink((0, 1), 1, 0.5, apart_helps),),
            furthest=Cursor(16),
            cursor=Cursor(16),
            futile=1,
        )
        after = decide(state, reported(3), 2.0).state
        assert isinstance(after, Training)
        assert after.members.futile == (0 if apart_helps else 2)


def test_a_library_is_named_before_the_data_and_the_canary_last() -> None:
    first = registered(0, facts={"library torch": "1", "dataset": "a", "canary": "x", "seed": "1"})

    def named(**facts: str) -> str:
        newcomer = registered(1, facts={**first.facts, **facts})
        difference = join_difference(newcomer, first, first)
        assert difference is not None
        return difference.message

    assert "canary y" in named(canary="y")
    assert "reads other data" in named(dataset="b", canary="y")
    assert "seed 2" in named(seed="2", dataset="b", canary="y")
    assert "library torch 2" in named(**{"library torch": "2", "dataset": "b"})


class TestComingBack:
    def test_the_first_to_come_back_is_who_all_others_are_compared_with(self) -> None:
        state = succeed(NEXT, Handover(frozenset({(0, pid_of(0)), (1, pid_of(1))}), frozenset()), 0.0)
        back = registered(0, position=Position(training().generation, has_left=False, has_trained=True))
        after = decide(state, back, 1.0).state
        assert members_of(after).reference == back
        later = registered(1, position=Position(training().generation, has_left=False, has_trained=True))
        assert members_of(decide(after, later, 1.0).state).reference == back

    def test_what_founders_have_found_is_out_of_date_once_somebody_holds_the_state(self) -> None:
        state = between(
            enrolled(0),
            enrolled(1, within=FIRST),
            settings=replace(SETTINGS, min_workers=3),
            founders=frozenset({0}),
            cursor=Cursor(16),
        )
        assert members_of(decide(state, reported(1, 15), 2.0).state).founders == {0}
        assert members_of(decide(state, reported(1, 16), 2.0).state).founders == frozenset()


class TestProof:
    """That the replica of a worker differs which could not apply a step: another could."""

    ACCUSED = Failure("UserCodeError", "no", worker=0, step=17, phase="apply")

    @pytest.mark.parametrize(
        ("worker", "step", "began", "is_proof"),
        [
            pytest.param(1, 17, 16, True, id="another that has applied it"),
            pytest.param(1, 16, 16, False, id="another that has not come so far"),
            pytest.param(0, 17, 16, False, id="itself"),
            pytest.param(3, 17, 18, False, id="another that was behind and has not copied"),
        ],
    )
    def test_is_the_word_of_another_that_applied_the_same(
        self, worker: int, step: int, began: int, is_proof: bool
    ) -> None:
        known = (
            *(holder(0, within=FIRST), holder(1, within=FIRST)),
            holder(2, 17, within=FIRST),  # which has not told yet whether it has applied it
            enrolled(3, within=FIRST),
        )
        state = between(*known, accused=self.ACCUSED, cursor=Cursor(began))
        after = decide(state, reported(worker, step), 2.0).state
        assert members_of(after).is_condemned is is_proof


@pytest.mark.parametrize(("now", "forgiven"), [(2.5, False), (2.75, True)])
def test_silence_is_forgiven_after_a_pause_of_more_than_half_the_timeout(now: float, forgiven: bool) -> None:
    after = decide(training(), Tick(), now).state
    known = members_of(after).find(0)
    assert known is not None
    assert known.heard == (now if forgiven else 0.0)


class TestWords:
    def test_samples_that_were_not_told_and_those_that_were_not_all(self) -> None:
        def told_of(reading: Reading) -> str:
            report = ExitReported(0, pid_of(0), "", 1, None, WorkerStatus(17, "compute"), reading)
            victims: tuple[Victim, ...] = ()
            for _ in range(FATAL):
                victims = with_victim(victims, report, enrolled(0))
            failure = find_poison(victims)
            assert failure is not None
            return failure.message

        assert "samples that were not reported" in told_of(Reading(0, 0, (), 0))
        assert "lists the first" not in told_of(Reading(0, 0, (1, 2), 2))
        assert "lists the first" in told_of(Reading(0, 0, (1, 2), 3))

    def test_a_victim_is_told_with_its_last_words_where_it_has_some(self) -> None:
        reading = Reading(lane=0, epoch=0, samples=(1,), count=1)
        report = ExitReported(0, pid_of(0), "a", GAVE_UP, None, WorkerStatus(17, "compute"), reading)
        assert with_victim((), report, enrolled(0), "the loader died. Look")[0].how.endswith(" (the loader died)")
        assert with_victim((), report, enrolled(0), "")[0].how.endswith(" gave up")

    @pytest.mark.parametrize(("here", "fewest", "told"), [(1, 2, True), (2, 2, False), (0, 1, False)])
    def test_that_too_few_are_left_is_told_where_it_is_so(self, here: int, fewest: int, told: bool) -> None:
        settings = replace(SETTINGS, min_workers=fewest)
        failure = autopsy_of_futility(Failure("WorkerLost", "it died."), 4, here, settings)
        assert ("min_workers is" in failure.message) is told

    def test_the_host_of_who_died_is_known_from_its_registration(self) -> None:
        report = ExitReported(0, pid_of(0), "", 1, None, WorkerStatus(17, "compute"))
        assert f"worker 0 (pid {pid_of(0)} on host a)" in autopsy_of_exit(report, enrolled(0)).message
        assert f"worker 0 (pid {pid_of(0)})" in autopsy_of_exit(report, None).message
        assert "on host b" in autopsy_of_exit(replace(report, host="b"), enrolled(0)).message

    @pytest.mark.parametrize(("workers", "advised"), [(1, False), (2, True)])
    def test_fewer_workers_are_advised_where_there_can_be_fewer(self, workers: int, advised: bool) -> None:
        settings = replace(SETTINGS, workers=workers)
        state = between(settings=settings, wanted=workers, given_up={0: 2}, awaited=frozenset({0}), founders={0})
        gave_up = ExitReported(0, pid_of(0), "a", GAVE_UP, None, WorkerStatus())
        (warning,) = [message for message in said(decide(state, gave_up, 2.0)) if "in a row have failed" in message]
        assert ("quorate resize" in warning) is advised

    def test_a_warning_of_who_leaves_is_of_its_step(self) -> None:
        state = decide(training(), told(0, 1, WorkerStatus(17, "compute")), 1.0).state
        decision = decide(state, replace(told(0, 2, WorkerStatus(17, "apply")), is_leaving=True), 2.0)
        assert [message for message, step in said(decision).items() if step == 17]


def test_when_replicas_differ_all_are_replaced_but_those_who_have_just_a_beginning() -> None:
    known = (
        holder(0, within=FIRST),
        enrolled(1, within=FIRST),  # it may have copied by now
        enrolled(2, cursor=Cursor(5)),  # it was left out since it trained
        enrolled(3),
        enrolled(4, has_trained=True),  # from a generation that began where it did
    )
    decision = condemn(between(*known), Failure("ReplicasDiffer", "they differ."), 2.0)
    assert [action.worker for action in decision.actions if isinstance(action, Expel)] == [0, 1, 2, 4]
    assert [one.worker for one in members_of(decision.state).enrolled] == [3]

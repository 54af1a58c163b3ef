"""The rules of membership, one by one: joining, living, completing, stopping. What is lost is in test_losses.py."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.played import (
    FIRST,
    PEER_LOST,
    SETTINGS,
    completed,
    declared,
    ending,
    exited,
    heartbeat,
    killed,
    last_of,
    message_of,
    pid_of,
    play,
    registered,
    reported,
    training,
    workers_of,
)
from quorate.coordinator.events import (
    DeclareGeneration,
    EndJob,
    FailureReported,
    GrantLease,
    LauncherGone,
    MembershipEvent,
    RecordEvents,
    Refuse,
    Registered,
    RelayStop,
    StopRequested,
    Tick,
    Welcome,
)
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Ended, Forming, State, Training
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, GenerationId, WorkerStatus


def test_generation_is_formed_when_the_last_worker_registers_in_any_order() -> None:
    decisions = play(start(SETTINGS, 0.0), (1.0, registered(2)), (2.0, registered(0)), (3.0, registered(1)))

    assert [type(decision.state) for decision in decisions] == [Forming, Forming, Training]
    for count, decision in enumerate(decisions, 1):
        assert f"has registered, {count} of 3; " in decision.reason
    assert decisions[-1].actions[0] == Welcome(1, 4.0)
    generation = declared(decisions[-1])
    assert generation.id == FIRST
    assert [(member.worker, member.address, list(member.lanes)) for member in generation.members] == [
        (0, "10.0.0.0:4000", [0, 1, 2]),
        (1, "10.0.0.1:4000", [3, 4, 5]),
        (2, "10.0.0.2:4000", [6, 7]),
    ]
    assert generation.behind == ()


def test_asking_again_is_answered_again_and_only_heard() -> None:
    first, again = play(start(SETTINGS, 0.0), (1.0, registered(0)), (2.0, registered(0)))
    assert again.actions == first.actions == (Welcome(0, 4.0),)
    assert isinstance(again.state, Forming)
    known = again.state.members.find(0)
    assert known is not None
    # Its lease counts from the second time, so its silence must too.
    assert known.heard == 2.0
    enrolled = (replace(known, heard=1.0),)
    assert replace(again.state, members=replace(again.state.members, enrolled=enrolled)) == first.state


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (registered(0, pid=99), "the place is taken: worker 0 (pid 4710 on host a) has registered for it"),
        (registered(3), "there is no place 3: the job has 0 to 2 (workers)"),
        (registered(-1), "there is no place -1"),
    ],
)
def test_a_stranger_is_refused_without_ending_the_job(newcomer: Registered, words: str) -> None:
    before, after = play(start(SETTINGS, 0.0), (1.0, registered(0)), (2.0, newcomer))
    assert after.state == before.state
    (refusal,) = after.actions
    assert isinstance(refusal, Refuse)
    assert refusal.failure.kind == "FrameError"
    assert words in refusal.failure.message


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (
            registered(1, facts={"canary": "bad"}),
            "worker 1's canary bad differs from worker 0's c0ffee: the machines do not compute alike.",
        ),
        (
            registered(1, facts={"canary": "bad", "torch": "2.1"}, host="b"),
            "worker 1's torch 2.1 differs from worker 0's (not given): all workers of a job need the same"
            " (hosts b and a).",
        ),
        (
            registered(1, facts={"canary": "bad", "dataset layout": "aa"}, host="b"),
            "worker 1 reads other data than worker 0 (dataset layout aa, not (not given)): all workers of a job need"
            " the same (hosts b and a). Give all of them the same files, the same index of shards",
        ),
        (
            registered(1, tensors={"w": "2"}),
            "worker 1 built other initial weights than worker 0: they first differ in 'w'."
            " The model is built without a fixed seed:",
        ),
        (registered(1, tensors={"w": "1", "x": "1"}), "they first differ in 'x'"),
    ],
)
def test_a_worker_that_cannot_compute_the_same_bits_ends_the_job(newcomer: Registered, words: str) -> None:
    decision = last_of(start(SETTINGS, 0.0), (1.0, registered(0)), (2.0, newcomer))
    refusal, end = decision.actions
    assert isinstance(refusal, Refuse)
    assert isinstance(end, EndJob)
    assert refusal.failure is end.failure
    assert end.failure is not None
    assert (end.failure.kind, end.failure.worker) == ("DivergedError", 1)
    assert words in end.failure.message


def test_a_library_that_decodes_samples_is_compared_where_both_have_loaded_it() -> None:
    facts = {"canary": "c0ffee", "library Pillow": "12"}
    for theirs, ends in (({}, False), ({"library Pillow": "12"}, False), ({"library Pillow": "13"}, True)):
        first = registered(0, facts={"canary": "c0ffee", "library h5py": "3", **theirs})
        decision = last_of(start(SETTINGS, 0.0), (1.0, first), (2.0, registered(1, facts=facts)))
        assert any(isinstance(action, EndJob) for action in decision.actions) is ends


def test_a_replacement_is_compared_with_the_first_worker_though_that_is_gone() -> None:
    lost = last_of(training(), (1.0, killed(0)))
    failure = ending((2.0, registered(0, life=1, facts={"canary": "bad"})), state=lost.state)
    assert failure is not None
    assert failure.message.startswith("worker 0's canary bad differs from worker 0's c0ffee")


def test_state_that_differs_after_a_resume_is_not_blamed_on_the_seed() -> None:
    at_200 = Cursor(200)
    events = ((1.0, registered(0, cursor=at_200)), (2.0, registered(1, tensors={"w": "2"}, cursor=at_200)))
    message = message_of(*events, state=start(SETTINGS, 0.0))
    assert message.startswith("worker 1 holds another state than worker 0 at step 200: they first differ in 'w'.")


def test_who_starts_further_back_copies_from_who_is_ahead() -> None:
    events = [(1.0, registered(0)), (1.0, registered(1, cursor=Cursor(200), tensors={"w": "2"})), (1.0, registered(2))]
    generation = declared(last_of(start(SETTINGS, 0.0), *events))
    assert (generation.cursor, generation.donor, generation.behind) == (Cursor(200), 1, (0, 2))


def test_heartbeat_renews_the_lease_and_records_its_events_once() -> None:
    first, again, late = play(
        training(),
        (1.0, heartbeat(0, 2, events=("{}",))),
        (2.0, heartbeat(0, 2, step=18, events=("{}",))),
        (3.0, heartbeat(0, 1, events=("{}",))),
    )
    assert first.actions == (GrantLease(0, 4.0), RecordEvents(("{}",)))
    assert again.actions == late.actions == (GrantLease(0, 4.0),)
    assert isinstance(late.state, Training)
    known = late.state.members.find(0)
    assert known is not None
    assert (known.heard, known.status.step) == (3.0, 16)


def test_a_worker_that_has_not_learned_its_generation_keeps_its_lease() -> None:
    decision = decide(training(), replace(heartbeat(0), generation=GenerationId(0, 0)), 1.0)
    assert decision.actions == (GrantLease(0, 4.0),)


@pytest.mark.parametrize("state", [start(SETTINGS, 0.0), training()])
def test_a_process_that_never_registered_gets_no_lease_and_changes_nothing(state: State) -> None:
    decision = decide(state, replace(heartbeat(0, events=("{}",)), pid=99), 1.0)
    assert (decision.state, decision.actions) == (state, ())


def test_a_users_exception_ends_the_job_and_what_follows_is_not_told() -> None:
    user = Failure("UserCodeError", "ValueError: no", traceback="Traceback", step=3)
    told, *later = play(
        training(),
        (1.0, FailureReported(1, user)),
        (1.1, FailureReported(0, PEER_LOST)),
        (1.2, exited(1, 1)),
        (1.3, reported(0)),
    )
    assert told.state == Ended(user.at(worker=1), heard={0: 0, 1: 0, 2: 0})
    assert [(decision.state, decision.actions) for decision in later] == [(told.state, ())] * 3


def test_a_users_exception_behind_a_broken_link_is_the_cause() -> None:
    failure = ending((1.0, reported(0, symptom=PEER_LOST)), (1.5, FailureReported(1, Failure("UserCodeError", "no"))))
    assert failure is not None
    assert (failure.kind, failure.worker) == ("UserCodeError", 1)


def test_a_failure_before_registration_ends_the_job() -> None:
    failure = ending((1.0, FailureReported(None, Failure("TaskError", "no such class"))), state=start(SETTINGS, 0.0))
    assert failure == Failure("TaskError", "no such class")


def test_the_step_of_a_failure_is_filled_in_from_the_last_heartbeat() -> None:
    failure = ending((1.0, heartbeat(1)), (2.0, FailureReported(1, Failure("LossError", "nan"))))
    assert failure == Failure("LossError", "nan", worker=1, step=16, phase="compute")


def test_job_is_complete_when_all_are_done_with_equal_digests() -> None:
    *waiting, last = play(training(), *((1.0, completed(worker)) for worker in (2, 2, 1, 0)))
    assert [decision.actions for decision in waiting] == [()] * 3
    assert last.state == Ended(None, {"by": 0}, heard={0: 0, 1: 0, 2: 0})
    assert last.actions == (EndJob(None, "d", {"by": 0}),)


def test_who_is_no_member_completes_nothing() -> None:
    # Another process than the one that has the place, and a newcomer that waits for the next generation.
    for stranger in (completed(2, life=1), completed(7)):
        *_, last = play(training(), (1.0, completed(0)), (1.0, completed(1)), (1.0, stranger))
        assert isinstance(last.state, Training)
        assert [done.worker for done in last.state.completed] == [0, 1]


def test_whoever_is_on_its_way_is_waited_for_however_long_its_setup_takes() -> None:
    state: State = decide(start(SETTINGS, 0.0), registered(1), 0.0).state
    for now in range(1, 2000):
        state = decide(state, replace(heartbeat(1, now), generation=GenerationId(0, 0)), float(now)).state
        state = decide(state, Tick(), float(now)).state
    *_, formed = play(state, (2000.0, registered(0)), (2000.0, registered(2)))
    assert isinstance(formed.state, Training)


@pytest.mark.parametrize("state", [start(SETTINGS, 0.0), training()])
def test_stop_is_relayed_once(state: State) -> None:
    first, second = play(state, (1.0, StopRequested("interrupted")), (2.0, StopRequested("terminated")))
    assert first.actions == (RelayStop("interrupted"),)
    assert (second.actions, second.state) == ((), first.state)


def test_a_launcher_that_stops_before_the_first_step_has_not_failed() -> None:
    _, gone = play(start(SETTINGS, 0.0), (1.0, StopRequested("interrupted")), (2.0, LauncherGone()))
    assert gone.state == Ended(None, {"ending": "interrupted"})
    assert gone.actions == (EndJob(None, "", {"ending": "interrupted"}),)


def test_a_launcher_that_is_gone_in_the_middle_of_a_stop_has() -> None:
    _, gone = play(training(), (1.0, StopRequested("interrupted")), (2.0, LauncherGone()))
    assert isinstance(gone.state, Ended)
    assert gone.state.failure is not None


def test_a_launcher_that_is_gone_ends_the_job() -> None:
    failure = ending((1.0, LauncherGone()))
    assert failure is not None
    assert failure.kind == "LauncherGone"


def test_events_that_arrive_after_the_end_are_written_once() -> None:
    decisions = play(
        training(),
        (1.0, heartbeat(0, 3, events=("a",))),
        (1.1, FailureReported(1, Failure("UserCodeError", "no"))),
        (1.2, heartbeat(0, 3, events=("a",))),
        (1.3, heartbeat(0, 4, events=("b",))),
        (1.4, heartbeat(0, 4, events=("b",))),
        (1.5, heartbeat(2, 1, events=("c",))),
        (1.6, heartbeat(7, 1, events=("from a stranger",))),
    )
    after = [decision.actions for decision in decisions[2:]]
    assert after == [(), (RecordEvents(("b",)),), (), (RecordEvents(("c",)),), ()]
    assert {type(decision.state) for decision in decisions[1:]} == {Ended}


def test_who_comes_after_the_end_is_told_how_it_ended() -> None:
    failure = Failure("UserCodeError", "no")
    assert decide(Ended(failure), registered(0), 9.0).actions == (Refuse(0, failure),)
    (refusal,) = decide(Ended(None), registered(0), 9.0).actions
    assert isinstance(refusal, Refuse)
    assert "the job is complete" in refusal.failure.message


WORKERS = st.integers(-1, 4)
LIVES = st.integers(0, 2)
STEPS = st.integers(0, 20)
STATUSES = st.builds(WorkerStatus, st.none() | STEPS, st.sampled_from(["", "exchange"]))
SYMPTOMS = st.builds(lambda peer: replace(PEER_LOST, peer=peer), st.none() | WORKERS)
EVENTS: st.SearchStrategy[MembershipEvent] = st.one_of(
    st.builds(registered, st.integers(0, 3), LIVES),
    st.builds(registered, st.integers(0, 3), LIVES, cursor=st.builds(Cursor, STEPS)),
    st.builds(lambda worker, digest: registered(worker, tensors={"w": digest}), WORKERS, st.sampled_from(["1", "2"])),
    st.builds(heartbeat, WORKERS, st.integers(1, 5), STEPS, st.just(("{}",)), LIVES),
    st.builds(reported, WORKERS, STEPS, st.integers(1, 3), st.none() | SYMPTOMS, LIVES),
    st.builds(
        FailureReported,
        st.none() | WORKERS,
        st.builds(Failure, st.sampled_from(["PeerLost", "PeerLost", "PeerLost", "UserCodeError"]), st.just("trouble")),
    ),
    st.builds(killed, WORKERS, st.sampled_from([9, 11, 63]), STATUSES, LIVES),
    st.builds(exited, WORKERS, st.integers(0, 3), LIVES),
    st.builds(completed, WORKERS, st.sampled_from(["d", "d", "d", "e"]), LIVES),
    st.builds(StopRequested, st.sampled_from(["interrupted", "terminated"])),
    st.just(Tick()),
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 3), EVENTS), max_size=40),
)
def test_any_sequence_of_events_ends_at_most_once_and_hosts_every_lane_once(
    workers: int, more_lanes: int, begun: bool, history: list[tuple[float, MembershipEvent]]
) -> None:
    job_settings = replace(SETTINGS, workers=workers, lanes=workers + more_lanes)
    state: State = training(job_settings) if begun else start(job_settings, 0.0)
    now = 0.0
    endings: list[EndJob] = []
    generations: list[DeclareGeneration] = []
    for pause, event in history:
        now += pause
        before = state
        decision = decide(state, event, now)
        state = decision.state
        assert decision.reason
        if isinstance(before, Ended):
            assert isinstance(state, Ended)
            assert (state.failure, state.result) == (before.failure, before.result)
        else:
            assert state != before or not set(map(type, decision.actions)) & {DeclareGeneration, EndJob}
        endings += [action for action in decision.actions if isinstance(action, EndJob)]
        generations += [action for action in decision.actions if isinstance(action, DeclareGeneration)]
    assert len(endings) == int(isinstance(state, Ended))
    assert [end.failure for end in endings] == ([state.failure] if isinstance(state, Ended) else [])
    numbers = [action.generation.id.number for action in generations]
    assert numbers == list(range(1 + begun, len(numbers) + 1 + begun))
    for action in generations:
        lanes = [lane for member in action.generation.members for lane in member.lanes]
        assert lanes == list(range(job_settings.lanes))
        assert len(set(workers_of(action.generation))) == len(action.generation.members)
    if isinstance(state, Forming | Training):
        places = [known.worker for known in state.members.enrolled]
        assert len(set(places)) == len(places)
        assert not set(places) & state.members.awaited
        pids = {pid_of(worker, life) for worker in range(4) for life in range(3)}
        assert {known.registration.pid for known in state.members.enrolled} <= pids
        assert not state.members.expelled & state.members.reaped

"""The rules of membership, one by one: no process, no socket, no clock but the numbers given."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.coordinator.membership import decide, start
from quorate.coordinator.records import (
    Completed,
    Decision,
    DeclareGeneration,
    Ended,
    EndJob,
    ExitReported,
    FailureReported,
    Forming,
    GrantLease,
    HeartbeatReceived,
    LauncherGone,
    MembershipEvent,
    Place,
    RecordEvents,
    Refuse,
    Registered,
    RelayStop,
    State,
    StopRequested,
    Terms,
    Tick,
    Training,
    Welcome,
)
from quorate.core.cursor import Cursor
from quorate.core.failure import Failure
from quorate.core.generation import GenerationId
from quorate.core.timing import Timing

TERMS = Terms(incarnation=3, lanes=8, workers=3, timing=Timing(5.0))
CURRENT = GenerationId(3, 1)
PEER_LOST = Failure("PeerLost", "worker 1 (10.0.0.2:4000) is gone: end of file", step=17, phase="exchange")


def registered(worker: int, **changes: object) -> Registered:
    plain = Registered(worker, 4710 + worker, "a", f"10.0.0.{worker}:4000", {"canary": "c0ffee"}, {"w": "1"})
    return replace(plain, **changes)  # type: ignore[arg-type]


def heartbeat(worker: int, sequence: int = 1, step: int = 16, events: tuple[str, ...] = ()) -> HeartbeatReceived:
    return HeartbeatReceived(worker, CURRENT, sequence, Place(step, "compute"), events)


def killed(worker: int, number: int = signal.SIGKILL, place: Place | None = None) -> ExitReported:
    return ExitReported(worker, 4710 + worker, "a", None, number, place or Place(17, "exchange"))


def exited(worker: int, code: int) -> ExitReported:
    return ExitReported(worker, 4710 + worker, "a", code, None, Place(17, "exchange"))


def play(state: State, *events: tuple[float, MembershipEvent]) -> list[Decision]:
    decisions: list[Decision] = []
    for now, event in events:
        decisions.append(decide(decisions[-1].state if decisions else state, event, now))
    return decisions


def training(terms: Terms = TERMS) -> Training:
    state = play(start(terms, 0.0), *((0.0, registered(worker)) for worker in range(terms.workers)))[-1].state
    assert isinstance(state, Training)
    return state


def ending(*events: tuple[float, MembershipEvent], state: State | None = None) -> Failure | None:
    """The failure that ends a job in training after these events."""
    last = play(state or training(), *events)[-1]
    assert isinstance(last.state, Ended)
    assert [action for action in last.actions if isinstance(action, EndJob)]
    return last.state.failure


def message_of(*events: tuple[float, MembershipEvent], state: State | None = None) -> str:
    failure = ending(*events, state=state)
    assert failure is not None
    return failure.message


def silence_until(now: float, *, of: int, step: float = 0.25) -> list[tuple[float, MembershipEvent]]:
    """Ticks up to a time at which everybody but one worker is heard."""
    events: list[tuple[float, MembershipEvent]] = []
    for count in range(1, int(now / step) + 1):
        beats = [(count * step, heartbeat(worker, count)) for worker in range(TERMS.workers) if worker != of]
        events += [*beats, (count * step, Tick())]
    return events


def test_generation_is_formed_when_the_last_worker_registers_in_any_order() -> None:
    decisions = play(start(TERMS, 0.0), (1.0, registered(2)), (2.0, registered(0)), (3.0, registered(1)))

    assert [type(decision.state) for decision in decisions] == [Forming, Forming, Training]
    welcome, declared = decisions[-1].actions
    assert welcome == Welcome(1, 4.0)
    assert isinstance(declared, DeclareGeneration)
    assert declared.generation.id == CURRENT
    assert [(member.worker, member.address, list(member.lanes)) for member in declared.generation.members] == [
        (0, "10.0.0.0:4000", [0, 1, 2]),
        (1, "10.0.0.1:4000", [3, 4, 5]),
        (2, "10.0.0.2:4000", [6, 7]),
    ]


def test_asking_again_is_answered_again_and_changes_nothing() -> None:
    first, again = play(start(TERMS, 0.0), (1.0, registered(0)), (2.0, registered(0)))
    assert again.actions == first.actions == (Welcome(0, 4.0),)
    assert again.state == first.state


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (registered(0, pid=99), "the place is taken: worker 0 (pid 4710 on host a) has registered for it"),
        (registered(3), "there is no place 3: the job has 0 to 2 (workers)"),
        (registered(-1), "there is no place -1"),
    ],
)
def test_a_stranger_is_refused_without_ending_the_job(newcomer: Registered, words: str) -> None:
    before, after = play(start(TERMS, 0.0), (1.0, registered(0)), (2.0, newcomer))
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
            registered(1, tensors={"w": "2"}),
            "worker 1 built other initial weights than worker 0: they first differ in 'w'."
            " The model is built without a fixed seed:",
        ),
        (registered(1, tensors={"w": "1", "x": "1"}), "they first differ in 'x'"),
        (
            registered(1, cursor=Cursor(200)),
            "worker 1 starts at step 200 (trained), worker 0 at step 0 (trained): they read other checkpoints.",
        ),
    ],
)
def test_a_worker_that_cannot_compute_the_same_bits_ends_the_job(newcomer: Registered, words: str) -> None:
    decision = play(start(TERMS, 0.0), (1.0, registered(0)), (2.0, newcomer))[-1]
    refusal, end = decision.actions
    assert isinstance(refusal, Refuse)
    assert isinstance(end, EndJob)
    assert refusal.failure is end.failure
    assert end.failure is not None
    assert (end.failure.kind, end.failure.worker) == ("DivergedError", 1)
    assert words in end.failure.message


def test_state_that_differs_after_a_resume_is_not_blamed_on_the_seed() -> None:
    at_200 = {"cursor": Cursor(200)}
    events = ((1.0, registered(0, **at_200)), (2.0, registered(1, tensors={"w": "2"}, **at_200)))
    message = message_of(*events, state=start(TERMS, 0.0))
    assert message.startswith("worker 1 holds another state than worker 0 at step 200: they first differ in 'w'.")


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
    known = late.state.crew.find(0)
    assert known is not None
    assert (known.heard, known.place.step) == (3.0, 16)


@pytest.mark.parametrize("generation", [GenerationId(2, 1), GenerationId(3, 2), GenerationId(4, 1)])
def test_another_generation_gets_no_lease_and_counts_as_silence(generation: GenerationId) -> None:
    state = training()
    decision = decide(state, replace(heartbeat(0), generation=generation), 1.0)
    assert (decision.state, decision.actions) == (state, ())


def test_a_worker_that_has_not_learned_its_generation_keeps_its_lease() -> None:
    decision = decide(training(), replace(heartbeat(0), generation=GenerationId(0, 0)), 1.0)
    assert decision.actions == (GrantLease(0, 4.0),)


def test_a_worker_that_never_registered_gets_no_lease() -> None:
    assert decide(start(TERMS, 0.0), heartbeat(0), 1.0).actions == ()


@pytest.mark.parametrize(
    ("exit_report", "sentence"),
    [
        (killed(1), "worker 1 (pid 4711 on host a) was killed by SIGKILL at step 17 while in exchange."),
        (killed(1, signal.SIGSEGV), "was killed by SIGSEGV at step 17 while in exchange. That is a crash in native"),
        (killed(1, 63), "worker 1 (pid 4711 on host a) was killed by signal 63 at step 17 while in exchange."),
        (exited(1, 3), "worker 1 (pid 4711 on host a) exited with code 3 at step 17 while in exchange."),
        (exited(1, 0), "worker 1 (pid 4711 on host a) exited before the job was complete (code 0) at step 17"),
        # The status page may be behind the heartbeat, and it may never have been written.
        (killed(1, place=Place(15, "apply")), "was killed by SIGKILL at step 16 while in compute."),
        (killed(1, place=Place(16, "apply")), "was killed by SIGKILL at step 16 while in apply."),
        (killed(1, place=Place()), "was killed by SIGKILL at step 16 while in compute."),
    ],
)
def test_a_death_is_told_in_one_sentence(exit_report: ExitReported, sentence: str) -> None:
    failure = ending((1.0, heartbeat(1)), (2.0, exit_report))
    assert failure is not None
    assert sentence in failure.message
    assert (failure.kind, failure.worker) == ("WorkerLost", 1)
    assert failure.step is not None


def test_memory_is_named_as_the_likely_cause_of_a_kill() -> None:
    assert "memory runs out" in message_of((1.0, killed(1)))


def test_a_death_before_registration_ends_the_job_at_once() -> None:
    message = message_of((1.0, exited(2, 1)), state=start(TERMS, 0.0))
    assert message.startswith("worker 2 (pid 4712 on host a) exited with code 1 at step 17 while in exchange before it")


def test_silence_ends_the_job_after_failure_timeout_and_not_before() -> None:
    *before, last = silence_until(5.0, of=2)
    assert not isinstance(play(training(), *before)[-1].state, Ended)
    failure = ending(*before, last)
    assert failure is not None
    assert failure.message == (
        "worker 2 (pid 4712 on host a) has not been heard for 5.0 s (failure_timeout: 5.0);"
        " its last word was its registration."
    )


def test_silence_tells_the_last_word() -> None:
    events = [(0.0, heartbeat(2, 1, step=17)), *silence_until(5.0, of=2)]
    assert message_of(*events).endswith("its last word was step 17, compute.")


def test_a_pause_of_the_coordinator_loses_nobody() -> None:
    held_up = decide(training(), Tick(), 60.0)
    assert isinstance(held_up.state, Training)
    assert "held up for 60.0 s" in held_up.reason
    assert isinstance(decide(held_up.state, Tick(), 61.0).state, Training)


def test_a_broken_link_waits_for_its_cause() -> None:
    suspected, lost = play(training(), (1.0, FailureReported(0, PEER_LOST)), (1.2, killed(1)))
    assert isinstance(suspected.state, Training)
    assert isinstance(lost.state, Ended)
    assert lost.state.failure is not None
    assert lost.state.failure.message.startswith("worker 1 (pid 4711 on host a) was killed by SIGKILL")


@pytest.mark.parametrize("kind", ["LinkError", "PeerLost", "FrameError", "LeaseExpired"])
def test_every_kind_of_link_error_is_a_symptom(kind: str) -> None:
    assert isinstance(decide(training(), FailureReported(0, replace(PEER_LOST, kind=kind)), 1.0).state, Training)


def test_the_exit_of_a_worker_that_gave_a_symptom_is_a_consequence() -> None:
    events = (
        (1.0, FailureReported(0, PEER_LOST)),
        (1.1, exited(0, 1)),
        (1.2, FailureReported(2, PEER_LOST)),
        (1.3, exited(2, 1)),
        (1.4, killed(1)),
    )
    assert message_of(*events).startswith("worker 1 (pid 4711 on host a) was killed by SIGKILL")


def test_the_silence_behind_a_broken_link_is_the_cause_even_if_it_is_noticed_later() -> None:
    events = silence_until(1.0, of=9)
    events += [(1.0, FailureReported(0, PEER_LOST)), (1.05, heartbeat(1, 5))]
    events += [(1.0 + time, event) for time, event in silence_until(5.25, of=1)]
    message = next(
        decision.state.failure.message
        for decision in play(training(), *events)
        if isinstance(decision.state, Ended) and decision.state.failure
    )
    assert message.startswith("worker 1 (pid 4711 on host a) has not been heard for")


def test_a_link_is_blamed_when_everybody_else_stays_alive() -> None:
    events = [(0.0, FailureReported(0, PEER_LOST)), *silence_until(5.0, of=0)]
    failure = ending(*events)
    assert failure is not None
    assert (failure.kind, failure.worker, failure.step) == ("PeerLost", 0, 17)
    assert failure.message == (
        "worker 0 (pid 4710 on host a) lost a link at step 17 while in exchange, and in 5.0 s (failure_timeout: 5.0)"
        " no process was found dead: worker 1 (10.0.0.2:4000) is gone: end of file."
    )


def test_a_link_is_blamed_at_once_when_all_report_symptoms() -> None:
    assert message_of(*((1.0, FailureReported(worker, PEER_LOST)) for worker in range(3))).startswith("worker 0 (pid")


def test_a_users_exception_ends_the_job_and_what_follows_is_not_told() -> None:
    user = Failure("UserCodeError", "ValueError: no", traceback="Traceback", step=3)
    reported, *later = play(
        training(), (1.0, FailureReported(1, user)), (1.1, FailureReported(0, PEER_LOST)), (1.2, exited(1, 1))
    )
    assert reported.state == Ended(user.at(worker=1), heard={0: 0, 1: 0, 2: 0})
    assert [(decision.state, decision.actions) for decision in later] == [(reported.state, ())] * 2


def test_a_users_exception_behind_a_broken_link_is_the_cause() -> None:
    failure = ending((1.0, FailureReported(0, PEER_LOST)), (1.5, FailureReported(1, Failure("UserCodeError", "no"))))
    assert failure is not None
    assert (failure.kind, failure.worker) == ("UserCodeError", 1)


def test_a_failure_before_registration_ends_the_job() -> None:
    failure = ending((1.0, FailureReported(None, Failure("TaskError", "no such class"))), state=start(TERMS, 0.0))
    assert failure == Failure("TaskError", "no such class")


def test_the_step_of_a_failure_is_filled_in_from_the_last_heartbeat() -> None:
    failure = ending((1.0, heartbeat(1)), (2.0, FailureReported(1, Failure("LossError", "nan"))))
    assert failure == Failure("LossError", "nan", worker=1, step=16, phase="compute")


def test_job_is_complete_when_all_are_done_with_equal_digests() -> None:
    *waiting, last = play(training(), *((1.0, Completed(worker, "d", {"by": worker})) for worker in (2, 2, 1, 0)))
    assert [decision.actions for decision in waiting] == [()] * 3
    assert last.state == Ended(None, {"by": 0}, heard={0: 0, 1: 0, 2: 0})
    assert last.actions == (EndJob(None, "d", {"by": 0}),)


def test_unequal_digests_end_the_job_and_name_everyone() -> None:
    failure = ending((1.0, Completed(0, "d")), (1.0, Completed(1, "d")), (1.0, Completed(2, "e")))
    assert failure is not None
    assert (failure.kind, failure.worker) == ("DivergedError", 2)
    assert (
        "worker 2 ended with other weights than worker 0: worker 0 has d, worker 1 has d, worker 2 has e."
        in failure.message
    )


def test_a_death_while_the_others_are_still_at_work_fails_the_job_though_it_was_done() -> None:
    assert "exited before the job was complete" in message_of((1.0, Completed(1, "d")), (1.1, exited(1, 0)))


def test_registration_deadline_names_who_is_missing() -> None:
    def wait_until(limit: float, terms: Terms) -> str:
        state: State = start(terms, 0.0)
        state = decide(state, replace(registered(1)), 0.0).state
        now = 0.0
        while not isinstance(state, Ended):
            now += 1.0
            state = decide(state, replace(heartbeat(1, int(now)), generation=GenerationId(0, 0)), now).state
            state = decide(state, Tick(), now).state
        assert now == limit
        assert state.failure is not None
        return state.failure.message

    assert wait_until(60.0, TERMS).startswith("workers 0, 2 did not register within 60 s of the start (1 of 3 did);")
    assert "within 90 s" in wait_until(90.0, replace(TERMS, timing=Timing(9.0)))


@pytest.mark.parametrize("state", [start(TERMS, 0.0), training()])
def test_stop_is_relayed_once(state: State) -> None:
    first, second = play(state, (1.0, StopRequested("interrupted")), (2.0, StopRequested("terminated")))
    assert first.actions == (RelayStop("interrupted"),)
    assert (second.actions, second.state) == ((), first.state)


def test_a_launcher_that_stops_before_the_first_step_has_not_failed() -> None:
    _, gone = play(start(TERMS, 0.0), (1.0, StopRequested("interrupted")), (2.0, LauncherGone()))
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
        (1.1, killed(1)),
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
PLACES = st.builds(Place, st.none() | st.integers(0, 20), st.sampled_from(["", "exchange"]))
EVENTS: st.SearchStrategy[MembershipEvent] = st.one_of(
    st.builds(registered, st.integers(0, 3)),
    st.builds(lambda worker, digest: registered(worker, tensors={"w": digest}), WORKERS, st.sampled_from(["1", "2"])),
    st.builds(heartbeat, WORKERS, st.integers(1, 5), st.integers(0, 20), st.just(("{}",))),
    st.builds(
        FailureReported,
        st.none() | WORKERS,
        st.builds(Failure, st.sampled_from(["PeerLost", "PeerLost", "UserCodeError"]), st.just("trouble")),
    ),
    st.builds(killed, WORKERS, st.sampled_from([9, 11, 63]), PLACES),
    st.builds(exited, WORKERS, st.integers(0, 3)),
    st.builds(Completed, WORKERS, st.sampled_from(["d", "d", "e"])),
    st.builds(StopRequested, st.sampled_from(["interrupted", "terminated"])),
    st.just(Tick()),
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 3), EVENTS), max_size=25),
)
def test_any_sequence_of_events_ends_at_most_once_and_hosts_every_lane_once(
    workers: int, more_lanes: int, begun: bool, history: list[tuple[float, MembershipEvent]]
) -> None:
    terms = replace(TERMS, workers=workers, lanes=workers + more_lanes)
    state: State = training(terms) if begun else start(terms, 0.0)
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
        endings += [action for action in decision.actions if isinstance(action, EndJob)]
        generations += [action for action in decision.actions if isinstance(action, DeclareGeneration)]
    assert len(endings) == int(isinstance(state, Ended))
    assert [end.failure for end in endings] == ([state.failure] if isinstance(state, Ended) else [])
    assert len(generations) <= 1
    for declared in generations:
        lanes = [lane for member in declared.generation.members for lane in member.lanes]
        assert lanes == list(range(terms.lanes))

"""What a worker's membership asks its coordinator for, how often and for how long: in one thread, in virtual time."""

import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

from made_events import make_event
from quorate.core.errors import DivergedError, FrameError, JobError, LeaseExpired, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member, WorkerStatus
from quorate.core.timing import Timing
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import (
    decode_failure,
    decode_id,
    decode_position,
    encode_cursor,
    encode_failure,
    encode_generation,
)
from quorate.worker.membership import Membership
from quorate.worker.membership_view import JobEnded

TIMING = Timing(5.0)
LEASE = TIMING.lease
HERE = "127.0.0.1:5000"
LOST = Failure("WorkerLost", "worker 0 counts as lost")


class VirtualTime:
    """A `Runtime` of one thread: time passes where somebody waits, and what is spawned is run by hand."""

    def __init__(self) -> None:
        self.time = 100.0
        self.spawned: dict[str, Callable[[], None]] = {}
        self.joined: list[str] = []
        self.waits: list[float] = []
        self.notified = 0
        self.on_wait: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.time

    def condition(self) -> "Waiting":
        return Waiting(self)

    def spawn(self, name: str, work: Callable[[], None]) -> "Spawned":
        self.spawned[name] = work
        return Spawned(name, self.joined)


class Spawned:
    def __init__(self, name: str, joined: list[str]) -> None:
        self._name, self._joined = name, joined

    def join(self) -> None:
        self._joined.append(self._name)


class Waiting:
    def __init__(self, runtime: VirtualTime) -> None:
        self._runtime = runtime

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        assert timeout is not None, "it would wait for ever"
        self._runtime.waits.append(timeout)
        assert len(self._runtime.waits) < 1000, "it waits again and again"
        self._runtime.time += timeout
        if self._runtime.on_wait:
            self._runtime.on_wait.pop(0)()
        return predicate()

    def notify_all(self) -> None:
        self._runtime.notified += 1


class Scripted:
    """A link with replies as planned, each after so many seconds; without any, nobody answers."""

    address = "a:1"

    def __init__(self, runtime: VirtualTime) -> None:
        self._runtime = runtime
        self.replies: list[tuple[float, Any]] = []
        self.asked: list[Any] = []
        self.timeouts: list[float] = []
        self.streams: list[list[pb.Directive | Exception]] = []
        self.is_closed = False

    def plan(self, *replies: Any, after: float = 0.0) -> None:
        self.replies += [(after, reply) for reply in replies]

    def call(self, request: Any, timeout: float) -> Any:
        self.asked.append(request)
        self.timeouts.append(timeout)
        seconds, reply = self.replies.pop(0) if self.replies else (timeout, None)
        self._runtime.time += seconds
        if isinstance(reply, Exception):
            raise reply
        return reply

    def follow(self, request: pb.FollowRequest) -> Iterator[pb.Directive]:
        assert self.streams, "nobody follows any more"
        for one in self.streams.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one

    def close(self) -> None:
        self.is_closed = True

    @property
    def kinds(self) -> list[str]:
        return [type(request).__name__ for request in self.asked]


@pytest.fixture
def runtime() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def link(runtime: VirtualTime) -> Scripted:
    return Scripted(runtime)


@pytest.fixture
def member(link: Scripted, runtime: VirtualTime) -> Membership:
    status = WorkerStatus(17, "exchange", 3, "worker 1")
    return Membership(link, TIMING, lambda: status, runtime=runtime, patience=TIMING.failure_timeout)


def patient(link: Scripted, runtime: VirtualTime, patience: float) -> Membership:
    """Registered at the time 100, with a lease until 104; waits for so long after that."""
    member = Membership(link, TIMING, lambda: WorkerStatus(17, "exchange"), runtime=runtime, patience=patience)
    link.plan(welcome())
    member.register(registration())
    return member


@pytest.fixture
def joined(member: Membership, link: Scripted) -> Membership:
    """Registered at the time 100, with a lease until 104, with nothing asked since."""
    link.plan(welcome())
    member.register(registration())
    link.asked.clear()
    link.timeouts.clear()
    return member


def registration() -> pb.RegisterRequest:
    return pb.RegisterRequest(slot=0, pid=4711, host="a", ring_address=HERE, cursor=encode_cursor(Cursor(7)))


def welcome(incarnation: int = 1) -> pb.RegisterReply:
    return pb.RegisterReply(worker=0, lease=LEASE, incarnation=incarnation)


def beat() -> pb.HeartbeatReply:
    return pb.HeartbeatReply(lease=LEASE)


def generation(number: int, incarnation: int = 1) -> Generation:
    return Generation(GenerationId(incarnation, number), (Member(0, HERE, range(2)),))


def formed(number: int, incarnation: int = 1) -> pb.Directive:
    return pb.Directive(formed=encode_generation(generation(number, incarnation)))


def the_end(failure: Failure | None = None) -> pb.Directive:
    return pb.Directive(end=pb.EndDirective(failure=encode_failure(failure)))


def refusal(failure: Failure) -> pb.RegisterReply:
    return pb.RegisterReply(refusal=encode_failure(failure))


def current(member: Membership) -> GenerationId:
    return member.view.generation_id


class TestRegister:
    def test_the_lease_counts_from_the_request_and_not_from_its_answer(
        self, member: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        link.plan(welcome(), after=1.5)
        member.register(registration())
        assert member.lease_remaining() == LEASE - 1.5
        assert set(runtime.spawned) == {"membership-heartbeat", "membership-follow"}

    def test_is_asked_for_again_until_it_is_answered(self, member: Membership, link: Scripted) -> None:
        link.plan(None, None, welcome())
        member.register(registration())
        assert link.kinds == ["RegisterRequest"] * 3
        assert link.timeouts == [TIMING.failure_timeout] * 3

    def test_is_given_up_after_a_while(self, member: Membership, link: Scripted, runtime: VirtualTime) -> None:
        with pytest.raises(LinkError, match=r"nothing came within 10\.0 s"):
            member.register(registration())
        assert TIMING.connect <= runtime.time - 100.0 < TIMING.connect + 2 * TIMING.failure_timeout
        assert runtime.spawned == {}

    def test_is_not_asked_for_again_when_the_time_is_just_over(self, member: Membership, link: Scripted) -> None:
        link.plan(None, after=TIMING.connect)
        with pytest.raises(LinkError):
            member.register(registration())
        assert len(link.asked) == 1

    @pytest.mark.parametrize("error", [DivergedError("another canary"), FrameError("taken"), JobEnded(LOST)])
    def test_a_refusal_is_the_error_that_it_tells(
        self, member: Membership, link: Scripted, runtime: VirtualTime, error: Exception
    ) -> None:
        told = LOST if isinstance(error, JobEnded) else Failure(type(error).__name__, str(error))
        link.plan(refusal(told))
        with pytest.raises(type(error), match=str(error)):
            member.register(registration())
        assert runtime.spawned == {}


class TestComingBack:
    def test_a_heartbeat_that_nobody_knows_presents_this_worker_to_who_asks(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        joined.view.handle(formed(3))
        joined.publish(make_event("step", 17))
        runtime.time += 3.0
        link.plan(pb.HeartbeatReply(unknown=True, incarnation=2), welcome(2), beat())
        joined.flush()
        assert link.kinds == ["HeartbeatRequest", "RegisterRequest", "HeartbeatRequest"]
        position = decode_position(link.asked[1].position)
        assert (position.generation, position.has_left) == (generation(3), False)
        assert link.asked[0].sequence == link.asked[2].sequence
        assert runtime.waits == [TIMING.heartbeat_every], "who has not been heard does not hurry"
        joined.view.handle(formed(4, incarnation=1))
        assert current(joined) == GenerationId(1, 3), "a late word of the coordinator before"

    def test_what_was_told_holds_for_a_still_later_one_that_answers(self, joined: Membership, link: Scripted) -> None:
        joined.publish(make_event("step", 17))
        link.plan(pb.HeartbeatReply(unknown=True, incarnation=2), welcome(3), beat())
        joined.flush()
        joined.view.handle(formed(1, incarnation=2))
        assert current(joined) == GenerationId(0, 0)
        joined.view.handle(formed(1, incarnation=3))
        assert current(joined) == GenerationId(3, 1)

    def test_an_earlier_one_that_answers_makes_nobody_believe_it_again(
        self, joined: Membership, link: Scripted
    ) -> None:
        joined.publish(make_event("step", 17))
        link.plan(pb.HeartbeatReply(unknown=True, incarnation=3), welcome(2), beat())
        joined.flush()
        joined.view.handle(formed(1, incarnation=2))
        assert current(joined) == GenerationId(0, 0)

    def test_who_is_refused_is_told_by_its_state_report(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(formed(1))
        link.plan(
            pb.StateReply(unknown=True, incarnation=2), refusal(LOST), pb.StateReply(refusal=encode_failure(LOST))
        )
        with pytest.raises(JobEnded, match="counts as lost"):
            joined.report_state(generation(1), Cursor(9), None)
        assert link.kinds == ["StateReport", "RegisterRequest", "StateReport"]


class TestReportState:
    def test_is_told_once_and_nothing_waits(self, joined: Membership, link: Scripted, runtime: VirtualTime) -> None:
        link.plan(pb.StateReply())
        joined.report_state(generation(1), Cursor(9), LOST, is_saved=True)
        (report,) = link.asked
        assert (report.worker, report.pid, report.saved, report.cursor.step) == (0, 4711, True, 9)
        assert decode_failure(report.symptom) == LOST
        assert runtime.waits == []
        assert joined.view.present(1).cursor == Cursor(9)

    def test_is_told_again_with_a_pause_for_as_long_as_a_coordinator_may_return(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        link.plan(None, None, pb.StateReply())
        joined.report_state(generation(1), Cursor(9), None)
        assert runtime.waits == [TIMING.heartbeat_every] * 2
        with pytest.raises(LeaseExpired):
            joined.report_state(generation(1), Cursor(9), None)
        assert runtime.time >= 100.0 + LEASE + TIMING.failure_timeout

    def test_is_told_again_as_often_as_somebody_does_not_know_this_worker_with_a_pause(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        unknown = pb.StateReply(unknown=True, incarnation=2)
        link.plan(unknown, welcome(2), unknown, welcome(2), pb.StateReply())
        joined.report_state(generation(1), Cursor(9), None)
        assert link.kinds.count("StateReport") == 3
        assert runtime.waits == [TIMING.heartbeat_every] * 2

    def test_is_given_up_where_nobody_takes_it_up_in_time(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        unknown = pb.StateReply(unknown=True, incarnation=2)
        for _ in range(30):
            link.plan(unknown, refusal(LOST))
        with pytest.raises(LeaseExpired):
            joined.report_state(generation(1), Cursor(9), None)
        assert runtime.time == pytest.approx(100.0 + LEASE + TIMING.failure_timeout)

    def test_the_end_of_the_job_is_its_answer(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(the_end(LOST))
        with pytest.raises(JobEnded, match="counts as lost"):
            joined.report_state(generation(1), Cursor(9), None)
        assert link.kinds == ["StateReport"]

    def test_a_link_that_is_closed_is_not_asked_again(self, joined: Membership, link: Scripted) -> None:
        joined.close()
        with pytest.raises(LinkError, match="was closed"):
            joined.report_state(generation(1), Cursor(9), None)
        assert link.kinds == ["StateReport"]


class TestLeaveToAct:
    def test_a_generation_is_waited_for_until_the_coordinator_cannot_return(
        self, joined: Membership, runtime: VirtualTime
    ) -> None:
        with pytest.raises(LeaseExpired):
            joined.await_generation()
        assert runtime.time == pytest.approx(100.0 + LEASE + TIMING.failure_timeout)
        assert set(runtime.waits) == {TIMING.heartbeat_every}

    def test_a_generation_does_not_begin_without_a_lease(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        joined.view.handle(formed(1))
        joined.publish(make_event("step", 1))
        runtime.time += LEASE
        link.plan(beat())
        runtime.on_wait = [lambda: None, joined.flush_last]
        assert joined.await_generation() == generation(1)
        assert joined.lease_remaining() > 0
        assert len(runtime.waits) == 2

    def test_where_it_dies_with_its_launcher_a_worker_waits_for_as_long_as_it_lives(
        self, link: Scripted, runtime: VirtualTime
    ) -> None:
        member = patient(link, runtime, math.inf)
        for wait in (lambda: member.await_generation(), member.flush_before_report):
            runtime.time += 1000 * TIMING.absence
            member.publish(make_event("step", 17))
            link.plan(beat())
            runtime.on_wait = [lambda: None, lambda: None, member.flush_last, lambda: member.view.handle(formed(1))]
            wait()
        runtime.time += 1000 * TIMING.absence
        link.plan(*[None] * 50, pb.StateReply())
        member.report_state(generation(1), Cursor(9), None)
        assert link.kinds.count("StateReport") == 51

    def test_elsewhere_for_as_long_as_coordinators_may_be_started(self, link: Scripted, runtime: VirtualTime) -> None:
        member = patient(link, runtime, 40.0)
        message = r"gives up: the coordinator at a:1 has not answered for 44\.\d s, .* in its place within 40 s"
        with pytest.raises(LeaseExpired, match=message):
            member.await_generation()
        assert runtime.time == pytest.approx(100.0 + LEASE + 40.0)

    def test_but_not_where_it_is_answered_and_granted_nothing(self, link: Scripted, runtime: VirtualTime) -> None:
        member = patient(link, runtime, math.inf)
        runtime.time += 60.0
        for _ in range(30):
            link.plan(pb.StateReply(unknown=True, incarnation=2), refusal(LOST))
        with pytest.raises(LeaseExpired, match=r"has granted no lease for .* s: this worker was replaced"):
            member.report_state(generation(1), Cursor(9), None)
        assert runtime.time == pytest.approx(160.0 + TIMING.failure_timeout)

    def test_nor_where_only_its_heartbeats_are_answered_like_that(self, link: Scripted, runtime: VirtualTime) -> None:
        member = patient(link, runtime, math.inf)
        runtime.time += 60.0
        member.publish(make_event("step", 17))
        link.plan(pb.HeartbeatReply())
        member.flush_last()
        with pytest.raises(LeaseExpired, match="was replaced"):
            member.await_generation()
        assert runtime.time == pytest.approx(160.0 + TIMING.failure_timeout)

    @pytest.mark.parametrize("silence", [None, LinkError("gone")], ids=["no answer", "no connection"])
    def test_but_where_the_one_that_refused_is_gone_since(
        self, link: Scripted, runtime: VirtualTime, silence: LinkError | None
    ) -> None:
        member = patient(link, runtime, 40.0)
        runtime.time += LEASE
        link.plan(pb.HeartbeatReply(), silence)
        assert [member._beat(1.0), member._beat(1.0)] == [True, False]
        with pytest.raises(LeaseExpired, match=r"gives up: .* none was started in its place within 40 s"):
            member.await_generation()
        assert runtime.time == pytest.approx(100.0 + LEASE + 40.0)

    def test_what_was_refused_once_is_forgotten_with_the_next_lease(self, link: Scripted, runtime: VirtualTime) -> None:
        member = patient(link, runtime, math.inf)
        link.plan(pb.HeartbeatReply(), beat())
        for _ in range(2):
            member.publish(make_event("step", 17))
            member.flush_last()
        runtime.time += 1000.0
        runtime.on_wait = [lambda: None] * 3 + [lambda: member.view.handle(the_end())]
        with pytest.raises(JobEnded):
            member.await_generation()

    def test_nor_for_ever(self, joined: Membership, runtime: VirtualTime) -> None:
        joined.view.handle(formed(1))
        with pytest.raises(LeaseExpired):
            runtime.time += LEASE
            joined.await_generation()
        assert runtime.time == pytest.approx(100.0 + LEASE + TIMING.failure_timeout, abs=0.1)

    def test_but_is_not_waited_for_when_the_job_ends_meanwhile(self, joined: Membership, runtime: VirtualTime) -> None:
        joined.view.handle(formed(1))
        runtime.time += LEASE
        runtime.on_wait = [lambda: joined.view.handle(the_end())]
        assert joined.await_generation() == generation(1)
        assert len(runtime.waits) == 1

    def test_ends_with_the_lease_to_the_moment(self, joined: Membership, runtime: VirtualTime) -> None:
        runtime.time += LEASE - 0.25
        joined.check_lease()
        joined.check_commit()
        runtime.time += 0.25
        for check in (joined.check_lease, joined.check_commit):
            with pytest.raises(LeaseExpired):
                check()

    def test_a_checkpoint_of_a_job_that_has_ended_may_be_committed(self, joined: Membership) -> None:
        joined.view.handle(the_end())
        joined.check_commit()
        with pytest.raises(JobEnded):
            joined.check_lease()


class TestComplete:
    def test_of_all_is_the_end(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(formed(3))
        joined.publish(make_event("step", 17))
        link.plan(beat(), pb.CompleteReply())
        assert joined.complete("digest", {"steps": 9})
        assert link.kinds == ["HeartbeatRequest", "CompleteRequest"], "what was done is told before"
        request = link.asked[1]
        assert (request.worker, request.pid, request.weights_digest) == (0, 4711, "digest")
        assert decode_id(request.generation) == GenerationId(1, 3)

    def test_of_some_is_another_generation(self, joined: Membership, link: Scripted) -> None:
        link.plan(None, pb.CompleteReply(regroup=True))
        assert not joined.complete("digest", {})

    def test_that_ends_with_a_failure_raises_it(self, joined: Membership, link: Scripted) -> None:
        link.plan(pb.CompleteReply(failure=encode_failure(LOST)))
        with pytest.raises(JobEnded, match="counts as lost"):
            joined.complete("digest", {})

    @pytest.mark.parametrize("failure", [None, LOST])
    def test_that_nobody_answers_since_the_job_has_ended(
        self, joined: Membership, link: Scripted, failure: Failure | None
    ) -> None:
        joined.view.handle(the_end(failure))
        if failure is None:
            assert joined.complete("digest", {})
        else:
            with pytest.raises(JobEnded, match="counts as lost"):
                joined.complete("digest", {})
        assert link.kinds == ["CompleteRequest"]


class TestLastWords:
    def test_come_after_the_events_before_them(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(formed(3))
        joined.publish(make_event("step", 17))
        link.plan(beat(), pb.Ack())
        joined.report_failure(LOST)
        assert link.kinds == ["HeartbeatRequest", "FailureReport"]
        report = link.asked[1]
        assert (report.worker, report.pid) == (0, 4711)
        assert decode_id(report.generation) == GenerationId(1, 3)

    def test_are_told_also_by_one_that_has_no_place(self, member: Membership, link: Scripted) -> None:
        member.publish(make_event("step", 17))
        link.plan(pb.Ack())
        member.report_failure(LOST)
        (report,) = link.asked
        assert not report.HasField("worker")
        assert report.pid > 0

    def test_are_not_needed_once_the_job_has_ended(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(the_end(LOST))
        joined.report_failure(LOST)
        assert link.asked == []

    def test_do_not_keep_anybody_for_long_and_raise_nothing(
        self, joined: Membership, link: Scripted, runtime: VirtualTime, caplog: pytest.LogCaptureFixture
    ) -> None:
        joined.report_failure(LOST)
        assert runtime.time - 100.0 <= 2.0
        assert "why this worker stops: LinkError('it does not answer')" in caplog.text
        link.plan(RuntimeError("broken"))
        joined.report_failure(LOST)
        assert "RuntimeError('broken')" in caplog.text

    def test_an_answer_is_enough(self, joined: Membership, link: Scripted, caplog: pytest.LogCaptureFixture) -> None:
        link.plan(pb.Ack())
        joined.report_failure(LOST)
        assert caplog.text == ""


class TestFlush:
    def test_sends_what_is_queued_and_nothing_where_nothing_is(self, joined: Membership, link: Scripted) -> None:
        joined.flush()
        assert link.asked == []
        joined.publish(make_event("step", 17))
        link.plan(beat())
        joined.flush()
        assert [len(request.events) for request in link.asked] == [1]

    def test_renews_the_lease_from_the_sending(self, joined: Membership, link: Scripted, runtime: VirtualTime) -> None:
        runtime.time += 2.0
        joined.publish(make_event("step", 17))
        link.plan(beat(), after=1.5)
        joined.flush()
        assert joined.lease_remaining() == LEASE - 1.5

    def test_does_not_renew_a_lease_that_nobody_has_granted(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        runtime.time += 2.0
        joined.publish(make_event("step", 17))
        link.plan(pb.HeartbeatReply(lease=0.0))
        joined.flush()
        assert joined.lease_remaining() == LEASE - 2.0

    def test_pauses_before_it_asks_again_and_ends_with_the_lease(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        joined.publish(make_event("step", 17))
        link.plan(None, LinkError("not taken"), beat())
        joined.flush()
        assert runtime.waits == [TIMING.heartbeat_every] * 2
        runtime.waits.clear()
        joined.publish(make_event("step", 18))
        with pytest.raises(LeaseExpired):
            joined.flush()
        assert link.timeouts[-1] <= LEASE

    def test_after_the_end_tries_once_more_for_a_moment(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(the_end())
        joined.flush()  # there is nothing to tell
        joined.publish(make_event("step", 17))
        link.plan(None, after=LEASE)
        link.plan(beat())
        joined.flush()
        assert link.timeouts[-1] == 0.5
        joined.publish(make_event("step", 18))
        with pytest.raises(JobEnded):
            joined.flush()

    def test_before_a_report_lasts_for_as_long_as_a_coordinator_may_return(
        self, joined: Membership, runtime: VirtualTime
    ) -> None:
        joined.publish(make_event("step", 17))
        joined.flush_before_report()
        assert runtime.time == pytest.approx(100.0 + LEASE + TIMING.failure_timeout)

    def test_before_a_report_asks_nobody_once_the_job_has_ended(self, joined: Membership, link: Scripted) -> None:
        joined.publish(make_event("step", 17))
        joined.view.handle(the_end())
        joined.flush_before_report()
        assert link.asked == []

    def test_the_last_is_brief_and_raises_nothing(
        self, joined: Membership, link: Scripted, runtime: VirtualTime, caplog: pytest.LogCaptureFixture
    ) -> None:
        joined.publish(make_event("step", 17))
        joined.flush_last()
        assert runtime.time == pytest.approx(100.5)
        link.plan(RuntimeError("broken"))
        joined.flush_last()
        assert "the last events: RuntimeError('broken')" in caplog.text
        link.plan(beat())
        joined.flush_last()
        assert len(link.asked[-1].events) == 1


class TestHeartbeats:
    def test_tell_where_this_worker_is(self, joined: Membership, link: Scripted) -> None:
        joined.view.handle(formed(3))
        joined.publish(make_event("step", 17))
        link.plan(beat())
        joined.flush()
        joined.ask_to_leave()
        joined.publish(make_event("step", 18))
        link.plan(beat())
        joined.flush()
        first, second = link.asked
        assert (first.worker, first.pid, first.step, first.phase) == (0, 4711, 17, "exchange")
        assert (first.moves, first.waits_for, decode_id(first.generation)) == (3, "worker 1", GenerationId(1, 3))
        assert (first.leaving, second.leaving) == (False, True)
        assert second.sequence == first.sequence + 1

    def test_come_at_their_pace_and_at_once_where_more_is_queued(
        self, joined: Membership, link: Scripted, runtime: VirtualTime, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            joined.publish(make_event("log", fields={"text": "x" * 400_000}))
        paused: list[int] = []
        runtime.on_wait = [lambda: paused.append(len(link.asked)) for _ in range(4)] + [joined.close]
        link.plan(beat(), beat(), beat(), beat(), None, RuntimeError("broken"), beat())
        runtime.spawned["membership-heartbeat"]()
        assert paused == [3, 4, 5, 6], "a pause after each, but for those with more to tell"
        assert set(runtime.waits) == {TIMING.heartbeat_every}
        assert set(link.timeouts) == {LEASE / 2}
        assert "a heartbeat could not be sent" in caplog.text

    def test_are_sent_one_at_a_time(self, joined: Membership, link: Scripted, runtime: VirtualTime) -> None:
        joined.publish(make_event("step", 17))
        told: list[int] = []

        class Slow(Scripted):
            def call(self, request: Any, timeout: float) -> Any:
                told.append(len(request.events))
                if len(told) == 1:
                    joined.flush_last()  # as another thread would: it waits, and gives up
                return super().call(request, timeout)

        link.plan(beat())
        link.__class__ = Slow
        joined.flush()
        assert told == [1]
        assert runtime.waits[0] == 0.5
        joined.publish(make_event("step", 18))
        link.plan(beat())
        joined.flush()
        assert told == [1, 1], "whoever comes next has its turn"

    def test_pause_also_after_a_turn_that_they_did_not_get(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        joined.publish(make_event("step", 17))
        runtime.on_wait = [lambda: None, joined.close]

        class Slow(Scripted):
            def call(self, request: Any, timeout: float) -> Any:
                runtime.spawned["membership-heartbeat"]()  # as the other thread does meanwhile
                return super().call(request, timeout)

        link.plan(beat())
        link.__class__ = Slow
        notified = runtime.notified
        joined.flush()
        assert runtime.waits == [LEASE / 2, TIMING.heartbeat_every]
        assert runtime.notified > notified + 1, "whoever waits for its turn is woken"


class TestFollowing:
    def test_goes_on_until_the_end_with_a_pause_after_a_break(
        self, joined: Membership, link: Scripted, runtime: VirtualTime, caplog: pytest.LogCaptureFixture
    ) -> None:
        link.streams = [[formed(1)], [RuntimeError("broken")], [formed(2), the_end()]]
        runtime.spawned["membership-follow"]()
        assert current(joined) == GenerationId(1, 2)
        assert runtime.waits == [TIMING.heartbeat_every] * 2
        assert "a directive of the coordinator could not be followed" in caplog.text

    def test_gives_up_where_no_thread_can_be_started_to_listen(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        link.streams = [[RuntimeError("can't start new thread")], [the_end()]]
        runtime.spawned["membership-follow"]()
        with pytest.raises(JobError, match=r"no thread could be started.* \(ulimit -v\)"):
            joined._check_coordinator_returns()

    def test_the_end_takes_the_lease_at_once_and_a_generation_does_not(
        self, joined: Membership, link: Scripted, runtime: VirtualTime
    ) -> None:
        leases: list[float] = []
        joined.view.close_when_over(generation(1), lambda: leases.append(joined.lease_remaining()))
        runtime.on_wait = [lambda: leases.append(joined.lease_remaining())]
        link.streams = [[formed(1)], [the_end()]]
        runtime.spawned["membership-follow"]()
        assert leases == [LEASE - TIMING.heartbeat_every]
        assert joined.lease_remaining() == 0.0

    def test_ends_when_the_membership_is_closed(self, joined: Membership, link: Scripted, runtime: VirtualTime) -> None:
        runtime.on_wait = [joined.close]
        link.streams = [[]]
        runtime.spawned["membership-follow"]()
        assert link.is_closed
        assert runtime.joined == ["membership-heartbeat", "membership-follow"]

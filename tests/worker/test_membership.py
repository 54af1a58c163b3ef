"""A worker's membership against a real coordinator on loopback."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from coordinator.served import TOKEN, Served, serve
from made_events import make_event
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.places import News, Outcome, Vacancy
from quorate.core.errors import DivergedError, FrameError, GenerationOver, LeaseExpired, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, GenerationId, WorkerStatus
from quorate.core.timing import Timing
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker import membership
from quorate.worker.coordinator_link import GrpcLink
from quorate.worker.heartbeats import Lease, Outbox
from quorate.worker.membership import Membership
from quorate.worker.membership_view import JobEnded


def registration(slot: int, *, pid: int = 0, **facts: str) -> pb.RegisterRequest:
    return pb.RegisterRequest(
        slot=slot,
        pid=pid or 4710 + slot,
        host="a",
        ring_address=f"127.0.0.1:{5000 + slot}",
        facts=facts,
        tensors=[pb.TensorDigest(name="w", digest="1")],
        cursor=pb.Cursor(),
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.005)


@pytest.fixture(autouse=True)
def reports_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: who leaves waits as long as it takes, where it is answered at all."""
    monkeypatch.setattr(membership, "_REPORT_LIMIT", 60.0)
    monkeypatch.setattr(membership, "_REST_LIMIT", 60.0)


@contextmanager
def joined(served: Served, *, failure_timeout: float = 5.0, workers: int = 1) -> Iterator[list[Membership]]:
    """Members of a generation, closed at the end."""
    members = [
        Membership(GrpcLink(served.address, TOKEN), Timing(failure_timeout), lambda: WorkerStatus(17, "exchange"))
        for _ in range(workers)
    ]
    try:
        for slot, member in enumerate(members):
            member.register(registration(slot))
        for member in members:
            member.await_generation()
        yield members
    finally:
        for member in members:
            member.close()


@contextmanager
def supervising(served: Served) -> Iterator[SupervisorClient]:
    client = SupervisorClient(served.address, TOKEN, timeout=600.0)  # a tenth of it for one call
    try:
        yield client
    finally:
        client.close()


def test_all_members_learn_the_same_generation(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2, lanes=3, incarnation=7) as served, joined(served, workers=2) as members:
        first, second = (member.await_generation() for member in members)
        assert first == second
        assert first.id == GenerationId(7, 1)
        assert [(member.address, list(member.lanes)) for member in first.members] == [
            ("127.0.0.1:5000", [0, 1]),
            ("127.0.0.1:5001", [2]),
        ]
        (event,) = served.events()
        assert event["kind"] == "generation"
        assert event["members"][1] == {"worker": 1, "address": "127.0.0.1:5001", "lanes": [2]}


def test_an_evaluation_does_not_wait_for_the_next_heartbeat(tmp_path: Path) -> None:
    hour = 36_000.0  # a heartbeat every hour
    with serve(tmp_path, workers=1, failure_timeout=hour) as served, joined(served, failure_timeout=hour) as members:
        members[0].publish(make_event("step", 1))
        members[0].publish(make_event("evaluation", 1))
        wait_until(lambda: served.kinds() == ["generation", "step", "evaluation"])


def test_complete_is_answered_when_all_are_done(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        early = threading.Thread(target=members[1].complete, args=("digest", {}))
        early.start()
        assert supervisor.news(0.05).outcome is None
        assert early.is_alive()
        members[0].publish(make_event("step", 1, {"loss": 0.5}))
        members[0].complete("digest", {"steps": 9})
        early.join(60)
        assert not early.is_alive()
        outcome = supervisor.news(60.0).outcome
        assert outcome is not None
        assert (outcome.failure, outcome.result) == (None, {"steps": 9})
        assert served.kinds() == ["generation", "step", "finished"]
        wait_until(lambda: members[0].view.ended)
        assert members[0].lease_remaining() <= 0
        with pytest.raises(JobEnded, match="it is complete"):
            members[0].check_lease()


def test_unequal_digests_end_the_generation_for_everyone(tmp_path: Path) -> None:
    endings: list[bool] = []

    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members:
        other = threading.Thread(target=lambda: endings.append(members[1].complete("e", {})))
        other.start()
        endings.append(members[0].complete("d", {}))
        other.join(60)
    assert endings == [False, False]


def test_a_worker_with_other_facts_is_refused_and_the_others_hear_of_it(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served:
        first, second = (
            Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(0, "joining"))
            for _ in range(2)
        )
        try:
            first.register(registration(0, canary="1"))
            with pytest.raises(DivergedError, match="worker 1's canary 2 differs from worker 0's 1"):
                second.register(registration(1, canary="2"))
            with pytest.raises(JobEnded, match="the machines do not compute alike"):
                first.await_generation()
            with pytest.raises(DivergedError):
                second.register(registration(1, canary="1"))
        finally:
            first.close()
            second.close()


def test_a_taken_place_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served:
        first, second = (
            Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(0, "joining"))
            for _ in range(2)
        )
        try:
            first.register(registration(0))
            taken = registration(0, pid=9)
            with pytest.raises(FrameError, match=r"the place is taken: worker 0 \(pid 4710 on host a\)"):
                second.register(taken)
        finally:
            first.close()
            second.close()


def test_stop_reaches_every_member(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        assert members[0].view.stop_requested is None
        supervisor.stop("interrupted")
        supervisor.stop("terminated")
        wait_until(lambda: all(member.view.stop_requested == "interrupted" for member in members))
        assert served.kinds() == ["generation", "stop"]


def test_a_reported_exception_ends_the_job_for_everyone(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        called: list[str] = []
        generation = members[1].await_generation()
        members[1].view.close_when_over(generation, lambda: called.append(threading.current_thread().name))
        members[0].publish(make_event("log", fields={"text": "before"}))
        members[0].report_failure(Failure("UserCodeError", "ValueError: no", traceback="Traceback"))
        outcome = supervisor.news(60.0).outcome
        assert outcome is not None
        assert outcome.failure is not None
        assert (outcome.failure.kind, outcome.failure.worker, outcome.failure.step) == ("UserCodeError", 0, 17)
        wait_until(lambda: called == ["membership-follow"])
        members[1].view.close_when_over(generation, lambda: called.append("late"))
        assert called[-1] == "late"
        with pytest.raises(JobEnded, match="ValueError: no") as raised:
            members[1].check_lease()
        assert raised.value.failure == outcome.failure
        assert served.kinds() == ["generation", "log", "failure"]
        assert served.events()[-1] == {
            "kind": "failure",
            "version": 1,
            "step": 17,
            "time": served.events()[-1]["time"],
            "cause": "UserCodeError",
            "message": "ValueError: no",
            "worker": 0,
            "lane": None,
            "phase": "exchange",
            "traceback": "Traceback",
            "exit_code": 1,
        }


def test_what_is_queued_when_another_ends_the_job_is_told_all_the_same(tmp_path: Path) -> None:
    # Heartbeats are ten seconds apart here: what arrives in time was sent for the sake of leaving.
    with (
        serve(tmp_path, workers=2, failure_timeout=100.0) as served,
        joined(served, failure_timeout=100.0, workers=2) as members,
    ):
        members[1].report_failure(Failure("UserCodeError", "no"))
        wait_until(lambda: members[0].view.ended)
        for step in (1, 2):
            members[0].publish(make_event("step", step))
        members[0].flush()  # or a checkpoint of them could not be committed
        assert served.kinds() == ["generation", "failure", "step", "step"]
        members[0].publish(make_event("step", 3))
        members[0].flush_last()
        assert served.kinds()[-3:] == ["step", "step", "step"]


def test_what_cannot_be_told_any_more_after_the_end_is_not_taken_for_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_REST_LIMIT", 0.5)
    with serve(tmp_path, workers=1) as served:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(0, ""))
        member.register(registration(0))
        member.report_failure(Failure("UserCodeError", "no"))
        wait_until(lambda: member.view.ended)
    try:
        member.publish(make_event("step", 1))
        with pytest.raises(JobEnded):
            member.flush()
    finally:
        member.close()


def test_leaving_a_coordinator_that_does_not_answer_is_brief_and_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_REST_LIMIT", 0.5)
    with serve(tmp_path, workers=1) as served:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(100.0), lambda: WorkerStatus(0, ""))
        member.register(registration(0))
    try:
        member.publish(make_event("step", 1))
        begun = time.monotonic()
        member.flush_last()
        assert time.monotonic() - begun < 50
    finally:
        member.close()


def test_a_burst_of_events_arrives_whole_and_in_order(tmp_path: Path) -> None:
    count = 25_000  # more than one message may hold, and many times what one batch does
    with serve(tmp_path, workers=1, failure_timeout=20.0) as served, joined(served, failure_timeout=20.0) as (member,):
        for number in range(count):
            member.publish(make_event("log", fields={"n": number, "text": "x" * 200}, time=0.0))
        member.complete("d", {})
        events = served.events()
    assert [event["n"] for event in events if event["kind"] == "log"] == list(range(count))
    assert events[-1]["kind"] == "finished"


def test_steps_that_every_worker_tells_are_written_once(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members:
        for member in members:
            for step in (1, 2, 5000):
                member.publish(make_event("step", step))
            member.publish(make_event("evaluation", 2))
        early = threading.Thread(target=members[1].complete, args=("d", {}))
        early.start()
        members[0].complete("d", {})
        early.join(60)
        told = [(event["kind"], event.get("step")) for event in served.events()]
    assert sorted(told[1:-1]) == [("evaluation", 2), ("step", 1), ("step", 2), ("step", 5000)]


def may_act(member: Membership) -> bool:
    try:
        member.check_lease()
    except LeaseExpired:
        return False
    return True


def test_the_lease_is_renewed_by_heartbeats_and_expires_without_them(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, failure_timeout=0.5) as served:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(0.5), lambda: WorkerStatus(0, ""))
        begun = time.monotonic()
        member.register(registration(0))
        # A lease is 0.4 s: one that ends more than a second after the start was renewed.
        wait_until(lambda: member.lease_remaining() > max(0.0, 1.0 - (time.monotonic() - begun)))
        wait_until(lambda: may_act(member))  # again, if this thread was held up for so long
    try:
        wait_until(lambda: member.lease_remaining() <= 0)
        with pytest.raises(LeaseExpired, match=r"has not answered for \d+\.\d s, longer than the lease of 0\.4 s"):
            member.check_lease()
        member.report_failure(Failure("LeaseExpired", "nobody listens"))  # returns, and raises nothing
    finally:
        member.close()


def test_whose_coordinator_was_replaced_commits_nothing_until_it_has_heard_of_the_next(tmp_path: Path) -> None:
    newest = [1]
    with serve(tmp_path, workers=1) as served:
        member = Membership(
            GrpcLink(served.address, TOKEN),
            Timing(60.0),
            lambda: WorkerStatus(0, ""),
            newest_incarnation=lambda: newest[0],
        )
        member.register(registration(0))
        member.await_generation()
        member.check_commit()
        newest[0] = 2  # behind a cut cable: the first still answers
        with pytest.raises(LeaseExpired, match=r"is of coordinator 1 of this run, and there is coordinator 2 now"):
            member.check_commit()
        member.check_lease()
        member.close()


def test_waiting_for_a_generation_ends_after_the_lease(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2, failure_timeout=0.5) as served:
        link = GrpcLink(served.address, TOKEN)
        member = Membership(link, Timing(0.5), lambda: WorkerStatus(0, ""), patience=1.0)
        member.register(registration(0))
    try:
        with pytest.raises(LeaseExpired, match=r"this worker gives up: the coordinator at .* within 1 s"):
            member.await_generation()
    finally:
        member.close()


def test_a_coordinator_that_comes_back_is_found_again_within_the_lease(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(3, ""))
        member.register(registration(0))
        member.await_generation()
    try:
        port = int(served.address.rpartition(":")[2])
        with serve(tmp_path, workers=1, port=port) as again, supervising(again) as supervisor:
            supervisor.stop("interrupted")
            wait_until(lambda: member.view.stop_requested == "interrupted")
            member.check_lease()
    finally:
        member.close()


def test_a_generation_of_an_earlier_coordinator_is_not_adopted(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, incarnation=7) as served:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(3, ""))
        member.register(registration(0))
        member.await_generation()
    try:
        port = int(served.address.rpartition(":")[2])
        with (
            serve(tmp_path, workers=1, incarnation=6, port=port) as earlier,
            joined(earlier) as (other,),
            supervising(earlier) as supervisor,
        ):
            # Directives are heard in order: who hears the stop has heard of the generation before it.
            supervisor.stop("interrupted")
            wait_until(lambda: member.view.stop_requested == "interrupted")
            assert other.await_generation().id == GenerationId(6, 1)
            assert member.await_generation().id == GenerationId(7, 1)
    finally:
        member.close()


def test_lease_counts_from_the_sending() -> None:
    now = 100.0
    lease = Lease(Timing(5.0), lambda: now)
    assert lease.remaining() <= 0
    lease.renew(sent=100.0, seconds=4.0)
    now = 103.0
    assert lease.remaining() == 1.0
    lease.renew(sent=99.0, seconds=4.0)  # an answer that was overtaken takes nothing away
    assert lease.remaining() == 1.0
    lease.renew(sent=103.0, seconds=0.0)  # an answer without a lease renews nothing
    assert lease.remaining() == 1.0
    now = 105.5
    assert lease.remaining() < 0
    assert "has not answered for 5.5 s, longer than the lease of 4.0 s (failure_timeout: 5.0)" in lease.explain("a:1")
    lease.end()
    lease.renew(sent=105.5, seconds=4.0)
    assert lease.remaining() <= 0


def test_an_unanswered_batch_is_sent_again_under_its_number() -> None:
    outbox = Outbox()
    outbox.publish(make_event("log", fields={"n": 1}, time=0.0))
    batch = outbox.next_batch()
    outbox.publish(make_event("log", fields={"n": 2}, time=0.0))
    assert outbox.next_batch() == batch
    assert not outbox.is_empty
    outbox.answered()
    following = outbox.next_batch()
    assert (following.sequence, len(following.lines)) == (batch.sequence + 1, 1)
    outbox.answered()
    assert outbox.is_empty


def test_batches_are_bounded_and_an_event_beyond_all_bounds_is_left_out() -> None:
    outbox = Outbox()
    for _ in range(10):
        outbox.publish(make_event("log", fields={"text": "x" * 200_000}))
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    sizes = []
    while not outbox.is_empty:
        sizes.append(len(outbox.next_batch().lines))
        outbox.answered()
    assert sizes == [2] * 5


def test_an_event_that_is_left_out_counts_as_arrived_with_those_before_it() -> None:
    outbox = Outbox()
    outbox.publish(make_event("log", fields={"n": 1}))
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    outbox.next_batch()
    assert (outbox.queued, outbox.arrived) == (2, 0)
    outbox.answered()
    assert outbox.arrived == 2
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    outbox.next_batch()
    outbox.answered()
    assert outbox.arrived == 3


class Silent:
    """A coordinator that never answers; it counts how often it is asked."""

    address = "a:1"

    def __init__(self) -> None:
        self.asked = 0

    def call(self, request: Any, timeout: float) -> Any:
        self.asked += 1

    def follow(self, request: Any) -> Iterator[Any]:
        return iter(())

    def close(self) -> None:
        pass


class Forgetful(Silent):
    """A coordinator that never knows whose heartbeat it gets, and loses its answer to whoever presents itself again."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def call(self, request: Any, timeout: float) -> Any:
        if isinstance(request, pb.HeartbeatRequest):
            self.told.append("heartbeat")
            return pb.HeartbeatReply(unknown=True, incarnation=2)
        if not request.HasField("position"):
            return pb.RegisterReply(lease=60.0, incarnation=1)
        self.told.append("position")
        return None


def test_a_position_is_told_once_since_a_generation_may_have_begun_when_only_the_answer_is_lost() -> None:
    link = Forgetful()
    member = Membership(link, Timing(0.2), lambda: WorkerStatus(0, ""))
    try:
        member.register(registration(0))
        wait_until(lambda: link.told.count("position") >= 3)
    finally:
        member.close()
    assert ("position", "position") not in list(itertools.pairwise(link.told))


def test_nobody_is_asked_again_once_the_membership_is_closed() -> None:
    link = Silent()
    member = Membership(link, Timing(5.0), lambda: WorkerStatus(0, ""))
    member.close()
    with pytest.raises(LinkError, match="was closed"):
        member.register(registration(0))
    assert link.asked == 1


def test_a_heartbeat_that_fails_unexpectedly_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class Welcoming(Silent):
        def call(self, request: Any, timeout: float) -> Any:
            return pb.RegisterReply(lease=5.0)

    asked: list[int] = []

    def fail() -> WorkerStatus:
        asked.append(1)
        raise ValueError("nobody expects this")

    member = Membership(Welcoming(), Timing(0.2), fail)
    member.register(registration(0))
    try:
        wait_until(lambda: len(asked) >= 2)
    finally:
        member.close()
    assert "a heartbeat could not be sent" in caplog.text


def test_a_wrong_token_is_turned_away(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served:
        member = Membership(GrpcLink(served.address, "wrong"), Timing(5.0), lambda: WorkerStatus(0, ""))
        try:
            with pytest.raises(FrameError, match="is another job's: it does not take this job's token"):
                member.register(registration(0))
        finally:
            member.close()


def test_a_coordinator_that_is_not_there_is_an_error_in_time() -> None:
    """On another host than the launcher's, from where it may not be reached at all."""
    link = GrpcLink("127.0.0.1:1", TOKEN)
    member = Membership(link, Timing(0.1), lambda: WorkerStatus(0, ""), patience=600.0)
    try:
        with pytest.raises(LinkError, match=r"the coordinator at 127\.0\.0\.1:1 does not answer"):
            member.register(registration(0))
    finally:
        member.close()


def test_no_thread_is_left_after_close(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served, joined(served):
        assert {"membership-heartbeat", "membership-follow"} <= {thread.name for thread in threading.enumerate()}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("membership")]


def test_a_membership_may_be_closed_by_the_end_itself(tmp_path: Path) -> None:
    closed = threading.Event()
    with serve(tmp_path, workers=1) as served, joined(served) as (member,):

        def leave() -> None:
            member.close()
            closed.set()

        member.view.close_when_over(member.await_generation(), leave)
        member.report_failure(Failure("UserCodeError", "no"))
        assert closed.wait(60)


def test_job_ended_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JobEnded(Failure("UserCodeError", "no"))))
    assert (error.failure, str(error)) == (Failure("UserCodeError", "no"), "the job has ended: no")


def test_importing_starts_no_thread_so_that_a_worker_may_be_forked_afterwards() -> None:
    code = "import os, quorate.worker.membership as m; print(len(os.listdir('/proc/self/task')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


FORKING = """
import os, sys
from quorate.core.timing import Timing
from quorate.worker.coordinator_link import GrpcLink
from quorate.core.generation import WorkerStatus
from quorate.worker.membership import Membership
from quorate.wire.proto import coordinator_pb2 as pb

address, token = sys.argv[1:]
children = []
for slot in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        membership = Membership(GrpcLink(address, token), Timing(5.0), lambda: WorkerStatus(0, ""))
        membership.register(pb.RegisterRequest(slot=slot, pid=os.getpid(), host="a", ring_address="127.0.0.1:1"))
        membership.await_generation()
        membership.complete("digest", {})
        membership.close()
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_workers_may_be_forked_from_a_process_that_imported_all_this(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served:
        command = [sys.executable, "-c", FORKING, served.address, TOKEN]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert served.kinds() == ["generation", "finished"]


def _work(address: str, failure_timeout: float, ready: Connection) -> None:
    member = Membership(GrpcLink(address, TOKEN), Timing(failure_timeout), lambda: WorkerStatus(17, "exchange"))
    member.register(registration(1, pid=os.getpid()))
    member.await_generation()
    ready.send("working")
    ready.recv()


@contextmanager
def worker_process(served: Served, failure_timeout: float, member: Membership) -> Iterator[int]:
    """A second worker, in a process of its own, at work in a generation with `member`."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_work, args=(served.address, failure_timeout, there), daemon=True)
    process.start()
    try:
        member.register(registration(0))
        member.await_generation()
        assert here.poll(60)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join(60)
        here.close()
        there.close()


def test_a_worker_that_is_stopped_at_step_17_is_expelled_after_failure_timeout(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2, failure_timeout=2.0) as served, supervising(served) as supervisor:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(2.0), lambda: WorkerStatus(17, "exchange"))
        try:
            with worker_process(served, 2.0, member) as pid:
                os.kill(pid, signal.SIGSTOP)
                assert supervisor.news(60.0, [(0, 4710), (1, pid)]) == News(None, ((1, pid),), workers=2)
                wait_until(lambda: is_over(member))
                (lost,) = [event for event in served.events() if event["kind"] == "lost"]
            assert lost["message"].startswith(f"worker 1 (pid {pid} on host a) has sent no heartbeat for ")
            assert lost["message"].endswith("(failure_timeout: 2.0); last seen at step 17, exchange.")
            assert lost["detect_s"] >= 2.0
        finally:
            member.close()


def test_a_worker_that_is_killed_at_step_17_is_told_by_its_exit_and_not_by_its_broken_link(tmp_path: Path) -> None:
    symptom = Failure("PeerLost", "worker 1 (127.0.0.1:5001) is gone: end of file")
    with serve(tmp_path, workers=2) as served, supervising(served) as supervisor:
        member = Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(17, "exchange"))
        try:
            with worker_process(served, 5.0, member) as pid:
                os.kill(pid, signal.SIGKILL)
                generation = member.await_generation()
                member.report_state(generation, Cursor(16), symptom)
                assert served.kinds() == ["generation"]
                supervisor.report_exit(1, pid, signal=signal.SIGKILL, step=17, phase="exchange", host="a")
                assert supervisor.news(60.0).vacant == {1: Vacancy(0.0, restore=False)}
                alone = member.await_generation(after=generation)
            assert [(one.worker, list(one.lanes), one.cursor) for one in alone.members] == [
                (0, [0, 1, 2, 3], Cursor(16)),
            ]
            assert served.kinds() == ["generation", "lost", "generation"]
            assert served.events()[1]["message"].startswith(
                f"worker 1 (pid {pid} on host a) was killed by SIGKILL at step 17 while in exchange."
            )
        finally:
            member.close()


def is_over(member: Membership) -> bool:
    """Whether a member has heard that its generation is over."""
    try:
        member.check_lease()
    except GenerationOver:
        return True
    return False


def lose(supervisor: SupervisorClient, slot: int) -> None:
    """Report the death of a member of these tests, whose pid is invented."""
    supervisor.report_exit(slot, 4710 + slot, signal=signal.SIGKILL)
    assert supervisor.news(60.0).vacant[slot] == Vacancy(0.0, restore=False)


def test_a_lost_member_ends_the_generation_for_the_others_and_closes_their_links(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        closed = threading.Event()
        generation = members[0].await_generation()
        members[0].view.close_when_over(generation, closed.set)
        members[0].check_lease()
        lose(supervisor, 1)
        assert closed.wait(60)
        with pytest.raises(GenerationOver, match=r"generation 1\.1 is over"):
            members[0].check_lease()
        members[0].report_state(generation, Cursor(16), None)
        later = members[0].await_generation(after=generation)
        assert later.id == GenerationId(1, 2)
        members[0].check_lease()  # what was said of the first does not hold for the second


def test_a_second_report_of_the_same_state_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        generation = members[0].await_generation()
        lose(supervisor, 1)
        for step in (16, 17):
            members[0].report_state(generation, Cursor(step), None)
        assert members[0].await_generation(after=generation).cursor == Cursor(16)


def test_who_counts_as_lost_is_told_so_when_it_reports_its_state(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        lose(supervisor, 1)
        with pytest.raises(JobEnded, match=r"worker 1 \(pid 4711\) counts as lost: another may have taken its place"):
            members[1].report_state(members[1].await_generation(), Cursor(17), None)


def test_who_counts_as_lost_gets_no_lease_any_more(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        lose(supervisor, 1)
        ends = []
        for _ in range(2):  # the first also waits for a heartbeat that was sent before
            for member in members:
                member.publish(make_event("log"))
                member.flush_last()
            ends.append([member._lease._until for member in members])
        before, after = ends
        assert after[0] > before[0]
        assert after[1] == before[1]


def test_a_newcomer_is_announced_for_the_next_boundary_and_joins_there(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        first = members[0].await_generation()
        lose(supervisor, 1)
        members[0].report_state(first, Cursor(16), None)
        alone = members[0].await_generation(after=first)
        assert not members[0].view.break_requested

        newcomer = Membership(GrpcLink(served.address, TOKEN), Timing(5.0), lambda: WorkerStatus(0, "join"))
        try:
            other = registration(1, pid=99)
            other.ring_address = "127.0.0.1:6001"
            newcomer.register(other)
            wait_until(lambda: members[0].view.break_requested)
            members[0].check_lease()  # it goes on until then
            members[0].report_state(alone, Cursor(20), None)
            together = newcomer.await_generation()
            assert members[0].await_generation(after=alone) == together
            assert (together.cursor, together.donor, together.behind) == (Cursor(20), 0, (1,))
            assert not members[0].view.break_requested
        finally:
            newcomer.close()


def test_complete_is_answered_with_another_generation_when_a_member_is_lost(tmp_path: Path) -> None:
    answers: list[bool] = []
    with serve(tmp_path, workers=2) as served, joined(served, workers=2) as members, supervising(served) as supervisor:
        generation = members[0].await_generation()
        done = threading.Thread(target=lambda: answers.append(members[0].complete("d", {})))
        done.start()
        lose(supervisor, 1)
        done.join(60)
        assert answers == [False]
        members[0].report_state(generation, Cursor(20), None)
        members[0].await_generation(after=generation)
        assert members[0].complete("d", {"steps": 20})
        outcome = supervisor.news(60.0).outcome
        assert outcome == Outcome(None, {"steps": 20})
        assert served.kinds() == ["generation", "lost", "generation", "finished"]

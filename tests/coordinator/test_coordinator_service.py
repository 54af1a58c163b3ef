"""Who may call the coordinator, and what its client says when a call fails."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.served import TOKEN, serve
from quorate.coordinator.__main__ import Admission, explain_refusal
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.places import News, Vacancy
from quorate.core.errors import LinkError, RequestError
from quorate.core.failure import Failure
from quorate.observe.events import LogMessage, Resized
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import TOKEN_KEY, carries_token, open_channel, stub_on, token_metadata

Stub = Any


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with serve(tmp_path, workers=1) as served:
        channel = open_channel(served.address)
        yield stub_on(channel)
        channel.close()


CALLS: dict[str, Callable[[Stub, Any], object]] = {
    "Register": lambda stub, token: stub.Register(pb.RegisterRequest(), metadata=token, timeout=60),
    "Heartbeat": lambda stub, token: stub.Heartbeat(pb.HeartbeatRequest(), metadata=token, timeout=60),
    "Follow": lambda stub, token: next(stub.Follow(pb.FollowRequest(), metadata=token, timeout=60)),
    "ReportState": lambda stub, token: stub.ReportState(pb.StateReport(), metadata=token, timeout=60),
    "ReportFailure": lambda stub, token: stub.ReportFailure(pb.FailureReport(), metadata=token, timeout=60),
    "Complete": lambda stub, token: stub.Complete(pb.CompleteRequest(), metadata=token, timeout=60),
    "ReportExit": lambda stub, token: stub.ReportExit(pb.ExitReport(), metadata=token, timeout=60),
    "Stop": lambda stub, token: stub.Stop(pb.StopRequest(), metadata=token, timeout=60),
    "Resize": lambda stub, token: stub.Resize(pb.ResizeRequest(workers=1), metadata=token, timeout=60),
    "Save": lambda stub, token: stub.Save(pb.SaveRequest(request="x"), metadata=token, timeout=60),
    "Events": lambda stub, token: next(stub.Events(pb.EventsRequest(), metadata=token, timeout=60)),
    "Status": lambda stub, token: stub.Status(pb.StatusRequest(), metadata=token, timeout=60),
    "Outcome": lambda stub, token: stub.Outcome(pb.OutcomeRequest(timeout=0.1), metadata=token, timeout=60),
}


def test_every_method_of_the_service_is_among_those_tried() -> None:
    assert set(CALLS) == {method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}


@pytest.mark.parametrize("method", sorted(CALLS))
def test_no_method_answers_without_the_token(stub: Stub, method: str) -> None:
    for metadata in ((), token_metadata("wrong"), token_metadata(""), token_metadata(TOKEN + "x")):
        with pytest.raises(grpc.RpcError) as raised:
            CALLS[method](stub, metadata)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_token_is_accepted(stub: Stub) -> None:
    assert stub.Outcome(pb.OutcomeRequest(timeout=0.01), metadata=token_metadata(TOKEN), timeout=60).ended is False


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="would let everybody in"):
        Admission("", lambda: False, asks_for_certificate=False)
    assert not carries_token((), TOKEN)
    assert not carries_token(((TOKEN_KEY, "é"),), TOKEN)


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.ReportFailure(pb.FailureReport(failure="{"), metadata=token_metadata(TOKEN), timeout=60),
        lambda stub: stub.ReportFailure(
            pb.FailureReport(failure='{"colour": 1}'), metadata=token_metadata(TOKEN), timeout=60
        ),
        lambda stub: stub.Complete(pb.CompleteRequest(result="{"), metadata=token_metadata(TOKEN), timeout=60),
    ],
)
def test_nonsense_is_refused_and_the_job_goes_on(stub: Stub, call: Callable[[Stub], object]) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        call(stub)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not stub.Outcome(pb.OutcomeRequest(timeout=0.01), metadata=token_metadata(TOKEN), timeout=60).ended


def test_an_event_that_is_none_is_skipped_and_the_rest_is_written(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served:
        channel = open_channel(served.address)
        stub: Stub = stub_on(channel)
        token = token_metadata(TOKEN)
        stub.Register(pb.RegisterRequest(), metadata=token, timeout=60)
        lines = ["{", "7", '{"kind": "log"}', '{"kind": "step", "step": "x", "time": 0}', '{"kind": "log", "time": 0}']
        reply = stub.Heartbeat(pb.HeartbeatRequest(sequence=1, events=lines), metadata=token, timeout=60)
        channel.close()
        assert reply.lease == 48.0
        assert served.kinds() == ["generation", "log"]


def test_an_exit_that_is_reported_leaves_a_vacancy_until_too_many_have_died(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served:
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        running = [(0, 4710), (1, 4711)]
        assert client.news(0.01, running) == News(None, workers=2)
        client.report_exit(1, 4711, signal=signal.SIGSEGV, host="a")
        # Also to one that has asked before the exit was known: the process that it names is no more.
        assert client.news(60.0, running).vacant == {1: Vacancy(0.0, restore=True)}
        assert client.news(0.01, [(0, 4710), (1, 0)]).vacant == {}, "another is on its way"
        client.report_exit(1, 4712, exit_code=1)
        client.report_exit(1, 4713, exit_code=1)
        (vacancy,) = client.news(60.0, running).vacant.values()
        assert 0.0 < vacancy.after <= 12.0
        client.report_exit(1, 4714, exit_code=1)
        outcome = client.news(60.0).outcome
        client.report_exit(0, 4710, exit_code=1)
        assert client.news(60.0).outcome == outcome
        client.close()
        assert outcome is not None
        assert outcome.failure is not None
        assert "It is the last of 4 workers that were lost" in outcome.failure.message
        assert served.kinds() == ["lost"] * 4 + ["failure"]
        assert served.events()[0]["message"].startswith(
            "worker 1 (pid 4711 on host a) was killed by SIGSEGV before it had joined the job."
        )


def test_who_is_expelled_is_told_until_it_has_been_reaped(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, failure_timeout=0.2) as served:
        channel = open_channel(served.address)
        stub: Stub = stub_on(channel)
        stub.Register(pb.RegisterRequest(pid=4710), metadata=token_metadata(TOKEN), timeout=60)
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        assert client.news(60.0) == client.news(60.0) == News(None, ((0, 4710),), workers=1)
        assert client.news(0.01, [(0, 4710)]).vacant == {}, "until then it may still write somewhere"
        client.report_exit(0, 4710, signal=signal.SIGKILL)
        # Whoever loses the answer is told of the empty place again.
        for _ in range(2):
            assert client.news(0.01) == News(None, vacant={0: Vacancy(0.0, restore=True)}, workers=1)
        assert client.news(0.01, [(0, 0)]) == News(None, workers=1)
        client.close()
        channel.close()
        assert served.kinds() == ["generation", "lost"]


def test_a_job_is_resized_or_refuses_with_the_reason(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, lanes=2) as served:
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        client.resize(2)
        assert client.news(60.0, [(0, 4710)]) == News(None, vacant={1: Vacancy(0.0, restore=True)}, workers=2)
        with pytest.raises(RequestError, match="it has 2 lanes, so 1 to 2 are possible"):
            client.resize(3)
        client.close()
        assert served.kinds() == ["resize"]


def test_a_wish_for_a_checkpoint_is_told_to_the_generation_at_work_and_the_newest_is_kept(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served:
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        channel = open_channel(served.address)
        stub: Stub = stub_on(channel)
        token = token_metadata(TOKEN)
        assert client.save("before anybody is there") == 0
        stub.Register(pb.RegisterRequest(pid=1), metadata=token, timeout=60)
        stub.Heartbeat(pb.HeartbeatRequest(pid=1, sequence=1, step=7, phase="forward"), metadata=token, timeout=60)
        assert client.save("first") == client.save("second") == 6
        follow = stub.Follow(pb.FollowRequest(), metadata=token, timeout=60)
        formed, wish = next(follow), next(follow)
        follow.cancel()
        assert formed.HasField("formed")
        assert (wish.save.request, wish.save.generation) == ("second", formed.formed.id)
        client.report_failure(Failure("TaskError", "that was all"))
        with pytest.raises(RequestError, match="the job has ended"):
            client.save("too late")
        client.close()
        channel.close()
        assert served.kinds() == ["generation", "failure"]


def test_whoever_asks_is_told_what_each_worker_was_last_heard_to_be_doing(tmp_path: Path) -> None:
    with serve(tmp_path, workers=2) as served:
        client, channel = SupervisorClient(served.address, TOKEN, timeout=60.0), open_channel(served.address)
        stub: Stub = stub_on(channel)
        metadata = token_metadata(TOKEN)
        assert client.status() == pb.StatusReply(wanted=2)
        registration = pb.RegisterRequest(slot=1, pid=4711, host="box", ring_address="127.0.0.1:1")
        stub.Register(registration, metadata=metadata, timeout=60)
        heartbeat = pb.HeartbeatRequest(
            worker=1, pid=4711, sequence=1, step=7, phase="exchange", waits_for="the other workers"
        )
        stub.Heartbeat(heartbeat, metadata=metadata, timeout=60)
        (word,) = client.status().workers
        assert 0 <= word.silent_s < 60
        word.silent_s = 0.0
        assert word == pb.WorkerState(
            worker=1, pid=4711, host="box", step=7, phase="exchange", waits_for="the other workers"
        )
        client.report_failure(Failure("JobError", "it is over"))
        assert client.status() == pb.StatusReply()
        channel.close()
        client.close()


def test_client_explains_a_wrong_token_and_a_missing_coordinator(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1) as served:
        client = SupervisorClient(served.address, "wrong", timeout=600.0)
        with pytest.raises(LinkError, match="it does not take this job's token"):
            client.stop("interrupted")
        client.close()
        with pytest.raises(LinkError, match="was closed"):
            client.stop("interrupted")
    gone = SupervisorClient(served.address, TOKEN, timeout=0.2)
    with pytest.raises(LinkError, match=r"does not answer \(DEADLINE_EXCEEDED\)"):
        gone.stop("interrupted")
    gone.close()


def test_an_address_of_another_machine_is_explained() -> None:
    message = explain_refusal("192.0.2.1", 8000, "")
    assert message == (
        "cannot listen on 192.0.2.1:8000: Cannot assign requested address;"
        " choose another with `port`, or 0 for any free one"
    )


def test_the_events_of_a_job_are_told_from_any_place_of_its_log_on(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, lanes=4) as served:
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        client.resize(2)
        client.resize(3)
        ((events, offset),) = client.events(0, follow=False)
        assert [event.workers for event in events if isinstance(event, Resized)] == [2, 3]
        assert list(client.events(offset, follow=False)) == []
        following = client.events(offset, follow=True)
        client.resize(4)
        ((event,), last) = next(iter(following))
        assert isinstance(event, Resized) and event.workers == 4
        following.cancel()
        with pytest.raises(LinkError):
            list(following)
        ((events, _),) = client.events(0, follow=False)
        assert len(events) == 3
        assert last == (tmp_path / "events.jsonl").stat().st_size
        client.close()
        with pytest.raises(LinkError, match="was closed"):
            client.events(0, follow=True)


def test_trouble_with_reading_the_event_log_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, workers=1, lanes=4) as served:
        client = SupervisorClient(served.address, TOKEN, timeout=60.0)
        served.events_file.mkdir()
        following = iter(client.events(0, follow=True))
        ((trouble,), offset) = next(following)
        assert isinstance(trouble, LogMessage) and "Is a directory" in (trouble.message or "")
        assert offset == 0
        time.sleep(0.2)  # for some more looks
        served.events_file.rmdir()
        client.resize(2)
        ((event,), _) = next(following)
        assert isinstance(event, Resized)
        client.close()

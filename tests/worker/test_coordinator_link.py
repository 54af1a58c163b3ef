"""What a worker's link to its coordinator promises: over gRPC, and in the simulator."""

import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from command import await_condition
from coordinator.served import TOKEN, serve
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import Action
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Decision, JobSettings, State
from quorate.core.timing import SYSTEM, Runtime, Timing
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker.coordinator_link import CoordinatorLink, GrpcLink
from simulation.clock import Process, VirtualClock
from simulation.network import Network
from simulation.simulated_coordinator import MemorySink, Office, SimulatedCoordinator
from simulation.simulated_membership import SimulatedLink
from simulation.threads import SimulatedRuntime

Body = Callable[[CoordinatorLink, Runtime, Callable[[], object]], None]
"""What is done with a link, and how its coordinator goes away."""


def over_grpc(body: Body, folder: Path) -> None:
    with serve(folder, workers=1) as served:
        link = GrpcLink(served.address, TOKEN)
        try:
            body(link, SYSTEM, served.stop)
        finally:
            link.close()


class Nobody:
    """Follows a coordinator, and does nothing about it."""

    def sees_decision(self, decision: Decision) -> bool:
        return False

    def sees_written(self, state: State, action: Action) -> None:
        pass


def in_the_simulator(body: Body, folder: Path) -> None:
    clock = VirtualClock()
    network = Network(clock, random.Random(7))
    settings = JobSettings(1, 4, 1, Timing(60.0))
    office = Office(clock, settings, decide, EventLog(MemorySink()), Nobody())
    coordinator = SimulatedCoordinator(office, start(settings, 0.0))
    worker = Process(clock, "worker 0")
    runtime = SimulatedRuntime(worker)
    link, ended = SimulatedLink(worker, network, lambda: coordinator, runtime), list[bool]()

    def stop() -> None:
        coordinator.die()
        link.lose_calls(coordinator)
        link.lose_stream(coordinator)

    def main() -> None:
        body(link, runtime, stop)
        ended.append(True)

    runtime.spawn("main", main)
    while not ended and clock.advance():
        pass
    assert ended


@pytest.fixture(params=[over_grpc, in_the_simulator])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Body], None]:
    return lambda body: request.param(body, tmp_path)


def registration(pid: int = 4710) -> pb.RegisterRequest:
    tensors = [pb.TensorDigest(name="w", digest="1")]
    return pb.RegisterRequest(pid=pid, host="a", ring_address=f"127.0.0.1:{pid}", tensors=tensors, cursor=pb.Cursor())


def test_a_call_is_answered_by_what_was_decided(run: Callable[[Body], None]) -> None:
    def body(link: CoordinatorLink, runtime: Runtime, stop: Callable[[], object]) -> None:
        welcome = link.call(registration(), 60.0)
        assert (welcome.lease, welcome.incarnation, welcome.refusal) == (48.0, 1, "")
        assert "the place is taken" in link.call(registration(pid=9), 60.0).refusal
        assert link.call(pb.HeartbeatRequest(worker=0, pid=4710, sequence=1), 60.0).lease == 48.0
        assert link.call(pb.HeartbeatRequest(worker=0, pid=9, sequence=1), 60.0).lease == 0.0

    run(body)


def test_what_is_declared_comes_in_its_order_until_the_coordinator_is_gone(run: Callable[[Body], None]) -> None:
    def body(link: CoordinatorLink, runtime: Runtime, stop: Callable[[], object]) -> None:
        link.call(registration(), 60.0)
        followed = link.follow(pb.FollowRequest(worker=0))
        assert next(followed).HasField("formed")
        link.call(pb.FailureReport(worker=0, failure='{"kind": "UserCodeError", "message": "no"}', pid=4710), 60.0)
        assert next(followed).HasField("end")
        stop()
        assert list(followed) == []

    run(body)


def test_nobody_answers_any_more_and_who_calls_is_told_so_in_time(run: Callable[[Body], None]) -> None:
    def body(link: CoordinatorLink, runtime: Runtime, stop: Callable[[], object]) -> None:
        link.call(registration(), 60.0)
        stop()
        began = runtime.now()
        while link.call(pb.HeartbeatRequest(worker=0, pid=4710, sequence=1), 0.2) is not None:
            pass  # it stops when it has answered what it has heard
        assert runtime.now() - began < 60.0

    run(body)


def test_a_coordinator_that_has_moved_is_followed_by_calls_and_by_the_directives(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serve(tmp_path / "first", workers=1) as first, serve(tmp_path / "second", workers=1) as second:
        addresses: list[str | None] = [None]
        link = GrpcLink(first.address, TOKEN, find=lambda: addresses[-1])
        try:
            assert link.call(pb.HeartbeatRequest(worker=0, pid=1), 60.0) is not None
            first.stop()
            addresses.append(second.address)
            # The first one stops when it has answered what it has heard.
            await_condition(
                "an answer of the next one",
                lambda: link.call(pb.HeartbeatRequest(worker=0, pid=1), 60.0) and link.address == second.address,
            )
            assert "the place" not in link.call(registration(), 60.0).refusal
            assert next(link.follow(pb.FollowRequest(worker=0))).HasField("formed")
        finally:
            link.close()


def test_a_coordinator_whose_host_has_fallen_silent_is_not_waited_for_when_another_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serve(tmp_path, workers=1) as second:
        link = GrpcLink(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN, find=lambda: second.address)
        try:
            assert link.call(pb.HeartbeatRequest(worker=0, pid=1), 0.1) is None
            assert link.address == second.address
            assert link.call(pb.HeartbeatRequest(worker=0, pid=1), 60.0) is not None
        finally:
            link.close()


def test_a_supervisor_is_sent_to_the_next_coordinator(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serve(tmp_path / "first", workers=1) as first, serve(tmp_path / "second", workers=2) as second:
        client = SupervisorClient(first.address, TOKEN, timeout=60.0)
        try:
            assert client.status().wanted == 1
            client.redirect(second.address)
            assert client.status().wanted == 2
        finally:
            client.close()

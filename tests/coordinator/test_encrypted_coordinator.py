"""A coordinator whose calls are encrypted: workers show certificates, and speak for themselves only."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest

from quorate.coordinator.client import SupervisorClient
from quorate.core.errors import FrameError, LinkError
from quorate.storage.run_folder import Door, RunFolder
from quorate.wire.certificates import Authority
from quorate.wire.handshake import COORDINATOR, SUPERVISOR
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, stub_on, token_metadata
from quorate.worker.coordinator_link import GrpcLink

TOKEN = "a token of the job"
AUTHORITY = Authority("tiny-0001")


@contextmanager
def serve_encrypted(run: RunFolder) -> Iterator[str]:
    """The process of a coordinator, as a supervisor starts it; its address."""
    identity = AUTHORITY.issue(COORDINATOR)
    told = {"run": str(run.path), "lanes": 4, "workers": 1, "failure_timeout": 60.0, "token": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "quorate.coordinator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(told | {"identity": asdict(identity)}).encode() + b"\n")
        process.stdin.flush()
        yield json.loads(process.stdout.readline())["address"]
        process.stdin.close()
        process.wait(60)
    for file in [file for file in run.path.rglob("*") if file.is_file()]:
        assert not any(line.encode() in file.read_bytes() for line in identity.secrets), f"a key is in {file}"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "tiny")


def test_who_may_say_what(run: RunFolder) -> None:
    with serve_encrypted(run) as address:
        with closing(GrpcLink(address, TOKEN, AUTHORITY.issue(2))) as link:
            with pytest.raises(LinkError, match=r"PERMISSION_DENIED.*spoke for worker 3 .* certificate of worker 2"):
                link.call(pb.RegisterRequest(slot=3, pid=1), timeout=60)
            assert link.call(pb.HeartbeatRequest(worker=2, pid=1), timeout=60) is not None
        supervisor = SupervisorClient(address, TOKEN, 600.0, AUTHORITY.issue(SUPERVISOR))
        with closing(supervisor):
            supervisor.report_exit(2, 1, exit_code=0)
        door = run.read_door()
        assert door.address != address
        assert door == Door(door.address, TOKEN, AUTHORITY.certificate)
        # The owner of the run has no key, may ask for all that owners ask for, and is no worker.
        with closing(SupervisorClient(door.address, door.token, 600.0, authority=door.authority)) as owner:
            assert owner.status().wanted == 1
            with pytest.raises(LinkError, match=r"spoke for supervisor and showed no certificate"):
                owner.report_exit(0, 1, exit_code=0)
        with closing(open_channel(door.address, authority=door.authority)) as channel:
            stub = stub_on(channel)
            with pytest.raises(grpc.RpcError, match="spoke for worker 0 and showed no certificate"):
                stub.Register(pb.RegisterRequest(slot=0, pid=1), metadata=token_metadata(TOKEN), timeout=60)


def test_a_foreign_certificate_is_told_to_whoever_shows_it(run: RunFolder) -> None:
    foreign = Authority("tiny-0001").issue(2)
    with serve_encrypted(run) as address:
        stranger = GrpcLink(address, TOKEN, foreign)
        refused = pytest.raises(FrameError, match="worker 2 refused the certificate of the coordinator at")
        with closing(stranger), refused:
            # Each call takes all of its time. A busy machine may need more than that for one.
            while stranger.call(pb.HeartbeatRequest(worker=2, pid=1), timeout=1) is None:
                pass
        lost = GrpcLink(address, "another token", AUTHORITY.issue(2))
        with closing(lost), pytest.raises(FrameError, match="does not take this job's token"):
            lost.call(pb.HeartbeatRequest(worker=2, pid=1), timeout=60)

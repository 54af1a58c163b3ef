"""The coordinator as a process: what it is told, what it answers, and when it ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quorate.coordinator.__main__ import Appointment, _begin
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import DeclareGeneration
from quorate.coordinator.states import JobSettings, Recalling
from quorate.core.errors import LinkError, RequestError
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId, Member
from quorate.core.timing import Timing
from quorate.observe.jsonl import JsonlSink
from quorate.storage.run_folder import RunFolder

TOKEN = "secret-of-the-job"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "job")


@contextmanager
def coordinator(run: RunFolder, **changes: object) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A coordinator's process and its answer."""
    appointment = {"run": str(run.path), "lanes": 2, "workers": 1, "failure_timeout": 0.2, "token": TOKEN, **changes}
    command = [sys.executable, "-m", "quorate.coordinator"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(appointment) + "\n")
        process.stdin.flush()
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_the_token_is_for_its_owner_only(run: RunFolder) -> None:
    with coordinator(run) as (process, answer):
        assert json.loads(run.address_file.read_text()) == {"address": answer["address"], "token": TOKEN}
        assert run.address_file.stat().st_mode & 0o777 == 0o600
        assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert TOKEN not in Path(f"/proc/{process.pid}/environ").read_text()
        assert answer["address"].startswith("127.0.0.1:")


def test_it_ends_with_its_launcher_and_says_so(run: RunFolder) -> None:
    with coordinator(run) as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
    assert not run.address_file.exists()
    log = (run.logs / "coordinator.jsonl").read_text()
    assert "the launcher of the job has ended" in log
    assert TOKEN not in log
    assert "Traceback" not in log
    (event,) = (json.loads(line) for line in run.events_file.read_text().splitlines())
    assert (event["kind"], event["cause"]) == ("failure", "LauncherGone")


@pytest.mark.parametrize("told", [True, False], ids=["after its appointment", "before its appointment"])
def test_it_ends_without_a_traceback_where_its_launcher_has_ended_while_it_starts(told: bool, run: RunFolder) -> None:
    appointment = {"run": str(run.path), "lanes": 2, "workers": 1, "failure_timeout": 0.2, "token": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "quorate.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(json.dumps(appointment).encode() + b"\n" if told else b"")
    process.stdin.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == (0 if told else 2)
    assert not run.address_file.exists()
    if told:
        log = (run.logs / "coordinator.jsonl").read_text()
        assert "nobody reads its answer" in log
        assert "Traceback" not in log


def test_it_ends_a_while_after_its_outcome_was_fetched(run: RunFolder) -> None:
    with coordinator(run) as (process, answer):
        client = SupervisorClient(answer["address"], TOKEN, timeout=600.0)
        client.report_failure(Failure("ProcessLost", "the fork server is gone"))
        asked = time.monotonic()
        outcome = client.news(60.0).outcome
        client.close()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - asked >= 0.4, "twice the timeout"
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.message == "the fork server is gone"
    assert not run.address_file.exists()


def test_ctrl_c_is_the_launchers_business(run: RunFolder) -> None:
    with coordinator(run) as (process, answer):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        client = SupervisorClient(answer["address"], TOKEN, timeout=600.0)
        client.stop("interrupted")
        client.close()
        assert process.poll() is None


def test_it_knows_the_mesh_of_a_sharded_gang(run: RunFolder) -> None:
    with coordinator(run, workers=4, lanes=4, mesh=[1, 2, 2]) as (_, answer):
        client = SupervisorClient(answer["address"], TOKEN)
        with pytest.raises(RequestError, match=r"cut for 4 workers \(shard 2 × tensor 2\)"):
            client.resize(2)
        client.close()


def test_a_mesh_of_another_number_of_workers_is_refused(run: RunFolder) -> None:
    with coordinator(run, workers=1, mesh=[1, 4, 1]) as (process, answer):
        assert answer == {"error": "the mesh (shard 4) has 4 workers, and the job 1", "exit_code": 2}
        assert process.wait(timeout=60) == 2


def test_a_port_in_use_is_told_with_the_remedy(run: RunFolder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with coordinator(run, port=port) as (process, answer):
            assert answer == {
                "error": f"port {port} on 127.0.0.1 is in use; choose another with `port`, or 0 for any free one",
                "exit_code": 2,
            }
            assert process.wait(timeout=60) == 2
    assert not run.address_file.exists()


def test_two_coordinators_never_share_a_port(run: RunFolder) -> None:
    with coordinator(run) as (_, answer):
        port = int(answer["address"].rpartition(":")[2])
        # Of another run: the next of this one would have the first end.
        with coordinator(RunFolder.create(run.path.parent, "other"), port=port) as (_, refusal):
            assert "is in use" in refusal["error"]


def test_every_coordinator_of_a_run_has_a_higher_incarnation(run: RunFolder) -> None:
    with coordinator(run):
        pass
    assert run.next_incarnation() == 2


@pytest.mark.long
def test_of_two_that_both_believe_the_older_ends_and_leaves_everything_to_the_newer(run: RunFolder) -> None:
    """As one that was moved while its host was cut off: its launcher has not ended, and nobody has killed it."""
    with coordinator(run, failure_timeout=300.0) as (older, before):  # it looks by itself every 15 seconds
        caller = SupervisorClient(before["address"], TOKEN, timeout=60.0)
        caller.stop("before")  # it serves
        with coordinator(run) as (newer, after):
            with pytest.raises(LinkError, match="another coordinator has taken the place"):
                caller.report_failure(Failure("ProcessLost", "told to the older"))
            assert older.wait(timeout=60) == 0
            caller.close()
            assert run.read_address(TOKEN) == after["address"], "it is not the older's to remove"
            assert newer.poll() is None
            client = SupervisorClient(after["address"], TOKEN, timeout=60.0)
            client.stop("after")
            client.close()
    log = (run.logs / "coordinator.jsonl").read_text()
    assert "coordinator 1 ends: coordinator 2 has taken its place" in log
    events = [json.loads(line) for line in run.events_file.read_text().splitlines()]
    assert [event.get("reason") for event in events] == ["before", "after"]


def test_one_whose_launcher_is_gone_says_nothing_where_another_goes_on(run: RunFolder) -> None:
    with coordinator(run, failure_timeout=60.0) as (older, _):  # it looks by itself every three seconds
        run.next_incarnation()
        assert older.stdin is not None
        older.stdin.close()
        older.stdin = None
        assert older.wait(timeout=60) == 0
    assert not run.events_file.exists()


def test_a_generation_that_the_launcher_has_not_read_of_yet_is_known_to_the_next_coordinator(run: RunFolder) -> None:
    """Or it would take the job for one that begins, and those who are there for all that there is."""
    settings = JobSettings(incarnation=2, lanes=2, workers=2, timing=Timing(1.0))
    handover = {"present": [], "awaited": [0, 1], "events_from": 0, "has_begun": False}
    with closing(EventLog(JsonlSink(run.events_file))) as event_log:
        begins = _begin(settings, event_log, handover)
        member = Member(0, "127.0.0.1:1", range(2))
        event_log.record(DeclareGeneration(Generation(GenerationId(1, 1), (member,))))
        goes_on = _begin(settings, event_log, handover)
    assert isinstance(begins, Recalling)
    assert isinstance(goes_on, Recalling)
    assert (begins.members.generations, goes_on.members.generations) == (0, 1)


def test_a_missing_appointment_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quorate.coordinator"], input="", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "no appointment on standard input" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("line", [b"", b"{}\n", b"not json\n", b"[]\n", b"\xff\n"])
def test_a_line_that_is_no_appointment_is_refused(line: bytes) -> None:
    with pytest.raises(RequestError, match="no appointment on standard input"):
        Appointment.from_json(line)


def test_a_run_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = RunFolder(tmp_path / "gone")
    with coordinator(gone) as (process, answer):
        assert str(gone.path) in answer["error"]
        assert process.wait(timeout=60) == 2


def test_torch_is_not_loaded() -> None:
    code = "import sys, quorate.coordinator.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

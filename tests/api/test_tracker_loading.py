"""The libraries of trackers are imported by one thread, and nobody uses them before that is done."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from history.run_builder import Story, build_run
from quorate.api import tracker as process
from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder
from quorate.tracking.tracker import Follower
from tracking.test_follower import Server, ServerTracker, make_run, tell

SPEC = JobSpec(task="task.py:T", name="tiny", batch_size=8, steps=3, track=TrackSpec(tensorboard=True))


class Slow(ServerTracker):
    """Its libraries are there when they are given."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.given = threading.Event()
        self.calls: list[str] = []

    def load(self) -> None:
        self.calls.append("load")
        self.given.wait()
        self.calls.append("loaded")

    def begin(self) -> bool:
        self.calls.append("begin")
        return super().begin()


def follow(run: RunFolder, tracker: Slow, over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(process, "followers_of", lambda *_: [Follower(run, tracker)])
    monkeypatch.setattr(process, "_EVERY", 0.01)
    return process._follow(run, SPEC, over)


def test_a_tracker_begins_when_its_libraries_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, server, over = make_run(tmp_path), Server(), threading.Event()
    tracker = Slow(server)
    tell(run, 1, 2, 3)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, run, tracker, over, monkeypatch)
        over.wait(0.2)  # in which it could have begun
        over.set()
        assert not following.done()
        tracker.given.set()
        assert following.result() == []
    assert tracker.calls == ["load", "loaded", "begin"]
    assert [step for step, _ in server.curve()] == [1, 2, 3]


def test_a_job_without_a_step_does_not_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, over = make_run(tmp_path), threading.Event()
    tracker = Slow(Server())
    over.set()
    assert follow(run, tracker, over, monkeypatch) == []
    assert "loaded" not in tracker.calls
    tracker.given.set()


def test_whoever_waits_in_vain_is_told_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, over = make_run(tmp_path), threading.Event()
    tracker = Slow(Server())
    tell(run, 1)
    over.set()
    monkeypatch.setattr(process, "PATIENCE", process.ABSENT)
    (missing,) = follow(run, tracker, over, monkeypatch)
    assert missing.endswith("nothing is sure after step 0 (its libraries are still being imported)")
    tracker.given.set()


def test_runs_that_ended_untold_are_told_and_what_cannot_be_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of trials whose driver was killed: the first was told, the second not to its end, the third not at all."""
    story, job = Story().begin().train(1, 3), {"track": {"tensorboard": True}}
    runs = [build_run(tmp_path, job=job, story=story, result={"status": "interrupted"}) for _ in range(3)]
    held = build_run(tmp_path, job=job, story=story)
    servers = {run.name: Server() for run in (*runs, held)}
    monkeypatch.setattr(process, "ABSENT", 0.0)
    monkeypatch.setattr(process, "_EVERY", 0.01)
    monkeypatch.setattr(process, "followers_of", lambda run, *_: [Follower(run, ServerTracker(servers[run.name]))])
    for run in runs[:2]:
        (run.path / "tracking").mkdir()
        (follower,) = process.followers_of(run, SPEC, TrackSpec())
        assert follower.poll() and (run is runs[1] or follower.finish("interrupted"))
    told = servers[runs[0].name].ending
    servers[runs[0].name] = Server()  # who is asked nothing has nothing

    for server in servers.values():
        server.fate = lambda: "away"
    with held.lock():
        process.catch_up_on_ended([*runs, held])
    first, second = caplog.messages[1:]  # after that it is tried again
    assert first.startswith("tiny-0002: server does not have all of the run: nothing is sure after step 3 (nobody")
    assert first.endswith(f"To send the rest: quorate track {runs[1].path}")
    why = "server does not answer, so this run is not sent either"
    assert second == f"tiny-0003: {why}. To send the rest: quorate track {runs[2].path}"

    for server in servers.values():
        server.fate = lambda: ""
    with held.lock():
        process.catch_up_on_ended([*runs, held])
        process.catch_up_on_ended([*runs, held])
    assert [len(servers[run.name].curve()) for run in (*runs, held)] == [0, 3, 3, 0]
    assert servers[runs[1].name].ending == servers[runs[2].name].ending == told
    assert len([message for message in caplog.messages if "To send" in message]) == 2


def test_a_run_whose_tracker_breaks_leaves_the_others_told_and_all_that_was_made_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story, job = Story().begin().train(1, 3), {"track": {"tensorboard": True}}
    broken, told = (build_run(tmp_path, job=job, story=story, result={"status": "complete"}) for _ in range(2))
    server = Server()
    made: list[Follower] = []
    closed: list[Follower] = []

    class Closing(Follower):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def followers_of(run: RunFolder, *_: object) -> list[Follower]:
        if run is broken:
            raise ImportError("No module named 'mlflow'")
        made.append(Closing(run, ServerTracker(server)))
        return made[-1:]

    monkeypatch.setattr(process, "followers_of", followers_of)
    process.catch_up_on_ended([broken, told])
    command = f"To send the rest: quorate track {broken.path}"
    assert caplog.messages == [f"{broken.name}: No module named 'mlflow'. {command}"]
    assert len(server.curve()) == 3
    assert len(made) == 1 and closed == made, "one for a run"


def test_the_wait_for_a_tracker_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_UNTOLD", 0.0)
    real = subprocess.Popen
    slow = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(0.5); print('[]')"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real(slow, **options))
    said: list[str] = []
    tracker = process.TrackerProcess(RunFolder.create(tmp_path, "tracked"), SPEC, said.append)
    tracker.close()
    assert [sentence.partition(",")[0] for sentence in said] == ["waiting until the run is tracked"]
    assert not caplog.records

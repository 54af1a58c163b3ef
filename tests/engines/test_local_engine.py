import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from command import PATIENCE, await_condition, command_line
from quorate.core.generation import ENDED_FOR_A_STOP
from quorate.core.processes import is_stopped
from quorate.core.task_source import TaskSource
from quorate.engines import local
from quorate.engines.engine import Exited, Interrupted, Preparation, Prepared, Ready, Remark, SettingUp, Started
from quorate.engines.local import LocalEngine, Pidfds
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import StatusPage, status_file

TIMEOUT = 1.0
SOURCE = TaskSource("task.py", {"task.py": b"x = 'a'\n"})
# A fork server that starts a worker, which does not die with it, and then does not listen any more.
DEAF_FORK_SERVER = """#!{python}
import json, pathlib, socket, subprocess, sys, time
messages = socket.socket(fileno=int(sys.argv[6]))
messages.sendall(json.dumps({{"what": "ready", "facts": {{}}, "source": {source!r}}}).encode() + b"\\n")
heard = b""
while b'"what": "start"' not in heard:
    heard += messages.recv(4096)
worker = subprocess.Popen(["sleep", "600"])
started = {{"what": "started", "slot": 0, "pid": worker.pid, "how": "spawned", "reason": ""}}
messages.sendall(json.dumps(started).encode() + b"\\n")
pathlib.Path({sign!r}).touch()
time.sleep(600)
"""


# The same, but its worker has a process group of its own, and has started another process there.
LEAVING_FORK_SERVER = DEAF_FORK_SERVER.replace(
    """["sleep", "600"])""", """["sh", "-c", "sleep 600 & echo $! > {sign}.part; exec sleep 600"], process_group=0)"""
).replace(
    "pathlib.Path({sign!r}).touch()",
    """
while not pathlib.Path({sign!r} + ".part").exists() or not pathlib.Path({sign!r} + ".part").read_text().strip():
    time.sleep(0.01)
pathlib.Path({sign!r} + ".part").rename({sign!r})""",
)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_the_end_of_a_process_is_waited_for_and_one_that_lives_on_is_named(sleeper: "subprocess.Popen[bytes]") -> None:
    watched = Pidfds()
    watched.add(sleeper.pid)
    assert watched.await_end(0.01) == [sleeper.pid]
    sleeper.kill()
    assert watched.await_end(60.0) == []
    sleeper.wait()
    watched.add(sleeper.pid)  # gone and reaped
    assert watched.await_end(0.0) == []


def test_a_process_that_is_watched_no_longer_is_not_waited_for(sleeper: "subprocess.Popen[bytes]") -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    watched = Pidfds()
    watched.add(sleeper.pid)
    watched.discard(sleeper.pid)
    watched.discard(sleeper.pid)
    assert watched.await_end(0.0) == []
    watched.add(sleeper.pid)
    watched.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@contextlib.contextmanager
def started(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalEngine, Path]]:
    """An engine that has a fork server of that kind with a worker, and the file which tells that this is there."""
    (folder / "logs").mkdir()
    script, sign = folder / "python", folder / "started"
    script.write_text(kind.format(python=sys.executable, sign=str(sign), source=SOURCE.to_json()))
    script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        preparation = Preparation("t:T", {}, "", [], 0, 1, True, failure_timeout=TIMEOUT)
        engine = LocalEngine(RunFolder(folder), preparation)
    with contextlib.closing(engine):
        assert engine.poll(PATIENCE) == [Ready(Prepared({}, SOURCE))]
        engine.start(Assignment(str(folder), 0, 1, "t:T", {}, "", "127.0.0.1:1", "token"))
        await_condition("the worker", sign.exists)
        yield engine, sign
        monkeypatch.setattr(local, "CLOSE_PATIENCE", 0.3)


def first_worker(engine: LocalEngine) -> Started:
    first, setup = engine.poll(PATIENCE)
    assert isinstance(first, Started)
    assert setup == SettingUp(0, first.pid, "start"), "from its start on, before it can say anything itself"
    return first


@pytest.mark.faults
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "deaf at the end"])
def test_what_the_workers_of_a_killed_fork_server_have_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]", is_killed: bool
) -> None:
    with started(LEAVING_FORK_SERVER, tmp_path, monkeypatch) as (engine, sign):
        left = int(sign.read_text())
        await_condition("what the worker has started", lambda: command_line(left) == "sleep 600 ")
        if is_killed:
            assert [type(notice) for notice in engine.poll(PATIENCE)] == [Started, SettingUp]
            os.kill(engine._fork_server._process.pid, signal.SIGKILL)
            interrupted, exited = engine.poll(PATIENCE)
            assert isinstance(interrupted, Interrupted)
            assert interrupted.reason.endswith("was killed by SIGKILL, and the workers with it")
            assert isinstance(exited, Exited)
        else:
            monkeypatch.setattr(local, "CLOSE_PATIENCE", 1.0)
            engine.close()
        await_condition("its end", lambda: not is_running(left))
        assert sleeper.poll() is None, "one of nobody's"


def is_running(pid: int) -> bool:
    """Whether a process is there and not just waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("told", [True, False], ids=["read before the end", "read at the end"])
def test_closing_a_deaf_fork_server_waits_for_its_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    monkeypatch.setattr(local, "CLOSE_PATIENCE", 0.3)
    with started(DEAF_FORK_SERVER, tmp_path, monkeypatch) as (engine, _):
        notices = engine.poll(PATIENCE) if told else []
        assert [type(notice) for notice in notices] == [Started, SettingUp] * told
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING):
            engine.close()
    assert time.monotonic() - begun >= 0.55, "as long as for the fork server, and as long again for its worker"
    (warning,) = [record.getMessage() for record in caplog.records]
    pid = int(warning.rpartition(" ")[2])
    assert warning == f"workers still end after 0.3 s: processes {pid}"
    assert command_line(pid) == "sleep 600 "
    os.kill(pid, signal.SIGKILL)


def told_of_stopped(engine: LocalEngine) -> str:
    """What is told of the next process that is stopped."""
    remarks: list[str] = []

    def look() -> list[str]:
        remarks.extend(notice.message for notice in engine.poll(0.01) if isinstance(notice, Remark))
        return remarks

    (remark,) = await_condition("a word of one that is stopped", look)
    assert "is stopped (SIGSTOP), and has been for 1." in remark
    return remark


@pytest.mark.faults
@pytest.mark.parametrize("is_child", [False, True], ids=["itself", "what it has started"])
def test_a_worker_that_is_stopped_in_its_setup_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_child: bool
) -> None:
    with started(LEAVING_FORK_SERVER, tmp_path, monkeypatch) as (engine, sign):
        first, child = first_worker(engine), int(sign.read_text())
        os.kill(child if is_child else first.pid, signal.SIGSTOP)
        of_child = f", of which process {child}" if is_child else ""
        told = told_of_stopped(engine)
        assert told.startswith(f"worker 0 (pid {first.pid}){of_child} is stopped")
        assert told.endswith("s, in `start`: it is ended, and another is started")
        assert engine._gone(0, first.pid, -signal.SIGKILL).code == ENDED_FOR_A_STOP
        await_condition("its end", lambda: not is_running(first.pid))


@pytest.mark.faults
def test_a_worker_that_its_coordinator_knows_is_left_to_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(DEAF_FORK_SERVER, tmp_path, monkeypatch) as (engine, _):
        first = first_worker(engine)
        StatusPage(status_file(RunFolder(tmp_path), 0)).write(0, "wait")
        os.kill(first.pid, signal.SIGSTOP)
        over = time.monotonic() + 2 * TIMEOUT
        while time.monotonic() < over:
            assert not [notice for notice in engine.poll(0.01) if isinstance(notice, Remark)]
        assert is_running(first.pid)
        os.kill(first.pid, signal.SIGKILL)


@pytest.mark.faults
def test_a_fork_server_that_has_workers_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(DEAF_FORK_SERVER, tmp_path, monkeypatch) as (engine, _):
        first = first_worker(engine)
        for _ in range(2):
            os.kill(engine._fork_server.pid, signal.SIGSTOP)
            assert told_of_stopped(engine).endswith("it is continued, since its workers would end with it")
            assert not is_stopped(engine._fork_server.pid)
        assert is_running(first.pid)
        os.kill(first.pid, signal.SIGKILL)


@pytest.mark.faults
def test_a_fork_server_that_is_gone_is_not_continued_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(DEAF_FORK_SERVER, tmp_path, monkeypatch) as (engine, _):
        first = first_worker(engine)
        engine._fork_server._process.kill()
        engine._fork_server._process.wait()  # as whoever has forked it may
        assert "continued" in engine._fork_server.end_stop(has_workers=True)
        os.kill(first.pid, signal.SIGKILL)


def test_a_worker_that_has_no_status_page_is_not_in_its_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, where it may have trained for days."""
    with started(DEAF_FORK_SERVER, tmp_path, monkeypatch) as (engine, _):
        first = first_worker(engine)
        status_file(RunFolder(tmp_path), 0).unlink()
        assert engine.poll(0.0) == []
        page = StatusPage(status_file(RunFolder(tmp_path), 0))
        page.write_setup("datasets()")
        (setup,) = engine.poll(0.0)
        assert isinstance(setup, SettingUp)
        assert (setup.slot, setup.phase) == (0, "datasets()")
        page.write(0, "wait")
        assert engine.poll(0.0) == [replace(setup, phase=None)]
        page.write(1, "compute")
        assert engine.poll(0.0) == [], "told once"
        engine.kill(0, first.pid)

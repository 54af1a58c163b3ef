import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import await_condition, command_line
from quorate.core.task_source import TaskSource
from quorate.engines import fork_server_process
from quorate.engines.fork_server_process import ForkServerLost, ForkServerProcess, Preparation, Prepared
from quorate.engines.messages import STARTED
from quorate.engines.pidfds import Pidfds
from quorate.worker.assignment import Assignment

SOURCE = TaskSource("task.py", {"task.py": b"x = 'a'\n"})
# A fork server that starts a worker, which does not die with it, and then does not listen any more.
DEAF_FORK_SERVER = """#!{python}
import json, pathlib, socket, subprocess, sys, time
messages = socket.socket(fileno=int(sys.argv[4]))
messages.sendall(json.dumps({{"what": "ready", "facts": {{}}, "source": {source!r}}}).encode() + b"\\n")
heard = b""
while b'"what": "start"' not in heard:
    heard += messages.recv(4096)
worker = subprocess.Popen(["sleep", "60"])
messages.sendall(json.dumps({{"what": "started", "slot": 0, "pid": worker.pid}}).encode() + b"\\n")
pathlib.Path({sign!r}).touch()
time.sleep(60)
"""


# The same, but its worker has a process group of its own, and has started another process there.
LEAVING_FORK_SERVER = DEAF_FORK_SERVER.replace(
    """["sleep", "60"])""", """["sh", "-c", "sleep 60 & echo $! > {sign}.part; exec sleep 60"], process_group=0)"""
).replace(
    "pathlib.Path({sign!r}).touch()",
    """
while not pathlib.Path({sign!r} + ".part").exists() or not pathlib.Path({sign!r} + ".part").read_text().strip():
    time.sleep(0.01)
pathlib.Path({sign!r} + ".part").rename({sign!r})""",
)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_the_end_of_a_process_is_waited_for_and_one_that_lives_on_is_named(sleeper: "subprocess.Popen[bytes]") -> None:
    watched = Pidfds()
    watched.add(sleeper.pid)
    assert watched.await_end(0.01) == [sleeper.pid]
    sleeper.kill()
    assert watched.await_end(5.0) == []
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


def started(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ForkServerProcess, Path]:
    """A fork server of that kind with a worker, and the file by which it has told that this is there."""
    script, sign = folder / "python", folder / "started"
    script.write_text(kind.format(python=sys.executable, sign=str(sign), source=SOURCE.to_json()))
    script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        fork_server = ForkServerProcess(folder / "log", Preparation("t:T", {}, "", [], 0, 1, True))
    assert fork_server.await_ready(lambda: False) == Prepared({}, SOURCE)
    fork_server.start(Assignment(str(folder), 0, 1, "t:T", {}, "", "127.0.0.1:1", "token"))
    await_condition("the worker", sign.exists)
    return fork_server, sign


@pytest.mark.faults
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "deaf at the end"])
def test_what_the_workers_of_a_killed_fork_server_have_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]", is_killed: bool
) -> None:
    fork_server, sign = started(LEAVING_FORK_SERVER, tmp_path, monkeypatch)
    left = int(sign.read_text())
    assert command_line(left) == "sleep 60 "
    if is_killed:
        assert [message["what"] for message in fork_server.poll(5.0)] == [STARTED]
        os.kill(fork_server._process.pid, signal.SIGKILL)
        with pytest.raises(ForkServerLost, match="was killed by SIGKILL, and the workers with it"):
            list(fork_server.poll(5.0))
    else:
        monkeypatch.setattr(fork_server_process, "CLOSE_PATIENCE", 1.0)
        fork_server.close()
    await_condition("its end", lambda: not is_running(left))
    assert sleeper.poll() is None, "one of nobody's"
    if is_killed:
        fork_server.close()


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
    monkeypatch.setattr(fork_server_process, "CLOSE_PATIENCE", 0.3)
    fork_server, _ = started(DEAF_FORK_SERVER, tmp_path, monkeypatch)
    messages = list(fork_server.poll(5.0)) if told else []
    assert [message["what"] for message in messages] == [STARTED] * told
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        fork_server.close()
    assert time.monotonic() - begun >= 0.55, "as long as for the fork server, and as long again for its worker"
    (warning,) = [record.getMessage() for record in caplog.records]
    pid = int(warning.rpartition(" ")[2])
    assert warning == f"workers still end after 0.3 s: processes {pid}"
    assert command_line(pid) == "sleep 60 "
    os.kill(pid, signal.SIGKILL)

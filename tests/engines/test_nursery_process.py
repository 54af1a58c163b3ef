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
from quorate.engines import nursery_process
from quorate.engines.messages import STARTED
from quorate.engines.nursery_process import NurseryProcess, Preparation, Prepared
from quorate.engines.pidfds import Pidfds
from quorate.worker.assignment import Assignment

SOURCE = TaskSource("task.py", {"task.py": b"x = 'a'\n"})
# A nursery that starts a worker, which does not die with it, and then does not listen any more.
DEAF_NURSERY = """#!{python}
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


@pytest.mark.parametrize("told", [True, False], ids=["read before the end", "read at the end"])
def test_closing_a_deaf_nursery_waits_for_its_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    script, sign = tmp_path / "python", tmp_path / "started"
    script.write_text(DEAF_NURSERY.format(python=sys.executable, sign=str(sign), source=SOURCE.to_json()))
    script.chmod(0o755)
    monkeypatch.setattr(nursery_process, "CLOSE_PATIENCE", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        nursery = NurseryProcess(tmp_path / "log", Preparation("t:T", {}, "", [], 0, 1, True))
    assert nursery.await_ready(lambda: False) == Prepared({}, SOURCE)
    nursery.start(Assignment(str(tmp_path), 0, 1, "t:T", {}, "", "127.0.0.1:1", "token"))
    await_condition("the worker", sign.exists)
    messages = list(nursery.poll(5.0)) if told else []
    assert [message["what"] for message in messages] == [STARTED] * told
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        nursery.close()
    assert time.monotonic() - begun >= 0.55, "as long as for the nursery, and as long again for its worker"
    (warning,) = [record.getMessage() for record in caplog.records]
    pid = int(warning.rpartition(" ")[2])
    assert warning == f"workers still end after 0.3 s: processes {pid}"
    assert command_line(pid) == "sleep 60 "
    os.kill(pid, signal.SIGKILL)

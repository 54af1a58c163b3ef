import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.core import processes
from quorate.core.processes import Answer, ask_child


def test_a_child_answers_and_leaves_nothing_behind_here() -> None:
    seen: list[int] = []

    def answer() -> str:
        seen.append(os.getpid())
        return f"{os.getppid()} " + "x" * 200_000

    told = ask_child(answer)
    assert told == Answer(f"{os.getpid()} " + "x" * 200_000, "exited with code 0")
    assert seen == []


def test_a_child_that_fails_or_dies_gives_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask_child(lambda: str(1 / 0)) == Answer("", "exited with code 1")
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert ask_child(die) == Answer("", "was killed by SIGKILL")
    assert ask_child(lambda: sys.exit(0)).text == ""


def take_long() -> str:
    time.sleep(60)
    return "late"


def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


def test_a_child_that_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    assert ask_child(take_long, seconds=0.1) == Answer("", "took longer than 0.1 s")
    assert time.monotonic() - started < 30


@pytest.fixture
def many_files() -> Iterator[None]:
    """Leave for more open files than `select` can watch."""
    usual, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 1200
    if highest != resource.RLIM_INFINITY and highest < enough:
        pytest.skip(f"no more than {highest} files may be open here")
    if usual != resource.RLIM_INFINITY and usual < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, highest))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, highest))


@pytest.mark.usefixtures("many_files")
def test_a_process_with_many_open_files_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = os.pipe

    def high_pipe() -> tuple[int, int]:
        low = pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in low]
        for end in low:
            os.close(end)
        return high[0], high[1]

    monkeypatch.setattr(os, "pipe", high_pipe)
    assert ask_child(lambda: "here", seconds=60) == Answer("here", "exited with code 0")


def test_an_interruption_leaves_neither_child_nor_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []
    fork = os.fork

    def counted_fork() -> int:
        forked.append(fork())
        return forked[-1]

    def interrupted(*_: object) -> tuple[str, bool]:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", counted_fork)
    monkeypatch.setattr(processes, "_read", interrupted)
    open_before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(KeyboardInterrupt):
        ask_child(take_long)
    assert len(set(Path("/proc/self/fd").iterdir())) == len(open_before)
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)

"""Programs that a process forks which has their imports done already."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from command import await_condition
from quorate.core.processes import children_of
from quorate.engines.interpreters import Child
from quorate.engines.warm_interpreters import WarmInterpreters


@pytest.fixture
def interpreters() -> Iterator[WarmInterpreters]:
    with closing(WarmInterpreters()) as warm:
        yield warm


def start(interpreters: WarmInterpreters) -> Child:
    """A coordinator, which waits for its appointment."""
    return interpreters.start(
        "quorate.coordinator", [], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def end(child: Child) -> tuple[str, int]:
    """What it says to an appointment that is none, and how it ends."""
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        child.stdin.write(b"nonsense\n")
        child.stdin.flush()
        said = json.loads(child.stdout.readline())["error"]
    return said, child.wait(60)


def parent_of(child: Child) -> int:
    return int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_it_is_a_process_of_its_own_that_ends_as_a_new_one_does(interpreters: WarmInterpreters) -> None:
    before = set(children_of(os.getpid()))
    one, other = start(interpreters), start(interpreters)
    assert parent_of(one) == parent_of(other)
    assert {parent_of(one)} == set(children_of(os.getpid())) - before
    assert os.getsid(one.pid) == one.pid
    assert Path(f"/proc/{one.pid}/cwd").readlink() == Path.cwd()
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0)
    other.kill()
    assert (other.wait(60), other.poll(), other.returncode) == (-signal.SIGKILL, -signal.SIGKILL, -signal.SIGKILL)
    said, code = end(one)
    assert said.startswith("the coordinator was given no appointment")
    assert (code, one.returncode) == (2, 2)
    (forks,) = set(children_of(os.getpid())) - before
    assert children_of(forks) == {}
    interpreters.close()
    assert set(children_of(os.getpid())) == before
    for pipe in (other.stdin, other.stdout):
        assert pipe is not None
        pipe.close()


def test_when_it_is_killed_another_takes_its_place(interpreters: WarmInterpreters) -> None:
    one = start(interpreters)
    first = parent_of(one)
    os.kill(first, signal.SIGKILL)
    await_condition("the end of who has forked it", lambda: Path(f"/proc/{first}/stat").read_text().split()[2] == "Z")
    assert end(one)[1] == -signal.SIGKILL  # nobody knows its exit code any more
    other = start(interpreters)
    assert parent_of(other) != first
    assert end(other)[1] == 2


def test_what_others_inherit_from_this_process_is_inherited_as_it_is_now(
    interpreters: WarmInterpreters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = start(interpreters)
    first = parent_of(one)
    assert end(one)[1] == 2
    monkeypatch.setenv("SOMETHING", "else")
    other = start(interpreters)
    assert parent_of(other) != first
    assert b"SOMETHING=else" in Path(f"/proc/{parent_of(other)}/environ").read_bytes()
    assert end(other)[1] == 2
    assert first not in children_of(os.getpid())
    monkeypatch.chdir(tmp_path)
    last = start(interpreters)
    assert Path(f"/proc/{last.pid}/cwd").readlink() == tmp_path
    assert end(last)[1] == 2

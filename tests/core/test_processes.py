"""Processes: whose they are, how they end, and what a forked one answers."""

import fcntl
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.core.processes import (
    Answer,
    StoppedProcesses,
    adopt_orphans,
    ask_child,
    children_of,
    die_with_parent,
    find_program,
    has_open,
    is_stopped,
    members_of,
)


def is_gone(descriptor: int) -> bool:
    """Whether every process that holds the other end of this pipe has ended, within a minute."""
    return bool(select.select([descriptor], [], [], 60)[0]) and os.read(descriptor, 1) == b""


def test_a_child_dies_when_its_parent_is_killed() -> None:
    alive, held = os.pipe()
    parent = os.fork()
    if parent == 0:
        born = os.getpid()
        if os.fork() == 0:
            die_with_parent(born)
            os.write(held, b"x")
            time.sleep(600)
        signal.pause()
    os.close(held)
    assert os.read(alive, 1) == b"x"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert is_gone(alive)
    os.close(alive)


def test_a_child_whose_parent_was_gone_already_dies_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent=1 if os.getppid() != 1 else 2)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_child_of_the_right_parent_lives_on() -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_an_orphan_becomes_a_child_of_whoever_adopts_and_keeps_its_group() -> None:
    told, tell = os.pipe()
    adopting = os.fork()
    if adopting == 0:
        adopt_orphans()
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        os.waitpid(worker, 0)
        found = children_of(os.getpid())
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.write(tell, f"{list(found.values()) == [worker]} {children_of(os.getpid())}".encode())
        os._exit(0)
    os.waitpid(adopting, 0)
    assert os.read(told, 100) == b"True {}"
    os.close(told)
    os.close(tell)


def in_a_machine(folder: Path, processes: dict[int, tuple[str, int, int, int]], lists: dict[int, str]) -> Path:
    """A folder like /proc with these processes: state, parent, group and session of each, and lists of children."""
    for pid, fields in processes.items():
        (folder / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (folder / str(pid) / "stat").write_text(f"{pid} (a) name) {' '.join(map(str, fields))} 0 -1\n")
    for pid, children in lists.items():
        (folder / str(pid) / "task" / str(pid) / "children").write_text(children)
    (folder / "self").mkdir()
    return folder


MACHINE = {
    10: ("S", 1, 10, 10),
    11: ("S", 10, 11, 10),
    12: ("Z", 10, 11, 10),
    13: ("S", 1, 11, 10),
    14: ("S", 1, 11, 99),
    15: ("D", 13, 12, 10),
    16: ("S", 11, 10, 10),
}


def test_children_are_found_among_all_processes_where_the_kernel_has_no_list(tmp_path: Path) -> None:
    assert children_of(10, in_a_machine(tmp_path, MACHINE, {})) == {11: 11, 12: 11}


def test_where_there_is_a_list_of_children_nobody_else_is_looked_at(tmp_path: Path) -> None:
    proc = in_a_machine(tmp_path, MACHINE, {10: "11 12 17 "})
    for pid in MACHINE.keys() - {11, 12}:
        (proc / str(pid) / "stat").unlink()
    assert children_of(10, proc) == {11: 11, 12: 11}
    (proc / "10" / "task" / "18").mkdir()
    (proc / "10" / "task" / "18" / "children").write_text("16 ")
    (proc / "16" / "stat").write_text("16 (b) S 10 16 10 0 -1\n")
    assert children_of(10, proc) == {11: 11, 12: 11, 16: 16}, "started by another thread"


def test_whoever_runs_in_the_groups_of_a_session_is_found_and_nobody_of_another(tmp_path: Path) -> None:
    proc = in_a_machine(tmp_path, MACHINE, {})
    assert members_of(10, {11, 12}, proc) == {11, 13, 15}
    assert members_of(99, {11}, proc) == {14}
    assert members_of(10, set(), proc) == set()


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
    time.sleep(600)
    return "late"


def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


def test_a_child_that_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    assert ask_child(take_long, seconds=0.1) == Answer("", "took longer than 0.1 s")
    assert time.monotonic() - started < 100


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

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", counted_fork)
    monkeypatch.setattr("multiprocessing.connection.Connection.poll", interrupted)
    open_before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(KeyboardInterrupt):
        ask_child(take_long)
    assert len(set(Path("/proc/self/fd").iterdir())) == len(open_before)
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_programs_for_root_are_found_without_a_path_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only-for-root").touch(mode=0o755)
    monkeypatch.setattr("quorate.core.processes.SYSTEM_FOLDERS", str(tmp_path))
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert find_program("only-for-root") == str(tmp_path / "only-for-root")
    assert find_program("no-such-program") is None


def test_who_has_a_file_open_is_found(tmp_path: Path) -> None:
    file, other = tmp_path / "lock", tmp_path / "other"
    other.touch()
    with file.open("w"):
        assert has_open(os.getpid(), file)
        assert not has_open(os.getpid(), other)
    assert not has_open(os.getpid(), file)
    with pytest.raises(FileNotFoundError):
        has_open(2**22 + 1, file)


def test_who_is_stopped_is_told_from_who_waits_or_is_gone() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    assert not is_stopped(pid)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert is_stopped(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not is_stopped(pid)


@pytest.mark.parametrize(("state", "counts"), [("T", True), ("t", False), ("D", False), ("Z", False)])
def test_only_a_stop_counts_and_not_a_debugger(tmp_path: Path, state: str, counts: bool) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (T T) {state} 1 7 7 0")
    assert is_stopped(7, tmp_path) == counts


def test_one_that_stays_stopped_for_too_long_is_told_and_one_that_goes_on_in_between_is_not() -> None:
    stopped = {1, 2}
    watch = StoppedProcesses(5.0, stopped.__contains__)
    for now in range(10, 15):
        assert watch.look(now, [1, 2, 3]) == {}
        if now == 12:
            stopped.discard(2)
    stopped.add(2)
    assert watch.look(15.0, [1, 2, 3]) == {1: 5.0}
    assert watch.look(16.0, [2, 3]) == {}, "nobody asks about it any more"
    assert watch.look(17.0, [1, 2]) == {}


def test_of_a_pause_of_whoever_looks_half_the_limit_counts_at_most() -> None:
    watch = StoppedProcesses(5.0, lambda _: True)
    for now in (10.0, 11.0, 3600.0, 3601.0):
        assert watch.look(now, [1]) == {}
    assert watch.look(3602.0, [1]) == {1: 5.5}


@pytest.mark.parametrize("pause", [1.1, 30.0])
def test_whoever_looks_seldom_tells_of_one_that_is_stopped_too(pause: float) -> None:
    watch = StoppedProcesses(2.0, lambda _: True)
    assert [watch.look(10.0 + looks * pause, [1]) for looks in range(3)] == [{}, {}, {1: 2.0}]

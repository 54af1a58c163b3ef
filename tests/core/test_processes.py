"""A child that asked for it does not outlive its parent, however the parent ends."""

import os
import select
import signal
import time
from pathlib import Path

from quorate.core.processes import adopt_orphans, children_of, die_with_parent, members_of


def is_gone(descriptor: int) -> bool:
    """Whether every process that holds the other end of this pipe has ended, within a few seconds."""
    return bool(select.select([descriptor], [], [], 4)[0]) and os.read(descriptor, 1) == b""


def test_a_child_dies_when_its_parent_is_killed() -> None:
    alive, held = os.pipe()
    parent = os.fork()
    if parent == 0:
        born = os.getpid()
        if os.fork() == 0:
            die_with_parent(born)
            os.write(held, b"x")
            time.sleep(60)
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

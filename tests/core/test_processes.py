"""A child that asked for it does not outlive its parent, however the parent ends."""

import os
import select
import signal
import time

from quorate.core.processes import adopt_orphans, children_of, die_with_parent


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

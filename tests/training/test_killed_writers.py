"""Two workers that save together, in processes of their own: one is killed at each call that changes the disk."""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.disk import Disk
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import GenerationOver, LinkError, PeerLost
from training.saving_workers import PATIENCE, Crew, Hand, Seat, Table, assert_loads, at, state_of

LENGTH = 4


class Pair(Seat):
    """A worker's place beside another process, over a socket that ends with either of them."""

    def __init__(self, link: socket.socket, position: int) -> None:
        super().__init__(Table(1), position, position)
        self._link = link
        link.settimeout(PATIENCE)

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        try:
            self._link.sendall(len(payload).to_bytes(LENGTH, "little") + payload)
            others = self._receive(int.from_bytes(self._receive(LENGTH), "little"))
        except (BrokenPipeError, ConnectionResetError):
            raise PeerLost("the other worker", "is gone") from None
        return (payload, others) if self.hosted.start == 0 else (others, payload)

    def check_there(self) -> None:
        """As the coordinator does, which ends the generation of one that is gone."""
        if not select.select([self._link], [], [], 0)[0]:
            return
        try:
            found = self._link.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            found = b""
        if not found:
            raise GenerationOver("the other worker is gone")

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            piece = self._link.recv(size - len(received))
            if not piece:
                raise PeerLost("the other worker", "is gone")
            received += piece
        return received


def live(hand: Hand, seat: Pair) -> None:
    """Save in the background after step 1 and at once after step 2; go on alone when the other is gone."""
    hand.seat = seat
    hand.check_lease = hand.check_commit = seat.check_there
    step = 1
    try:
        hand.checkpointer.enter(hand.seat, step)
        hand.checkpointer.begin(at(1), hand.seat)
        hand.checkpointer.settle()
        hand.train(2)
        step = 2
        hand.checkpointer.save(at(2), hand.seat)
    except LinkError:
        hand.checkpointer.leave()
        hand.check_lease = hand.check_commit = lambda: None
        hand.seat = Seat(Table(1), 0, hand.number)
        hand.checkpointer.enter(hand.seat, step)
        if step == 1:
            hand.train(2)
        hand.checkpointer.save(at(2), hand.seat)
    hand.checkpointer.close(PATIENCE)


def run_both(crew: Crew, victim: int, call: int, half_written: bool) -> list[int]:
    """How the two processes ended."""
    pids = []
    links = socket.socketpair()
    for position, hand in enumerate(crew.hands):
        pid = os.fork()
        if pid == 0:
            links[1 - position].close()
            _child(
                lambda hand=hand, position=position: live(hand, Pair(links[position], position)),  # type: ignore[misc]
                call if position == victim else None,
                half_written,
            )
        pids.append(pid)
    for link in links:
        link.close()
    return [_ended(pid) for pid in pids]


def _child(act: Callable[[], None], call: int | None, half_written: bool) -> None:
    real_write = os.write

    def die(name: str, arguments: tuple[Any, ...]) -> None:
        if half_written and name == "write":
            real_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    # So that it is known where it hangs, if it does.
    faulthandler.dump_traceback_later(0.7 * PATIENCE, file=2)
    try:
        with Disk(call, die).watched():
            act()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)


def _ended(pid: int) -> int:
    over = time.monotonic() + PATIENCE
    while time.monotonic() < over:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)  # between two looks
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a worker whose neighbour was killed does not come to an end")


def kill_at(tmp_path: Path, victim: int, call: int, half_written: bool) -> bool:
    """Whether it came to that call; whatever happened, only whole checkpoints are there, the last one among them."""
    crew = Crew(tmp_path / f"{victim}-{call}-{half_written}", 2)
    expected = {1: state_of(crew.first, at(1))}
    codes = run_both(crew, victim, call, half_written)
    assert codes[1 - victim] == 0, f"killed at call {call}"
    assert codes[victim] in (0, -signal.SIGKILL)
    crew.train(2)
    expected[2] = state_of(crew.first, at(2))
    folder = CheckpointFolder(crew.folder.folder)
    assert folder.search().skipped == ()
    for info in folder.list():
        assert_loads(folder, info, expected[info.cursor.step])
    assert folder.list()[-1].cursor.step == 2, f"killed at call {call}"
    if codes[victim]:
        crew.whole(2)
    return codes[victim] != 0


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, id="the one that commits"), pytest.param(1, id="the other", marks=pytest.mark.long)],
)
def test_one_of_two_writers_is_killed_at_some_calls(tmp_path: Path, victim: int) -> None:
    calls = (2, 7, 12, 17, 22, 27) if victim == 0 else (1, 3, 5, 7)
    assert all(kill_at(tmp_path, victim, call, half_written=False) for call in calls)


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("half_written", [False, True], ids=["before", "half-way"])
@pytest.mark.parametrize("victim", [0, 1], ids=["the one that commits", "the other"])
def test_one_of_two_writers_is_killed_at_every_call(tmp_path: Path, victim: int, half_written: bool) -> None:
    call = 0
    while kill_at(tmp_path, victim, call, half_written):
        call += 1
    assert call > 8

"""Processes that a script forks, and that hear each other through it."""

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from quorate.core.processes import die_with_parent

_PIECE = 1 << 16


class Seat:
    """What a process of a gang has: its number, and a line to the script."""

    def __init__(self, position: int, connection: socket.socket) -> None:
        self.position = position
        self._connection = connection
        self._lines = connection.makefile("r")

    def gather(self, said: Any) -> list[Any]:
        """What everybody says here, in the order of their numbers; it waits for all."""
        self.send("said", said)
        everyone: list[Any] = json.loads(self._lines.readline())
        return everyone

    def send(self, what: str, value: Any) -> None:
        """Tell the script."""
        self._connection.sendall(json.dumps([what, value]).encode() + b"\n")


class _Member:
    """A process of a gang, as the script holds it."""

    def __init__(self, position: int, play: Callable[[Seat], Any]) -> None:
        self.position = position
        self.connection, theirs = socket.socketpair()
        self._received = b""
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self.connection.close()
            _live(play, Seat(position, theirs), parent)
        theirs.close()

    def read(self) -> tuple[str, Any] | None:
        """Its next message, if that has come whole. It sends one at a time."""
        try:
            piece = self.connection.recv(_PIECE)
        except ConnectionResetError:  # it was killed before it has read what it was told
            piece = b""
        if not piece:
            return "end", "it has ended without a word"
        self._received += piece
        if not self._received.endswith(b"\n"):
            return None
        (what, value), self._received = json.loads(self._received), b""
        return what, value

    def end(self) -> None:
        """Nothing of it is left when this returns."""
        self.connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def run_gang(processes: int, play: Callable[[Seat], Any], may_die: Collection[int] = ()) -> list[Any]:
    """What `play` gives in each of so many forked processes, as JSON can carry it.

    One that fails ends all, and the script with them, by a SystemExit that says why. Those that `may_die` may also end
    without a word, and their result is None.
    """
    members: list[_Member] = []
    try:
        members += (_Member(position, play) for position in range(processes))
        return _attend(members, may_die)
    finally:
        for member in members:
            member.end()


def _live(play: Callable[[Seat], Any], seat: Seat, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        seat.send("result", play(seat))
    except BaseException as error:
        seat.send("error", f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _attend(members: list[_Member], may_die: Collection[int]) -> list[Any]:
    """Pass on what they say, until all have a result."""
    heard: dict[str, dict[int, Any]] = {"said": {}, "result": {}}
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.connection, selectors.EVENT_READ, member)
        while len(heard["result"]) < len(members):
            for key, _ in selector.select():
                message = key.data.read()
                if message is None:
                    continue
                what, value = message
                if what == "end" and key.data.position in may_die:
                    what, value = "result", None
                if what in ("end", "error"):
                    raise SystemExit(f"process {key.data.position} of {len(members)}: {value}")
                if what == "result":
                    selector.unregister(key.fileobj)
                heard[what][key.data.position] = value
            if len(heard["said"]) == len(members):
                _tell_all(members, _in_order(heard["said"]))
                heard["said"] = {}
    return _in_order(heard["result"])


def _tell_all(members: list[_Member], everyone: list[Any]) -> None:
    for member in members:
        member.connection.sendall(json.dumps(everyone).encode() + b"\n")


def _in_order(by_position: dict[int, Any]) -> list[Any]:
    return [by_position[position] for position in sorted(by_position)]

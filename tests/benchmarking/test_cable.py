"""Two processes on a cable, and that nothing of it is left, however they end."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarking.command_line import start_benchmark
from benchmarking.wired import holders, namespace, needs_cables, on_a_cable
from benchmarks.cable import BURST, DEVICE, plug_in
from benchmarks.gang import Seat, run_gang
from command import Workplace, await_condition
from schemas import validate

MBIT = 400.0
PAYLOAD = bytes(2**21)


def send(seat: Seat, host: str) -> float:
    """Process 1 sends to process 0: the seconds that it took."""
    server = socket.create_server((host, 0)) if seat.position == 0 else None
    port = seat.gather(server.getsockname()[1] if server is not None else 0)[0]
    began = time.perf_counter()
    if server is None:
        with socket.create_connection(("192.0.2.1", port), timeout=60) as connection:
            connection.sendall(PAYLOAD)
            connection.recv(1)
    else:
        with server, server.accept()[0] as connection:
            received = 0
            while received < len(PAYLOAD):
                received += len(connection.recv(2**16))
            connection.send(b"!")
    return time.perf_counter() - began


@needs_cables
def test_a_cable_carries_no_more_than_it_may_and_is_gone_afterwards() -> None:
    def play(seat: Seat) -> Any:
        host = plug_in(seat, MBIT)
        return [namespace(), host, send(seat, host), len(holders({namespace()}))]

    (one, first, slow, *held), (other, second, _, *held_too) = run_gang(2, play)
    assert len({one, other, namespace()}) == 3
    assert (first, second) == ("192.0.2.1", "192.0.2.2")
    at_once = int(BURST.removesuffix("kb")) * 1024
    assert slow > (len(PAYLOAD) - at_once) * 8 / (MBIT * 1e6)
    assert (held, held_too) == ([1], [1]), "while they last, a process stands in each"
    assert holders({one, other}) == []
    assert not Path("/sys/class/net", DEVICE).exists()


@needs_cables
@pytest.mark.parametrize("how", ["by an error", "by a signal"])
def test_a_process_that_fails_takes_the_cable_with_it(how: str, tmp_path: Path) -> None:
    def play(seat: Seat) -> None:
        plug_in(seat, MBIT)
        (tmp_path / str(seat.position)).write_text(namespace())
        seat.gather("noted")
        if seat.position == 1 and how == "by an error":
            raise ValueError("what a pity")
        if seat.position == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(SystemExit, match="what a pity" if how == "by an error" else "without a word"):
        run_gang(2, play)
    left = {(tmp_path / name).read_text() for name in ("0", "1")}
    assert len(left - {namespace()}) == 2
    assert holders(left) == []


@needs_cables
def test_what_cannot_be_made_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cable.QUEUE", "never")
    with pytest.raises(SystemExit, match=r"`tc qdisc add dev cable root tbf .* latency never`: .*never.*sch_tbf"):
        run_gang(2, lambda seat: plug_in(seat, MBIT))


@pytest.mark.long
@needs_cables
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_namespace(number: signal.Signals, workplace: Workplace) -> None:
    temporary = workplace.temporary
    running = start_benchmark(workplace, "overlap", "--json")
    found = await_condition("both ends of a cable", lambda: _pair(on_a_cable(temporary)))
    running.process.send_signal(number)
    done = running.done()
    await_condition("the end of the namespaces", lambda: not holders(found), 60.0)
    assert on_a_cable(temporary) == set()
    if number == signal.SIGTERM:
        assert (done.code, done.document["status"]) == (143, "terminated")
        validate("bench", done.document)
        assert list(temporary.iterdir()) == []


def _pair(found: set[str]) -> set[str]:
    return found if len(found) == 2 else set()

"""Hosts that do not answer, and workers that are only busy."""

import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from bad_networks import BadNetworks
from quorate.chaos.network_namespaces import inside_network
from quorate.core.errors import FrameError, PeerLost
from quorate.wire.stream import FEWEST_PROBES, LOOKS, SHORTEST_PROBE, Silence, Stream, TcpInfo, Watch
from quorate.wire.tcp import SHORTEST_CALL, connect
from wire.pairs import credentials, wait_until, within

LIMIT = 1.0
PATIENCE = 60.0


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        yield near, far


def info(sock: socket.socket) -> TcpInfo:
    told = TcpInfo.of(sock)
    assert told is not None
    return told


def fill_up(sock: socket.socket) -> int:
    """Send until the peer has no room for more; the bytes that the kernel has taken."""
    sock.setblocking(False)
    sent = 0
    while select.select([], [sock], [], 0.3)[1]:
        sent += sock.send(bytes(2**20))
    return sent


# --- what the kernel tells


def test_the_kernel_tells_what_is_acknowledged_and_when() -> None:
    with connection() as (near, far):
        before, others = info(near), info(far)
        near.sendall(bytes(12345))
        wait_until(lambda: info(near).acknowledged == before.acknowledged + 12345)
        after = info(near)
        assert (after.unacknowledged, after.probes) == (0, 0)
        assert max(after.since_sent, after.since_acknowledgement, info(far).since_data) < 60
        assert info(far).acknowledged == others.acknowledged
        wait_until(lambda: info(near).since_sent > 0.1 and info(near).since_acknowledgement > 0.1)
        wait_until(lambda: info(far).since_data > 0.1)
        assert (told := info(near)).since_data >= told.since_sent, "nothing has come yet"
        far.sendall(b"x")
        wait_until(lambda: (told := info(near)).since_data < told.since_sent)


def test_of_a_closed_connection_nothing_is_told() -> None:
    with connection() as (near, _):
        near.close()
        assert TcpInfo.of(near) is None


@pytest.mark.parametrize("limit", [0.1, 1.0, 2.0, 5.0, 7.5, 60.0, 1e6])
def test_the_kernel_gives_up_an_idle_connection_by_itself_a_little_after_the_limit(limit: float) -> None:
    with connection() as (near, _):
        Silence(near, limit)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            near.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert count >= FEWEST_PROBES
        assert limit < idle + every * count <= max(limit, FEWEST_PROBES * SHORTEST_PROBE) + 2 * every


# --- a worker that is busy, or stopped

BUSY = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("here", flush=True)
sys.stdin.readline()
count = 0
while count < int(sys.argv[2]):
    count += len(sock.recv(2**20))
sock.sendall(b"done")
sys.stdin.readline()
"""


@contextmanager
def stopped_peer(takes: int) -> Iterator[tuple[Stream, "subprocess.Popen[str]"]]:
    """A worker that is stopped, and reads so many bytes once it goes on and is told to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", BUSY, str(server.getsockname()[1]), str(takes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            try:
                sock = server.accept()[0]
                assert peer.stdout is not None
                assert peer.stdout.readline() == "here\n"
                peer.send_signal(signal.SIGSTOP)
                stream = Stream(sock, "worker 0", LIMIT)
                yield stream, peer
                stream.close()
            finally:
                peer.kill()


def go_on(peer: "subprocess.Popen[str]") -> None:
    peer.send_signal(signal.SIGCONT)
    assert peer.stdin is not None
    peer.stdin.write("\n")
    peer.stdin.flush()


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 1000, 32 * 2**20], ids=["nothing", "a little", "more than there is room for"])
def test_a_peer_that_is_stopped_for_longer_than_the_limit_is_not_lost(size: int, threads: ThreadPoolExecutor) -> None:
    looks: list[float] = []
    with stopped_peer(takes=size) as (stream, peer):

        class Looked(Stream):
            def __init__(self) -> None:
                pass

            def check_silence(self) -> None:
                looks.append(time.monotonic())
                stream.check_silence()

            def suspicion(self) -> PeerLost | None:
                return stream.suspicion()

        watch = Watch(within(PATIENCE), [Looked()], LIMIT)
        sending = threads.submit(stream.send_all, [memoryview(bytes(size))] if size else [], watch)
        answer = bytearray(4)
        receiving = threads.submit(stream.fill, memoryview(answer), watch)
        wait_until(lambda: len(looks) > 1 and looks[-1] - looks[0] > 3 * LIMIT, PATIENCE)
        assert stream.suspicion() is None
        assert sending.done() == (size < 2**20)
        assert not receiving.done()
        go_on(peer)
        sending.result(PATIENCE)
        receiving.result(PATIENCE)
        assert answer == b"done"


# --- a path that is dead


@pytest.fixture
def namespaces(namespaces_allowed: None) -> Iterator[BadNetworks]:
    with BadNetworks(2) as namespaces:
        yield namespaces


@contextmanager
def across(namespaces: BadNetworks) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from the first namespace to the second."""
    here, there = namespaces.network_of(0), namespaces.network_of(1)
    with inside_network(there.namespace, lambda: socket.create_server((there.address, 0))) as server:
        near = inside_network(here.namespace, lambda: socket.create_connection(server.getsockname(), 60))
        far = server.accept()[0]
    with near, far:
        yield near, far


CUTS = {"both ways": [(0, 1), (1, 0)], "there": [(0, 1)], "back": [(1, 0)]}


def cut(namespaces: BadNetworks, ways: list[tuple[int, int]]) -> None:
    for pair in ways:
        namespaces.cut_one_way(*pair)
        assert not namespaces.reaches(*pair, 0.05)


def assert_noticed(stream: Stream, threads: ThreadPoolExecutor) -> None:
    began = time.monotonic()
    watch = Watch(within(PATIENCE), [stream], LIMIT)
    receiving = threads.submit(stream.fill, memoryview(bytearray(1)), watch)
    # Where this process is held up for longer than the limit, the kernel notices before it.
    by_us, by_the_kernel = r"its host has not acknowledged anything for \d+\.\d s", "Connection timed out"
    with pytest.raises(PeerLost, match=f"worker 1 is gone: ({by_us}|{by_the_kernel})") as lost:
        receiving.result(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    if by_the_kernel not in str(lost.value):
        assert stream.suspicion() is not None, "it is known after the link was closed too"


@pytest.mark.parametrize("ways", [pytest.param("both ways", marks=pytest.mark.long), "there", "back"])
def test_a_path_that_dies_under_what_was_sent_is_noticed(
    ways: str, namespaces: BadNetworks, threads: ThreadPoolExecutor
) -> None:
    with across(namespaces) as (near, _):
        stream = Stream(near, "worker 1", LIMIT)
        cut(namespaces, CUTS[ways])
        stream.send_all([memoryview(b"lost")], within(100))
        assert_noticed(stream, threads)


@pytest.mark.parametrize(
    "ways", ["both ways", *(pytest.param(way, marks=pytest.mark.long) for way in ("there", "back"))]
)
def test_a_path_that_dies_under_an_idle_connection_is_noticed(
    ways: str, namespaces: BadNetworks, threads: ThreadPoolExecutor
) -> None:
    with across(namespaces) as (near, _):
        stream = Stream(near, "worker 1", LIMIT)
        cut(namespaces, CUTS[ways])
        assert_noticed(stream, threads)


def test_a_path_that_dies_under_a_full_window_is_noticed_by_the_one_who_does_not_read(
    namespaces: BadNetworks, threads: ThreadPoolExecutor
) -> None:
    with across(namespaces) as (near, far):
        stream = Stream(far, "worker 1", LIMIT)
        sent = fill_up(near)
        cut(namespaces, CUTS["both ways"])
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            threads.submit(stream.fill, memoryview(bytearray(sent)), Watch(within(PATIENCE), [stream], LIMIT)).result(
                PATIENCE
            )


def test_a_path_that_heals_before_the_limit_is_not_noticed(
    namespaces: BadNetworks, threads: ThreadPoolExecutor
) -> None:
    with across(namespaces) as (near, far):
        stream = Stream(near, "worker 1", 10 * LIMIT)
        cut(namespaces, CUTS["both ways"])
        stream.send_all([memoryview(b"late")], within(100))
        receiving = threads.submit(stream.fill, memoryview(bytearray(1)), Watch(within(PATIENCE), [stream], 10 * LIMIT))
        wait_until(lambda: info(near).since_acknowledgement > LIMIT)
        assert info(near).unacknowledged
        namespaces.heal()
        far.settimeout(PATIENCE)
        assert far.recv(4) == b"late"
        far.sendall(b"x")
        receiving.result(PATIENCE)


# --- looking


class Link(Stream):
    """Counts how often it is looked after."""

    def __init__(self, suspect: PeerLost | None = None) -> None:
        self.looks = 0
        self.lost: PeerLost | None = None
        self.suspect = suspect

    def check_silence(self) -> None:
        self.looks += 1
        if self.lost is not None:
            raise self.lost

    def suspicion(self) -> PeerLost | None:
        return self.suspect


def test_links_are_looked_after_now_and_then_however_often_the_deadline_is_asked() -> None:
    link = Link()
    watch = Watch(lambda: 100.0, [link], 1000.0)
    assert [watch() for _ in range(1000)] == [100.0] * 1000
    assert link.looks == 1
    assert Watch(lambda: 100.0, [link], 2.0)() == 2.0 / LOOKS, "it is asked again in time for the next look"
    assert Watch(lambda: -1.0, [link], 2.0)() == -1.0


def test_whoever_waits_for_one_neighbour_learns_that_the_other_is_silent(threads: ThreadPoolExecutor) -> None:
    other = Link()
    with connection() as (near, _):
        stream = Stream(near, "worker 1", LIMIT)
        waiting = threads.submit(stream.fill, memoryview(bytearray(1)), Watch(within(PATIENCE), [other], 0.1))
        wait_until(lambda: other.looks > 2)
        other.lost = PeerLost("worker 2", "silent")
        with pytest.raises(PeerLost, match="worker 2 is gone: silent"):
            waiting.result(PATIENCE)


def test_a_link_that_ends_because_of_a_silent_one_is_not_to_blame() -> None:
    closed, silent = PeerLost("worker 2", "it closed the connection"), PeerLost("worker 1", "silent")
    assert Watch(within(100), [Link(), Link(silent)], LIMIT).blame(closed) is silent
    assert Watch(within(100), [Link(), Link()], LIMIT).blame(closed) is closed
    wrong = FrameError("of another generation")
    assert Watch(within(100), [Link(silent)], LIMIT).blame(wrong) is wrong


# --- a host that does not even take a call


@contextmanager
def mute_host() -> Iterator[str]:
    """An address whose kernel drops every call, since nobody takes those before."""
    with socket.socket() as server, ExitStack() as callers:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        host, port = server.getsockname()
        yield f"{host}:{port}"


def test_a_host_that_does_not_answer_a_call_is_lost_before_the_deadline() -> None:
    began = time.monotonic()
    with mute_host() as address, pytest.raises(PeerLost, match=r"cannot be reached \(its host has not answered for"):
        connect(address, credentials(0), 1, within(PATIENCE), 0.1)
    assert SHORTEST_CALL <= time.monotonic() - began < PATIENCE / 2

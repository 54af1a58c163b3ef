"""What only real sockets do: strangers, deaths, forks."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import GenerationId
from quorate.wire import reception, stream
from quorate.wire.link import HEADER_SIZE, Tag, checksum_of, encode_header
from quorate.wire.stream import LOW_WATER
from quorate.wire.tcp import Listener, TcpLink, connect
from wire.pairs import GENERATION, Waiting, credentials, listening, open_descriptors, tcp_pair, wait_until, within

TAG = Tag(GENERATION, step=5, channel=1, index=2)


def knock(listener: Listener) -> socket.socket:
    return socket.create_connection(split_address(listener.address))


def bare_end_and_link() -> tuple[socket.socket, TcpLink]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        link = TcpLink(server.accept()[0], "worker 0")
    return far, link


def has_ipv6() -> bool:
    try:
        Listener.bind("::1").close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")),
    ],
)
def test_links_form_over_either_protocol(host: str) -> None:
    ours, theirs = tcp_pair(host=host)
    ours.send(TAG, b"hello", within(100))
    assert theirs.receive(TAG, within(100)) == b"hello"
    assert ours.peer.startswith("worker 1 (")
    assert theirs.peer.startswith("worker 0 (")
    ours.close()
    theirs.close()


def test_a_worker_where_nobody_listens_is_lost_at_once() -> None:
    with listening() as listener:
        address = listener.address
    began = time.monotonic()
    with pytest.raises(PeerLost, match=rf"worker 1 \({address}\) is gone: it cannot be reached .*refused"):
        connect(address, credentials(0), 1, within(100))
    assert time.monotonic() - began < 50


def test_a_worker_that_never_answers_is_lost_when_the_deadline_is_over() -> None:
    with listening() as listener, pytest.raises(PeerLost, match="no frame for"):
        connect(listener.address, credentials(0), 1, within(1.5))


def test_an_address_that_nobody_knows_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match="its address is not known here"):
        connect("no-such-host.invalid:1", credentials(0), 1, within(100))


def test_a_wait_for_a_worker_that_never_comes_ends_with_the_deadline() -> None:
    with (
        listening() as listener,
        pytest.raises(PeerLost, match=r"worker 4 is gone: it did not connect within \d+\.\d"),
    ):
        listener.accept(credentials(1), 4, within(0.1))


def test_closing_a_listener_ends_the_wait_for_a_peer(threads: ThreadPoolExecutor) -> None:
    waiting = Waiting(within(60))
    with listening() as listener:
        accepting = threads.submit(listener.accept, credentials(1), 0, waiting)
        assert waiting.begun.wait(60)
        listener.close()
        with pytest.raises(PeerLost, match="worker 0 is gone: the link was closed on this side"):
            accepting.result(60)
        with pytest.raises(PeerLost, match="closed on this side"):
            listener.accept(credentials(1), 0, within(100))


def test_strangers_do_not_disturb_the_wait_for_the_right_one(threads: ThreadPoolExecutor) -> None:
    with listening() as listener, ExitStack() as strangers:
        silent = strangers.enter_context(knock(listener))
        knock(listener).close()  # a port scan
        garbage = strangers.enter_context(knock(listener))
        garbage.sendall(b"GET / HTTP/1.1\r\nHost: anyone\r\n\r\n" * 10)
        hesitant = strangers.enter_context(knock(listener))
        hesitant.sendall(b"Q")
        accepting = threads.submit(listener.accept, credentials(1), 0, within(100))
        with pytest.raises(FrameError, match="refused the proof of the job token"):
            connect(listener.address, credentials(0, token="guess"), 1, within(100))
        ours = connect(listener.address, credentials(0), 1, within(100))
        theirs = accepting.result()
        ours.send(TAG, b"hello", within(100))
        assert theirs.receive(TAG, within(100)) == b"hello"
        hesitant.settimeout(60)
        assert hesitant.recv(1) == b"", "who has begun to speak and is not the peer is turned away"
        ours.close()
        theirs.close()
        listener.close()
        silent.settimeout(60)
        assert silent.recv(1) == b""


def test_more_strangers_than_the_reception_holds_do_not_keep_the_right_one_out(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MOST_VISITORS", 3)
    with listening() as listener, ExitStack() as strangers:
        for _ in range(10):
            strangers.enter_context(knock(listener))
        accepting = threads.submit(listener.accept, credentials(1), 0, within(100))
        connect(listener.address, credentials(0), 1, within(100)).close()
        accepting.result().close()


def test_a_connection_that_waits_silently_can_be_the_peer_of_the_next_wait(threads: ThreadPoolExecutor) -> None:
    with listening() as listener, knock(listener) as early:
        with pytest.raises(PeerLost):
            listener.accept(credentials(1), 0, within(0.1))
        accepting = threads.submit(listener.accept, credentials(1), 0, within(100))
        later = connect(listener.address, credentials(0), 1, within(100))
        accepting.result().close()
        later.close()
        early.settimeout(0.05)
        with pytest.raises(TimeoutError):
            early.recv(1)


@pytest.mark.parametrize(
    ("generation", "worker", "told"),
    [(GenerationId(3, 6), 0, r"generation 3\.6, worker 1 in 3\.7"), (GENERATION, 2, "worker 2 answered .* worker 0")],
)
def test_a_worker_that_does_not_fit_is_told_so_and_named_when_the_wait_is_over(
    generation: GenerationId, worker: int, told: str, threads: ThreadPoolExecutor
) -> None:
    with listening() as listener:
        tried = threading.Event()
        accepting = threads.submit(listener.accept, credentials(1), 0, lambda: 0 if tried.is_set() else 0.01)
        with pytest.raises(FrameError, match="worker 1"):
            connect(listener.address, credentials(worker, generation=generation), 1, within(100))
        tried.set()
        with pytest.raises(FrameError, match=f"worker 0 did not connect within .*{told}"):
            accepting.result(60)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\0" * HEADER_SIZE, "where a frame begins"),
        (encode_header(TAG, 3)[:-1] + b"\0", "damaged header: its checksum"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(sent: bytes, told: str) -> None:
    far, link = bare_end_and_link()
    with far:
        far.sendall(sent)
        with pytest.raises(FrameError, match=told):
            link.receive(TAG, within(100))
        far.settimeout(60)
        assert far.recv(1) == b"", "a link that has lost its place is closed"


def test_a_frame_that_breaks_off_says_how_much_came() -> None:
    far, link = bare_end_and_link()
    far.sendall(encode_header(TAG, 10) + b"abcd")
    far.close()
    with pytest.raises(PeerLost, match=r"worker 0 is gone: it closed the connection \(4 of 10 bytes came\)"):
        link.receive(TAG, within(100))


@pytest.fixture
def sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends when the kernel says so, or not within a test."""
    monkeypatch.setattr(stream, "LONGEST_WAIT", 60.0)


def waiting_for_a_large_frame(threads: ThreadPoolExecutor) -> tuple[socket.socket, socket.socket, "Future[None]"]:
    """Both ends of a connection, and a receive that waits at the second one with only a part of its frame there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near = server.accept()[0]
    asked = threading.Semaphore(0)

    def deadline() -> float:
        asked.release()
        return 60

    buffer = bytearray(2 * LOW_WATER)
    receiving = threads.submit(TcpLink(near, "worker 0").receive_into, TAG, buffer, deadline)
    assert asked.acquire(timeout=60)
    far.sendall(encode_header(TAG, len(buffer), checksum_of(buffer)) + bytes(1000))
    wait_until(lambda: unread(near) > 1000)
    return far, near, receiving


def unread(sock: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.usefixtures("sound_sleep")
def test_a_large_frame_does_not_wake_its_receiver_for_every_packet(threads: ThreadPoolExecutor) -> None:
    far, near, receiving = waiting_for_a_large_frame(threads)
    with far:
        assert select.select([near], [], [], 0) == ([], [], []), "what is there is not worth waking up for"
        far.sendall(bytes(2 * LOW_WATER - 1000))
        receiving.result(60)
    near.close()


@pytest.mark.usefixtures("sound_sleep")
def test_a_peer_that_is_gone_within_a_large_frame_is_lost_at_once(threads: ThreadPoolExecutor) -> None:
    far, _, receiving = waiting_for_a_large_frame(threads)
    far.close()
    with pytest.raises(PeerLost, match=rf"it closed the connection \(1000 of {2 * LOW_WATER} bytes came\)"):
        receiving.result(60)


@pytest.mark.usefixtures("sound_sleep")
def test_a_small_frame_after_a_large_one_is_not_waited_for_longer(threads: ThreadPoolExecutor) -> None:
    ours, theirs = tcp_pair()
    large = bytearray(2 * LOW_WATER)
    receiving = threads.submit(theirs.receive_into, TAG, large, within(100))
    ours.send(TAG, bytes(len(large)), within(100))
    receiving.result(60)
    waiting = Waiting(within(60))
    small = threads.submit(theirs.receive, TAG, waiting)
    assert waiting.begun.wait(60)
    ours.send(TAG, b"x", within(100))
    assert small.result(60) == b"x"
    ours.close()
    theirs.close()


def test_a_peer_that_ends_its_direction_is_gone_though_it_keeps_the_connection(threads: ThreadPoolExecutor) -> None:
    far, link = bare_end_and_link()
    with far:
        waiting = Waiting(within(60))
        sending = threads.submit(link.send, TAG, bytes(32 * 2**20), waiting)
        assert waiting.begun.wait(60)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost, match="worker 0 is gone: it closed the connection"):
            sending.result(60)


def test_a_closed_link_gives_its_descriptor_back() -> None:
    before = open_descriptors()
    for link in tcp_pair():
        link.close()
    assert open_descriptors() <= before


WORKER = """
import os, sys, threading
from quorate.core.generation import GenerationId
from quorate.wire.handshake import Credentials
from quorate.wire.tcp import Listener, connect
link = connect(sys.argv[1], Credentials("secret", 0, GenerationId(3, 7)), 1, lambda: 60.0)
listener = Listener.bind("127.0.0.1")
if sys.argv[2] == "with a loader":
    told, telling = os.pipe()
    if os.fork() == 0:
        os.write(telling, b".")
        threading.Event().wait(60)
        os._exit(0)
    os.read(told, 1)
print(listener.address, flush=True)
threading.Event().wait(60)
"""


@pytest.mark.parametrize("company", ["alone", "with a loader"])
def test_a_worker_killed_while_its_peer_receives_is_lost_at_once(company: str, threads: ThreadPoolExecutor) -> None:
    with listening() as listener:
        accepting = threads.submit(listener.accept, credentials(1), 0, within(100))
        command = [sys.executable, "-c", WORKER, listener.address, company]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as worker:
            try:
                link = accepting.result()
                assert worker.stdout is not None
                address = worker.stdout.readline().strip()
                waiting = Waiting(within(100))
                receiving = threads.submit(link.receive, TAG, waiting)
                assert waiting.begun.wait(60)
                worker.kill()
                killed = time.monotonic()
                with pytest.raises(PeerLost, match=r"worker 0 \(127.* is gone: it closed the connection"):
                    receiving.result(60)
                assert time.monotonic() - killed < 50
                # A loader that kept the port would answer for a worker that is dead.
                with pytest.raises(PeerLost, match="cannot be reached"):
                    connect(address, credentials(1), 0, within(100))
                if company == "with a loader":
                    os.killpg(worker.pid, 0)  # raises if the loader is not there to keep anything open
            finally:
                os.killpg(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("into", [False, True])
def test_a_payload_that_was_damaged_on_its_way_is_refused(into: bool) -> None:
    far, link = bare_end_and_link()
    sent, damaged = b"gradient" * 100, bytearray(b"gradient" * 100)
    damaged[333] ^= 4
    with far:
        far.sendall(encode_header(TAG, len(sent), checksum_of(sent)) + damaged)
        with pytest.raises(FrameError, match=r"worker 0 sent a damaged payload for generation .*0x.*0x"):
            link.receive_into(TAG, bytearray(len(sent)), within(100)) if into else link.receive(TAG, within(100))
        with pytest.raises(PeerLost):
            link.receive(TAG, within(100))

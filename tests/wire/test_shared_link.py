"""What only shared memory does: slots that are used again, doorbells beside it, and what a death leaves of it."""

import gc
import os
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import GenerationId
from quorate.wire import shared_link
from quorate.wire.link import HEADER_SIZE, Tag, encode_header
from quorate.wire.reception import connect_local, pass_descriptors
from quorate.wire.shared_link import SLOT, SLOTS, SharedLink, connect_shared
from quorate.wire.shared_memory import Doorbell, Segment
from wire.pairs import (
    GENERATION,
    Waiting,
    accept_shared,
    credentials,
    listening_locally,
    open_descriptors,
    shared_pair,
    wait_until,
    within,
)

TAG = Tag(GENERATION, step=5, channel=1, index=2)
STALE = GenerationId(3, 6)


def mappings() -> set[str]:
    """The shared memory that this process sees."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:quorate" in line}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    gc.collect()  # what other tests have left in circles, such as an error and its frames
    descriptors, mapped = open_descriptors(), mappings()
    yield
    assert open_descriptors() <= descriptors
    assert mappings() <= mapped


class Far:
    """A link, and the bare doorbells at its other end."""

    def __init__(self) -> None:
        forth, back = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        memory = Segment.create(2 * SLOT * SLOTS)
        with closing(memory):
            self.link = SharedLink("worker 0", GENERATION, memory, sending=back[1], receiving=forth[1], side=1)
        self.sockets = forth[0], back[0]
        self.sends = Doorbell(forth[0], "worker 1", GENERATION)
        self.receives = Doorbell(back[0], "worker 1", GENERATION)


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.link.close()
    far.sends.close()
    far.receives.close()


def test_a_shared_link_forms_between_two_that_belong_together_and_its_memory_has_no_name() -> None:
    ours, theirs = shared_pair()
    assert (ours.peer, theirs.peer) == ("worker 1 (this host)", "worker 0 (this host)")
    assert len(mappings()) == 2
    assert all("(deleted)" in line for line in mappings())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 16 * SLOTS - 1, 16 * SLOTS, 16 * SLOTS + 1, 16 * SLOTS * 5 + 3])
def test_frames_of_any_length_flow_through_small_slots_both_ways(
    size: int, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_link, "SLOT", 16)
    ours, theirs = shared_pair()
    payloads = [os.urandom(size) for _ in range(3)]

    def send_all(link: SharedLink) -> None:
        for payload in payloads:
            link.send(TAG, payload, within(100))

    sending = [threads.submit(send_all, link) for link in (ours, theirs)]
    for link in (theirs, ours):
        place = bytearray(size)
        link.receive_into(TAG, place, within(100))
        assert [place, link.receive(TAG, within(100)), link.receive(TAG, within(100))] == payloads
    for thread in sending:
        thread.result(60)
    ours.close()
    theirs.close()


def test_a_frame_that_the_memory_holds_waits_for_nobody_and_a_larger_one_for_the_receiver(
    threads: ThreadPoolExecutor,
) -> None:
    ours, theirs = shared_pair()
    payload = os.urandom(SLOT * SLOTS)
    ours.send(TAG, payload, within(100))
    waiting = Waiting(within(5))
    sending = threads.submit(ours.send, TAG, b"one more", waiting)
    assert waiting.begun.wait(60)
    assert not sending.done()
    assert theirs.receive(TAG, within(100)) == payload
    assert theirs.receive(TAG, within(100)) == b"one more"
    sending.result(60)
    ours.close()
    theirs.close()


def test_what_was_sent_before_closing_still_arrives() -> None:
    """Also where the one that closes has not read that slots are free: over TCP it would have nothing to read."""
    ours, theirs = shared_pair()
    frames = [bytes([number]) for number in range(SLOTS)]
    for content in frames:
        ours.send(TAG, content, within(100))
    early = [theirs.receive(TAG, within(100)) for _ in range(SLOTS // 2)]
    ours.close()
    late = [theirs.receive(TAG, within(100)) for _ in range(SLOTS // 2)]
    assert early + late == frames
    with pytest.raises(PeerLost, match=r"worker 0 \(this host\) is gone: it closed the connection"):
        theirs.receive(TAG, within(100))


def test_no_copy_is_made_on_the_way(threads: ThreadPoolExecutor) -> None:
    ours, theirs = shared_pair()
    payload, place = bytes(16 * 2**20), bytearray(16 * 2**20)
    tracemalloc.start()
    try:
        sending = threads.submit(ours.send, TAG, payload, within(100))
        theirs.receive_into(TAG, place, within(100))
        sending.result(60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SLOT
    ours.close()
    theirs.close()


def test_a_wait_sleeps(threads: ThreadPoolExecutor) -> None:
    ours, theirs = shared_pair()
    ours.send(TAG, bytes(SLOT * SLOTS), within(100))
    asked = threading.Semaphore(0)

    def deadline() -> float:
        asked.release()
        return 30

    waits: list[Future[Any]] = [
        threads.submit(ours.send, TAG, b"", deadline),
        threads.submit(ours.receive, TAG, deadline),
    ]
    for _ in waits:
        assert asked.acquire(timeout=60)
    assert not asked.acquire(timeout=0.2), "a wait that sleeps has no question for its deadline"
    theirs.close()
    for wait in waits:
        assert isinstance(wait.exception(60), PeerLost)


@pytest.mark.parametrize("generation", [STALE, GenerationId(2, 7)])
def test_a_frame_whose_doorbell_is_of_another_generation_is_refused(generation: GenerationId, far: Far) -> None:
    stale = Doorbell(far.sockets[0], "worker 1", generation)
    stale.ring(encode_header(TAG, 0), within(100))
    with pytest.raises(FrameError, match=rf"worker 0 sent message 1 of generation {generation} .* generation 3\.7"):
        far.link.receive(TAG, within(100))
    assert_closed(far.link)


def test_frames_out_of_order_are_refused(far: Far) -> None:
    far.sockets[0].send(struct.pack("<qqQ", 3, 7, 2) + encode_header(TAG, 0))
    with pytest.raises(FrameError, match=r"sent message 2 .* where message 1"):
        far.link.receive(TAG, within(100))
    assert_closed(far.link)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (b"", f"sent 0 bytes where a frame begins with {HEADER_SIZE}"),
        (b"+", f"sent 1 bytes where a frame begins with {HEADER_SIZE}"),
        (bytes(HEADER_SIZE), "where a frame begins with b'QRTE'"),
        (encode_header(TAG, 3)[:-1] + b"\0", "damaged header"),
    ],
)
def test_what_is_no_header_is_refused(message: bytes, told: str, far: Far) -> None:
    far.sends.ring(message, within(100))
    with pytest.raises(FrameError, match=f"worker 0 .*{told}"):
        far.link.receive(TAG, within(100))
    assert_closed(far.link)


def test_a_frame_that_begins_before_the_last_one_ended_is_refused(far: Far) -> None:
    for _ in range(2):
        far.sends.ring(encode_header(TAG, SLOT + 1), within(100))
    with pytest.raises(FrameError, match=r"worker 0 sent b'QRTE.* where b'\+' was expected: it has lost its place"):
        far.link.receive(TAG, within(100))
    assert_closed(far.link)


def test_an_answer_that_frees_no_slot_is_refused(far: Far) -> None:
    far.receives.ring(b"+", within(100))
    with pytest.raises(FrameError, match=r"worker 0 sent b'\+' where b'-' was expected"):
        far.link.send(TAG, bytes(SLOT * SLOTS + 1), within(100))
    assert_closed(far.link)


def assert_closed(link: SharedLink) -> None:
    with pytest.raises(PeerLost, match="closed on this side"):
        link.send(TAG, b"", within(100))


def test_a_worker_where_nobody_listens_is_lost_at_once() -> None:
    with listening_locally() as listener:
        address = listener.address
    with pytest.raises(PeerLost, match=r"worker 1 \(this host\) is gone: it cannot be reached"):
        connect_shared(address, credentials(0), 1, within(100))


def nothing(sock: socket.socket) -> None:
    sock.close()


def memory_alone(sock: socket.socket) -> None:
    with closing(Segment.create(2 * SLOT * SLOTS)) as memory:
        pass_descriptors(sock, [memory.descriptor], "worker 1")


def memory_twice(sock: socket.socket) -> None:
    with closing(Segment.create(2 * SLOT * SLOTS)) as memory:
        pass_descriptors(sock, [memory.descriptor] * 2, "worker 1")


def little_memory(sock: socket.socket) -> None:
    with closing(Segment.create(SLOT)) as memory:
        pass_descriptors(sock, [memory.descriptor, sock.fileno()], "worker 1")


@pytest.mark.parametrize(
    ("passes", "error", "told"),
    [
        (nothing, PeerLost, "it closed the connection"),
        (memory_alone, FrameError, r"worker 0 \(this host\) passed 1 descriptors where 2 were expected"),
        (memory_twice, FrameError, r"worker 0 \(this host\) passed something that is not a connection"),
        (little_memory, FrameError, f"shared {SLOT:,} bytes of memory where {2 * SLOT * SLOTS:,} were expected"),
    ],
)
def test_a_peer_that_passes_something_else_is_refused_and_nothing_of_it_kept(
    passes: Callable[[socket.socket], None], error: type[Exception], told: str, threads: ThreadPoolExecutor
) -> None:
    with listening_locally() as listener, ExitStack() as stack:
        accepting = threads.submit(accept_shared, listener, credentials(1), 0, within(100))
        sock = stack.enter_context(connect_local(listener.address, credentials(0), 1, within(100)))
        passes(sock)
        with pytest.raises(error, match=told):
            accepting.result(60)


def stop_at_copy(number: int, told: int) -> None:
    """Have this process stand still within a transfer, once it has said so."""
    copy, count = shared_link._copy, iter(range(1, number + 1))

    def counted(source: memoryview, target: memoryview) -> None:
        if next(count) == number:
            os.write(told, b".")
            signal.pause()
        copy(source, target)

    shared_link._copy = counted


def run_worker(address: str, does: str, company: str, told: int) -> NoReturn:
    try:
        signal.alarm(200)
        link = connect_shared(address, credentials(0), 1, within(100))
        if company == "with a loader" and os.fork() == 0:
            signal.alarm(200)
            signal.pause()
        stop_at_copy(3 * SLOTS, told)
        if does == "sends":
            link.send(TAG, bytes(SLOT * SLOTS * 10), within(100))
        else:
            link.receive(TAG, within(100))
    finally:
        os._exit(1)


@pytest.mark.parametrize("company", ["alone", "with a loader"])
@pytest.mark.parametrize("does", ["sends", "receives"])
def test_a_worker_killed_within_a_large_transfer_is_lost_at_once(does: str, company: str) -> None:
    hears, tells = os.pipe()
    with listening_locally() as listener:
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            run_worker(listener.address, does, company, tells)
        os.close(tells)
        link = accept_shared(listener, credentials(1), 0, within(100))
    waiting = Waiting(within(100))
    payload = bytearray(SLOT * SLOTS * 10)
    try:
        with ThreadPoolExecutor(1) as thread:
            transfer = thread.submit(link.receive_into if does == "sends" else link.send, TAG, payload, waiting)
            assert os.read(hears, 1) == b".", "it never came to the middle of the transfer"
            assert waiting.begun.wait(60)
            wait_until(lambda: sleeps(worker))
            os.kill(worker, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(PeerLost, match=r"worker 0 \(this host\) is gone"):
                transfer.result(60)
            assert time.monotonic() - killed < 50
        if company == "with a loader":
            os.killpg(worker, 0)  # raises if the loader is not there to keep anything open
    finally:
        os.killpg(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.close(hears)


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

"""What every Link promises, for each implementation."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from children import in_child
from memory_link import memory_link_pair
from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, LeaseExpired, PeerLost
from quorate.core.generation import GenerationId
from quorate.wire.link import Link, Tag
from wire.pairs import GENERATION, Waiting, shared_pair, tcp_pair, tls_pair, within

TAG = Tag(GENERATION, step=5, channel=1, index=2)
LARGE = 32 * 2**20  # More than a socket's buffers hold, or shared memory.

Links = tuple[Link, Link]

PAIRS: dict[str, Callable[[], Links]] = {
    "memory": lambda: memory_link_pair(("worker 0", "worker 1")),
    "tcp": tcp_pair,
    "tls": tls_pair,
    "shared": shared_pair,
}


@pytest.fixture(params=PAIRS)
def links(request: pytest.FixtureRequest) -> Iterator[Links]:
    pair = PAIRS[request.param]()
    yield pair
    for link in pair:
        link.close()


@pytest.mark.parametrize("payload", [b"abc", bytearray(b"abc"), memoryview(b"abc"), b"", b"x" * 100_000])
def test_a_payload_arrives_as_it_was_sent(links: Links, threads: ThreadPoolExecutor, payload: Buffer) -> None:
    sending = threads.submit(links[0].send, TAG, payload, within(100))
    assert links[1].receive(TAG, within(100)) == payload
    sending.result()


def test_payloads_of_several_dimensions_travel_as_bytes(links: Links, threads: ThreadPoolExecutor) -> None:
    square = memoryview(bytes(range(32))).cast("Q", (2, 2))
    sending = threads.submit(links[0].send, TAG, square, within(100))
    place = bytearray(32)
    links[1].receive_into(TAG, memoryview(place).cast("Q", (2, 2)), within(100))
    sending.result()
    assert place == bytes(range(32))


def test_frames_arrive_in_order_in_both_directions(links: Links, threads: ThreadPoolExecutor) -> None:
    tags = [replace(TAG, index=index) for index in range(20)]

    def send_all(link: Link) -> None:
        for tag in tags:
            link.send(tag, str(tag.index).encode(), within(100))

    sending = [threads.submit(send_all, link) for link in links]
    for link in links:
        assert [link.receive(tag, within(100)) for tag in tags] == [str(tag.index).encode() for tag in tags]
    for thread in sending:
        thread.result()


def test_a_buffer_is_filled_in_place_around_nothing_else(links: Links, threads: ThreadPoolExecutor) -> None:
    place = bytearray(b"........")
    sending = threads.submit(links[0].send, TAG, b"abcd", within(100))
    links[1].receive_into(TAG, memoryview(place)[2:6], within(100))
    sending.result()
    assert place == b"..abcd.."


def test_large_payloads_cross_at_the_same_time(links: Links, threads: ThreadPoolExecutor) -> None:
    payloads = [bytes([side]) * LARGE for side in (1, 2)]
    sending = [
        threads.submit(link.send, TAG, payload, within(100)) for link, payload in zip(links, payloads, strict=True)
    ]
    receiving = [threads.submit(link.receive, TAG, within(100)) for link in links]
    assert receiving[0].result() == payloads[1]
    assert receiving[1].result() == payloads[0]
    for thread in sending:
        thread.result()


@pytest.mark.parametrize(
    "other",
    [
        replace(TAG, generation=GenerationId(3, 6)),
        replace(TAG, generation=GenerationId(2, 7)),
        replace(TAG, step=4),
        replace(TAG, channel=9),
        replace(TAG, index=3),
    ],
)
def test_a_frame_about_something_else_is_refused_with_both_tags(
    links: Links, threads: ThreadPoolExecutor, other: Tag
) -> None:
    sending = threads.submit(links[0].send, other, b"late", within(100))
    with pytest.raises(FrameError) as refusal:
        links[1].receive(TAG, within(100))
    assert str(other) in str(refusal.value)
    assert str(TAG) in str(refusal.value)
    assert "worker 0" in str(refusal.value)
    assert_closed(links[1])
    assert sending.exception() is None or isinstance(sending.exception(), PeerLost)


@pytest.mark.parametrize("place", [bytearray(3), bytearray(5), bytearray()])
def test_a_payload_of_another_length_is_refused_with_both_lengths(
    links: Links, threads: ThreadPoolExecutor, place: bytearray
) -> None:
    sending = threads.submit(links[0].send, TAG, b"abcd", within(100))
    with pytest.raises(FrameError, match=rf"sent 4 bytes .* expected were {len(place)} bytes"):
        links[1].receive_into(TAG, place, within(100))
    assert not any(place)
    assert_closed(links[1])
    assert sending.exception() is None or isinstance(sending.exception(), PeerLost)


def test_a_payload_beyond_the_limit_is_refused_with_both_lengths(
    links: Links, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.wire.link.RECEIVE_LIMIT", 3)
    sending = threads.submit(links[0].send, TAG, b"abcd", within(100))
    with pytest.raises(FrameError, match=r"sent 4 bytes .* at most 3 bytes"):
        links[1].receive(TAG, within(100))
    assert sending.exception() is None or isinstance(sending.exception(), PeerLost)


@pytest.mark.parametrize("closing", [0, 1])
def test_closing_ends_a_receive_on_either_side(links: Links, threads: ThreadPoolExecutor, closing: int) -> None:
    waiting = Waiting(within(100))
    receiving = threads.submit(links[0].receive, TAG, waiting)
    assert waiting.begun.wait(60)
    links[closing].close()
    detail = "closed on this side" if closing == 0 else "it closed"
    with pytest.raises(PeerLost, match=f"worker 1.* is gone: .*{detail}"):
        receiving.result(60)


@pytest.mark.parametrize("closing", [0, 1])
def test_closing_ends_a_send_on_either_side(links: Links, threads: ThreadPoolExecutor, closing: int) -> None:
    waiting = Waiting(within(100))
    sending = threads.submit(links[0].send, TAG, bytes(LARGE), waiting)
    assert waiting.begun.wait(60)
    links[closing].close()
    with pytest.raises(PeerLost, match="worker 1"):
        sending.result(60)


def test_a_closed_link_stays_closed(links: Links) -> None:
    links[0].close()
    links[0].close()
    assert_closed(links[0])
    with pytest.raises(PeerLost, match="worker 0"):
        links[1].receive(TAG, within(100))
    assert_closed(links[1])


def test_a_wait_past_its_deadline_loses_the_peer_and_says_how_long_it_was(links: Links) -> None:
    with pytest.raises(PeerLost, match=r"worker 0.* is gone: no frame for (0\.[1-9]|[1-9]\d*\.\d) s"):
        links[1].receive(TAG, within(0.1))
    assert_closed(links[1])


def test_a_send_past_its_deadline_loses_the_peer(links: Links) -> None:
    with pytest.raises(PeerLost, match=r"worker 1.* is gone: no frame for"):
        links[0].send(TAG, bytes(LARGE), within(0.1))


def test_a_deadline_that_moves_while_one_waits_is_asked_again(links: Links, threads: ThreadPoolExecutor) -> None:
    asked = threading.Semaphore(0)

    def renewed() -> float:
        asked.release()
        return 0.01

    receiving = threads.submit(links[1].receive, TAG, renewed)
    for _ in range(4):
        assert asked.acquire(timeout=60)
    links[0].send(TAG, b"at last", within(100))
    assert receiving.result() == b"at last"


def test_an_error_of_the_deadline_passes_through(links: Links) -> None:
    def expired() -> float:
        raise LeaseExpired("no word from the coordinator for 4.0 s")

    with pytest.raises(LeaseExpired, match=r"4\.0 s"):
        links[1].receive(TAG, expired)
    assert_closed(links[1])


@pytest.mark.parametrize("links", [name for name in PAIRS if name != "memory"], indirect=True)
def test_in_a_forked_child_it_is_closed_and_leaves_the_parents_alone(links: Links) -> None:
    def work() -> None:
        with pytest.raises(PeerLost, match="closed on this side"):
            links[0].send(TAG, b"", within(100))
        links[0].close()

    assert in_child(work) == 0
    links[0].send(TAG, b"still here", within(100))
    assert links[1].receive(TAG, within(100)) == b"still here"


def assert_closed(link: Link) -> None:
    with pytest.raises(PeerLost):
        link.send(TAG, b"", within(100))
    with pytest.raises(PeerLost):
        link.receive(TAG, within(100))

"""What an encrypted connection does with bytes: how many it holds at a time, and how long it waits for the rest."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from quorate.core.errors import PeerLost
from quorate.wire.certificates import COORDINATOR, Authority
from quorate.wire.link import Tag
from quorate.wire.tls import READ_AT_ONCE, RECORD, TlsSession, refusal_at
from wire.pairs import GENERATION, tls_pair, within

TAG = Tag(GENERATION, step=5, channel=1, index=2)


def agreed() -> tuple[TlsSession, TlsSession]:
    """The session of a caller and that of the listener, once they have agreed; the word of welcome is read."""
    authority = Authority.mint("digits-0001")
    caller = TlsSession(authority.issue(0), "worker 1", calls=1)
    listener = TlsSession(authority.issue(1), "a caller (127.0.0.1:1)")
    while not listener.is_complete:
        listener.feed(caller.shake_hands())
        caller.feed(listener.shake_hands())
    assert caller.decrypt_into(memoryview(bytearray(1))) == 1
    return caller, listener


def test_a_large_frame_is_encrypted_piece_by_piece_and_comes_out_whole() -> None:
    caller, listener = agreed()
    parts = [b"header", bytes(range(256)) * 2**12 + b"odd", b"", b"end"]
    pieces = list(caller.encrypt([memoryview(part) for part in parts]))
    assert len(pieces) == 5
    # Besides what it carries, a record has a few bytes, and those of a piece are as large as can be.
    assert max(map(len, pieces)) < READ_AT_ONCE + RECORD
    decrypted, place = bytearray(), memoryview(bytearray(READ_AT_ONCE))
    for piece in pieces:
        listener.feed(piece)
        while taken := listener.decrypt_into(place):
            decrypted += place[:taken]
    assert decrypted == b"".join(parts)


def test_a_peer_that_stalls_within_a_record_is_lost_when_the_deadline_is_over() -> None:
    link, accepted = tls_pair()
    with closing(link), closing(accepted):
        assert link._tls is not None
        (record,) = link._tls.encrypt([memoryview(bytes(100))])
        link._socket.sendall(record[: len(record) // 2])
        with pytest.raises(PeerLost, match="no frame for"):
            accepted.receive(TAG, within(0.2))


def test_a_stranger_in_the_coordinators_place_that_never_ends_its_words_is_not_listened_to_for_ever() -> None:
    hung_up = threading.Event()

    def say_little(door: socket.socket) -> None:
        connection, _ = door.accept()
        with connection, suppress(ConnectionError):
            connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KB begins
            while True:
                connection.sendall(b"\x02")
                time.sleep(0.01)
        hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as threads:
        threads.submit(say_little, door)
        address = "{}:{}".format(*door.getsockname())
        assert refusal_at(address, Authority.mint("digits-0001").issue(0), COORDINATOR, seconds=0.5) is None
        assert hung_up.wait(60)

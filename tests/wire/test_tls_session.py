"""What an encrypted connection does with bytes, and how long it waits for the rest."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from quorate.core.errors import PeerLost
from quorate.wire.certificates import Authority
from quorate.wire.handshake import COORDINATOR
from quorate.wire.link import Tag
from quorate.wire.tls import refusal_at
from wire.pairs import GENERATION, tls_pair, within

TAG = Tag(GENERATION, step=5, channel=1, index=2)


def test_a_large_frame_comes_out_whole_while_another_goes_the_other_way() -> None:
    link, accepted = tls_pair()
    content = bytes(range(256)) * 2**14 + b"odd"
    with closing(link), closing(accepted), ThreadPoolExecutor(2) as threads:
        sending = [threads.submit(one.send, TAG, content, within(100)) for one in (link, accepted)]
        assert accepted.receive(TAG, within(100)) == content
        place = bytearray(len(content))
        link.receive_into(TAG, place, within(100))
        assert place == content
        assert [one.result(100) for one in sending] == [None, None]


def test_a_peer_that_stalls_within_a_record_is_lost_when_the_deadline_is_over() -> None:
    link, accepted = tls_pair()
    with closing(link), closing(accepted):
        socket.socket.send(link._socket, b"\x17\x03\x03\x40\x00" + bytes(100))  # a record of 16 KB begins
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
        assert refusal_at(address, Authority("digits-0001").issue(0), COORDINATOR, seconds=0.5) is None
        assert hung_up.wait(60)

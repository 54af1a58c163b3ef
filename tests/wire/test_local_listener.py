"""Workers of one host that find each other."""

import threading

import pytest

from quorate.core.errors import PeerLost
from quorate.core.generation import GenerationId
from quorate.wire.handshake import Credentials
from quorate.wire.reception import connect_local
from wire.pairs import listening_locally

GENERATION = GenerationId(1, 1)


def test_of_several_that_are_awaited_the_one_is_named_that_did_not_come() -> None:
    has_come = threading.Event()
    with listening_locally() as listener:

        def come() -> None:
            with connect_local(listener.address, Credentials("token", 1, GENERATION), 0, lambda: 30.0):
                has_come.wait(60)

        visitor = threading.Thread(target=come)
        visitor.start()
        try:
            with pytest.raises(PeerLost, match="worker 2 is gone: it did not connect within") as lost:
                for worker, sock in listener.accept(
                    Credentials("token", 0, GENERATION), {1, 2}, lambda: 0.0 if has_come.is_set() else 30.0
                ):
                    assert worker == 1
                    sock.close()
                    has_come.set()
            assert lost.value.worker == 2
        finally:
            has_come.set()
            visitor.join()

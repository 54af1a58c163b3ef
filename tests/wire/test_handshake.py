from contextlib import suppress

import pytest

from quorate.core.errors import FrameError
from quorate.core.generation import GenerationId
from quorate.wire.handshake import Credentials, Handshake, introduce, receive_introduction
from wire.pairs import credentials


class Talk:
    """Two handshakes that face each other, and every byte that passed between them."""

    def __init__(self, connects: Handshake, listens: Handshake) -> None:
        self.said = b""
        self.errors: list[FrameError | None] = [None, None]
        self._sides = [connects, listens]
        self._inboxes = [b"", b""]
        self._expects = [-1, -1]
        while any([self._advance(0), self._advance(1)]):
            pass

    def _advance(self, side: int) -> bool:
        expected = self._expects[side]
        if expected > len(self._inboxes[side]):
            return False
        try:
            if expected < 0:
                turn = next(self._sides[side])
            else:
                message, self._inboxes[side] = self._inboxes[side][:expected], self._inboxes[side][expected:]
                turn = self._sides[side].send(message)
        except StopIteration:
            self._expects[side] = 10**9
            return False
        except FrameError as error:
            self.errors[side] = error
            self._expects[side] = 10**9
            return False
        self.said += turn.send
        self._inboxes[1 - side] += turn.send
        self._expects[side] = turn.expect
        return True


def talk(connects: Credentials, expects: int, listens: Credentials, awaits: int) -> Talk:
    return Talk(introduce(connects, expects), receive_introduction(listens, {awaits}))


def test_two_that_belong_together_agree_and_the_token_stays_unsaid() -> None:
    done = talk(credentials(0, "a-long-secret"), 1, credentials(1, "a-long-secret"), 0)
    assert done.errors == [None, None]
    assert b"a-long-secret" not in done.said
    assert len(done.said) > 100


def test_another_token_is_refused_on_both_sides() -> None:
    done = talk(credentials(0, "ours"), 1, credentials(1, "theirs"), 0)
    assert "worker 1 refused the proof of the job token that worker 0 gave" in str(done.errors[0])
    # Not a part of either proof is told: a log is read by more people than hold the token.
    assert str(done.errors[1]) == (
        "worker 0 gave a wrong proof of the job token: it holds another token, so it belongs to another run"
    )
    assert "ours" not in str(done.errors) and "theirs" not in str(done.errors)


def test_another_generation_is_told_on_both_sides_with_both() -> None:
    old, new = GenerationId(1, 2), GenerationId(1, 3)
    done = talk(credentials(0, generation=old), 1, credentials(1, generation=new), 0)
    assert str(done.errors[0]) == "worker 1 is in generation 1.3, worker 0 in 1.2"
    assert str(done.errors[1]) == "worker 0 is in generation 1.2, worker 1 in 1.3"


def test_another_worker_is_told_on_both_sides_with_both() -> None:
    done = talk(credentials(0), 1, credentials(2), 0)
    assert str(done.errors[0]) == "worker 2 answered where worker 0 expected worker 1"
    assert str(done.errors[1]) == "worker 0 expected worker 1 and met worker 2"


def test_a_listener_proves_nothing_to_who_has_not_proven_itself() -> None:
    handshake = receive_introduction(credentials(1), {0})
    next(handshake)
    connects = introduce(credentials(0), 1)
    proof_size = handshake.send(next(connects).send).expect
    assert handshake.send(bytes(proof_size)).send.strip(b"\0") == b""


def test_a_proof_is_good_for_one_connection_only() -> None:
    first = introduce(credentials(0), 1)
    hello = next(first).send
    listener = receive_introduction(credentials(1), {0})
    next(listener)
    proof = first.send(listener.send(hello).send).send
    replayed = receive_introduction(credentials(1), {0})
    next(replayed)
    replayed.send(hello)
    replayed.send(proof)
    with pytest.raises(FrameError, match="wrong proof"):
        next(replayed)


def test_a_connection_that_ends_at_itself_is_noticed() -> None:
    handshake = introduce(credentials(0), 0)
    hello = next(handshake).send
    with pytest.raises(FrameError, match=r"role 1 where listens \(2\) was expected"):
        handshake.send(hello)


def test_an_impostor_of_the_listener_is_noticed() -> None:
    handshake = introduce(credentials(0), 1)
    impostor = receive_introduction(credentials(1, "guess"), {0})
    next(impostor)
    proof = handshake.send(impostor.send(next(handshake).send).send)
    with pytest.raises(FrameError, match="wrong proof"):
        handshake.send(b"\x01" + bytes(proof.expect - 1))
    with suppress(FrameError):
        impostor.close()


def test_garbage_is_not_a_worker() -> None:
    handshake = receive_introduction(credentials(1), {0})
    size = next(handshake).expect
    with pytest.raises(FrameError, match="stranger sent b'GET '"):
        handshake.send(b"GET / HTTP/1.1".ljust(size))


def test_a_token_is_never_printed() -> None:
    assert "secret" not in repr(credentials(0))

"""Links that are encrypted: who is let in, who is refused and how that is told, and what can be overheard."""

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError, PeerLost
from quorate.wire.certificates import Authority
from quorate.wire.handshake import Credentials, Identity
from quorate.wire.link import Tag
from quorate.wire.tcp import Listener, TcpLink, connect
from quorate.wire.tls import TlsSocket
from wire.pairs import GENERATION, credentials, listening, open_descriptors, tls_pair, wait_until, within

TAG = Tag(GENERATION, step=5, channel=1, index=2)
AGO = datetime.timedelta(hours=-1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("digits-0001")


def accept(threads: ThreadPoolExecutor, listener: Listener, authority: Authority, peer: int = 0) -> Future[TcpLink]:
    return threads.submit(listener.accept, credentials(1, authority=authority), peer, within(100))


def assert_right_one_is_let_in(accepting: Future[TcpLink], listener: Listener, authority: Authority) -> None:
    """After whoever was refused: the wait was not disturbed."""
    link = connect(listener.address, credentials(0, authority=authority), 1, within(100))
    accepted = accepting.result(100)
    link.send(TAG, b"hello", within(100))
    assert accepted.receive(TAG, within(100)) == b"hello"
    assert link.is_encrypted
    link.close()
    accepted.close()


def told_by_the_listener(listener: Listener, own: Credentials, caller: Credentials) -> tuple[str, str]:
    """What a caller, and then the listener, say of a link that does not come about."""
    with ThreadPoolExecutor(1) as threads:
        refused = threading.Event()
        accepting = threads.submit(listener.accept, own, 0, lambda: 0.0 if refused.is_set() else 0.05)
        with pytest.raises(FrameError) as at_caller:
            connect(listener.address, caller, 1, within(100))
        # Its deadline is asked again only once it has done with whom it refused.
        refused.set()
        with pytest.raises(FrameError) as at_listener:
            accepting.result(100)
    return str(at_caller.value), str(at_listener.value)


REFUSED = r"worker 1 \(.*\) refused the certificate of worker 0"


def forged(job: Authority, certificate: Identity) -> Credentials:
    """Its own authority is that of the job: a forger would say so."""
    return replace(credentials(0), identity=replace(certificate, authority=job.certificate))


class TestRefusals:
    @pytest.mark.parametrize(
        ("caller", "called", "error", "words"),
        [
            pytest.param(
                lambda job: forged(job, Authority("digits-0001").issue(0)),
                *(1, FrameError, rf"{REFUSED}: another authority has made it"),
                id="made by another authority",
            ),
            pytest.param(
                lambda job: forged(job, job.issue(0, lifetime=AGO)),
                *(1, FrameError, rf"{REFUSED}: it has expired"),
                id="expired",
            ),
            pytest.param(
                lambda _: credentials(0, authority=Authority("digits-0002")),
                *(1, FrameError, r"worker 0 refused the certificate of worker 1 \(.*another authority"),
                id="finds a foreign listener",
            ),
            pytest.param(
                lambda job: credentials(0, authority=job),
                *(2, FrameError, r"certificate of worker 2 .* that of another process"),
                id="another listens where one is called",
            ),
            # It holds the job's token and a certificate of the job: just not that one.
            pytest.param(
                lambda job: replace(credentials(0), identity=job.issue(7)),
                *(1, PeerLost, "it closed the connection"),
                id="introduces itself as another",
            ),
            pytest.param(
                lambda job: credentials(0, token="another", authority=job),
                *(1, FrameError, "refused the proof of the job token"),
                id="a foreign token within",
            ),
            pytest.param(
                lambda _: credentials(0),
                *(1, FrameError, "the other end encrypts, and this one does not"),
                id="does not encrypt",
            ),
        ],
    )
    def test_a_caller_who_does_not_fit_is_refused_and_disturbs_nobody(
        self,
        threads: ThreadPoolExecutor,
        authority: Authority,
        caller: Callable[[Authority], Credentials],
        called: int,
        error: type[Exception],
        words: str,
    ) -> None:
        with listening() as listener:
            accepting = accept(threads, listener, authority)
            with pytest.raises(error, match=words):
                connect(listener.address, caller(authority), called, within(100))
            assert_right_one_is_let_in(accepting, listener, authority)

    def test_one_who_encrypts_finds_a_listener_that_does_not(
        self, threads: ThreadPoolExecutor, authority: Authority
    ) -> None:
        with listening() as listener:
            refused = threading.Event()
            plain = threads.submit(listener.accept, credentials(1), 0, lambda: 0.0 if refused.is_set() else 0.05)
            door = socket.create_connection(split_address(listener.address))
            caller = TlsSocket.over(door, authority.issue(0), "worker 1", calls=1)
            with caller, suppress(ConnectionError, FrameError):
                caller.shake_hands()
            refused.set()
            with pytest.raises(FrameError, match="the other end encrypts, and this one does not"):
                plain.result(100)

    @pytest.mark.parametrize(
        ("caller", "words"),
        [
            (lambda job: replace(Authority("digits-0001").issue(0), authority=job.certificate), "another auth"),
            (lambda job: job.issue(0, lifetime=AGO), "it has expired"),
        ],
    )
    def test_the_listener_names_whom_it_refused(self, authority: Authority, caller: object, words: str) -> None:
        assert callable(caller)
        identity: Identity = caller(authority)
        with listening() as listener:
            own = credentials(1, authority=authority)
            theirs, ours = told_by_the_listener(listener, own, replace(credentials(0), identity=identity))
        assert "refused the certificate of worker 0" in theirs
        assert "worker 1 refused the certificate of a caller (127.0.0.1:" in ours
        assert f", as worker 0): {words}" in ours

    def test_who_shows_none_is_named_by_its_address(self, threads: ThreadPoolExecutor, authority: Authority) -> None:
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(cadata=authority.certificate)
        with listening() as listener:
            refused = threading.Event()
            own = credentials(1, authority=authority)
            accepting = threads.submit(listener.accept, own, 0, lambda: 0.0 if refused.is_set() else 0.05)
            raw = socket.create_connection(split_address(listener.address))
            connection = bare.wrap_socket(raw, server_hostname="worker-0.worker-1.quorate")
            with connection, pytest.raises(ssl.SSLError, match="certificate required"):
                connection.recv(1)
            refused.set()
            with pytest.raises(
                FrameError, match=r"worker 1 refused a caller \(127\.0\.0\.1:\d+, as worker 0\): it showed no"
            ):
                accepting.result(100)


def test_a_link_shows_nothing_of_what_it_carries(threads: ThreadPoolExecutor, authority: Authority) -> None:
    """A tap between the two sees every byte."""
    secret = b"weights of the model " * 5000
    for own, is_seen in ((authority, False), (None, True)):
        with listening() as listener, _tap(listener.address) as (address, seen):
            accepting = threads.submit(listener.accept, credentials(1, authority=own), 0, within(100))
            link = connect(address, credentials(0, authority=own), 1, within(100))
            accepted = accepting.result()
            link.send(TAG, secret, within(100))
            assert accepted.receive(TAG, within(100)) == secret
            link.close()
            accepted.close()
            wait_until(lambda seen=seen: len(seen) > len(secret))  # type: ignore[misc]
        assert (b"of the model" in bytes(seen)) is is_seen
        assert (b"QRTE" in bytes(seen)) is is_seen


@contextmanager
def _tap(address: str) -> Iterator[tuple[str, bytearray]]:
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(3) as threads:

        def pass_on(here: socket.socket, there: socket.socket) -> None:
            with here, there:
                while content := here.recv(2**16):
                    seen.extend(content)
                    there.sendall(content)
                there.shutdown(socket.SHUT_RDWR)

        def take_in() -> None:
            here, _ = door.accept()
            there = socket.create_connection(split_address(address))
            threads.submit(pass_on, here, there)
            threads.submit(pass_on, there.dup(), here.dup())

        threads.submit(take_in)
        yield "{}:{}".format(*door.getsockname()), seen


def test_a_damaged_record_is_refused(threads: ThreadPoolExecutor) -> None:
    link, accepted = tls_pair()
    socket.socket.send(link._socket, b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(FrameError, match=r"the encryption between worker 1 and a caller \(.*, as worker 0\)"):
        accepted.receive(TAG, within(100))
    link.close()


def test_keys_leave_no_descriptor_behind() -> None:
    before = open_descriptors()
    for link in tls_pair():
        link.close()
    assert open_descriptors() <= before
    assert not any("memfd:certificate" in one for one in open_descriptors())

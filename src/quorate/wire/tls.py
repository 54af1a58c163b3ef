"""TLS 1.3 between two processes of a job: each shows the certificate that the job's authority gave it.

A session turns bytes into bytes and touches no socket: those who wait, with deadlines, among strangers, or for a peer
that falls silent, go on doing so with the plain socket.
"""

import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError
from quorate.core.generation import file_name_of
from quorate.wire.certificates import Identity, host_of, in_words, process_in

RECORD = 2**14 + 2**8 + 5
"""The most bytes of a record: so much of the next one may already have been read from the socket."""

READ_AT_ONCE = 256 * 2**10
"""Bytes that are read before they are decrypted, or encrypted before they are sent: a call for each record costs more
than its encryption."""

WELCOME = b"\x01"
"""The listener's first word: TLS tells a caller that its certificate is refused only when it reads something."""

_FOREIGN = "another authority has made it, so the two belong to different runs"
_OUTDATED = "it has expired, or is not valid yet: compare the clocks of the hosts"
_REFUSED_HERE = {9: _OUTDATED, 10: _OUTDATED, 62: "it is that of another process"}
"""By the codes of OpenSSL's verification."""
_REFUSED_THERE = {
    _FOREIGN: ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR"),
    _OUTDATED: ("SSLV3_ALERT_CERTIFICATE_EXPIRED",),
    "there is none": ("TLSV13_ALERT_CERTIFICATE_REQUIRED",),
    "it does not fit": ("SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_CERTIFICATE_UNKNOWN"),
}
"""By what the other end says."""
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG")


class TlsSession:
    """One end of an encrypted connection. One thread may encrypt while another decrypts.

    `peer` is who is at the other end, for people.
    """

    def __init__(self, identity: Identity, peer: str, calls: int | str | None = None) -> None:
        """`calls`: the worker, or whoever else is called by name; None for the end that listens."""
        self.peer = peer
        self.is_complete = False
        self._own = in_words(identity.name)
        self._is_server = calls is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # Who calls whom, in one name: the certificate of whoever is called is good for any caller.
        name = file_name_of(calls) if isinstance(calls, int) else calls
        called = None if name is None else f"{identity.name}.{host_of(name)}"
        self._session = _context(identity, is_server=self._is_server).wrap_bio(
            self._incoming, self._outgoing, server_side=self._is_server, server_hostname=called
        )
        # OpenSSL's sessions are not made for two threads, and one may send while another receives.
        self._lock = threading.Lock()

    def shake_hands(self) -> bytes:
        """Go on with the handshake, as far as what was fed allows; what there is to send now. FrameError where the
        other end is not of this job: `last_words` tells it why."""
        with self._lock:
            try:
                self._session.do_handshake()
                self.is_complete = True
                if self._is_server:
                    self._session.write(WELCOME)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise self._refusal(error) from None
            return self._outgoing.read()

    def last_words(self) -> bytes:
        """What is to be sent before the connection is ended: why the other end was refused."""
        with self._lock:
            return self._outgoing.read()

    @property
    def certified(self) -> str:
        """Who the other end is, by its certificate: worker-1, say."""
        return next((name for name in map(process_in, _names_in(self._session.getpeercert())) if name), "")

    def encrypt(self, parts: Sequence[memoryview]) -> Iterator[bytes]:
        """What has to be sent for these parts, piece by piece."""
        pending = 0
        for part in parts:
            while part.nbytes:
                # OpenSSL encrypts all that it is given: a whole frame would lie in memory twice before a byte of it is
                # sent, and whoever receives meanwhile would wait for the lock.
                with self._lock:
                    written = self._session.write(part[: READ_AT_ONCE - pending])
                part, pending = part[written:], pending + written
                if pending == READ_AT_ONCE:
                    yield self.last_words()
                    pending = 0
        if pending:
            yield self.last_words()

    def decrypt_into(self, buffer: memoryview) -> int | None:
        """How many bytes were there, of those that were fed; None if more has to be fed first, 0 at the end."""
        taken = 0
        with self._lock:
            try:
                while taken < buffer.nbytes:
                    record: Any = self._session.read(buffer.nbytes - taken, buffer[taken:])
                    if not record:  # of what was put into a buffer, the length
                        break
                    taken += int(record)
            except ssl.SSLWantReadError:
                return taken or None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                pass
            except ssl.SSLError as error:
                raise self._refusal(error) from None
        return taken

    def feed(self, received: memoryview | bytes) -> None:
        """What came from the other end."""
        with self._lock:
            self._incoming.write(received)

    def _refusal(self, error: ssl.SSLError) -> FrameError:
        """An error of OpenSSL's in words, with who has refused whom."""
        caller = getattr(self._session, "called_as", "").partition(".")[0]
        peer = f"{self.peer[:-1]}, as {in_words(caller)})" if caller else self.peer
        return FrameError(explain(error, self._own, peer, is_agreed=self.is_complete))


def refusal_at(address: str, identity: Identity, calls: str, seconds: float) -> FrameError | None:
    """Why whoever listens there and this process refuse each other, if they do: gRPC just says that nobody answers.

    None where that is not known after so many seconds."""
    session = TlsSession(identity, f"the {calls} at {address}", calls)
    end = time.monotonic() + seconds
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            while (remaining := end - time.monotonic()) > 0:
                connection.settimeout(remaining)
                if words := session.shake_hands():
                    connection.sendall(words)
                if not (received := connection.recv(RECORD)):
                    break
                session.feed(received)
                if session.is_complete and session.decrypt_into(memoryview(bytearray(1))) is not None:
                    break
    except FrameError as refusal:
        return refusal
    except OSError:
        pass
    return None


def explain(error: ssl.SSLError, own: str, peer: str, *, is_agreed: bool = False) -> str:
    """What OpenSSL makes of a certificate, or of the lack of one, as people say it."""
    reason = error.reason or ""
    refused = next((why for why, reasons in _REFUSED_THERE.items() if reason in reasons), None)
    if isinstance(error, ssl.SSLCertVerificationError):
        why = _REFUSED_HERE.get(error.verify_code, f"{_FOREIGN} ({error.verify_message})")
        return f"{own} refused the certificate of {peer}: {why}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"{own} refused {peer}: it showed no certificate"
    if refused is not None:
        return f"{peer} refused the certificate of {own}: {refused}"
    if reason in _PLAIN and not is_agreed:
        return f"{peer} does not encrypt, and {own} does: `encrypt` differs, or it is no worker"
    return f"the encryption between {own} and {peer} failed: {reason or error}"


def _names_in(certificate: Mapping[str, Any] | None) -> list[str]:
    return [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]


class _Listening(ssl.SSLObject):
    """Remembers by what name it was called."""

    called_as = ""


def _note_name(session: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
    if isinstance(session, _Listening):
        session.called_as = name or ""


@functools.lru_cache(maxsize=8)
def _context(identity: Identity, *, is_server: bool) -> ssl.SSLContext:
    """What all sessions of a process share, on that side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority)
    _load_chain(context, identity)
    if is_server:
        context.num_tickets = 0  # connections are few and long: nobody resumes a session
        context.sslobject_class = _Listening
        context.sni_callback = _note_name
    return context


def _load_chain(context: ssl.SSLContext, identity: Identity) -> None:
    """Python takes a key from a file only: this one has no name, lies in memory, and is gone at once."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write((identity.certificate + identity.key).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)

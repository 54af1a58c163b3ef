"""TLS 1.3 between two processes of a job: each shows the certificate that the job's authority gave it.

Imported by jobs that encrypt alone.
"""

import functools
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError
from quorate.core.generation import file_name_of
from quorate.wire.handshake import TO_WHO_DOES_NOT_ENCRYPT, WELCOME, Identity, host_of, in_words, process_in

Result = TypeVar("Result")

AT_ONCE = 256 * 2**10
"""Bytes that OpenSSL is given at once: it encrypts all of them, and whoever receives meanwhile waits for that."""

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


class TlsSocket(ssl.SSLSocket):
    """An encrypted connection, used as a plain socket that does not wait. One thread may send while another receives.

    What does not decrypt is a FrameError.
    """

    # Who is at the other end, for people; and who is here.
    peer = own = ""
    # By what name this end was called, if it was.
    called_as = ""
    is_complete = False
    # OpenSSL is not made for two threads.
    _turn: threading.Lock

    @classmethod
    def over(cls, sock: socket.socket, identity: Identity, peer: str, calls: int | str | None = None) -> "TlsSocket":
        """The connection of a plain socket from now on. `calls`: the worker, or whoever else is called by name; None
        for the end that listens."""
        # Who calls whom, in one name: the certificate of whoever is called is good for any caller.
        name = file_name_of(calls) if isinstance(calls, int) else calls
        called = None if name is None else f"{identity.name}.{host_of(name)}"
        context = _context(identity, is_server=calls is None)
        with sock:  # it is empty once it was wrapped
            encrypted = context.wrap_socket(
                sock, server_side=calls is None, server_hostname=called, do_handshake_on_connect=False
            )
        assert isinstance(encrypted, cls), "the context makes these"
        encrypted.peer, encrypted.own, encrypted._turn = peer, in_words(identity.name), threading.Lock()
        return encrypted

    def shake_hands(self) -> int:
        """Go on with the handshake as far as that goes without waiting: the event to wait for, 0 once it is complete.
        FrameError where the other end is not of this job, which it is told."""
        if self.is_complete:
            return 0
        try:
            with self._turn:
                self.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLEOFError:
            raise ConnectionError("it closed the connection while the two agreed on how to encrypt") from None
        except ssl.SSLError as error:
            if self.server_side and error.reason in _PLAIN:
                # OpenSSL has no word for whoever does not speak TLS, who would take silence for a crowd.
                with suppress(OSError):
                    socket.socket.send(self, TO_WHO_DOES_NOT_ENCRYPT)
            raise self._refusal(error) from None
        self.is_complete = True
        if self.server_side:
            self.send(WELCOME)
        return 0

    def certified(self) -> str:
        """Who the other end is, by its certificate: worker-1, say."""
        return next((name for name in map(process_in, _names_in(self.getpeercert())) if name), "")

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._attempt(lambda: ssl.SSLSocket.recv(self, buflen, flags))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return self._attempt(lambda: ssl.SSLSocket.recv_into(self, buffer, nbytes, flags))

    def send(self, data: Any, flags: int = 0) -> int:
        return self._attempt(lambda: ssl.SSLSocket.send(self, data, flags))

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]  # which refuses
        """Send the beginning of the first of these that has any bytes."""
        return next((self.send(memoryview(each)[:AT_ONCE]) for each in buffers if len(each)), 0)

    def shutdown(self, how: int) -> None:
        # Without its own, which would have a thread that is about to send send as it is what it was given.
        socket.socket.shutdown(self, how)

    def _attempt(self, use: Callable[[], Result]) -> Result:
        try:
            with self._turn:
                return use()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise ConnectionError("it closed the connection") from None
        except ssl.SSLError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: ssl.SSLError) -> FrameError:
        """An error of OpenSSL's in words, with who has refused whom."""
        caller = self.called_as.partition(".")[0]
        peer = f"{self.peer[:-1]}, as {in_words(caller)})" if caller else self.peer
        return FrameError(explain(error, self.own, peer, is_agreed=self.is_complete))


def refusal_at(address: str, identity: Identity, calls: str, seconds: float) -> FrameError | None:
    """Why whoever listens there and this process refuse each other, if they do: gRPC just says that nobody answers.

    None where that is not known after so many seconds."""
    try:
        plain = socket.create_connection(split_address(address), seconds)
        with TlsSocket.over(plain, identity, f"the {calls} at {address}", calls) as connection:
            connection.shake_hands()
            connection.recv(1)  # only now a caller is told that its certificate is refused
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


def _note_name(sock: Any, name: str | None, _: ssl.SSLContext) -> None:
    sock.called_as = name or ""


@functools.lru_cache(maxsize=8)
def _context(identity: Identity, *, is_server: bool) -> ssl.SSLContext:
    """What all sessions of a process share, on that side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority)
    _load_chain(context, identity)
    context.sslsocket_class = TlsSocket
    if is_server:
        context.num_tickets = 0  # connections are few and long: nobody resumes a session
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

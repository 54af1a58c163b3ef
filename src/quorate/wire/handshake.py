"""How two workers that connect prove that they belong together.

Each tells who it is, whom it expects and a fresh nonce; then each proves that it holds the job's token by an HMAC over
both tellings. The token never crosses the wire, and a proof is good for one connection, one direction only. The
messages are fixed structures: nothing that comes from a socket is ever executed or unpickled.

Both sides are written as generators of turns, so that sockets, deadlines and strangers are somebody else's concern.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from enum import IntEnum

from quorate.core.errors import FrameError
from quorate.core.generation import GenerationId, file_name_of, name_of

_HELLO = struct.Struct("<4sHHqqQQ32s")
_MAGIC = b"QRTH"
_VERSION = 3
_TLS_BEGINS = (b"\x15\x03", b"\x16\x03")
"""What whoever encrypts says first: an alert or a handshake of TLS."""
TO_WHO_DOES_NOT_ENCRYPT = b"\x15\x03\x03\x00\x02\x02\x46".ljust(_HELLO.size, b"\0")
"""An alert of TLS (protocol version), as long as what is waited for by a worker that does not encrypt."""
WELCOME = b"\x01"
"""The first word of a listener that encrypts: a caller is told that its certificate is refused only when it reads."""

COORDINATOR = "coordinator"
SUPERVISOR = "supervisor"
DOMAIN = "quorate"
"""Names in certificates end so. An authority is one job's alone, so they need not name the job as well."""

_ACCEPTED = b"\x01"
_REFUSED = b"\x00"
_PROOF_SIZE = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Identity:
    """What a process proves itself by: its certificate and its key; and the authority that vouches for the others.

    `name` is worker-2, server-0, coordinator or supervisor. All else is PEM.
    """

    name: str
    certificate: str
    key: str = field(repr=False)
    authority: str = field(repr=False)

    @property
    def secrets(self) -> list[str]:
        """What must not be written down: the key, without the lines around it, which every key has."""
        return self.key.splitlines()[1:-1]


def host_of(name: str) -> str:
    """What stands for the host in the certificate of a process: processes are told apart, not the hosts they run on."""
    return f"{name}.{DOMAIN}"


def process_in(host: str) -> str:
    """The process that such a host stands for; empty for what stands for any of its callers."""
    return "" if host.startswith("*.") else host.removesuffix(f".{DOMAIN}")


def in_words(name: str) -> str:
    """worker-2 as people know it: worker 2."""
    return name.replace("-", " ", 1)


@dataclass(frozen=True)
class Credentials:
    """Who a worker is, and what proves it."""

    token: str = field(repr=False)
    worker: int
    generation: GenerationId
    # What it shows where links are encrypted; without one they are not.
    identity: Identity | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Turn:
    """Send these bytes, then hand over that many from the peer."""

    send: bytes
    expect: int


Handshake = Generator[Turn, bytes, int]
"""Ends with the peer's number when both sides are proven; raises FrameError when they do not belong together."""


class _Role(IntEnum):
    CONNECTS = 1
    LISTENS = 2


@dataclass(frozen=True)
class _Hello:
    role: int
    worker: int
    peer: int
    generation: GenerationId
    nonce: bytes

    @classmethod
    def of(cls, credentials: Credentials, peer: int, role: _Role) -> "_Hello":
        return cls(role, credentials.worker, peer, credentials.generation, secrets.token_bytes(32))

    def encode(self) -> bytes:
        ids = (self.worker, self.peer, self.generation.incarnation, self.generation.number)
        return _HELLO.pack(_MAGIC, _VERSION, self.role, *ids, self.nonce)


def introduce(credentials: Credentials, peer: int) -> Handshake:
    """The side that connects: it proves itself first."""
    ours = _Hello.of(credentials, peer, _Role.CONNECTS)
    theirs = _decode((yield Turn(ours.encode(), _HELLO.size)), _Role.LISTENS)
    _check_match(ours, theirs)
    verdict = yield Turn(_proof(credentials, ours, theirs, _Role.CONNECTS), 1 + _PROOF_SIZE)
    if verdict[:1] != _ACCEPTED:
        raise FrameError(
            f"{name_of(peer)} refused the proof of the job token that {name_of(credentials.worker)} gave: "
            "the two hold different tokens, so they belong to different runs"
        )
    _check_proof(_proof(credentials, ours, theirs, _Role.LISTENS), verdict[1:], peer)
    return peer


def receive_introduction(
    credentials: Credentials, peers: Collection[int], certified: Callable[[], str] = lambda: ""
) -> Handshake:
    """The side that listens, for any of these workers: it proves nothing to a stranger.

    `certified` tells, once something has come, whose certificate was shown; empty where links are not encrypted.
    """
    theirs = _decode((yield Turn(b"", _HELLO.size)), _Role.CONNECTS)
    peer = theirs.worker if theirs.worker in peers else min(peers)
    ours = _Hello.of(credentials, peer, _Role.LISTENS)
    # Told even where it does not match, so that the other side can say what differs.
    given = yield Turn(ours.encode(), 0 if _mismatch(ours, theirs) else _PROOF_SIZE)
    _check_match(ours, theirs)
    if (shown := certified()) and shown != file_name_of(peer):
        raise FrameError(f"{in_words(shown)}, by its certificate, introduced itself as {name_of(peer)}")
    try:
        _check_proof(_proof(credentials, theirs, ours, _Role.CONNECTS), given, peer)
    except FrameError:
        yield Turn(_REFUSED + bytes(_PROOF_SIZE), 0)
        raise
    yield Turn(_ACCEPTED + _proof(credentials, theirs, ours, _Role.LISTENS), 0)
    return peer


def _decode(message: bytes, role: _Role) -> _Hello:
    magic, version, given_role, worker, peer, incarnation, number, nonce = _HELLO.unpack(message)
    if magic[:2] in _TLS_BEGINS:
        raise FrameError(
            "the other end encrypts, and this one does not: `encrypt` differs, or it belongs to another run"
        )
    if magic != _MAGIC:
        raise FrameError(f"a stranger sent {magic!r} where a worker begins with {_MAGIC!r}")
    if version != _VERSION:
        raise FrameError(
            f"{name_of(worker)} speaks version {version} of the handshake, this one version {_VERSION}: "
            "install the same release of Quorate on every machine"
        )
    if given_role != role:
        # A connection to a dead worker's port on the same host can end at itself.
        raise FrameError(f"the other end is in role {given_role} where {role.name.lower()} ({int(role)}) was expected")
    return _Hello(given_role, worker, peer, GenerationId(incarnation, number), nonce)


def _mismatch(ours: _Hello, theirs: _Hello) -> str:
    """What does not fit, with both values; empty where all does."""
    if theirs.generation != ours.generation:
        own = name_of(ours.worker)
        return f"{name_of(theirs.worker)} is in generation {theirs.generation}, {own} in {ours.generation}"
    if theirs.worker != ours.peer:
        return f"{name_of(theirs.worker)} answered where {name_of(ours.worker)} expected {name_of(ours.peer)}"
    if theirs.peer != ours.worker:
        return f"{name_of(theirs.worker)} expected {name_of(theirs.peer)} and met {name_of(ours.worker)}"
    return ""


def _check_match(ours: _Hello, theirs: _Hello) -> None:
    if mismatch := _mismatch(ours, theirs):
        raise FrameError(mismatch)


def _proof(credentials: Credentials, connects: _Hello, listens: _Hello, role: _Role) -> bytes:
    message = bytes([role]) + connects.encode() + listens.encode()
    return hmac.digest(credentials.token.encode(), message, "sha256")


def _check_proof(expected: bytes, given: bytes, peer: int) -> None:
    if not hmac.compare_digest(expected, given):
        raise FrameError(
            f"{name_of(peer)} gave a wrong proof of the job token: it holds another token, so it belongs to another run"
        )

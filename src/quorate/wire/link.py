"""The link between two workers, and its frames: a header that says what the payload is about, then the payload."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import xxhash

from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, PeerLost
from quorate.core.generation import GenerationId

Deadline = Callable[[], float]
"""Seconds that may still be waited. It is asked again at every wake-up, from any thread, since a lease can be renewed
while one waits; it may raise an error of its own, which passes through the wait."""

RECEIVE_LIMIT = 2**30
"""The most bytes that `receive` takes in one frame."""

LONGEST_WAIT = 1.0
"""Seconds between two questions to a deadline, so that one that starts to raise is heard."""

CLOSED_HERE = PeerLost.CLOSED_HERE

MAGIC = b"QRTE"
VERSION = 2

_FIELDS = struct.Struct("<4sHHQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_SIZE = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class Tag:
    """What a frame is about. Both ends know it beforehand; a frame with another tag is refused."""

    generation: GenerationId
    step: int
    channel: int
    index: int

    def __str__(self) -> str:
        return f"generation {self.generation}, step {self.step}, channel {self.channel}, index {self.index}"


class Link(Protocol):
    """Carries frames both ways, in order. At any time one thread may send and another receive.

    A dead or closed peer is a PeerLost, at once; so is a wait whose deadline is over. A frame of another generation,
    tag or length is a FrameError. After any error the link is closed: its stream has lost its place.
    """

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        """Send one frame; the payload must not change until this returns."""
        ...

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        """The payload of the next frame, of any length up to `RECEIVE_LIMIT`."""
        ...

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        """Put the payload of the next frame into `buffer`, which it must fill exactly."""
        ...

    def close(self) -> None:
        """End every wait on both ends with PeerLost. Any thread may call it, any number of times."""
        ...


def checksum_of(payload: Buffer) -> int:
    """What goes along with a payload that may be damaged on its way."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(tag: Tag, length: int, payload_checksum: int = 0) -> bytes:
    """The header of a frame with a payload of `length` bytes; what never leaves the host's memory has no checksum."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        tag.channel,
        tag.generation.incarnation,
        tag.generation.number,
        tag.step,
        tag.index,
        length,
        payload_checksum,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(header: Buffer, peer: str) -> tuple[Tag, int, int]:
    """The tag, the payload's length and its checksum, or a FrameError if these bytes are not an intact header."""
    fields, (checksum,) = bytes(header[: _FIELDS.size]), _CHECKSUM.unpack_from(header, _FIELDS.size)
    magic, version, channel, incarnation, number, step, index, length, payload_checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise FrameError(f"{peer} sent {magic!r} where a frame begins with {MAGIC!r}: it is not a Quorate worker")
    if version != VERSION:
        raise FrameError(
            f"{peer} sent a frame of version {version}, this worker reads version {VERSION}: "
            "install the same release of Quorate on every machine"
        )
    computed = xxhash.xxh3_64_intdigest(fields)
    if checksum != computed:
        raise FrameError(
            f"{peer} sent a damaged header: its checksum is {checksum:#018x}, its bytes give {computed:#018x}"
        )
    return Tag(GenerationId(incarnation, number), step, channel, index), length, payload_checksum


def check_frame(expected: Tag, expected_length: int | None, tag: Tag, length: int, peer: str) -> None:
    """Refuse a frame about something else, so that a late one is never taken for a present one; a payload that does not
    fill its place exactly; and where any length is taken, one for which no memory should be set aside."""
    if tag != expected:
        raise FrameError(f"{peer} sent a frame about {tag}; expected was {expected}")
    if expected_length is not None and length != expected_length:
        raise FrameError(f"{peer} sent {length} bytes for {tag}; expected were {expected_length} bytes")
    if expected_length is None and length > RECEIVE_LIMIT:
        raise FrameError(f"{peer} sent {length} bytes for {tag}; at most {RECEIVE_LIMIT} bytes are taken in one frame")


def check_payload(checksum: int, payload: Buffer, tag: Tag, peer: str) -> None:
    """Refuse a payload that is not what was sent: the checksums of TCP let some damage through."""
    computed = checksum_of(payload)
    if computed != checksum:
        raise FrameError(
            f"{peer} sent a damaged payload for {tag}: its checksum is {checksum:#018x}, "
            f"its bytes give {computed:#018x}"
        )


def flat_bytes(payload: Buffer) -> memoryview:
    """A payload as a flat view of its bytes."""
    view = memoryview(payload)
    # An empty view of several dimensions cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")

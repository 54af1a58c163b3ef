"""A frame: a header that says what the payload is about, then the payload."""

import struct
from dataclasses import dataclass

import xxhash

from quorate.core.digests import Buffer
from quorate.core.errors import FrameError
from quorate.core.generation import GenerationId

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


def check_tag(expected: Tag, tag: Tag, peer: str) -> None:
    """Refuse a frame about something else, so that a late frame is never taken for a present one."""
    if tag != expected:
        raise FrameError(f"{peer} sent a frame about {tag}; expected was {expected}")


def check_length(expected: int, length: int, tag: Tag, peer: str) -> None:
    """Refuse a payload that does not fill its place exactly."""
    if length != expected:
        raise FrameError(f"{peer} sent {length} bytes for {tag}; expected were {expected} bytes")


def check_payload(checksum: int, payload: Buffer, tag: Tag, peer: str) -> None:
    """Refuse a payload that is not what was sent: the checksums of TCP let some damage through."""
    computed = checksum_of(payload)
    if computed != checksum:
        raise FrameError(
            f"{peer} sent a damaged payload for {tag}: its checksum is {checksum:#018x}, "
            f"its bytes give {computed:#018x}"
        )


def check_limit(limit: int, length: int, tag: Tag, peer: str) -> None:
    """Refuse a payload for which no memory should be set aside."""
    if length > limit:
        raise FrameError(f"{peer} sent {length} bytes for {tag}; at most {limit} bytes are taken in one frame")


def flat_bytes(payload: Buffer) -> memoryview:
    """A payload as a flat view of its bytes."""
    view = memoryview(payload)
    # An empty view of several dimensions cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")

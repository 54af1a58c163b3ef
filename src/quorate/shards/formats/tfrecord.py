"""TFRecord files of tf.train.Example, read without TensorFlow.

A record is a dict by feature: int64 and float lists are arrays of numpy (also those of one value), a bytes list is
bytes where it has one value, and otherwise a list of them. Checksums (masked CRC32C) are checked when a shard is
indexed; after that its bytes are under the digests of the index.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.shards.errors import BadRecord
from quorate.shards.formats.format import BLOCK, Block, Content, Format, Scanner, ShardFile

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_RECORD = 60
"""Bytes of the memory for where a record lies."""
_COMPRESSED = re.compile(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]")
_VARINT, _BYTES, _FIXED = 0, 2, 5
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
"""Of a Feature, by the number of the list that it has."""


class TfRecords:
    """The records of a block, whose bytes are those that the index has the digest of."""

    def __init__(self, content: Content, block: Block) -> None:
        self._block, self._content = block, memoryview(content)
        self._places: list[tuple[int, int]] = []
        position = 0
        while position + _HEAD.size <= len(content):
            begin = position + _HEAD.size
            end = begin + _HEAD.unpack_from(content, position)[0]
            self._places.append((begin, end))
            position = end + _CRC.size
        if position != len(content) or len(self._places) != block.records:
            why = f"there are other records than the {block.records} that the index has"
            raise BadRecord(block.file, f"byte {block.start}", why)

    @property
    def nbytes(self) -> int:
        return len(self._content) + _RECORD * len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> dict[str, Any]:
        begin, end = self._places[row]
        try:
            return parse_example(self._content[begin:end])
        except (ValueError, IndexError, OverflowError) as error:
            place = _place(self._block.row + row, self._block.start + begin - _HEAD.size)
            raise BadRecord(self._block.file, place, f"it is no tf.train.Example: {error}") from None


class TfRecord(Format):
    """TFRecord files, as TensorFlow and Beam write them."""

    kind = "tfrecord"
    endings = (".tfrecord", ".tfrecords")

    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        scanner, crc = Scanner(file, looks_for_compression=False), _crc32c()
        position = records = row = 0
        while position < file.size:
            end = _record_end(file, scanner, crc, position, row + records)
            if not position:
                fields |= _fields(scanner.read(position, end))
            records, position = records + 1, end
            if position - scanner.start >= BLOCK or position == file.size:
                length = position - scanner.start
                yield Block(file.name, scanner.start, length, records, row), scanner.cut(length)
                row, records = row + records, 0

    def open(self, content: Content, block: Block, *_: Any) -> TfRecords:
        return TfRecords(content, block)


def _record_end(file: ShardFile, scanner: Scanner, crc: Callable[[bytes], int], position: int, number: int) -> int:
    """Where the record ends that begins there; refuses one whose checksums do not hold."""
    head = scanner.read(position, position + _HEAD.size)
    if len(head) < _HEAD.size:
        raise BadRecord(file.name, _place(number, position), "the file ends in the middle of a length: it was cut off")
    length, checksum = _HEAD.unpack(head)
    if _masked(crc(head[:8])) != checksum:
        if not position and _COMPRESSED.match(head):
            raise RequestError(
                f"{file.name} is compressed as a whole (TFRecordOptions with GZIP or ZLIB), so that no block of it can "
                "be read by itself. Write it without compression."
            )
        why = f"the checksum of its length ({length:,}) does not hold: the file was damaged, or is no TFRecord file"
        raise BadRecord(file.name, _place(number, position), why)
    begin, end = position + _HEAD.size, position + _HEAD.size + length + _CRC.size
    if end > file.size:  # before it is read
        why = f"the file ends before the {length:,} bytes of the record: it was cut off"
        raise BadRecord(file.name, _place(number, position), why)
    content = scanner.read(begin, end)
    found, (expected,) = _masked(crc(content[:length])), _CRC.unpack(content[length:])
    if found != expected:
        why = f"its checksum is {found:#010x}, and {expected:#010x} was written: the file was damaged"
        raise BadRecord(file.name, _place(number, position), why)
    return int(end)


def _place(number: int, position: int) -> str:
    return f"record {number}, byte {position}"


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value
    except ImportError:
        raise RequestError(
            f"To index TFRecord files takes the package google-crc32c: {install_of('tfrecord')}."
        ) from None
    return value  # type: ignore[no-any-return]


def _fields(framed: bytes) -> dict[str, str]:
    """What the first record consists of; nothing where it is no Example, which whoever reads it is told."""
    content = memoryview(framed)[_HEAD.size : -_CRC.size]
    try:
        return {name: kind for name, kind, _ in _features(content)}
    except (ValueError, IndexError, OverflowError):
        return {}


# --- protobuf, as far as an Example has it


def parse_example(content: memoryview) -> dict[str, Any]:
    """The features of a serialized tf.train.Example, by name."""
    return {name: _PARSERS[kind](values) if kind else None for name, kind, values in _features(content)}


def _features(content: memoryview) -> Iterator[tuple[str, str, memoryview]]:
    """Name, kind and serialized list of each feature; a feature that has no list has no kind."""
    for number, _, features in _messages(content):
        if number != 1:
            raise ValueError("field 2 of a tf.train.SequenceExample is not read" if number == 2 else f"field {number}")
        for _, _, entry in _messages(features):
            name, kind, values = "", "", memoryview(b"")
            for key, _, part in _messages(entry):
                if key == 1:
                    name = bytes(part).decode()
                for inner, _, found in _messages(part) if key == 2 else ():
                    if inner not in _KINDS:
                        raise ValueError(f"a feature with field {inner}")
                    kind, values = _KINDS[inner], found
            yield name, kind, values


def _messages(content: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of a message that are messages, texts or bytes: number, kind on the wire, content."""
    for number, wire, value in _wire(content):
        if wire != _BYTES:
            raise ValueError(f"field {number} is no message")
        yield number, wire, value


def _wire(content: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """All fields of a message; of a varint and a fixed number the bytes that it has."""
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        wire, end = tag & 7, position
        if wire == _BYTES:
            length, position = _varint(content, position)
            end = position + length
        elif wire == _VARINT:
            end = _varint(content, position)[1]
        elif wire == _FIXED:
            end = position + 4
        else:
            raise ValueError(f"a field of wire type {wire}")
        if end > len(content):
            raise ValueError("a field goes beyond its end")
        yield tag >> 3, wire, content[position:end]
        position = end


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _bytes_list(values: memoryview) -> bytes | list[bytes]:
    found = [bytes(value) for _, _, value in _messages(values)]
    return found[0] if len(found) == 1 else found


def _float_list(values: memoryview) -> numpy.ndarray:
    # Packed or one by one: a float is its four bytes either way.
    content = b"".join(bytes(value) for _, _, value in _wire(values))
    return numpy.frombuffer(content, "<f4").astype(numpy.float32)


def _int64_list(values: memoryview) -> numpy.ndarray:
    content = numpy.frombuffer(b"".join(bytes(value) for _, _, value in _wire(values)), numpy.uint8)
    ends = numpy.flatnonzero(content < 0x80)
    if len(content) and (not len(ends) or ends[-1] != len(content) - 1):
        raise ValueError("the last number of a list is cut off")
    begins = numpy.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - begins + 1
    if len(lengths) and lengths.max() > 10:
        raise ValueError("a number of more than 64 bits")
    found = numpy.zeros(len(ends), numpy.uint64)
    for byte in range(int(lengths.max(initial=0))):
        has = lengths > byte
        part = (content[begins[has] + byte] & 0x7F).astype(numpy.uint64)
        found[has] |= part << numpy.uint64(7 * byte)
    return found.view(numpy.int64)


_PARSERS: dict[str, Callable[[memoryview], Any]] = {"bytes": _bytes_list, "float": _float_list, "int64": _int64_list}

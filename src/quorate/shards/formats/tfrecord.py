"""TFRecord files of tf.train.Example, read without TensorFlow.

A record is a dict by feature: int64 and float lists are arrays of numpy (also those of one value), a bytes list is
bytes where it has one value, and otherwise a list of them. Checksums (masked CRC32C) are checked when a shard is
indexed; after that its bytes are under the digests of the index.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto  # type: ignore[import-untyped]
from google.protobuf.descriptor_pool import DescriptorPool  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.shards.formats.format import BLOCK, BadRecord, Block, Content, Format, Scanner, ShardFile

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_RECORD = 60
"""Bytes of the memory for where a record lies."""
_COMPRESSED = re.compile(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]")


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
        except DecodeError as error:
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
    try:
        return {name: kind or "" for name, kind, _ in _features(framed[_HEAD.size : -_CRC.size])}
    except DecodeError:
        return {}


# --- messages


def parse_example(content: bytes | memoryview) -> dict[str, Any]:
    """The features of a serialized tf.train.Example, by name."""
    return {name: None if kind is None else _PARSERS[kind](values) for name, kind, values in _features(content)}


def _features(content: bytes | memoryview) -> Iterator[tuple[str, str | None, Any]]:
    """Name, kind and values of each feature; a feature that has no list has no kind."""
    example = _example_type().FromString(bytes(content))
    if example.HasField("feature_lists"):
        raise DecodeError("a tf.train.SequenceExample is not read")
    for entry in example.features.feature:
        lists = [(each.name, values.value) for each, values in entry.value.ListFields()]
        yield (entry.key, *(lists[-1] if lists else (None, ())))


def _bytes_list(values: Sequence[bytes]) -> bytes | list[bytes]:
    return values[0] if len(values) == 1 else list(values)


_PARSERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "bytes": _bytes_list,
    "float": lambda values: numpy.array(values, numpy.float32),
    "int64": lambda values: numpy.array(values, numpy.int64),
}
_MESSAGES: dict[str, tuple[tuple[str, int | str, bool], ...]] = {
    "BytesList": (("value", FieldDescriptorProto.TYPE_BYTES, True),),
    "FloatList": (("value", FieldDescriptorProto.TYPE_FLOAT, True),),
    "Int64List": (("value", FieldDescriptorProto.TYPE_INT64, True),),
    "Feature": (("bytes", "BytesList", False), ("float", "FloatList", False), ("int64", "Int64List", False)),
    "Entry": (("key", FieldDescriptorProto.TYPE_STRING, False), ("value", "Feature", False)),
    "Features": (("feature", "Entry", True),),
    "Nothing": (),
    "Example": (("features", "Features", False), ("feature_lists", "Nothing", False)),
}
"""The fields of each message, in the order of their numbers: name, type, and whether there are several."""


@cache
def _example_type() -> Any:
    """The class of tf.train.Example, whose own is part of TensorFlow."""
    file = FileDescriptorProto(name="quorate/example.proto", package="quorate.example", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, is_repeated) in enumerate(fields, 1):
            label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                made.type = kind
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Example"))

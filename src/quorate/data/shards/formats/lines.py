"""Text files, a record a line: JSON (.jsonl, .ndjson) or plain text (.txt).

Lines end with LF or CRLF, the last one also with the file. Of JSON, empty lines are no records; of plain text they are.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy
import orjson

from quorate.data.shards.errors import BadRecord
from quorate.data.shards.formats.format import BLOCK, Block, Content, OpenRanges, Scanned, Scanner, ShardFile

_MARK = b"\xef\xbb\xbf"
_LINE = 50
"""Bytes of the memory for a line, beside those it consists of."""
_BLANK = b" \t\r"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}

_LONG = 19
"""So many digits in a row may be an integer of more than 64 bits: with a minus, and one more without."""
_INTEGER = re.compile(rb"(?:(?<=-)\d{19}|\d{20})\d*(?![\d.eE])")
_ZERO = 48
_NO_INTEGER = numpy.isin(numpy.arange(256), list(b'0123456789."'))
"""What stands before digits that are no integer, or not the whole of one."""
# Digits are looked for four at a time first: these bits of a word say so, of hardly anything else, and many in a row
# have as many words.
_WORDS = 4
_HALVES, _DIGITS = (numpy.frombuffer(_WORDS * byte, numpy.uint32)[0] for byte in (b"\xf0", b"0"))
_PIECE = 1 << 18
_NOWHERE = numpy.empty(0, numpy.int64)

Array = numpy.ndarray[Any, Any]
Decode = Callable[[bytes], Any]


@dataclass
class LineScan:
    """One text file while it is indexed."""

    file: ShardFile
    format: "_Lines"
    fields: dict[str, str] = field(default_factory=dict)

    def blocks(self) -> Iterator[Scanned]:
        """Blocks of whole lines."""
        scanner = Scanner(self.file)
        fields: dict[str, str] | None = None
        row, is_more = 0, True
        while is_more:
            is_more = scanner.read_on()
            if is_more and len(scanner.buffer) < BLOCK:
                continue
            cut = scanner.buffer.rfind(b"\n") + 1 if is_more else len(scanner.buffer)
            records = sum(map(self.format.is_record, _split(scanner.buffer[:cut])))
            if not records:
                # A line that is longer than a block, or empty ones: those go before the next block or behind the last.
                continue
            block = Block(self.file.name, scanner.start, cut, records, row)
            content = scanner.cut(cut)
            if not is_more:
                self._check_end(content, block)
            if fields is None:
                fields = self.format.fields(LineRecords(content, block, self.format))
                self.fields |= fields or {}
            yield Scanned(block, content)
            row += records

    def _check_end(self, content: bytes, block: Block) -> None:
        """Refuse a last line without a newline that is no whole one."""
        begin = content.rfind(b"\n") + 1
        if not self.format.is_whole(content[begin:]):
            why = "the file ends in the middle of a line: it was cut off"
            raise BadRecord(self.file.name, f"byte {block.start + begin}", why)


class LineRecords:
    """The lines of a block."""

    def __init__(self, content: Content, block: Block, format: "_Lines") -> None:
        self._block = block
        self._format = format
        self._decode = format.decode
        self._size = len(content)
        self._lines = _split(content)
        # Of a block without blank lines and the like, where a line begins is found when somebody must be told.
        self._begins: list[int] | None = None
        self._exact: frozenset[int] = frozenset()
        is_marked = not block.start and content[: len(_MARK)] == _MARK
        long = format.long_numbers(content)
        if is_marked or len(long) or len(self._lines) != block.records:
            self._look_closer(is_marked, long)
        if len(self._lines) != block.records:
            why = f"there are {len(self._lines)} records, and the index says {block.records}"
            raise BadRecord(block.file, f"byte {block.start}", why)

    def _look_closer(self, is_marked: bool, long: Array) -> None:
        """Leave out lines that are no records and the mark of UTF-8, and find those with long numbers."""
        begins = accumulate((len(line) + 1 for line in self._lines), initial=0)
        kept = {begin: line for begin, line in zip(begins, self._lines, strict=False) if self._format.is_record(line)}
        if is_marked and 0 in kept:
            kept = {len(_MARK): kept.pop(0)[len(_MARK) :]} | kept
        self._lines, self._begins = list(kept.values()), list(kept)
        self._exact = frozenset((numpy.searchsorted(self._begins, long, side="right") - 1).tolist())

    @property
    def nbytes(self) -> int:
        """What they take of the memory."""
        return self._size + _LINE * len(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Any:
        line = self._lines[row]
        try:
            return self._decode(line) if row not in self._exact else self._format.decode_exactly(line)
        except ValueError:
            return self._decoded_otherwise(row, line)

    def _decoded_otherwise(self, row: int, line: bytes) -> Any:
        try:
            return self._format.decode_exactly(line)
        except UnicodeDecodeError as error:
            place = f"byte {self._begin(row) + error.start}"
            raise BadRecord(self._block.file, place, f"byte {line[error.start]:#04x} is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            why = f"the line is no JSON: {error}"
            raise BadRecord(self._block.file, f"byte {self._begin(row)}", why) from None

    def _begin(self, row: int) -> int:
        behind = sum(map(len, self._lines[:row])) + row if self._begins is None else self._begins[row]
        return self._block.start + behind


class _Lines(OpenRanges):
    """What both kinds of text files have in common."""

    kind: str
    decode: Decode

    def scan(self, file: ShardFile) -> LineScan:
        """Find the blocks of a text file."""
        return LineScan(file, self)

    def records(self, content: Content, block: Block) -> LineRecords:
        """The lines of a block."""
        return LineRecords(content, block, self)

    def is_record(self, line: bytes) -> bool:
        """Whether a line is one."""
        raise NotImplementedError

    def is_whole(self, line: bytes) -> bool:
        """Whether a line that ends with the file may be all of it."""
        raise NotImplementedError

    def decode_exactly(self, line: bytes) -> Any:
        """What a line says where `decode` does not know it; that may take long."""
        raise NotImplementedError

    def long_numbers(self, content: Content) -> Array:
        """Where digits are that `decode` may not take for what they are."""
        raise NotImplementedError

    def fields(self, records: LineRecords) -> dict[str, str] | None:
        """What the records consist of, as far as the first that can be decoded tells; None if there is none."""
        raise NotImplementedError


class TextLines(_Lines):
    """Plain text: every line is a record, also an empty one."""

    kind = "text"

    def is_record(self, line: bytes) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def is_whole(self, line: bytes) -> bool:  # noqa: ARG002
        """Nobody can tell."""
        return True

    def decode(self, line: bytes) -> str:
        """The text of a line."""
        return line.removesuffix(b"\r").decode()

    def decode_exactly(self, line: bytes) -> str:
        """The same."""
        return self.decode(line)

    def long_numbers(self, content: Content) -> Array:  # noqa: ARG002
        """A text has no numbers."""
        return _NOWHERE

    def fields(self, records: LineRecords) -> dict[str, str]:  # noqa: ARG002
        """A text is no more than a text."""
        return {}


class JsonLines(_Lines):
    """JSON: every line that is not empty is a record."""

    kind = "jsonl"
    decode = staticmethod(orjson.loads)

    def is_record(self, line: bytes) -> bool:
        """Whether there is more than white space."""
        return bool(line.strip(_BLANK))

    def is_whole(self, line: bytes) -> bool:
        """Whether it is JSON, or blank."""
        if not self.is_record(line):
            return True
        # What is bad for another reason, such as bytes that are not UTF-8, is a bad record and no half of one.
        with contextlib.suppress(RecursionError):
            try:
                json.loads(line.decode("utf-8-sig", errors="replace"))
            except ValueError:
                return False
        return True

    def decode_exactly(self, line: bytes) -> Any:
        """What orjson does not know: NaN and Infinity, as Python writes them, and integers of more than 64 bits."""
        return json.loads(line.decode())

    def long_numbers(self, content: Content) -> Array:
        """Integers of so many digits that orjson might make floating-point numbers of them."""
        # Piece by piece: what is computed of one stays in the processor's cache.
        begins = [begin for start in range(0, len(content), _PIECE) for begin in _long_runs(content, start)]
        return numpy.array([begin for begin in begins if _INTEGER.match(content, begin)], numpy.int64)

    def fields(self, records: LineRecords) -> dict[str, str] | None:
        """The names and types of a record's fields."""
        for row in range(len(records)):
            with contextlib.suppress(BadRecord):
                record = records[row]
                if not isinstance(record, dict):
                    return {"": _type(record)}
                return {name: _type(value) for name, value in record.items()}
        return None


def _split(content: Content) -> list[bytes]:
    lines = bytes(content).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _long_runs(content: Content, start: int) -> list[int]:
    """Where many digits in a row begin that may be an integer, in the piece that starts there."""
    end = min(start + _PIECE + 2 * _LONG, len(content))  # behind it, to see one that begins in its last bytes
    words = numpy.frombuffer(content, numpy.uint32, (end - start) // _WORDS, start)
    if not _runs(words & _HALVES == _DIGITS, _WORDS).any():
        return []
    start = max(0, start - 1)  # to see what is before the first
    codes = numpy.frombuffer(content, numpy.uint8, end - start, start)
    found = numpy.flatnonzero(_runs(codes - _ZERO < 10, _LONG))
    found = found[(found == 0) | ~_NO_INTEGER[codes[found - 1]]]
    begins: list[int] = (found + start).tolist()
    return begins


def _runs(values: Array, length: int) -> Array:
    """Where so many begin that are all true."""
    done = 1
    while done < length:
        more = min(done, length - done)
        values = values[:-more] & values[more:]
        done += more
    return values


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")

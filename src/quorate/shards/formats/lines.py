"""Text files, a record a line: JSON (.jsonl, .ndjson) or plain text (.txt).

Lines end with LF or CRLF, the last one also with the file. Of JSON, empty lines are no records; of plain text they are.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy
import orjson

from quorate.shards.errors import BadRecord
from quorate.shards.formats.format import BLOCK, Block, Content, Format, Scanner, ShardFile

_MARK = b"\xef\xbb\xbf"
_LINE = 50
"""Bytes of the memory for a line, beside those it consists of."""
_BLANK = b" \t\r"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}

_LONG = 19 * b"0"
"""So many digits in a row may be an integer of more than 64 bits: with a minus, and one more without."""
_INTEGER = re.compile(rb"(?:(?<=-)\d{19}|\d{20})\d*(?![\d.eE])")
_AS_ZEROS = bytes(48 if code in b"0123456789" else code if code in b'."' else 32 for code in range(256))
"""Digits as zeros, and all else as blanks, but for what stands before digits that are no integer or not all of one."""


class LineRecords:
    """The lines of a block."""

    def __init__(self, content: Content, block: Block, format: "TextLines") -> None:
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
        if is_marked or long or len(self._lines) != block.records:
            self._look_closer(is_marked, long)
        if len(self._lines) != block.records:
            why = f"there are {len(self._lines)} records, and the index says {block.records}"
            raise BadRecord(block.file, f"byte {block.start}", why)

    def _look_closer(self, is_marked: bool, long: list[int]) -> None:
        """Leave out lines that are no records and the mark of UTF-8, and find those with long numbers."""
        begins = accumulate((len(line) + 1 for line in self._lines), initial=0)
        kept = {begin: line for begin, line in zip(begins, self._lines, strict=False) if self._format.is_record(line)}
        if is_marked and 0 in kept:
            kept = {len(_MARK): kept.pop(0)[len(_MARK) :]} | kept
        self._lines, self._begins = list(kept.values()), list(kept)
        self._exact = frozenset((numpy.searchsorted(self._begins, long, side="right") - 1).tolist())

    @property
    def nbytes(self) -> int:
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
            why, offset = f"byte {line[error.start]:#04x} is not UTF-8", error.start
        except (ValueError, RecursionError) as error:
            why, offset = f"the line is not JSON: {error}", 0
        begin = sum(map(len, self._lines[:row])) + row if self._begins is None else self._begins[row]
        raise BadRecord(self._block.file, f"byte {self._block.start + begin + offset}", why)


class TextLines(Format):
    """Plain text: every line is a record, also an empty one."""

    kind = "text"
    endings: tuple[str, ...] = (".txt",)

    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        scanner = Scanner(file)
        found: dict[str, str] | None = None
        row, is_more = 0, True
        while is_more:
            is_more = scanner.read_on()
            if is_more and len(scanner.buffer) < BLOCK:
                continue
            cut = scanner.buffer.rfind(b"\n") + 1 if is_more else len(scanner.buffer)
            records = sum(map(self.is_record, _split(scanner.buffer[:cut])))
            if not records:
                # A line that is longer than a block, or empty ones: those go before the next block or behind the last.
                continue
            block = Block(file.name, scanner.start, cut, records, row)
            content = scanner.cut(cut)
            last = content.rfind(b"\n") + 1
            if not is_more and not self.is_whole(content[last:]):
                why = "the file ends in the middle of a line: it was cut off"
                raise BadRecord(file.name, f"byte {block.start + last}", why)
            if found is None:
                found = self.fields(LineRecords(content, block, self))
                fields |= found or {}
            yield block, content
            row += records

    def open(self, content: Content, block: Block, *_: Any) -> LineRecords:
        return LineRecords(content, block, self)

    def is_record(self, line: bytes) -> bool:  # noqa: ARG002
        return True

    def is_whole(self, line: bytes) -> bool:  # noqa: ARG002
        """Whether a line that ends with the file may be all of it; of plain text nobody can tell."""
        return True

    def decode(self, line: bytes) -> Any:
        return line.removesuffix(b"\r").decode()

    def decode_exactly(self, line: bytes) -> Any:
        """The same where `decode` does not know it; that may take long."""
        return self.decode(line)

    def long_numbers(self, content: Content) -> list[int]:  # noqa: ARG002
        """Where digits are that `decode` may not take for what they are."""
        return []

    def fields(self, records: LineRecords) -> dict[str, str] | None:  # noqa: ARG002
        """What the records consist of, as far as the first that can be decoded tells; None if there is none."""
        return {}


class JsonLines(TextLines):
    """JSON: every line that is not empty is a record."""

    kind = "jsonl"
    endings = (".jsonl", ".ndjson")
    # Not a method of ours, which would cost a call more for every line.
    decode = staticmethod(orjson.loads)  # type: ignore[assignment]

    def is_record(self, line: bytes) -> bool:
        return bool(line.strip(_BLANK))

    def is_whole(self, line: bytes) -> bool:
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

    def long_numbers(self, content: Content) -> list[int]:
        """Integers of so many digits that orjson might make floating-point numbers of them."""
        found = []
        # So they are found at the speed of memory: most texts have no such run of digits at all.
        digits = bytes(content).translate(_AS_ZEROS)
        begin = digits.find(_LONG)
        while begin >= 0:
            if digits[begin - 1 : begin] not in (b".", b'"') and _INTEGER.match(content, begin):
                found.append(begin)
            end = digits.find(b" ", begin)
            begin = digits.find(_LONG, end) if end >= 0 else -1
        return found

    def fields(self, records: LineRecords) -> dict[str, str] | None:
        for row in range(len(records)):
            with contextlib.suppress(BadRecord):
                record = records[row]
                named = record if isinstance(record, dict) else {"": record}
                return {name: _TYPES.get(type(value), "null") for name, value in named.items()}
        return None


def _split(content: Content) -> list[bytes]:
    lines = bytes(content).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines

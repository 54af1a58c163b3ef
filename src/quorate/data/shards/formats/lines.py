"""Text files, a record a line: JSON (.jsonl, .ndjson) or plain text (.txt).

Lines end with LF or CRLF, the last one also with the file. Of JSON, empty lines are no records; of plain text they are.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import orjson

from quorate.data.shards.errors import BadRecord
from quorate.data.shards.formats.format import BLOCK, Block, Content, Scanned, ShardFile
from quorate.data.shards.formats.scanner import Scanner

_MARK = b"\xef\xbb\xbf"
_NEWLINE = 10
_LINE = 150
"""Bytes of the memory for where a line lies."""
_BLANK = bytes(range(33))
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}

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
        row, is_more = 0, True
        while is_more:
            is_more = scanner.read_on()
            if is_more and len(scanner.buffer) < BLOCK:
                continue
            cut = scanner.buffer.rfind(b"\n") + 1 if is_more else len(scanner.buffer)
            records = len(self.format.lines(bytes(scanner.buffer[:cut])))
            if not records:
                # A line that is longer than a block, or empty ones: those go before the next block or behind the last.
                continue
            block = Block(self.file.name, scanner.start, cut, records, row)
            content = scanner.cut(cut)
            if not row:
                self.fields |= self.format.fields(LineRecords(content, block, self.format))
            yield Scanned(block, content)
            row += records


class LineRecords:
    """The lines of a block."""

    def __init__(self, content: Content, block: Block, format: "_Lines") -> None:
        self._content = bytes(content)
        self._block = block
        self._format = format
        # Plain numbers: to take one out of an array would cost as much as to decode a short line.
        self._lines: list[list[int]] = format.lines(self._content).tolist()
        if len(self._lines) != block.records:
            why = f"there are {len(self._lines)} records, and the index says {block.records}"
            raise BadRecord(block.file, f"byte {block.start}", why)

    @property
    def nbytes(self) -> int:
        """What they take of the memory."""
        return len(self._content) + _LINE * len(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Any:
        begin, end = self._lines[row]
        if not begin and not self._block.start and self._content.startswith(_MARK):
            begin = len(_MARK)
        line = self._content[begin:end].removesuffix(b"\r")
        try:
            return self._format.decode(line)
        except UnicodeDecodeError as error:
            place = f"byte {self._block.start + begin + error.start}"
            raise BadRecord(self._block.file, place, f"byte {line[error.start]:#04x} is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            place = f"byte {self._block.start + begin}"
            raise BadRecord(self._block.file, place, f"the line is no JSON: {error}") from None


class _Lines:
    """What both kinds of text files have in common."""

    kind: str
    unit = "byte"
    alike = False

    def scan(self, file: ShardFile) -> LineScan:
        """Find the blocks of a text file."""
        return LineScan(file, self)

    def read(self, file: ShardFile, block: Block) -> bytes:
        """The bytes of a block."""
        return file.read(block.start, block.length)

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],  # noqa: ARG002 (each line says itself what is in it)
        tail: Callable[[], bytes],  # noqa: ARG002
        columns: Sequence[str] | None = None,  # noqa: ARG002 (refused by whoever was asked for them)
    ) -> LineRecords:
        """The records of a block."""
        return LineRecords(content, block, self)

    def lines(self, content: bytes) -> numpy.ndarray:
        """Where each record begins and ends, without its newline."""
        ends = numpy.flatnonzero(numpy.frombuffer(content, numpy.uint8) == _NEWLINE)
        if content and not content.endswith(b"\n"):
            ends = numpy.append(ends, len(content))
        begins = numpy.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        return numpy.stack([begins, ends], axis=1).astype(numpy.int64)

    def decode(self, line: bytes) -> Any:
        """The record that a line is."""
        raise NotImplementedError

    def fields(self, records: LineRecords) -> dict[str, str]:
        """What the first records consist of."""
        raise NotImplementedError


class TextLines(_Lines):
    """Plain text: every line is a record, also an empty one."""

    kind = "text"

    def decode(self, line: bytes) -> str:
        """The text of a line."""
        return line.decode()

    def fields(self, records: LineRecords) -> dict[str, str]:  # noqa: ARG002
        """A text is no more than a text."""
        return {}


class JsonLines(_Lines):
    """JSON: every line that is not empty is a record."""

    kind = "jsonl"

    def lines(self, content: bytes) -> numpy.ndarray:
        """Where each record begins and ends; empty lines are left out."""
        lines = super().lines(content)
        # Only a line that begins with white space can be empty, and most files have none.
        first = numpy.frombuffer(content + b"\n", numpy.uint8)[lines[:, 0]] if len(lines) else lines[:, 0]
        for number in numpy.flatnonzero(first < len(_BLANK)):
            begin, end = lines[number].tolist()
            if not content[begin:end].strip(_BLANK):
                lines[number] = -1
        return lines[lines[:, 0] >= 0]

    def decode(self, line: bytes) -> Any:
        """The value of a line."""
        try:
            return orjson.loads(line)
        except ValueError:
            # It does not know NaN and Infinity, which Python's own writes for them.
            return json.loads(line.decode())

    def fields(self, records: LineRecords) -> dict[str, str]:
        """The names and types of the first record's fields."""
        record = records[0]
        if not isinstance(record, dict):
            return {"": _type(record)}
        return {name: _type(value) for name, value in record.items()}


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")

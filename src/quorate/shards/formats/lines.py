"""Text files, a record a line: JSON (.jsonl, .ndjson) or plain text (.txt).

Lines end with LF or CRLF, the last one also with the file. Of JSON, empty lines are no records; of plain text they are.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from quorate.shards.formats.format import BLOCK, BadRecord, Block, Content, Format, Scanner, ShardFile

_MARK = b"\xef\xbb\xbf"
_LINE = 50
"""Bytes of the memory for a line, beside those it consists of."""
_BLANK = b" \t\r"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}


class LineRecords:
    """The lines of a block."""

    def __init__(self, content: Content, block: Block, format: "TextLines") -> None:
        self._block, self._format, self._size = block, format, len(content)
        self._all = _split(content)
        self._lines = self._all
        if len(self._all) != block.records:
            self._lines = [line for line in self._all if format.is_record(line)]
        if len(self._lines) != block.records:
            why = f"there are {len(self._lines)} records, and the index says {block.records}"
            raise BadRecord(block.file, f"byte {block.start}", why)
        self._is_marked = not block.start and content[: len(_MARK)] == _MARK
        if self._is_marked:
            self._lines = [self._lines[0][len(_MARK) :], *self._lines[1:]]

    @property
    def nbytes(self) -> int:
        return self._size + _LINE * len(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Any:
        line = self._lines[row]
        try:
            return self._format.decode(line)
        except UnicodeDecodeError as error:
            why, offset = f"byte {line[error.start]:#04x} is not UTF-8", error.start
        except (ValueError, RecursionError) as error:
            why, offset = f"the line is not JSON: {error}", 0
        raise BadRecord(self._block.file, f"byte {self._block.start + self._begin(row) + offset}", why)

    def _begin(self, row: int) -> int:
        """Where a record begins, which is looked for only when somebody must be told."""
        begins, position = [], 0
        for line in self._all:
            if len(self._all) == len(self._lines) or self._format.is_record(line):
                begins.append(position)
            position += len(line) + 1
        return begins[row] + (len(_MARK) if self._is_marked and row == 0 else 0)


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

    def fields(self, records: LineRecords) -> dict[str, str] | None:  # noqa: ARG002
        """What the records consist of, as far as the first that can be decoded tells; None if there is none."""
        return {}


class JsonLines(TextLines):
    """JSON, with NaN and Infinity as Python writes them: every line that is not empty is a record."""

    kind = "jsonl"
    endings = (".jsonl", ".ndjson")

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

    def decode(self, line: bytes) -> Any:
        # Not by orjson, which makes floating-point numbers of integers with more than 64 bits.
        return json.loads(line.decode())

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

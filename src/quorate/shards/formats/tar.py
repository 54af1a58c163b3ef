"""Tar files in the convention of WebDataset.

Files that follow each other and have the same name up to the first dot are one record: ``{"__key__": "0001", "jpg":
bytes, "cls": bytes}``. Endings are in lower case. Folders, and files whose name has no ending or begins with a dot, are
no part of any record. A record never spans two blocks, and no key comes twice in a file.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quorate.shards.errors import BadRecord
from quorate.shards.formats.format import BLOCK, Block, Content, Format, Scanner, ShardFile

UNIT = 512
KEY = "__key__"
_ZEROS = bytes(UNIT)
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_FILE, _FOLDER, _SPARSE = b"0\x007", b"5", b"S"
_EXTENDED, _GLOBAL, _LONG_NAME, _LONG_LINK = b"x", b"g", b"L", b"K"
_MEMBER = 300
"""Bytes of the memory for where a file lies, and what it is called."""
_KEYS = 100_000
"""So many keys of a tar file are remembered, its first ones: one that has all files of a field, and then all of the
next, begins again with them."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: its record and field, where its headers begin, where its content does, and where it ends."""

    key: str
    field: str
    head: int
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + -(-self.size // UNIT) * UNIT


class _Bad(Exception):  # noqa: N818
    def __init__(self, offset: int, why: str) -> None:
        self.offset, self.why = offset, why


class _Walk:
    """The members of a run of `size` bytes, one header after the other; `read(begin, end)` gives some of them, fewer at
    the end.

    Positions are counted from its beginning. When all members were taken, `end` is where the zeros behind them begin.
    Unless the bytes were `checked` as a whole, the sum in each header is.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes], *, checked: bool = False) -> None:
        self._size, self._read, self._is_checked = size, read, checked
        self._long_name: str | None = None
        self._long_size: int | None = None
        self._head: int | None = None
        self.end = 0

    def __iter__(self) -> Iterator[Member]:
        position = 0
        while len(header := self._read(position, position + UNIT)) == UNIT and header != _ZEROS:
            name, size, kind = self._header(header, position)
            self._head = position if self._head is None else self._head
            if kind in (_EXTENDED, _LONG_NAME, _GLOBAL, _LONG_LINK):
                if not self._has(position + UNIT, size):
                    raise _Bad(position, "the file ends in the middle of a name: it was cut off")
                if kind in (_EXTENDED, _LONG_NAME):
                    self._extend(kind, self._read(position + UNIT, position + UNIT + size), position)
                position += UNIT + -(-size // UNIT) * UNIT
            else:
                member = self._member(name, size, kind, position)
                # Behind the header of a folder there is nothing, whatever it says.
                position = position + UNIT if member is None else member.end
                if member is not None:
                    yield member
            self.end = position
        if len(header) < UNIT and header.strip(b"\0"):
            raise _Bad(position, "the file ends in the middle of a header: it was cut off")

    def _member(self, name: str, size: int, kind: bytes, position: int) -> Member | None:
        name = name if self._long_name is None else self._long_name
        size = size if self._long_size is None else self._long_size
        head = position if self._head is None else self._head
        self._long_name = self._long_size = self._head = None
        if kind == _SPARSE:
            raise _Bad(position, _sparse(name))
        if kind not in _FILE:
            if kind == _FOLDER:
                return None
            raise _Bad(position, f"{name} is a link or a special file, which a shard cannot have: tar it with -h")
        if not self._has(position + UNIT, size):
            raise _Bad(position, f"the file ends before the {size:,} bytes of {name}: it was cut off")
        parts = _NAME.fullmatch(name)
        key, field = ("", "") if parts is None else (parts[1], parts[2].lower())
        return Member(key, field, head, position + UNIT, size)

    def _has(self, begin: int, size: int) -> bool:
        # Asked before it is read: a size may be anything, and all up to there would be kept.
        end = begin + size
        return end <= self._size and len(self._read(max(begin, end - 1), end)) == min(size, 1)

    def _extend(self, kind: bytes, content: bytes, position: int) -> None:
        if kind == _LONG_NAME:
            self._long_name = _name(content.rstrip(b"\0"), position)
            return
        try:
            words = dict(_extended(content))
            size = int(words[b"size"]) if b"size" in words else self._long_size
            if size is not None and size < 0:
                raise ValueError
        except ValueError:
            raise _Bad(position, "an extended header cannot be read: the file was damaged") from None
        if b"path" in words:
            self._long_name = _name(words[b"path"], position)
        self._long_size = size
        if any(word.startswith(b"GNU.sparse.") for word in words):
            name = words.get(b"GNU.sparse.name", words.get(b"path", b"a file"))
            raise _Bad(position, _sparse(name.decode(errors="backslashreplace")))

    def _header(self, header: bytes, position: int) -> tuple[str, int, bytes]:
        try:
            # To add up a header takes longer than all else that is done with it.
            if not self._is_checked:
                told = int(header[148:156].split(b"\0")[0].strip() or b"0", 8)
                if told != sum(header) - sum(header[148:156]) + 8 * 32:
                    raise ValueError
            size = _number(header[124:136])
        except ValueError:
            raise _Bad(position, "there is no header of a tar file: it was damaged, or is not a tar file") from None
        name = _name(header[:100].split(b"\0")[0], position)
        prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
        return f"{_name(prefix, position)}/{name}" if prefix else name, size, header[156:157]


def _name(text: bytes, position: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        shown = text.decode(errors="backslashreplace")
        raise _Bad(position, f"the name {shown} is not in UTF-8: rename the file, and tar it again") from None


def _sparse(name: str) -> str:
    return f"{name} was written without its holes, and only tar itself can fill them in: tar it without --sparse (-S)"


def _number(text: bytes) -> int:
    # Sizes of 8 GiB and more are written in binary, with the first bit set.
    value = int.from_bytes(text[1:], "big") if text[0] == 0x80 else int(text.split(b"\0")[0].strip() or b"0", 8)
    if value < 0:
        raise ValueError
    return value


def _extended(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of an extended header: ``length word=value`` and a newline each."""
    while content.strip(b"\0"):
        length = int(content.split(b" ", 1)[0])
        line, content = content[:length], content[length:]
        word, equals, value = line.partition(b" ")[2].removesuffix(b"\n").partition(b"=")
        if not equals or length < 5 or len(line) != length:
            raise ValueError
        yield word, value


class TarRecords:
    """The records of a block of a tar file, whose bytes are those that the index has the digest of."""

    def __init__(self, content: Content, block: Block) -> None:
        self._content = memoryview(content)
        self._records: list[list[Member]] = []
        try:
            walk = _Walk(len(content), lambda begin, end: bytes(self._content[begin:end]), checked=True)
            for member in walk:
                if member.key and (not self._records or self._records[-1][0].key != member.key):
                    self._records.append([member])
                elif member.key:
                    self._records[-1].append(member)
        except _Bad as bad:
            raise BadRecord(block.file, f"byte {block.start + bad.offset}", bad.why) from None
        if len(self._records) != block.records:
            why = f"there are {len(self._records)} records, and the index says {block.records}"
            raise BadRecord(block.file, f"byte {block.start}", why)

    @property
    def nbytes(self) -> int:
        return len(self._content) + _MEMBER * sum(map(len, self._records))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: int) -> dict[str, Any]:
        members = self._records[row]
        record: dict[str, Any] = {KEY: members[0].key}
        for each in members:
            record[each.field] = bytes(self._content[each.begin : each.begin + each.size])
        return record


class Tar(Format):
    """Tar files in the convention of WebDataset."""

    kind = "tar"
    endings = (".tar",)

    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        scanner = Scanner(file)
        try:
            yield from _blocks(file, scanner, fields)
        except _Bad as bad:
            raise BadRecord(file.name, f"byte {bad.offset}", bad.why) from None

    def open(self, content: Content, block: Block, *_: Any) -> TarRecords:
        return TarRecords(content, block)


def _blocks(file: ShardFile, scanner: Scanner, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
    end = records = row = 0
    key: str | None = None
    keys: set[int] = set()
    members: set[str] = set()
    walk = _Walk(file.size, scanner.read)
    for member in walk:
        if not member.key:
            continue
        if member.key != key:
            if end - scanner.start >= BLOCK:
                # What lies between two records, such as a folder, belongs to the block before.
                length = member.head - scanner.start
                yield Block(file.name, scanner.start, length, records, row), scanner.cut(length)
                row, records = row + records, 0
            _add_key(keys, member)
            key, members = member.key, set()
            records += 1
        if member.field in members:
            raise _Bad(member.head, f"the record {member.key} has two files .{member.field}")
        members.add(member.field)
        fields.setdefault(member.field, "bytes")
        end = member.end
    _check_end(file, scanner, walk.end)
    if records:
        length = end - scanner.start
        yield Block(file.name, scanner.start, length, records, row), scanner.cut(length)


def _add_key(keys: set[int], member: Member) -> None:
    """Refuse a record that was there before: it was torn apart, and neither half of it is right.

    Keys are kept by their hashes: themselves they would take several times the memory.
    """
    value = hash(member.key)
    if value in keys:
        why = (
            f"the record {member.key} was there before, and its files must follow each other: tar their folder with "
            "--sort=name, and give every record a name of its own"
        )
        raise _Bad(member.head, why)
    if len(keys) < _KEYS:
        keys.add(value)


def _check_end(file: ShardFile, scanner: Scanner, position: int) -> None:
    """Refuse a file that was cut off between two members, or that goes on behind its end."""
    # There should be two units of zeros, and some tools read and write one.
    if len(scanner.read(position, position + UNIT)) < UNIT:
        why = "the file ends without its end mark, which is zeros: it was cut off"
        raise _Bad(min(position, file.size), why)
    if (more := scanner.first_byte(position)) is not None:
        why = (
            "there is more behind the end of the archive, such as a second tar file: make a shard of each, or "
            "join them with tar --concatenate"
        )
        raise _Bad(more, why)

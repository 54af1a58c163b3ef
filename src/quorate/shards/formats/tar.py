"""Tar files in the convention of WebDataset.

Files that follow each other and have the same name up to the first dot are one record: ``{"__key__": "0001", "jpg":
bytes, "cls": bytes}``. Endings are in lower case. Folders, and files whose name has no ending or begins with a dot, are
no part of any record. A record never spans two blocks, and no key comes twice in a file.
"""

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from quorate.shards.formats.format import BLOCK, BadRecord, Block, ByteFile, Content, Format, Scanner, ShardFile

UNIT = tarfile.BLOCKSIZE
KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_MEMBER = 300
"""Bytes of the memory for where a file lies, and what it is called."""
_KEYS = 100_000
"""So many keys of a tar file are remembered, its first ones: one that has all files of a field, and then all of the
next, begins again with them."""


class Member(NamedTuple):
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
    """The members of a run of `size` bytes that belong to records. When all were taken, `end` is where the zeros behind
    them begin: tarfile stops without a word at what it cannot read."""

    def __init__(self, size: int, content: io.RawIOBase | io.BytesIO) -> None:
        self._size, self._content = size, content
        self.end = 0

    def __iter__(self) -> Iterator[Member]:
        tar: tarfile.TarFile | None = None
        try:
            # Names that are not UTF-8 are refused below, where the file is known.
            given = cast(BinaryIO, self._content)
            tar = tarfile.TarFile(fileobj=given, encoding="utf-8", errors="surrogateescape")
            if tar.firstmember is None:  # type: ignore[attr-defined]
                return  # to ask for another would go on behind what it could not read
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                self._check(info)
                if info.isreg() and (parts := _NAME.fullmatch(info.name)) is not None:
                    yield Member(parts[1], parts[2].lower(), info.offset, info.offset_data, info.size)
                self.end = tar.offset
        except tarfile.TarError:
            self.end = 0 if tar is None else tar.offset
            raise _Bad(self.end, self.refusal() or _NO_HEADER) from None

    def refusal(self) -> str | None:
        """What is wrong with the header at the end; None for zeros."""
        self._content.seek(self.end)
        head = self._content.read(UNIT) or b""
        if head.strip(b"\0"):
            return _NO_HEADER if len(head) == UNIT else "the file ends in the middle of a header: it was cut off"
        return None if len(head) == UNIT else "the file ends without its end mark, which is zeros: it was cut off"

    def _check(self, info: tarfile.TarInfo) -> None:
        name = info.name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        if name != info.name:
            raise _Bad(info.offset, f"the name {name} is not in UTF-8: rename the file, and tar it again")
        if info.issparse() or any(word.startswith("GNU.sparse.") for word in info.pax_headers):
            why = "was written without its holes, and only tar itself can fill them in: tar it without --sparse (-S)"
            raise _Bad(info.offset, f"{name} {why}")
        if not info.isreg() and not info.isdir():
            raise _Bad(info.offset, f"{name} is a link or a special file, which a shard cannot have: tar it with -h")
        if info.size < 0:
            raise _Bad(info.offset, _NO_HEADER)
        # Asked before it is read: a size may be anything.
        if info.isreg() and info.offset_data + info.size > self._size:
            raise _Bad(info.offset, f"the file ends before the {info.size:,} bytes of {name}: it was cut off")


_NO_HEADER = "there is no header of a tar file, or it cannot be read: it was damaged, or is not a tar file"


class TarRecords:
    """The records of a block of a tar file, whose bytes are those that the index has the digest of."""

    def __init__(self, content: Content, block: Block) -> None:
        self._content = memoryview(content)
        self._records: list[list[Member]] = []
        try:
            for member in _Walk(len(content), io.BytesIO(content)):
                if not self._records or self._records[-1][0].key != member.key:
                    self._records.append([])
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
        try:
            yield from _blocks(file, fields)
        except _Bad as bad:
            raise BadRecord(file.name, f"byte {min(bad.offset, file.size)}", bad.why) from None

    def open(self, content: Content, block: Block, *_: Any) -> TarRecords:
        return TarRecords(content, block)


def _blocks(file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
    scanner = Scanner(file)
    end = records = row = 0
    key: str | None = None
    # By their hashes: themselves they would take several times the memory.
    keys: set[int] = set()
    members: set[str] = set()
    walk = _Walk(file.size, ByteFile(file.size, lambda begin, length: scanner.read(begin, begin + length)))
    for member in walk:
        if member.key != key:
            if end - scanner.start >= BLOCK:
                # What lies between two records, such as a folder, belongs to the block before.
                length = member.head - scanner.start
                yield Block(file.name, scanner.start, length, records, row), scanner.cut(length)
                row, records = row + records, 0
            if hash(member.key) in keys:
                # It was torn apart, and neither half of it is right.
                why = (
                    f"the record {member.key} was there before, and its files must follow each other: tar their folder "
                    "with --sort=name, and give every record a name of its own"
                )
                raise _Bad(member.head, why)
            if len(keys) < _KEYS:
                keys.add(hash(member.key))
            key, members = member.key, set()
            records += 1
        if member.field in members:
            raise _Bad(member.head, f"the record {member.key} has two files .{member.field}")
        members.add(member.field)
        fields.setdefault(member.field, "bytes")
        end = member.end
    if (refusal := walk.refusal()) is not None:
        raise _Bad(walk.end, refusal)
    if (more := scanner.first_byte(walk.end)) is not None:
        why = (
            "there is more behind the end of the archive, such as a second tar file: make a shard of each, or "
            "join them with tar --concatenate"
        )
        raise _Bad(more, why)
    if records:
        length = end - scanner.start
        yield Block(file.name, scanner.start, length, records, row), scanner.cut(length)

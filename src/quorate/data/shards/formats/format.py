"""What every kind of shard can do: find its blocks, read one, and open it as records."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy

from quorate.core.errors import RequestError

BLOCK = 4_000_000
"""About so many bytes are read, checked and decoded together, where a format leaves it to us."""

Content = bytes | bytearray | memoryview


class ShardFile(Protocol):
    """A shard that is open for reading, wherever it lies."""

    @property
    def name(self) -> str:
        """As the index calls it."""
        ...

    @property
    def size(self) -> int:
        """In bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """So many bytes from there, fewer only where the file ends."""
        ...


@dataclass(frozen=True)
class Block:
    """A run of records of a shard.

    `start` and `length` are bytes of the file, or rows where the format counts in rows. `row` is the number of its
    first record in its shard.
    """

    file: str
    start: int
    length: int
    records: int
    row: int = 0


@dataclass(frozen=True)
class Scanned:
    """A block that was found in a shard, and its content."""

    block: Block
    content: Content


class Records(Protocol):
    """The records of a block. One that cannot be decoded raises `BadRecord`."""

    @property
    def nbytes(self) -> int:
        """What they take of the memory, about."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


@runtime_checkable
class ColumnRecords(Protocol):
    """Records that also come as columns: parquet and hdf5."""

    def columns(self, rows: Sequence[int] | numpy.ndarray) -> dict[str, numpy.ndarray]:
        """Some rows, by the name of the column; strings and what has no shape of its own are arrays of objects."""
        ...


class Scan(Protocol):
    """One shard while it is indexed."""

    @property
    def fields(self) -> Mapping[str, str]:
        """What its records consist of, with types; complete when all blocks were taken."""
        ...

    def blocks(self) -> Iterator[Scanned]:
        """Its blocks in order. A shard that cannot be read raises `BadRecord`."""
        ...


class Format(Protocol):
    """A kind of shard. Its methods may be called from several threads."""

    kind: str
    unit: str
    """What blocks are counted in: byte or row."""
    alike: bool
    """Whether all shards must have the same fields."""

    def scan(self, file: ShardFile) -> Scan:
        """Find the blocks of a shard, for the index."""
        ...

    def read(self, file: ShardFile, block: Block) -> bytes:
        """The bytes of a block, over which its digest is made; short or wrong ones if the file has changed."""
        ...

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],
        tail: Callable[[], bytes],
        columns: Sequence[str] | None = None,
    ) -> Records:
        """Decode a block whose bytes were checked, all its columns or some.

        `fields` are the schema of the index. `tail` gives the checked bytes behind the last block of the shard; only
        parquet asks for them, and not again for a shard whose footer it still has.
        """
        ...


class ByteRanges:
    """What formats have in common whose blocks are ranges of bytes."""

    unit = "byte"

    def read(self, file: ShardFile, block: Block) -> bytes:
        """The bytes of a block."""
        return file.read(block.start, block.length)


class OpenRanges(ByteRanges):
    """Blocks that say themselves what is in them: their bytes are enough to open them."""

    alike = False

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],  # noqa: ARG002
        tail: Callable[[], bytes],  # noqa: ARG002
        columns: Sequence[str] | None = None,  # noqa: ARG002 (refused by whoever was asked for them)
    ) -> Records:
        """The records of a block."""
        return self.records(content, block)

    def records(self, content: Content, block: Block) -> Records:
        """The records in some bytes."""
        raise NotImplementedError


def check_columns(columns: Sequence[str] | None, fields: Mapping[str, str]) -> None:
    """Refuse columns that the shards do not have, or that are asked for twice."""
    for position, name in enumerate(columns or ()):
        if name not in fields:
            raise RequestError(f"there is no column {name} in the shards; there are {', '.join(fields)}.")
        if columns is not None and name in columns[:position]:
            raise RequestError(f"column {name} is asked for twice: name each column once.")


# No text and no tar file begins like this; of bzip2 more is compared than its first letters, which a text may have.
_COMPRESSED = {
    ".gz": re.compile(rb"\x1f\x8b\x08"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".zip": re.compile(rb"PK\x03\x04"),
}


class Scanner:
    """The bytes of a file from the beginning of the present block on, as far as they were needed."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file
        self._position = 0
        self.start = 0
        self.buffer = bytearray()

    def has(self, count: int) -> bool:
        """Read on until so many bytes of the block are there; whether the file has them."""
        while len(self.buffer) < count and self.read_on():
            pass
        return len(self.buffer) >= count

    def read_on(self) -> bool:
        """Read one piece more; whether there was one."""
        more = self._file.read(self._position, BLOCK)
        if not self._position:
            self._refuse_compressed(more)
        self._position += len(more)
        self.buffer += more
        return bool(more)

    def rest(self) -> int:
        """How many bytes the file has from the beginning of the block on."""
        return self._file.size - self.start

    def first_byte(self, begin: int) -> int | None:
        """The first from there, counted from the beginning of the block, that is not zero; nothing is kept of it."""
        piece = bytes(memoryview(self.buffer)[begin:])
        while not (behind := piece.lstrip(b"\0")):
            begin += len(piece)
            if not (piece := self._file.read(self.start + begin, BLOCK)):
                return None
        return begin + len(piece) - len(behind)

    def cut(self, count: int) -> bytes:
        """End the block after so many bytes, and begin the next."""
        content = bytes(memoryview(self.buffer)[:count])
        del self.buffer[:count]
        self.start += count
        return content

    def _refuse_compressed(self, content: bytes) -> None:
        name = self._file.name
        ending = next((ending for ending, begin in _COMPRESSED.items() if begin.match(content)), None)
        if ending is not None:
            raise RequestError(
                f"{name} is compressed as a whole, though its name does not say so, and no block of it can be read by "
                f"itself. Rename it to {name}{ending}, and unpack it."
            )

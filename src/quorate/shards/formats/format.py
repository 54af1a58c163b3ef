"""What every kind of shard can do: find its blocks, read one, and open it as records; and what may be wrong with it."""

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy

from quorate.core.errors import JobError, RequestError


class ShardError(JobError):
    """A shard cannot be read as it should; `place` says where in the file, such as "byte 512" or "row 7"."""

    def __init__(self, file: str, place: str, why: str) -> None:
        self.file, self.place, self.why = file, place, why
        super().__init__(f"{file}, {place}: {why}")


class BadRecord(ShardError):  # noqa: N818 (a happening, not a mistake)
    """A record whose bytes are those that were indexed, and that cannot be decoded all the same."""


class DamagedBlock(ShardError):  # noqa: N818
    """Bytes of a shard that are not those that were indexed."""


BLOCK = 4_000_000
"""About so many bytes are read, checked and decoded together, where a format leaves it to us."""

Content = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ShardFile:
    """A shard that is open for reading, wherever it lies, by the name that the index has for it.

    `read(start, length)` gives so many bytes from there, fewer only where the file ends; several threads may call it.
    """

    name: str
    size: int
    read: Callable[[int, int], bytes]


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


class Format(ABC):
    """A kind of shard, by the endings of its files. Its methods may be called from several threads.

    Blocks are counted in a `unit`, byte or row. `alike`: all shards must have the same fields.
    """

    kind: str
    endings: tuple[str, ...]
    unit: str = "byte"
    alike: bool = False

    @abstractmethod
    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        """The blocks of a shard in order, for the index; a shard that cannot be read raises `BadRecord`.

        `fields` gets what its records consist of, with types, and is complete when all blocks were taken.
        """

    def read(self, file: ShardFile, block: Block) -> bytes:
        """The bytes of a block, over which its digest is made; short or wrong ones if the file has changed."""
        return file.read(block.start, block.length)

    @abstractmethod
    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],
        tail: Callable[[], bytes],
        columns: Sequence[str] | None = None,
        /,
    ) -> Records:
        """Decode a block whose bytes were checked, all its columns or some.

        `fields` are the schema of the index. `tail` gives the checked bytes behind the last block of the shard; only
        parquet asks for them, and not again for a shard whose footer it still has.
        """


class ByteFile(io.RawIOBase):
    """Bytes that lie anywhere, as a file of Python of so many bytes; `content` gives those from a position on."""

    def __init__(self, size: int, content: Callable[[int, int], Content]) -> None:
        super().__init__()
        self._size, self._content = size, content
        self._position = 0
        # What `content` has raised: libraries that read by this file make another error of it.
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> Any:
        try:
            content = self._content(self._position, self._size - self._position if size < 0 else size)
        except Exception as error:
            self.error = error
            raise
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)


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

    def __init__(self, file: ShardFile, *, looks_for_compression: bool = True) -> None:
        self._file = file
        self._looks = looks_for_compression  # for what begins like no text and no tar file; a number may
        self._position = 0
        self.start = 0
        self.buffer = bytearray()

    def read(self, begin: int, end: int) -> bytes:
        """Bytes of the file, none from before the block, and fewer where the file ends; all up to there is kept."""
        while len(self.buffer) < end - self.start and self.read_on():
            pass
        return bytes(memoryview(self.buffer)[begin - self.start : end - self.start])

    def read_on(self) -> bool:
        """Read one piece more; whether there was one."""
        more = self._file.read(self._position, BLOCK)
        ending = next((ending for ending, begin in _COMPRESSED.items() if begin.match(more)), None)
        if self._looks and not self._position and ending is not None:
            name = self._file.name
            raise RequestError(
                f"{name} is compressed as a whole, though its name does not say so, and no block of it can be read by "
                f"itself. Rename it to {name}{ending}, and unpack it."
            )
        self._position += len(more)
        self.buffer += more
        return bool(more)

    def first_byte(self, begin: int) -> int | None:
        """The first of the file from there that is not zero; nothing is kept of it."""
        piece = bytes(memoryview(self.buffer)[begin - self.start :])
        while not (behind := piece.lstrip(b"\0")):
            begin += len(piece)
            if not (piece := self._file.read(begin, BLOCK)):
                return None
        return begin + len(piece) - len(behind)

    def cut(self, count: int) -> bytes:
        """End the block after so many bytes, and begin the next."""
        content = bytes(memoryview(self.buffer)[:count])
        del self.buffer[:count]
        self.start += count
        return content

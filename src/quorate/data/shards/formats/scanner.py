"""Reads a file from front to end, and hands out what was read block by block."""

import re

from quorate.core.errors import RequestError
from quorate.data.shards.formats.format import BLOCK, ShardFile

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

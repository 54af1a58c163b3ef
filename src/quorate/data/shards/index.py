"""The index of a dataset in shards: which shards there are, their blocks, and the digest of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import xxhash

from quorate.data.shards.errors import DamagedBlock
from quorate.data.shards.formats.format import Block, Content

VERSION = 2
DIGEST = 16
ARRAYS = {
    "digests": ("U8", numpy.uint8),
    "length": ("I64", numpy.int64),
    "records": ("I64", numpy.int64),
    "shard_of_block": ("I64", numpy.int64),
    "sizes": ("I64", numpy.int64),
    "start": ("I64", numpy.int64),
    "tail_digests": ("U8", numpy.uint8),
    "tails": ("I64", numpy.int64),
}
"""The arrays of an index in the order of their names, with their types as safetensors and as NumPy call them."""
_PER_SHARD = ("sizes", "tails", "tail_digests")
_DIGESTS = ("digests", "tail_digests")

Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Shards in the order of their names, and their blocks in the order of the records.

    `start` and `length` of a block are bytes, or rows of hdf5. `tails` says where the last block of a shard ends: what
    is behind has a digest too, so that no byte of a shard can change unseen (of hdf5 it is the whole file).
    """

    kind: str
    schema: Mapping[str, str]
    shards: tuple[str, ...]
    sizes: Array
    tails: Array
    tail_digests: Array
    shard_of_block: Array
    start: Array
    length: Array
    records: Array
    digests: Array
    # Where the shards lie as seen from the index; empty: beside it.
    root: str = ""
    # The folder or URL that the names of the shards are relative to.
    place: str = field(default="", compare=False)

    def __len__(self) -> int:
        """The number of all records."""
        return int(self.first[-1])

    @property
    def blocks(self) -> int:
        """The number of all blocks."""
        return len(self.start)

    @cached_property
    def first(self) -> Array:
        """The number of the first record of each block, and behind them the number of all records."""
        return numpy.concatenate([[0], numpy.cumsum(self.records, dtype=numpy.int64)])

    @cached_property
    def first_block(self) -> Array:
        """The first block of each shard, and behind them the number of all blocks."""
        return numpy.searchsorted(self.shard_of_block, numpy.arange(len(self.shards) + 1)).astype(numpy.int64)

    def block(self, number: int) -> Block:
        """One block by its number."""
        shard = int(self.shard_of_block[number])
        row = int(self.first[number] - self.first[self.first_block[shard]])
        start, length, records = (int(each[number]) for each in (self.start, self.length, self.records))
        return Block(self.shards[shard], start, length, records, row)

    # --- digests

    @cached_property
    def digest(self) -> str:
        """Of all that the index says of the data, and so of these; not of where they lie."""
        digest = xxhash.xxh3_128(self.head())
        for array in self.arrays.values():
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def arrays(self) -> dict[str, Array]:
        """What there is of each shard and of each block, in the order in which it is written."""
        found: dict[str, Array] = {}
        for name, (_, kind) in ARRAYS.items():
            count = len(self.shards) if name in _PER_SHARD else self.blocks
            array = numpy.ascontiguousarray(getattr(self, name), dtype=kind)
            found[name] = array.reshape((count, DIGEST) if name in _DIGESTS else (count,))
        return found

    def head(self, **more: str) -> bytes:
        """All the rest but for where the shards lie, and where each array begins and ends: the header of a safetensors
        file."""
        header: dict[str, Any] = {}
        position = 0
        for name, array in self.arrays.items():
            end = position + array.nbytes
            header[name] = {"dtype": ARRAYS[name][0], "shape": list(array.shape), "data_offsets": [position, end]}
            position = end
        about = {
            "kind": self.kind,
            "schema": json.dumps(dict(self.schema)),
            "shards": "\n".join(self.shards),
            "version": str(VERSION),
        }
        return json.dumps({"__metadata__": about | more, **header}, sort_keys=True, separators=(",", ":")).encode()

    def check(self, number: int, content: Content) -> None:
        """Raise `DamagedBlock` if these bytes are not those of the block."""
        block = self.block(number)
        unit = "row" if self.kind == "hdf5" else "byte"
        self._check(block.file, f"{unit} {block.start}", self.digests[number], content)

    def check_tail(self, shard: int, content: Content) -> None:
        """Raise `DamagedBlock` if these bytes are not those from the end of the shard's last block to its own."""
        self._check(self.shards[shard], f"byte {int(self.tails[shard])}", self.tail_digests[shard], content)

    @staticmethod
    def _check(file: str, place: str, expected: Array, content: Content) -> None:
        found = xxhash.xxh3_128_digest(content)
        if found != expected.tobytes():
            raise DamagedBlock(file, place, expected.tobytes().hex(), found.hex())

"""The index of a dataset in shards: which shards there are, their blocks, and the digest of each.

One file beside the shards, in the layout of safetensors: a header in JSON and arrays behind it. The same shards give
the same index, byte for byte.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import xxhash

from quorate.core.errors import RequestError
from quorate.data.shards.errors import DamagedBlock
from quorate.data.shards.formats.format import Block, Content
from quorate.storage.atomic import write_atomically
from quorate.storage.objects import ObjectMissing, ObjectStore, is_url

NAME = "index.quorate"
VERSION = 1
DIGEST = 16
_ARRAYS = {
    "digests": ("U8", numpy.uint8),
    "length": ("I64", numpy.int64),
    "records": ("I64", numpy.int64),
    "shard_of_block": ("I64", numpy.int64),
    "sizes": ("I64", numpy.int64),
    "start": ("I64", numpy.int64),
    "tail_digests": ("U8", numpy.uint8),
    "tails": ("I64", numpy.int64),
}
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

    @property
    def digest(self) -> str:
        """Of everything in the index, and so of all data."""
        return self._encoded[0]

    def block(self, number: int) -> Block:
        """One block by its number."""
        shard = int(self.shard_of_block[number])
        row = int(self.first[number] - self.first[self.first_block[shard]])
        start, length, records = (int(each[number]) for each in (self.start, self.length, self.records))
        return Block(self.shards[shard], start, length, records, row)

    def locate(self, sample: int) -> tuple[int, int]:
        """The block that holds a record, and its number in there."""
        block = int(numpy.searchsorted(self.first, sample, side="right")) - 1
        return block, sample - int(self.first[block])

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

    # --- as a file

    @classmethod
    def load(cls, place: str | Path) -> "ShardIndex":
        """Read the index of a folder or URL of shards, or an index file itself, and check its digest."""
        name = str(place).rstrip("/")
        parent, _, last = name.rpartition("/")
        if not is_url(name):
            path = Path(name).expanduser().absolute()
            file = path / NAME if path.is_dir() else path
            return cls.decode(_read_file(file, name), str(file), str(file.parent))
        if not last.endswith(Path(NAME).suffix):
            parent, last = name, NAME
        try:
            content = ObjectStore(parent).read(last)
        except ObjectMissing:
            raise _missing(name) from None
        return cls.decode(content, f"{parent}/{last}", parent)

    @classmethod
    def decode(cls, content: bytes, file: str, beside: str) -> "ShardIndex":
        """The index that a file's bytes are of; `beside` is the folder or URL that the file lies in."""
        try:
            return cls._decoded(content, beside)
        except _Unreadable as error:
            raise RequestError(f"{file} {error}.{_again(beside)}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise RequestError(f"{file} is damaged: it is no index of shards any more.{_again(beside)}") from None

    @classmethod
    def _decoded(cls, content: bytes, beside: str) -> "ShardIndex":
        size = int.from_bytes(content[:8], "little")
        head, data = content[8 : 8 + size], memoryview(content)[8 + size :]
        header = json.loads(head)
        about = header.pop("__metadata__")
        version = int(about["version"])
        if version != VERSION:
            raise _Unreadable(f"has version {version}, and this Quorate reads version {VERSION}")
        arrays = {}
        for name, (_, kind) in _ARRAYS.items():
            begin, end = header[name]["data_offsets"]
            arrays[name] = numpy.frombuffer(data[begin:end], kind).reshape(header[name]["shape"])
        root = about["root"]
        index = cls(
            kind=about["kind"],
            schema=json.loads(about["schema"]),
            shards=tuple(about["shards"].split("\n")) if about["shards"] else (),
            root=root,
            place=_joined(beside, root),
            **arrays,
        )
        if index._encoded[0] != about["digest"] or index._encoded[1] != content[: 8 + size]:
            raise _Unreadable("is damaged: its digest is not that of its content")
        return index

    def encode(self) -> bytes:
        """The content of the index file."""
        _, head, data = self._encoded
        return head + data

    def save(self, place: str | Path) -> None:
        """Write the index file: whole or not at all. `place` is the file, or its URL."""
        if is_url(str(place)):
            parent, _, last = str(place).rpartition("/")
            ObjectStore(parent).put(last, self.encode())
        else:
            write_atomically(Path(place), self.encode())

    @cached_property
    def _encoded(self) -> tuple[str, bytes, bytes]:
        """Digest, header and arrays. The digest is of everything but itself."""
        header: dict[str, Any] = {}
        pieces, position = [], 0
        for name, (word, kind) in _ARRAYS.items():
            array = numpy.ascontiguousarray(getattr(self, name), dtype=kind)
            count = len(self.shards) if name in _PER_SHARD else self.blocks
            array = array.reshape((count, DIGEST) if name in _DIGESTS else (count,))
            header[name] = {
                "dtype": word,
                "shape": list(array.shape),
                "data_offsets": [position, position + array.nbytes],
            }
            pieces.append(array.tobytes())
            position += array.nbytes
        data = b"".join(pieces)
        about = {
            "kind": self.kind,
            "root": self.root,
            "schema": json.dumps(dict(self.schema)),
            "shards": "\n".join(self.shards),
            "version": str(VERSION),
        }
        digest = xxhash.xxh3_128(_json({"__metadata__": about, **header}))
        digest.update(data)
        found = digest.hexdigest()
        head = _json({"__metadata__": about | {"digest": found}, **header})
        head += b" " * (-len(head) % 8)
        return found, len(head).to_bytes(8, "little") + head, data


class _Unreadable(Exception):  # noqa: N818
    """Why a file is not an index that can be used."""


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _read_file(file: Path, named: str) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(named) from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}.") from None


def _missing(place: str) -> RequestError:
    folder = place.rpartition("/")[0] or "." if place.endswith(Path(NAME).suffix) else place
    return RequestError(f"{place} has no index of its shards yet. Make it with: quorate data index {folder}")


def _again(beside: str) -> str:
    return f" Make it again with: quorate data index {beside} --force"


def _joined(beside: str, root: str) -> str:
    if not root:
        return beside
    return root if is_url(root) or root.startswith("/") else str(Path(beside, root))

"""The index of a dataset in shards: which shards there are, their blocks, and the digest of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import xxhash

from quorate.core.addresses import is_url, shown
from quorate.core.cached import cached_property
from quorate.core.errors import RequestError
from quorate.core.regular_file import read_regular
from quorate.shards.formats.format import Block
from quorate.storage.atomic import write_atomically
from quorate.storage.objects import ObjectMissing, open_store, refuse_secret

NAME = "index.quorate"

VERSION = 2
DIGEST = 16
ARRAYS = ("digests", "length", "records", "shard_of_block", "sizes", "start", "tail_digests", "tails")
"""The arrays of an index in the order of their names."""
_PER_SHARD = ("sizes", "tails", "tail_digests")
_TYPES = dict.fromkeys(ARRAYS, ("I64", numpy.int64)) | dict.fromkeys(("digests", "tail_digests"), ("U8", numpy.uint8))
"""As safetensors and as NumPy call them."""

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
    place: str = ""

    def __len__(self) -> int:
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
        shard = int(self.shard_of_block[number])
        row = int(self.first[number] - self.first[self.first_block[shard]])
        start, length, records = (int(each[number]) for each in (self.start, self.length, self.records))
        return Block(self.shards[shard], start, length, records, row)

    def block_bytes(self, number: int) -> int:
        """Bytes of a block; where blocks are counted in rows, as many as fall to its rows."""
        if self.kind != "hdf5":
            return int(self.length[number])
        shard = int(self.shard_of_block[number])
        rows = int(self.first[self.first_block[shard + 1]] - self.first[self.first_block[shard]])
        return int(self.sizes[shard]) * int(self.records[number]) // max(1, rows)

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
        for name in ARRAYS:
            count = len(self.shards) if name in _PER_SHARD else self.blocks
            array = numpy.ascontiguousarray(getattr(self, name), dtype=_TYPES[name][1])
            found[name] = array.reshape((count, DIGEST) if name.endswith("digests") else (count,))
        return found

    def head(self, **more: str) -> bytes:
        """All the rest but for where the shards lie, and where each array begins and ends: the header of a safetensors
        file."""
        header: dict[str, Any] = {}
        position = 0
        for name, array in self.arrays.items():
            end = position + array.nbytes
            header[name] = {"dtype": _TYPES[name][0], "shape": list(array.shape), "data_offsets": [position, end]}
            position = end
        about = {
            "kind": self.kind,
            "schema": json.dumps(dict(self.schema)),
            "shards": "\n".join(self.shards),
            "version": str(VERSION),
        }
        return json.dumps({"__metadata__": about | more, **header}, sort_keys=True, separators=(",", ":")).encode()


def load_index(place: str | Path) -> ShardIndex:
    """Read the index of a folder or URL of shards, or an index file itself, and check its digest."""
    name = str(place).rstrip("/")
    if not is_url(name):
        path = Path(name).expanduser().absolute()
        file = path / NAME if path.is_dir() else path
        if path.is_file() and path.suffix != Path(NAME).suffix:
            raise RequestError(
                f"{path} is a data file, not an index. Give the folder that was indexed, such as {path.parent}"
            )
        return decode(_read_file(file, name), str(file), str(file.parent))
    refuse_secret(name)
    parent, _, last = name.rpartition("/")
    if not last.endswith(Path(NAME).suffix):
        parent, last = name, NAME
    try:
        content = open_store(parent).read(last)
    except ObjectMissing:
        raise _missing(name) from None
    return decode(content, f"{parent}/{last}", parent)


def save_index(index: ShardIndex, place: str | Path) -> None:
    """Write the index file: whole or not at all. `place` is the file, or its URL."""
    if is_url(str(place)):
        parent, _, last = str(place).rpartition("/")
        open_store(parent).put(last, encode(index))
    else:
        write_atomically(Path(place), encode(index))


def encode(index: ShardIndex) -> bytes:
    """The content of the index file."""
    return b"".join([_head(index), *(array.tobytes() for array in index.arrays.values())])


def decode(content: bytes, file: str, beside: str) -> ShardIndex:
    """The index that a file's bytes are of; `beside` is the folder or URL that the file lies in."""
    # Where the shards lie if the index cannot be read: one of another name may have them anywhere.
    place = beside if file == f"{beside}/{NAME}" else "PATH"
    try:
        size = int.from_bytes(content[:8], "little")
        head, data = content[8 : 8 + size], memoryview(content)[8 + size :]
        header = json.loads(head)
        about = header.pop("__metadata__")
        if (version := int(about["version"])) != VERSION:
            place = _joined(beside, about.get("root", ""))
            raise _Unreadable(f"has version {version}, and this Quorate reads version {VERSION}")
        arrays = {}
        for name in ARRAYS:
            begin, end = header[name]["data_offsets"]
            arrays[name] = numpy.frombuffer(data[begin:end], _TYPES[name][1]).reshape(header[name]["shape"])
        root, shards = about["root"], tuple(about["shards"].split("\n")) if about["shards"] else ()
        schema, where = json.loads(about["schema"]), _joined(beside, root)
        index = ShardIndex(kind=about["kind"], schema=schema, shards=shards, root=root, place=where, **arrays)
        # That of the root is compared with the rest of the header.
        if index.digest != about["digest"] or _head(index) != content[: 8 + size]:
            raise _Unreadable("is damaged: a digest is not that of its content")
        return index
    except _Unreadable as error:
        why = str(error)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        why = "is damaged: it is no longer an index of shards"
    output = "" if file == f"{place}/{NAME}" else f" --output {shown(file)}"
    again = f"Make it again with: quorate data index {shown(place)}{output} --force"
    raise RequestError(f"{shown(file)} {why}. {again}")


def _head(index: ShardIndex) -> bytes:
    """The header with the digest of the data and that of where they lie, and its length before it."""
    root_digest = xxhash.xxh3_128_hexdigest(index.root.encode())
    head = index.head(digest=index.digest, root=index.root, root_digest=root_digest)
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


class _Unreadable(Exception):  # noqa: N818
    """Why a file is not an index that can be used."""


def _read_file(file: Path, named: str) -> bytes:
    try:
        return read_regular(file)
    except (FileNotFoundError, NotADirectoryError):
        folder = file.parent if file.suffix == Path(NAME).suffix else file
        if not folder.exists():
            raise RequestError(f"{folder}: there is no such folder.") from None
        raise _missing(named) from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}.") from None


def _missing(place: str) -> RequestError:
    folder = place.rpartition("/")[0] or "." if place.endswith(Path(NAME).suffix) else place
    return RequestError(
        f"{shown(place)} has no index of its shards yet. Make it with: quorate data index {shown(folder)}"
    )


def _joined(beside: str, root: str) -> str:
    if not root:
        return beside
    return root if is_url(root) or root.startswith("/") else str(Path(beside, root))

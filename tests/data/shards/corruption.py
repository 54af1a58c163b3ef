"""Damage that happens to shards by chance, and what it has done to whom, found out without any reader of Quorate's."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy

from quorate.shards.index import ShardIndex


@dataclass(frozen=True)
class Harm:
    """What damage has done: samples that are not what they were any more, and files that are not there at all."""

    how: str
    bad: frozenset[int]
    gone: frozenset[str]
    touched: frozenset[str]


def corrupt(index: ShardIndex, sound: Path, folder: Path, others: Path, how: str, chance: random.Random) -> Harm:
    """Damage a copy of sound shards; `others` are sound files of the same names that hold something else."""
    file = chance.choice([folder / name for name in index.shards])
    touched = {file.name} | _WAYS[how](file, index, others, chance)
    changed = {name for name in touched if _content(folder / name) != (sound / name).read_bytes()}
    gone = {name for name in changed if not (folder / name).exists()}
    bad = {
        sample
        for block in range(index.blocks)
        if index.block(block).file in changed - gone and _is_harmed(index, block, sound, folder)
        for sample in range(int(index.first[block]), int(index.first[block + 1]))
    }
    return Harm(how, frozenset(bad), frozenset(gone), frozenset(changed))


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


# --- what happens


def _flip(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return set()


def _overwrite(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    content = bytearray(file.read_bytes())
    start, length = chance.randrange(len(content)), chance.choice([4, 64, 512, 4096])
    piece = content[start : start + length]
    content[start : start + length] = chance.choice([bytes(len(piece)), chance.randbytes(len(piece))])
    file.write_bytes(content)
    return set()


def _cut(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])
    return set()


def _swap_blocks(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    """Two blocks of a file have changed places; of rows, which are not bytes of the file, two ranges of it."""
    content = file.read_bytes()
    shard = index.shards.index(file.name)
    numbers = range(int(index.first_block[shard]), int(index.first_block[shard + 1]))
    if index.kind == "hdf5" or len(numbers) < 2:
        length = len(content) // 4
        ranges = [(start, start + length) for start in sorted((chance.randrange(length), len(content) - length))]
    else:
        chosen = [index.block(number) for number in sorted(chance.sample(numbers, 2))]
        ranges = [(block.start, block.start + block.length) for block in chosen]
    (a, b), (c, d) = ranges
    file.write_bytes(content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:])
    return set()


def _swap_files(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    other = file.with_name(chance.choice([name for name in index.shards if name != file.name]))
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return {other.name}


def _remove(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    file.unlink()
    return set()


def _empty(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    file.write_bytes(b"")
    return set()


def _replace(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    file.write_bytes((others / file.name).read_bytes())
    return set()


def _append(file: Path, index: ShardIndex, others: Path, chance: random.Random) -> set[str]:
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randrange(1, 3000)))
    return set()


_WAYS: dict[str, Callable[[Path, ShardIndex, Path, random.Random], set[str]]] = {
    "a bit is flipped": _flip,
    "a range is written over": _overwrite,
    "the file is cut off": _cut,
    "blocks have changed places": _swap_blocks,
    "files have changed places": _swap_files,
    "another sound file is in its place": _replace,
    "the file is emptied": _empty,
    "the file is removed": _remove,
    "bytes are appended": _append,
}
WAYS = tuple(_WAYS)


# --- whom it has harmed


def _is_harmed(index: ShardIndex, number: int, sound: Path, folder: Path) -> bool:
    block = index.block(number)
    if index.kind == "hdf5":
        rows, found = (_rows(each / block.file, block.start, block.length) for each in (sound, folder))
        return found is None or found != rows
    before, after = (sound / block.file).read_bytes(), (folder / block.file).read_bytes()
    span = slice(block.start, block.start + block.length)
    shard = index.shards.index(block.file)
    # Of Parquet no row group is known without the footer, which lies behind the last.
    footer = slice(int(index.tails[shard]), int(index.sizes[shard])) if index.kind == "parquet" else slice(0)
    return before[span] != after[span] or before[footer] != after[footer]


def _rows(file: Path, start: int, length: int) -> dict[str, tuple[Any, bytes]] | None:
    """What an HDF5 file has in some rows, dataset by dataset; None if it cannot be read."""
    found: dict[str, tuple[Any, bytes]] = {}
    try:
        with h5py.File(file, "r") as opened:

            def note(name: str, each: Any) -> None:
                if isinstance(each, h5py.Dataset) and each.shape:
                    rows = numpy.asarray(each[start : start + length])
                    found[name] = (rows.dtype.newbyteorder("="), rows.shape), rows.tobytes()

            opened.visititems(note)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError):
        return None
    return found

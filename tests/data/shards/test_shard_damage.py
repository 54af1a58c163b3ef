"""Random damage to shards of every kind: verify names it, and no reader ever gets another record for the right one."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data.shards.shard_files import KINDS, Written, assert_same, small_blocks, write_shards
from quorate.data.bad_sample import Unreachable
from quorate.shards.blocks import ShardBlocks
from quorate.shards.formats.format import ShardError
from quorate.shards.formats.kinds import format_of
from quorate.shards.index import ShardIndex, decode, encode
from quorate.shards.indexing import Flaw, build_index, verify_shards

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")


@dataclass(frozen=True)
class Sound:
    """A dataset as it was indexed; damage is done to copies of it."""

    written: Written
    index: ShardIndex


@pytest.fixture
def sound(kind: str, tmp_path: Path, small_blocks: None) -> Sound:
    written = write_shards(kind, tmp_path / "sound", (30, 12, 12, 25), seed=3)
    return Sound(written, build_index(str(written.folder)))


def damage(files: list[Path], chance: random.Random) -> set[str]:
    """One thing that happens to files; the names of those that are no longer what they were."""
    file = chance.choice(files)
    content = bytearray(file.read_bytes())
    match chance.choice(["flip", "flip", "flip", "burst", "cut", "append", "remove", "swap", "zero"]):
        case "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case "burst":
            start = chance.randrange(len(content))
            content[start : start + 64] = chance.randbytes(len(content[start : start + 64]))
        case "cut":
            del content[chance.randrange(len(content)) :]
        case "append":
            content += chance.randbytes(chance.randrange(1, 2000))
        case "zero":
            start = chance.randrange(len(content))
            content[start : start + 512] = b"\xaa" * len(content[start : start + 512])
        case "remove":
            file.unlink()
            return {file.name}
        case "swap":
            other = chance.choice([each for each in files if each != file])
            mine, theirs = file.read_bytes(), other.read_bytes()
            file.write_bytes(theirs)
            other.write_bytes(mine)
            return {file.name, other.name}
    if bytes(content) == file.read_bytes():
        return set()
    file.write_bytes(content)
    return {file.name}


def hold(sound: Sound, folder: Path, chance: random.Random) -> None:
    """Damage a copy, and see that it is told by verify and by whoever reads."""
    shutil.copytree(sound.written.folder, folder)
    index = build_copy(sound.index, folder)
    touched = damage(sorted(folder.iterdir()), chance)
    flaws = verify_shards(index)
    assert {flaw.file for flaw in flaws} == touched
    bad = records_told_bad(flaws, index)
    blocks = ShardBlocks(index)
    for number in range(index.blocks):
        first = int(index.first[number])
        expected = sound.written.records[first : first + int(index.records[number])]
        try:
            records = blocks.read(number)
            found = [records[row] for row in range(len(records))]
        except (ShardError, Unreachable) as error:
            assert index.block(number).file in touched, "only what was damaged is refused"
            assert index.block(number).file in str(error)
            continue
        same(found, list(expected))
        assert number not in bad, "what verify calls damaged is never read"


def build_copy(index: ShardIndex, folder: Path) -> ShardIndex:
    return decode(encode(index), "index", str(folder))


def records_told_bad(flaws: tuple[Flaw, ...], index: ShardIndex) -> set[int]:
    """The blocks that verify has named one by one."""
    places = {(flaw.file, flaw.start) for flaw in flaws if flaw.records and flaw.start is not None}
    return {number for number in range(index.blocks) if (index.block(number).file, index.block(number).start) in places}


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_is_named_and_never_read(kind: str, sound: Sound, tmp_path: Path) -> None:
    for seed in range(8):
        hold(sound, tmp_path / str(seed), random.Random(f"{kind} {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_much_random_damage_is_named_and_never_read(kind: str, sound: Sound, tmp_path: Path) -> None:
    for seed in range(500):
        hold(sound, tmp_path / "copy", random.Random(f"{kind} {seed} long"))
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.parametrize("kind", KINDS)
class TestVerify:
    def test_finds_nothing_where_nothing_has_changed(self, kind: str, sound: Sound) -> None:
        assert verify_shards(sound.index) == ()

    def test_names_a_block_by_its_place(self, kind: str, sound: Sound) -> None:
        if format_of(kind).unit == "row":
            return  # which bytes of the file are which rows is for HDF5 to know
        block = sound.index.block(1)
        file = sound.written.folder / block.file
        content = bytearray(file.read_bytes())
        content[block.start + 1] ^= 1
        file.write_bytes(content)
        [flaw] = verify_shards(sound.index)
        assert (flaw.file, flaw.start, flaw.length, flaw.records) == (
            block.file,
            block.start,
            block.length,
            block.records,
        )
        assert flaw.place == f"bytes {block.start} to {block.start + block.length}"
        assert "has changed: its digest is" in flaw.problem

    def test_names_missing_and_extra_shards_and_other_sizes(self, kind: str, sound: Sound) -> None:
        first, second, third, fourth = sound.written.files
        first.unlink()
        shutil.copy(second, second.with_name(f"zz.{KINDS[kind]}"))
        third.write_bytes(third.read_bytes() + b"more")
        flaws = verify_shards(sound.index)
        assert [(flaw.file, flaw.problem.split(", ")[0]) for flaw in flaws if flaw.start is None] == [
            (first.name, "is missing"),
            (third.name, f"has {third.stat().st_size:,} bytes"),
            (f"zz.{KINDS[kind]}", "is not in the index"),
        ]
        assert flaws[0].records == 30
        assert fourth.name not in {flaw.file for flaw in flaws}

    def test_tells_of_a_change_outside_of_the_records(self, kind: str, sound: Sound) -> None:
        file = sound.written.files[0]
        start = int(sound.index.tails[0])
        content = bytearray(file.read_bytes())
        if kind == "hdf5":
            # The space for more names, in the heap of the root group, of which nothing is read.
            position = content.rindex(b"HEAP") + 100
        elif start == len(content):
            return  # all of it is records
        else:
            position = start + 5
        content[position] ^= 255
        file.write_bytes(content)
        flaws = [flaw for flaw in verify_shards(sound.index) if "outside of the records" in flaw.problem]
        assert [(flaw.file, flaw.start, flaw.records) for flaw in flaws] == [(file.name, start, 0)]

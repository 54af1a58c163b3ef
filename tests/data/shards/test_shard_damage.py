"""What verify says of shards of every kind. Random damage is in `test_corrupt_reading`."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.shards.shard_files import KINDS, Written, small_blocks, write_shards
from quorate.shards.formats.kinds import format_of
from quorate.shards.index import ShardIndex
from quorate.shards.indexing import build_index, verify_shards

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

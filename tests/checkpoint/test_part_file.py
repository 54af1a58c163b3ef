import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from checkpoint.disk import NEEDING_SPACE, Disk, full, killed
from quorate.checkpoint.manifest import Part
from quorate.checkpoint.part_file import PIECE, parts_in, read_part, verify_part, write_part
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import write_fully
from sealing import cipher

CONTENT = bytes(range(256)) * 8
CHUNKS = (CONTENT[:100], bytearray(CONTENT[100:1000]), b"", memoryview(CONTENT)[1000:])
WAYS = {"plain": "xxh3-128", "sha": "sha-256", "encrypted": "xxh3-128"}
CHUNK = 1 << 20


def write(folder: Path, way: str = "plain", stem: str = "1-of-1") -> Part:
    return write_part(folder, stem, CHUNKS, digest=WAYS[way], cipher=_cipher(way))


def read(folder: Path, part: Part, way: str = "plain") -> bytes:
    return bytes(read_part(folder, part, _cipher(way)))


def _cipher(way: str) -> Any:
    return cipher() if way == "encrypted" else None


class TestThereAndBack:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_name_tells_the_digest_of_what_lies_there(self, tmp_path: Path, way: str) -> None:
        part = write(tmp_path, way)
        (file,) = tmp_path.iterdir()
        lies = file.read_bytes()
        digest = hashlib.sha256(lies).hexdigest() if way == "sha" else xxhash.xxh3_128(lies).hexdigest()
        ending = "safetensors.enc" if way == "encrypted" else "safetensors"
        assert part == Part(f"1-of-1.{digest}.{ending}", len(lies), f"{WAYS[way]}:{digest}")
        assert file.name == part.file
        assert (lies == CONTENT) is (way != "encrypted")
        assert read(tmp_path, part, way) == CONTENT
        verify_part(tmp_path, part)  # takes no key

    @pytest.mark.parametrize("size", [0, 1, CHUNK, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
    @pytest.mark.parametrize("way", ["plain", "encrypted"])
    def test_whatever_the_size(self, tmp_path: Path, size: int, way: str) -> None:
        content = os.urandom(size)
        part = write_part(tmp_path, "1-of-1", [content], digest=WAYS[way], cipher=_cipher(way))
        assert read(tmp_path, part, way) == content

    def test_the_same_again_is_the_same_part(self, tmp_path: Path) -> None:
        assert write(tmp_path) == write(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1

    def test_the_memory_is_ones_own_and_can_be_written(self, tmp_path: Path) -> None:
        part = write(tmp_path)
        first, second = read_part(tmp_path, part), read_part(tmp_path, part)
        first[0] ^= 1
        (tmp_path / part.file).write_bytes(bytes(part.bytes))
        assert bytes(second) == CONTENT

    def test_is_read_once(self, tmp_path: Path) -> None:
        part = write(tmp_path)
        os.truncate(tmp_path / part.file, 0)
        # What nobody has reads as zeros, and takes no time or space: were it read twice, it would show in the calls.
        os.truncate(tmp_path / part.file, 3 * PIECE)
        whole = dataclasses.replace(
            part, bytes=3 * PIECE, digest=f"xxh3-128:{xxhash.xxh3_128_hexdigest(bytes(3 * PIECE))}"
        )
        before = _bytes_read()
        assert not any(read_part(tmp_path, whole)[:: PIECE // 2])
        assert 3 * PIECE <= _bytes_read() - before < 4 * PIECE


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


class TestTheWriterDies:
    """At every call that changes the disk, by SIGKILL, before the call or in the middle of a write."""

    @pytest.mark.parametrize("way", ["plain", "encrypted"])
    @pytest.mark.parametrize("half_written", [False, True], ids=["before", "half-way"])
    def test_no_name_looks_like_a_part_that_is_not_whole(self, tmp_path: Path, half_written: bool, way: str) -> None:
        call, found = 0, []
        while True:
            folder = tmp_path / f"killed-at-{call}"
            folder.mkdir()
            if not killed(lambda folder=folder: write(folder, way), call, half_written):  # type: ignore[misc]
                break
            parts = parts_in(folder)
            for part in parts.values():
                assert read(folder, part, way) == CONTENT
            others = {entry.name for entry in folder.iterdir()} - {part.file for part in parts.values()}
            assert all(name.startswith(".") and name.endswith(".partial") for name in others)
            found.append(len(parts))
            assert read(folder, write(folder, way), way) == CONTENT
            call += 1
        assert found == sorted(found)
        assert set(found) == {0, 1}
        assert len(found) > 5


class TestTheDiskFails:
    def test_full_at_any_call_it_is_told_and_the_space_given_back(self, tmp_path: Path) -> None:
        with Disk().watched(NEEDING_SPACE) as undisturbed:
            write(tmp_path)
        assert undisturbed.calls == ["open", *["write"] * 3, "fsync", "rename", "open", "fsync"]
        for call in range(len(undisturbed.calls)):
            folder = tmp_path / f"full-at-{call}"
            folder.mkdir()
            with Disk(call, full).watched(NEEDING_SPACE), pytest.raises(OSError, match="No space left"):
                write(folder)
            # After the rename it is whole, and only its name may not survive a power cut.
            assert [entry.name for entry in folder.iterdir()] == [part.file for part in parts_in(folder).values()]
            assert bool(parts_in(folder)) is (call > undisturbed.calls.index("rename"))

    def test_the_source_fails(self, tmp_path: Path) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"one"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_part(tmp_path, "1-of-1", chunks(), digest="xxh3-128")
        assert not list(tmp_path.iterdir())

    def test_memory_that_changes_while_it_is_written_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = bytearray(1000)
        real = write_fully

        def change_first(descriptor: int, chunk: memoryview) -> int:
            content[500] = 1
            return real(descriptor, chunk)

        monkeypatch.setattr("quorate.checkpoint.part_file.write_fully", change_first)
        with pytest.raises(CheckpointError, match=r"reads back differently.*changed while it was written"):
            write_part(tmp_path, "1-of-1", [content], digest="sha-256")
        assert not list(tmp_path.iterdir())

    def test_what_did_not_reach_the_file_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quorate.checkpoint.part_file.write_fully", lambda descriptor, chunk: len(chunk))
        with pytest.raises(CheckpointError, match="reads back differently"):
            write(tmp_path)
        assert not list(tmp_path.iterdir())


class TestReadingFails:
    def test_with_another_key_the_part_is_named(self, tmp_path: Path) -> None:
        part = write(tmp_path, "encrypted")
        with pytest.raises(CheckpointError, match=rf"part {part.file} cannot be decrypted.*the key given is"):
            read_part(tmp_path, part, cipher(bytes(32)))

    def test_damage_is_told_as_damage_not_as_a_wrong_key(self, tmp_path: Path) -> None:
        part = write(tmp_path, "encrypted")
        whole = (tmp_path / part.file).read_bytes()
        for at in (0, 10, len(whole) // 2, len(whole) - 1):
            (tmp_path / part.file).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match="is damaged or of another checkpoint"):
                read_part(tmp_path, part, cipher())

    def test_made_up_by_somebody_without_the_key(self, tmp_path: Path) -> None:
        """Size and digest can be made to fit by anybody; the tags cannot."""
        part = write(tmp_path, "encrypted")
        content = bytearray((tmp_path / part.file).read_bytes())
        content[-1] ^= 1
        (tmp_path / part.file).write_bytes(content)
        made_up = dataclasses.replace(part, digest=f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}")
        verify_part(tmp_path, made_up)
        with pytest.raises(CheckpointError, match=r"cannot be decrypted: chunk 1 of 1 .* not authentic"):
            read_part(tmp_path, made_up, cipher())

    def test_a_plain_part_where_an_encrypted_one_should_be(self, tmp_path: Path) -> None:
        part = write(tmp_path)
        with pytest.raises(CheckpointError, match=r"cannot be decrypted: .* not encrypted as Quorate does it"):
            read_part(tmp_path, part, cipher())


class TestPartsIn:
    def test_by_their_names(self, tmp_path: Path) -> None:
        written = {
            index: write(tmp_path, way, f"{index + 1}-of-12")
            for index, way in ((1, "sha"), (9, "plain"), (0, "encrypted"))
        }
        for other in (
            f".3-of-12.{'0' * 8}.partial",
            "3-of-12.safetensors",
            f"3-of-12.{'0' * 31}.safetensors",
            f"3-of-12.{'0' * 32}.safetensors.partial",
            f"x3-of-12.{'0' * 32}.safetensors",
            "manifest.json",
        ):
            (tmp_path / other).write_bytes(b"")
        (tmp_path / f"4-of-12.{'0' * 32}.safetensors").mkdir()
        found = parts_in(tmp_path)
        assert found == written
        assert list(found) == [0, 1, 9]

    def test_one_that_was_written_twice_is_there_once(self, tmp_path: Path) -> None:
        twice = {write(tmp_path, "encrypted") for _ in range(2)}
        assert len(twice) == 2
        assert set(parts_in(tmp_path).values()) < twice

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(OSError) as told:
            parts_in(tmp_path / "none")
        assert told.value.errno == errno.ENOENT

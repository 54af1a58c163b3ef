"""What is cached on the disk is exactly what would be read or decoded, stays below its size, and is never trusted."""

import functools
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from data.shards.shard_files import in_child, small_blocks, write_indexed, write_shards
from quorate.core.errors import RequestError
from quorate.shards.blocks import ShardBlocks
from quorate.shards.dataset import Shards
from quorate.shards.disk_cache import DiskCache
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from quorate.storage import atomic
from quorate.storage.atomic import temporary_of

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")

MB = 1_000_000


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "CACHEDIR.TAG")]


# --- the folder


def test_what_is_put_is_got_and_no_part_of_a_file_is_ever_seen(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", MB)
    assert cache.get("a/1") is None
    cache.put("a/1", b"content")
    assert cache.get("a/1") == b"content"
    assert DiskCache(tmp_path / "cache", MB).get("a/1") == b"content"
    cache.put("a/1", b"other")
    assert cache.get("a/1") == b"other"
    assert len(files_of(tmp_path / "cache")) == 1


@pytest.mark.parametrize("position", [0, 500, -1])
def test_a_damaged_file_is_not_there(position: int, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)
    cache.put("a/1", bytes(1000))
    content = bytearray(cache.path("a/1").read_bytes())
    content[position] ^= 1
    cache.path("a/1").write_bytes(content)
    assert cache.get("a/1") is None
    assert not cache.path("a/1").exists()


def test_it_stays_below_its_size_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 400_000)
    for number in range(300):
        cache.put(f"d/{number}", bytes(4000))
        past = time.time() - 10_000 + number  # as if they had been written seconds apart
        os.utime(cache.path(f"d/{number}"), (past, past))
        assert cache.get("d/0") is not None, "what is used stays"
    assert sum(path.stat().st_blocks * 512 for path in files_of(tmp_path)) <= 430_000
    assert cache.get("d/299") is not None
    assert cache.get("d/1") is None
    assert len(files_of(tmp_path)) > 50


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mine = [tmp_path / name for name in ("scratch/thesis.tex", "scratch/d/1", "scratch/d/1.kept", "elsewhere/1.kept")]
    cache = DiskCache(tmp_path / "scratch", 45_000)
    for path in [*mine, cache.folder / "notes", cache.folder / "d/notes.txt"]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(50_000))
        os.utime(path, (1, 1))
    (cache.folder / "link").symlink_to(elsewhere)
    for number in range(50):
        cache.put(f"d/{number}", bytes(4000))
    assert all(path.exists() for path in [*mine, cache.folder / "notes", cache.folder / "d/notes.txt"])
    assert len(list(cache.folder.glob("d/*.kept"))) < 11, "it was swept"
    assert cache.get("d/49") is not None, "and what else is there does not count"


def test_a_folder_that_is_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quorate-cache").mkdir()
    (tmp_path / "quorate-cache/mine").touch()
    with pytest.raises(RequestError, match="is not a cache of Quorate"):
        DiskCache(tmp_path, MB)


def test_left_overs_of_dead_processes_are_swept_and_those_of_others_are_not(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)
    path = cache.path("a/1")
    path.parent.mkdir()
    ours = temporary_of(path)
    old, elsewhere = temporary_of(path), ours.with_name(ours.name.replace(atomic._host(), "0123"))
    pid = os.fork()
    if pid == 0:
        temporary_of(path).write_bytes(b"half")
        os._exit(0)
    os.waitpid(pid, 0)
    (dead,) = cache.folder.glob("a/.*.partial")
    for each in (old, ours, elsewhere):
        each.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.put("b/1", bytes(10))
    assert not dead.exists()
    assert not old.exists()
    assert ours.exists()
    assert elsewhere.exists(), "nobody can tell whether its process lives"


def test_a_full_disk_ends_the_caching_and_not_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, MB)
    (cache.folder / "d").write_bytes(b"a file where a folder should be")
    for _ in range(3):
        cache.put("d/1", b"content")
    assert cache.get("d/1") is None
    assert caplog.text.count("is written to no longer") == 1


def test_who_cannot_make_room_does_not_fill_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, MB)
    (cache.folder / ".lock").mkdir()
    for number in range(3):
        cache.put(f"d/{number}", b"content")
    assert caplog.text.count("is written to no longer") == 1
    assert len(list(cache.folder.glob("d/*"))) == 1


def test_a_disk_that_takes_no_more_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)

    def work() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        cache.put("d/1", bytes(1000))
        cache.put("d/2", bytes(5000))
        return cache.has_failed and cache.get("d/1") == bytes(1000) and cache.get("d/2") is None

    assert in_child(work)() == 0
    assert [path.name for path in files_of(tmp_path)] == ["1.kept"]


def test_several_processes_share_a_folder_that_is_too_small_for_them(tmp_path: Path) -> None:
    def content(number: int) -> bytes:
        return f"{number} ".encode() * 500

    def work(seed: int) -> bool:
        cache, random = DiskCache(tmp_path, 40_000), numpy.random.default_rng(seed)
        for number in random.integers(0, 60, 400).tolist():
            found = cache.get(f"d/{number}")
            if found is None:
                cache.put(f"d/{number}", content(number))
            elif found != content(number):
                return False
        return not cache.has_failed

    children = [in_child(functools.partial(work, seed)) for seed in range(3)]
    assert [ended() for ended in children] == [0, 0, 0]
    assert not list((tmp_path / "quorate-cache").glob("d/.*"))
    # Two others may each write a share while the third looks.
    assert sum(path.stat().st_size for path in files_of(tmp_path)) < 60_000


def test_a_process_that_is_killed_as_it_places_a_file_leaves_what_was_there(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)
    cache.put("d/1", b"before")

    def work() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            cache.put("d/1", b"behind")
        return True

    assert in_child(work)() == -signal.SIGKILL
    assert len(files_of(tmp_path)) == 2, "its half is still there"
    assert cache.get("d/1") == b"before"
    DiskCache(tmp_path, MB).put("d/2", b"next")
    assert cache.get("d/1") == b"before"
    assert len(files_of(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its mode: whoever runs the tests may be allowed everything.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RequestError, match="cannot be written to"):
        DiskCache(tmp_path, MB)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be made"):
        DiskCache(tmp_path / "file/cache", MB)


# --- blocks of a store


def test_blocks_of_a_store_are_read_once_and_damage_is_read_again_from_there(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_shards("parquet", data)
    save_index(build_index(f"file://{data}"), data / NAME)
    shards = Shards(f"file://{data}", cache={"folder": tmp_path / "cache", "gb": 0.1})
    expected = shards.batch([0, 30, 45])
    kept = files_of(tmp_path / "cache")
    assert {path.name for path in kept} >= {"0.kept", "tail-0.kept", "5.kept", "tail-1.kept"}

    class Unused(Exception):
        pass

    def unused(*_: Any) -> Any:
        raise Unused

    again = Shards(f"file://{data}", cache={"folder": tmp_path / "cache", "gb": 0.1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardBlocks, "_read", unused)
        assert torch.equal(again.batch([0, 30, 45])["vector"], expected["vector"])
    again.close()
    for path in kept:
        path.write_bytes(b"damaged" * 100)
    assert torch.equal(again.batch([0, 30, 45])["vector"], expected["vector"])
    again.close()
    shards.close()


def test_blocks_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    write_indexed("parquet", tmp_path / "data")
    Shards(tmp_path / "data", cache={"folder": tmp_path / "cache"}).batch([0, 40])
    assert not files_of(tmp_path / "cache")

"""What holds for every place, and where folders and stores differ: how a copy dies half way."""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint.disk import killed
from checkpoint.only_part import part_of
from object_store import BUCKET
from quorate.checkpoint.manifest import MANIFEST, Part
from quorate.checkpoint.part_file import verify_part
from quorate.core.errors import CheckpointError, RequestError
from quorate.storage.objects import ObjectMissing, StoreError
from quorate.stores.objects import FsspecStore
from quorate.stores.place import Contents, FolderPlace, ObjectPlace, Place, files_of, place_at, place_for
from quorate.stores.transfer import Source, copy_checkpoints, copy_one, fetch_checkpoint
from stores.copied_run import infos, make_source, save


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path / "runs", 2, 4)


@pytest.fixture
def memory() -> Iterator[FsspecStore]:
    store = FsspecStore(f"memory://{uuid.uuid4().hex}/tiny-0001")
    yield store
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        (tmp_path / "backup").mkdir()
        return place_for(str(tmp_path / "backup"), "tiny-0001")
    if request.param == "memory":
        return ObjectPlace(request.getfixturevalue("memory"))
    request.getfixturevalue("s3")
    return place_for(f"s3://{BUCKET}/{uuid.uuid4().hex}", "tiny-0001")


def test_every_place_keeps_the_contract(place: Place, source: Source, tmp_path: Path) -> None:
    first, second = infos(source).values()
    assert (place.contents().whole, place.contents().unfinished) == ({}, {})
    assert place.read("job.yaml") is None

    place.write("job.yaml", b"one")
    place.write("job.yaml", b"another")
    assert place.read("job.yaml") == b"another"

    assert copy_one(first, place).bytes > first.bytes
    copy_one(second, place)
    copy_one(second, place)
    assert place.contents().whole == {each.path.name: files_of(each.manifest) for each in (first, second)}
    assert not place.contents().unfinished

    back = fetch_checkpoint(place, second.path.name, tmp_path / "back")
    assert back.manifest == second.manifest
    assert part_of(back.path).read_bytes() == part_of(second.path).read_bytes()
    with pytest.raises(ObjectMissing):
        place.fetch(f"{second.path.name}/none", tmp_path / "none", 1)

    place.remove(second.path.name)
    place.remove(second.path.name)
    assert set(place.contents().whole) == {first.path.name}
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        fetch_checkpoint(place, second.path.name, tmp_path / "back")
    assert not list((tmp_path / "back").glob(".*")), "a fetch that failed leaves nothing"


def test_a_small_file_is_removed_like_a_checkpoint(place: Place) -> None:
    place.write("source.json", b"{}")
    place.write("job.yaml", b"task: x\n")
    for _ in range(2):  # what is gone is as good as removed
        place.remove("source.json")
        assert (place.read("source.json"), place.read("job.yaml")) == (None, b"task: x\n")


def test_no_copy_is_made_of_damage(place: Place, source: Source) -> None:
    info = infos(source)["step-00000004"]
    part = part_of(info.path)
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        copy_one(info, place)
    assert not place.contents().whole


def test_what_was_saved_anew_replaces_its_copy(place: Place, source: Source) -> None:
    """As when checkpoints are encrypted with another key: the old parts must go."""
    copy_one(infos(source)["step-00000004"], place)
    before = place.contents().whole
    shutil.rmtree(infos(source)["step-00000004"].path)
    save(source, 4, numbers=65)
    copy_one(infos(source)["step-00000004"], place)
    assert place.contents().whole == {"step-00000004": files_of(infos(source)["step-00000004"].manifest)}
    assert place.contents().whole != before


class Death(BaseException):
    """A process that is killed does nothing more."""


def dying(store: FsspecStore, monkeypatch: pytest.MonkeyPatch, call: int, after: bool) -> list[str]:
    """Let the store's call number `call` be the last, done or not; returns the list of calls."""
    calls: list[str] = []
    real = store._do

    def do(method: str, *arguments: Any, **options: Any) -> Any:
        calls.append(method)
        is_last = len(calls) - 1 == call
        if is_last and not after:
            raise Death
        try:
            return real(method, *arguments, **options)
        finally:
            if is_last:
                raise Death

    monkeypatch.setattr(store, "_do", do)
    return calls


def test_copier_that_dies_at_any_call_of_a_store_leaves_no_lie(
    memory: FsspecStore, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ObjectPlace(memory)
    for after in (False, True):
        call, is_over = 0, False
        while not is_over:
            fsspec.filesystem("memory").store.clear()
            with monkeypatch.context() as patch:
                calls = dying(memory, patch, call, after)
                try:
                    copy_checkpoints(source, place)
                    is_over = True
                except Death:
                    pass
            for name in place.contents().whole:
                back = tmp_path / f"back-{after}-{call}"
                assert fetch_checkpoint(place, name, back).manifest == infos(source)[name].manifest
            copy_checkpoints(source, place)
            assert place.contents().whole.keys() == infos(source).keys(), "the next one completes it"
            assert not place.contents().unfinished
            call += 1
        assert call > 10 and "put_file" in calls and "pipe_file" in calls


def test_copier_that_is_killed_at_any_call_to_the_disk_leaves_no_lie(tmp_path: Path) -> None:
    source = make_source(tmp_path / "runs", 2)
    (info,) = infos(source).values()
    call = 0
    while True:
        place = FolderPlace(tmp_path / f"backup-{call}")
        was_killed = killed(lambda target=place: copy_one(info, target), call, half_written=True)  # type: ignore[misc]
        for name in place.contents().whole:
            fetch_checkpoint(place, name, tmp_path / f"back-{call}")
        if not was_killed:
            break
        copy_one(info, place)
        assert set(place.contents().whole) == {info.path.name}
        call += 1
    assert call > 8


def test_copier_that_is_killed_while_it_replaces_a_copy_has_not_removed_it(tmp_path: Path) -> None:
    source, place = make_source(tmp_path / "runs", 2), FolderPlace(tmp_path / "backup")
    (before,) = infos(source).values()
    copy_one(before, place)
    shutil.rmtree(before.path)
    (info,) = infos(make_source(tmp_path / "anew", 2, numbers=65)).values()
    shutil.copytree(tmp_path / "backup", tmp_path / "kept")
    call = moments_between = 0
    while True:
        shutil.rmtree(tmp_path / "backup")
        shutil.copytree(tmp_path / "kept", tmp_path / "backup")
        was_killed = killed(lambda: copy_one(info, place), call, half_written=True)
        named = list(place.contents().whole)
        if not named:
            moments_between += 1
            (aside,) = (tmp_path / "backup").glob(".removing-*")
            assert {file.name for file in aside.iterdir()} == {MANIFEST, before.manifest.parts[0].file}
            verify_part(aside, before.manifest.parts[0])
        for name in named:
            fetch_checkpoint(place, name, tmp_path / f"back-{call}")
        if not was_killed:
            break
        call += 1
    assert call > 8 and moments_between > 0
    assert place.contents() == Contents({info.path.name: files_of(info.manifest)})


def test_a_copy_that_cannot_get_its_name_leaves_the_one_before(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real, spoilt = FolderPlace(tmp_path / "backup"), os.rename, list[Path]()
    copy_one(infos(source)["step-00000004"], place)
    before = place.contents()
    (info,) = infos(make_source(tmp_path / "anew", 4, numbers=65)).values()

    def rename(old: Path, new: Path) -> None:
        if old.name.startswith(".copying-"):
            spoilt.append(old)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StoreError, match="Input/output error"):
        copy_one(info, place)
    assert spoilt and place.contents() == before


def lose(part: Path) -> None:
    """As another launcher does, that takes it for a leftover."""
    shutil.rmtree(part.parent)


def rot(part: Path) -> None:
    part.write_bytes(bytes(part.stat().st_size))


@pytest.mark.parametrize(("harm", "reason"), [(lose, "is missing"), (rot, "is damaged")])
def test_a_copy_that_cannot_be_read_back_is_trouble_of_the_place(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], reason: str
) -> None:
    place, info = FolderPlace(tmp_path / "backup"), infos(source)["step-00000004"]
    harmed: list[Path] = []

    def verify(folder: Path, part: Part) -> None:
        if folder.name.startswith(".copying-"):
            harmed.append(folder)
            harm(folder / part.file)
        verify_part(folder, part)

    monkeypatch.setattr("quorate.stores.place.verify_part", verify)
    with pytest.raises(StoreError, match=reason) as caught:
        copy_one(info, place)
    assert harmed
    assert caught.value.message.startswith(f"{tmp_path}/backup: the copy of step-00000004")
    assert "although the checkpoint is valid" in caught.value.message
    assert ".copying-" not in caught.value.message and not caught.value.lasts
    assert place.contents() == Contents()


def test_a_mount_point_is_not_made(source: Source, tmp_path: Path) -> None:
    place = place_for(str(tmp_path / "nas"), "tiny-0001")
    with pytest.raises(StoreError, match=r"/nas: there is no such folder\. Mount it") as caught:
        copy_checkpoints(source, place)
    assert caught.value.lasts
    with pytest.raises(StoreError, match="there is no such folder"):
        copy_one(infos(source)["step-00000004"], place)
    assert not (tmp_path / "nas").exists()
    (tmp_path / "nas").mkdir()
    assert len(copy_checkpoints(source, place)) == 2


def test_what_was_put_before_a_death_is_not_put_again(memory: FsspecStore, source: Source) -> None:
    place = ObjectPlace(memory)
    info = infos(source)["step-00000004"]
    part = part_of(info.path)
    memory.put_file(f"{info.path.name}/{part.name}", part)
    assert set(place.contents().unfinished) == {info.path.name}
    assert copy_one(info, place).bytes == (info.path / MANIFEST).stat().st_size
    assert set(place.contents().whole) == {info.path.name}


def test_a_part_that_another_takes_away_is_noticed_before_the_commit(
    memory: FsspecStore, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ObjectPlace(memory)
    info = infos(source)["step-00000004"]
    real = memory.put_file

    def swept(key: str, file: Path) -> None:
        real(key, file)
        memory.remove(key)

    monkeypatch.setattr(memory, "put_file", swept)
    with pytest.raises(StoreError, match="just after it was copied"):
        copy_one(info, place)
    assert not place.contents().whole


def test_folder_that_cannot_be_written_is_explained(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    place = place_at(str(tmp_path / "file" / "tiny-0001"))
    with pytest.raises(StoreError, match="Not a directory"):
        copy_one(infos(source)["step-00000004"], place)


def test_addresses() -> None:
    assert isinstance(place_at("/mnt/backup/tiny-0001"), FolderPlace)
    assert str(place_at("file:///mnt/backup/tiny-0001")) == "/mnt/backup/tiny-0001"
    assert str(place_for("s3://bucket/prefix/", "tiny-0001")) == "s3://bucket/prefix/tiny-0001"
    with pytest.raises(RequestError, match="not a kind of store"):
        place_at("sss://bucket/tiny-0001")

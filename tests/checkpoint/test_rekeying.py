"""Checkpoints under another key: readable at any moment, whatever happens while they are rewritten."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.whole_save import save_whole
from quorate.checkpoint.listing import CheckpointInfo, Unusable, read_manifest
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.part_file import write_part
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, UntrustedError
from quorate.encryption import key as key_module
from quorate.encryption.cipher import Cipher
from quorate.encryption.key import read_key, rekey, sweep_leftovers

STATE: dict[str, Any] = {"a": torch.arange(40.0), "b": torch.ones(3, dtype=torch.int64), "text": "kept"}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


@pytest.fixture
def info(folder: CheckpointFolder) -> CheckpointInfo:
    job = {"checkpoint": {"keep": 3}}
    return save_whole(folder, STATE, step=7, phase=0, weights_digest="digest", job=job, environment={}, metrics={})


def key_file(tmp_path: Path, letter: str) -> Mapping[str, Any]:
    path = tmp_path / f"key-{letter}"
    path.write_text(letter * 64)
    return {"key_file": str(path), "key_env": None}


def assert_readable(folder: CheckpointFolder) -> Manifest:
    (info,) = folder.list()
    folder.verify(info)
    loaded = CheckpointFolder(folder.folder).load(info)
    assert loaded.state["text"] == "kept"
    assert torch.equal(loaded.state["a"], STATE["a"])
    assert torch.equal(loaded.state["b"], STATE["b"])
    return loaded.manifest


def files(info: CheckpointInfo) -> set[str]:
    return {entry.name for entry in info.path.iterdir()}


def test_from_plain_to_one_key_and_another_and_back(
    folder: CheckpointFolder, info: CheckpointInfo, tmp_path: Path
) -> None:
    for place in (key_file(tmp_path, "a"), key_file(tmp_path, "b"), None):
        new = None if place is None else read_key(place)
        before = files(info)
        assert rekey(info, new, place)
        manifest = assert_readable(folder)
        assert manifest.encryption == (None if new is None else new.label)
        assert files(info) == {"manifest.json", *(part.file for part in manifest.parts)}
        assert files(info) & before == {"manifest.json"}
        assert manifest.job["checkpoint"]["keep"] == 3
        assert not rekey(info, new, place), "it is so already"


def test_a_key_that_has_only_moved_is_looked_for_in_its_new_place(
    folder: CheckpointFolder, info: CheckpointInfo, tmp_path: Path
) -> None:
    place = key_file(tmp_path, "a")
    rekey(info, read_key(place), place)
    before = assert_readable(folder)
    moved = {"key_file": str(tmp_path / "moved"), "key_env": None}
    shutil.move(str(place["key_file"]), str(moved["key_file"]))
    assert rekey(info, read_key(moved), moved)
    assert assert_readable(folder).parts == before.parts


def test_what_the_job_asks_to_be_encrypted_is_taken_from_those_with_the_key_only(
    folder: CheckpointFolder, info: CheckpointInfo, tmp_path: Path
) -> None:
    """Plain ones, and those of earlier versions, are let in by changing their key, which is done on purpose."""
    place = key_file(tmp_path, "a")
    strict = CheckpointFolder(folder.folder, cipher=read_key(place))
    search = strict.search()
    assert search.newest is None
    assert search.skipped[0].kind is Unusable.UNTRUSTED and "is not encrypted, although" in search.skipped[0].reason
    with pytest.raises(UntrustedError):
        strict.load(info)
    rekey(info, read_key(place), place)
    assert strict.load(info).state["text"] == "kept"
    manifest = read_manifest(info.path)
    (info.path / "manifest.json").write_text(replace(manifest, tag="").to_json())
    assert strict.search().newest is None
    assert rekey(info, read_key(place), place)
    assert read_manifest(info.path) == manifest, "the parts stay as they are"
    forged = replace(manifest, metrics={"loss": 0.0})
    (info.path / "manifest.json").write_text(forged.to_json())
    with pytest.raises(UntrustedError, match="not authentic"):
        rekey(info, read_key(place), place)
    with pytest.raises(UntrustedError, match="not authentic"):
        strict.verify(info)
    newer = save_whole(folder, STATE, step=9, phase=0, weights_digest="digest", job={}, environment={}, metrics={})
    (info.path / "manifest.json").write_text(manifest.to_json())
    search = strict.search()
    assert search.newest is not None and search.newest.path == info.path
    assert [each.path for each in search.skipped] == [newer.path]


def test_without_the_old_key_nothing_changes(folder: CheckpointFolder, info: CheckpointInfo, tmp_path: Path) -> None:
    place = key_file(tmp_path, "a")
    rekey(info, read_key(place), place)
    Path(str(place["key_file"])).unlink()
    before = {entry: entry.read_bytes() for entry in info.path.iterdir()}
    with pytest.raises(CheckpointError, match="cannot read the key file"):
        rekey(info, Cipher(b"n" * 32), key_file(tmp_path, "b"))
    assert {entry: entry.read_bytes() for entry in info.path.iterdir()} == before
    assert rekey(info, None, None, old=Cipher(bytes.fromhex("a" * 64))), "it may be given by hand"
    assert_readable(folder)


@pytest.mark.parametrize("letter", ["a", "b"], ids=["the same key", "another"])
@pytest.mark.parametrize("seam", ["write_part", "write_atomically", "discard"])
def test_one_that_dies_while_it_rewrites_leaves_a_whole_checkpoint_and_can_be_repeated(
    folder: CheckpointFolder,
    info: CheckpointInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seam: str,
    letter: str,
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(key_module, seam, die)
        with pytest.raises(Killed):
            rekey(info, read_key(key_file(tmp_path, "a")), key_file(tmp_path, "a"))
    assert_readable(folder)
    place = key_file(tmp_path, letter)
    is_done = seam == "discard" and letter == "a"
    assert rekey(info, read_key(place), place) is not is_done
    manifest = assert_readable(folder)
    assert files(info) == {"manifest.json", *(part.file for part in manifest.parts)}, "what was left over is gone"


def test_what_cannot_be_removed_is_told(info: CheckpointInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = info.manifest.parts
    place = key_file(tmp_path, "a")
    with monkeypatch.context() as patch:
        patch.setattr(key_module, "discard", lambda _: None)
        for _ in range(2):  # the second time, only that is left to do
            with pytest.raises(CheckpointError, match=f"{part.file}, which is left over .* cannot be removed"):
                rekey(info, read_key(place), place)
    assert not rekey(info, read_key(place), place)
    assert part.file not in files(info)


def test_one_that_fails_half_way_leaves_no_part_of_the_new_kind(
    info: CheckpointInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part,) = info.manifest.parts
    second = replace(part, file=f"2-of-2.{'0' * 32}.safetensors")
    twofold = replace(info.manifest, parts=(part, second))
    (info.path / "manifest.json").write_text(twofold.to_json())
    written: list[str] = []

    def write(*given: Any, **how: Any) -> Any:
        written.append(write_part(*given, **how).file)
        assert (info.path / written[-1]).exists()
        return replace(part, file=written[-1])

    monkeypatch.setattr(key_module, "write_part", write)
    with pytest.raises(CheckpointError, match=r"2-of-2\.0+\.safetensors is missing"):
        rekey(info, read_key(key_file(tmp_path, "a")), key_file(tmp_path, "a"))
    assert len(written) == 1
    assert files(info) == {"manifest.json", part.file}


def test_leftovers_of_writers_that_died_are_swept(folder: CheckpointFolder, info: CheckpointInfo) -> None:
    for name in (".writing-step-00000009-ab", ".removing-step-00000003-cd"):
        (folder.folder / name).mkdir()
        (folder.folder / name / "1-of-1.safetensors").write_text("in plain")
    sweep_leftovers(folder.folder)
    assert [entry.name for entry in folder.folder.iterdir()] == [info.path.name]
    sweep_leftovers(folder.folder / "none")


def test_a_damaged_part_is_named_and_left_as_it_is(info: CheckpointInfo, tmp_path: Path) -> None:
    (part,) = info.manifest.parts
    path = info.path / part.file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=part.file):
        rekey(info, read_key(key_file(tmp_path, "a")), key_file(tmp_path, "a"))
    assert files(info) == {"manifest.json", part.file}


def test_a_folder_that_cannot_be_written_is_named(info: CheckpointInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(key_module, "write_atomically", refuse)
    with pytest.raises(CheckpointError, match="cannot be rewritten: Permission denied"):
        rekey(replace(info), Cipher(b"n" * 32), {"key_env": "KEY", "key_file": None})

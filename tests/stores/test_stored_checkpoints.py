"""Saves to an object store that goes away, and what a writer that was replaced leaves there."""

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.whole_save import save_whole
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import AttemptGone, CheckpointError
from quorate.core.generation import Cursor
from quorate.history.run_detail import CheckpointList
from quorate.storage.objects import Stored
from quorate.storage.run_folder import RunFolder
from quorate.stores.objects import FsspecStore
from quorate.supervisor.supervisor import find_newest

MANIFEST = Manifest(1, 0, "", (), {}, "weights", {}, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> FsspecStore:
    store = FsspecStore(f"memory://{uuid.uuid4().hex}/tiny-0001")
    RunFolder(tmp_path).keep_in(store)
    return store


@pytest.fixture
def folder(tmp_path: Path, store: FsspecStore) -> CheckpointFolder:
    return CheckpointFolder.at(tmp_path / "checkpoints")


def away(patch: pytest.MonkeyPatch, *methods: str) -> list[str]:
    """Have the store fail by these methods of its library; the list has the calls that did."""
    calls: list[str] = []
    real = FsspecStore._do

    def do(self: FsspecStore, method: str, *arguments: Any, **options: Any) -> Any:
        if method in methods:
            calls.append(method)
            raise ConnectionError("the store is away")
        return real(self, method, *arguments, **options)

    patch.setattr(FsspecStore, "_do", do)
    return calls


def test_one_is_given_up_also_while_the_store_is_away(
    folder: CheckpointFolder, store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = folder.open(Cursor(1))
    with monkeypatch.context() as patch:
        calls = away(patch, "pipe_file")
        with pytest.raises(CheckpointError, match="cannot be reached"):
            attempt.write(0, 1, [b"content"])
        calls.clear()
        attempt.give_up()
        assert calls
    again = folder.open(Cursor(2))
    again.sweep()
    assert {key.partition("/")[0] for key in store.list()} == {again.name}


def test_what_is_committed_is_saved_although_the_store_goes_away_after_that(
    folder: CheckpointFolder, store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = folder.open(Cursor(1))
    attempt.write(0, 1, [b"content"])
    with monkeypatch.context() as patch:
        calls = away(patch, "rm_file")
        assert folder.commit(attempt.name, MANIFEST, lambda: None).cursor == Cursor(1)
        assert calls
    assert [info.cursor for info in folder.list()] == [Cursor(1)]


def test_a_manifest_without_its_parts_is_replaced(folder: CheckpointFolder, store: FsspecStore) -> None:
    replaced = folder.open(Cursor(1))
    replaced.write(0, 1, [b"old"])

    def swept() -> None:
        for key in store.list():
            if key.endswith(".safetensors"):
                store.remove(key)

    folder.commit(replaced.name, MANIFEST, swept)
    assert "step-00000001/manifest.json" in store.list()
    assert folder.list() == ()

    attempt = folder.open(Cursor(1))
    part = attempt.write(0, 1, [b"new"])
    folder.commit(attempt.name, MANIFEST, lambda: None)
    (info,) = folder.list()
    assert info.manifest.parts == (part,)
    folder.verify(info)


def test_of_a_store_that_is_away_nobody_says_that_it_has_no_checkpoint(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = folder.open(Cursor(1))
    attempt.write(0, 1, [b"content"])
    folder.commit(attempt.name, MANIFEST, lambda: None)
    away(monkeypatch, "find")
    with pytest.raises(CheckpointError, match="cannot be reached"):
        CheckpointList.read(RunFolder(tmp_path))


def test_a_voucher_that_goes_while_it_is_read_is_that_of_one_that_is_gone(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = folder.open(Cursor(1))
    attempt.vouch(0, b"voucher")
    real = FsspecStore.read

    def read(self: FsspecStore, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.remove(key)
        return real(self, key, start, length)

    monkeypatch.setattr(FsspecStore, "read", read)
    with pytest.raises(AttemptGone):
        attempt.vouchers()


@pytest.mark.parametrize("has_tags", [False, True])
def test_a_manifest_of_the_same_length_is_shown_anew(
    folder: CheckpointFolder, store: FsspecStore, monkeypatch: pytest.MonkeyPatch, has_tags: bool
) -> None:
    """As one is that was encrypted anew; and one that has not changed is not read again, by a store that tells."""
    attempt = folder.open(Cursor(1))
    attempt.write(0, 1, [b"content"])
    saved = folder.commit(attempt.name, MANIFEST, lambda: None)
    key, reads = "step-00000001/manifest.json", []
    listed, read = FsspecStore.list, FsspecStore.read

    def tagged(self: FsspecStore) -> dict[str, Stored]:
        return {name: replace(each, tag=str(hash(read(self, name)))) for name, each in listed(self).items()}

    def counted(self: FsspecStore, name: str) -> bytes:
        reads.append(name)
        return read(self, name)

    if has_tags:
        monkeypatch.setattr(FsspecStore, "list", tagged)
    monkeypatch.setattr(FsspecStore, "read", counted)
    before = store.read(key)
    after = replace(saved.manifest, weights_digest="WEIGHTS").to_json().encode()
    assert len(after) == len(before)
    assert [info.manifest.weights_digest for info in folder.list()] == ["weights"]
    store.put(key, after)
    assert [info.manifest.weights_digest for info in folder.list()] == ["WEIGHTS"]
    reads.clear()
    assert [info.manifest.weights_digest for info in folder.list()] == ["WEIGHTS"]
    assert reads == ([] if has_tags else [key])


def test_several_set_aside_at_once(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole(folder, {"step": 4}, step=4, weights_digest="w")
    second = CheckpointFolder.at(folder.folder)
    listed = second.list()
    folder.set_aside(0)
    with monkeypatch.context() as patched:
        answers = iter([listed])
        patched.setattr(second, "list", lambda: next(answers, ()))  # it has looked before
        second.set_aside(0)
    assert {info.path.name for info in folder.distrusted()} == {"step-00000004"}
    assert find_newest(folder, None, saved=4) is None

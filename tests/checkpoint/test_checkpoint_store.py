"""The contract of a store of checkpoints, for a folder, for an object store and for one in memory."""

import errno
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.memory_store import MemoryStore
from checkpoint.split_save import split
from checkpoint.whole_save import save_whole
from object_store import BUCKET
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import CheckpointFolder, CheckpointStore, NoSpace, remove_surplus
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import encode
from quorate.core.errors import AttemptGone, CheckpointError, LeaseExpired
from quorate.core.generation import Cursor
from quorate.storage.objects import open_store
from quorate.storage.run_folder import RunFolder

STATE = {"a": torch.arange(4.0), "b": {"c": torch.ones(2, dtype=torch.int64), "d": "text"}}


@pytest.fixture(params=["folder", "memory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "objects":
        request.getfixturevalue("s3")
        RunFolder(tmp_path).keep_in(open_store(f"s3://{BUCKET}/{tmp_path.name}-{secrets.token_hex(4)}"))
    return CheckpointFolder.at(tmp_path / "checkpoints")


def steps(store: CheckpointStore) -> list[int]:
    return [info.cursor.step for info in store.list()]


def manifest(step: int, weights: str = "weights") -> Manifest:
    return Manifest(step, 0, "", (), encode(STATE).skeleton, weights, {}, {}, {})


def write(store: CheckpointStore, attempt: str, index: int) -> None:
    """One of two writers writes its part, in a process of its own."""
    name, tensor = sorted(encode(STATE).tensors.items())[index]
    store.open(Cursor(1), name=attempt).write(index, 2, TensorFile({name: tensor}).chunks())


def nothing() -> None:
    pass


def test_what_several_have_written_is_there_from_its_commit_on(store: CheckpointStore) -> None:
    attempt = store.open(Cursor(1), 100)
    for index in (1, 0):
        assert index not in attempt.written()
        write(store, attempt.name, index)
        assert index in attempt.written()
        assert steps(store) == []
    info = store.commit(attempt.name, manifest(1), nothing)
    assert steps(store) == [1]
    assert store.list() == (info,)
    assert len(info.manifest.parts) == 2
    loaded = store.load(info)
    assert loaded.manifest.weights_digest == "weights"
    assert torch.equal(loaded.state["a"], STATE["a"])  # type: ignore[arg-type]
    assert loaded.state["b"]["d"] == "text"


def test_two_attempts_do_not_meet_and_one_sweeps_the_other_away(store: CheckpointStore) -> None:
    left, attempt = store.open(Cursor(1)), store.open(Cursor(1))
    write(store, left.name, 0)
    assert attempt.written() == {}
    attempt.sweep()
    write(store, attempt.name, 1)
    with pytest.raises(AttemptGone):
        left.written()
    assert list(attempt.written()) == [1]


def test_one_that_is_given_up_is_gone_for_all(store: CheckpointStore) -> None:
    attempt = store.open(Cursor(1))
    write(store, attempt.name, 0)
    store.open(Cursor(1), name=attempt.name).give_up()
    with pytest.raises(AttemptGone):
        write(store, attempt.name, 1)
    with pytest.raises(AttemptGone):
        attempt.written()
    with pytest.raises(AttemptGone):
        store.commit(attempt.name, manifest(1), nothing)
    attempt.give_up()
    assert steps(store) == []


def test_one_that_was_committed_cannot_be_given_up(store: CheckpointStore) -> None:
    attempt = store.open(Cursor(1))
    for index in (0, 1):
        write(store, attempt.name, index)
    info = store.commit(attempt.name, manifest(1), nothing)
    attempt.give_up()
    assert torch.equal(store.load(info).state["a"], STATE["a"])  # type: ignore[arg-type]


def test_who_may_not_commit_may_try_again_later(store: CheckpointStore) -> None:
    def refuse() -> None:
        raise LeaseExpired("the coordinator has sent no heartbeat for too long")

    attempt = store.open(Cursor(1))
    for index in (0, 1):
        write(store, attempt.name, index)
    with pytest.raises(LeaseExpired):
        store.commit(attempt.name, manifest(1), refuse)
    assert steps(store) == []
    assert len(attempt.written()) == 2
    store.commit(attempt.name, manifest(1), nothing)
    assert steps(store) == [1]


def test_the_same_state_again_is_left_as_it_is_and_another_is_refused(store: CheckpointStore) -> None:
    first = save_whole(store, STATE, step=1, weights_digest="weights")
    assert save_whole(store, STATE, step=1, weights_digest="weights", metrics={"loss": 0.7}) == first
    assert store.list() == (first,)
    with pytest.raises(CheckpointError, match=r"weights.*other.*cannot pass through both"):
        save_whole(store, STATE, step=1, weights_digest="other")
    assert steps(store) == [1]


def test_the_same_state_in_other_pieces_is_left_as_it_is(tmp_path: Path) -> None:
    """Digests are of pieces: resumed with another mesh, a run has others for the same weights."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    cut = split(folder, save_whole(folder, STATE, step=1, weights_digest="of pieces"))
    assert save_whole(folder, STATE, step=1, weights_digest="of the whole") == cut
    assert folder.list() == (cut,)


def test_retention_removes_what_is_too_much(store: CheckpointStore) -> None:
    for step in (3, 1, 2, 4):
        save_whole(store, STATE, step=step)
    assert steps(store) == [1, 2, 3, 4]
    removed = remove_surplus(store, Retention(1), 2, Cursor(4))
    assert [info.cursor.step for info in removed] == [1, 3]
    assert steps(store) == [2, 4]
    with pytest.raises(CheckpointError, match="cannot remove"):
        store.remove(removed[0].path)


def test_without_space_that_is_said_and_nothing_is_listed(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_whole(store, STATE, step=1)
    with pytest.MonkeyPatch.context() as patch:
        _fill(store, patch)
        with pytest.raises(NoSpace, match="needs"):
            save_whole(store, STATE, step=2)
        assert steps(store) == [1]
    if isinstance(store, MemoryStore):
        store.free = None
    save_whole(store, STATE, step=2)
    assert steps(store) == [1, 2]


def _fill(store: CheckpointStore, patch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if isinstance(store, MemoryStore):
        store.free = 1
    else:
        patch.setattr(sys.modules[type(store).__module__], "write_part", full)


def test_after_a_power_cut_what_was_committed_is_there_and_nothing_else() -> None:
    store = MemoryStore()
    save_whole(store, STATE, step=1)
    attempt = store.open(Cursor(2))
    write(store, attempt.name, 0)
    store.cut_power()
    with pytest.raises(AttemptGone):
        attempt.written()
    assert steps(store) == [1]

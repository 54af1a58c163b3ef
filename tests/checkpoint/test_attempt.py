import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quorate.checkpoint import part_file
from quorate.checkpoint import store as store_module
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.store import CheckpointFolder, FolderAttempt
from quorate.core.errors import AttemptGone, CheckpointError
from quorate.core.generation import Cursor
from sealing import cipher


@pytest.fixture
def attempt(tmp_path: Path) -> FolderAttempt:
    return opened(CheckpointFolder(tmp_path / "checkpoints"))


def opened(folder: CheckpointFolder) -> FolderAttempt:
    attempt = folder.open(Cursor(1))
    assert isinstance(attempt, FolderAttempt)
    return attempt


def write(attempt: FolderAttempt, index: int) -> Any:
    return attempt.write(index, 2, [b"content"])


def manifest() -> Manifest:
    return Manifest(1, 0, "", (), {}, "weights", {}, {}, {})


def entries(attempt: FolderAttempt) -> list[str]:
    return [entry.name for entry in attempt.path.parent.iterdir()]


def test_a_part_that_gets_its_name_while_others_look_is_no_failure(
    attempt: FolderAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, is_file = write(attempt, 0), Path.is_file
    (attempt.path / ".2-of-2.0a1b2c3d.partial").write_bytes(b"content")

    def look_and_rename(path: Path) -> bool:
        found = is_file(path)
        if path.suffix == ".partial":
            path.rename(path.with_name("renamed"))
        return found

    monkeypatch.setattr(Path, "is_file", look_and_rename)
    assert attempt.written() == {0: first}


def test_whoever_comes_too_late_notices(attempt: FolderAttempt) -> None:
    write(attempt, 0)
    attempt.give_up()
    assert entries(attempt) == []
    with pytest.raises(AttemptGone, match="abandoned by another writer"):
        write(attempt, 1)
    with pytest.raises(AttemptGone):
        attempt.written()
    attempt.give_up()
    assert entries(attempt) == [], "nobody makes it again"


def test_whoever_is_in_the_middle_of_a_part_notices(attempt: FolderAttempt) -> None:
    def chunks() -> Any:
        yield b"a beginning"
        attempt.give_up()
        yield b"and the rest"

    with pytest.raises(AttemptGone):
        attempt.write(0, 2, chunks())
    assert entries(attempt) == []


def test_one_that_is_given_up_while_it_is_committed_is_whole_or_nothing(
    attempt: FolderAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose part is there may still fail, as its folder cannot be synced: what it removes is no checkpoint."""
    folder = CheckpointFolder(attempt.path.parent)
    write(attempt, 0)
    removing, committed = threading.Event(), threading.Event()
    unlink = os.unlink

    def dawdle(*arguments: Any, **options: Any) -> None:
        removing.set()
        committed.wait(0.5)  # the committer, if nothing holds it back, is done by then
        unlink(*arguments, **options)

    def fail_late(source: Path, final: Path) -> None:
        source.rename(final)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "move_into_place", fail_late)
        with pytest.raises(CheckpointError, match="Input/output"):
            write(attempt, 1)
    assert len(attempt.written()) == 2

    def check() -> None:
        """The writer begins to remove it when the committer has looked at everything."""
        monkeypatch.setattr(os, "unlink", dawdle)
        thread.start()
        assert removing.wait(60)

    thread = threading.Thread(target=attempt.give_up)
    try:
        with pytest.raises((CheckpointError, OSError)):
            folder.commit(attempt.name, manifest(), check)
    finally:
        committed.set()
        thread.join(60)
    monkeypatch.undo()
    assert [info.cursor for info in folder.list()] == []
    assert folder.search().skipped == ()


def test_whoever_looks_for_parts_notices(attempt: FolderAttempt, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_too_late(path: Path) -> Any:
        attempt.give_up()
        return part_file.parts_in(path)

    monkeypatch.setattr(store_module, "parts_in", look_too_late)
    with pytest.raises(AttemptGone):
        attempt.written()


def test_its_space_is_given_back_also_where_it_cannot_be_renamed(
    attempt: FolderAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(attempt, 0)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", refuse)
    attempt.give_up()
    assert entries(attempt) == []


def test_what_writers_say_of_an_encrypted_checkpoint_is_not_in_plain(tmp_path: Path) -> None:
    attempt = opened(CheckpointFolder(tmp_path, cipher=cipher(bytes(32))))
    attempt.vouch(0, b"a secret name")
    attempt.vouch(3, b"another")
    assert attempt.vouchers() == {0: b"a secret name", 3: b"another"}
    assert not [path for path in attempt.path.iterdir() if b"secret" in path.read_bytes()]

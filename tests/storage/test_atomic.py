import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quorate.storage.atomic import discard, write_atomically, write_fully, write_new_file


def test_replaces_the_content_and_leaves_no_temporary(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_atomically(file, "old")
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_secret_is_never_readable_by_others_even_before_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    real = os.rename

    def watch(source: Path, target: Path) -> None:
        modes.append(stat.S_IMODE(source.stat().st_mode))
        real(source, target)

    monkeypatch.setattr(os, "rename", watch)
    write_atomically(tmp_path / "secret", "token", mode=0o600)
    assert modes == [0o600]
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_write_keeps_the_old_content_and_no_temporary(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    write_atomically(file, "old")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def watch(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        return watch

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, watched(name))
    write_atomically(tmp_path / "file", "x")
    assert calls == ["write", "fsync", "rename", "fsync"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    assert write_new_file(tmp_path / "file", [b"0123456789", b"", bytearray(b"ab")]) == 12
    assert (tmp_path / "file").read_bytes() == b"0123456789ab"


def test_a_new_file_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_new_file(tmp_path / "file", [b"theirs"])
    assert (tmp_path / "file").read_text() == "mine"


def test_buffers_of_wide_elements_count_in_bytes(tmp_path: Path) -> None:
    wide: Any = memoryview(bytes(16)).cast("d")
    with (tmp_path / "file").open("wb") as file:
        assert write_fully(file.fileno(), wide) == 16
        assert write_fully(file.fileno(), memoryview(b"").cast("B")) == 0
    assert (tmp_path / "file").stat().st_size == 16


def test_discard_removes_folders_files_and_links_but_not_what_a_link_shows(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("link", "file", "folder", "missing"):
        discard(tmp_path / name)
    assert list(tmp_path.iterdir()) == [target]

import os
import socket
from pathlib import Path

import pytest

from quorate.core.regular_file import open_regular, opened_regular, read_regular


def test_a_file_is_read_also_through_links(tmp_path: Path) -> None:
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.write_bytes(b"one\ntwo\n")
    link.symlink_to(file)
    folder.symlink_to(tmp_path)
    for path in (file, link, folder / "file"):
        assert read_regular(path) == b"one\ntwo\n"
        with opened_regular(path) as lines:
            assert list(lines) == [b"one\n", b"two\n"]


@pytest.mark.timeout(5)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT], ids=["to read", "to write"])
@pytest.mark.parametrize(
    ("kind", "told"), [("fifo", "a FIFO"), ("socket", "a socket"), ("device", "a device"), ("folder", "Is a directory")]
)
def test_what_is_no_file_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str, flags: int
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("/dev/zero") if kind == "device" else Path(kind)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            listener.bind(str(path))
        elif kind == "folder":
            path.mkdir()
        with pytest.raises(OSError, match=told) as refused:
            open_regular(path, flags)
    assert refused.value.filename == str(path)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before, "a descriptor is left"


def test_what_is_not_there_is_told_as_always(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")

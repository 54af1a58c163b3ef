"""The source of a task in a run's folder."""

import json
import os
from pathlib import Path

import pytest

from quorate.core.errors import JobError
from quorate.core.task_source import TaskSource
from quorate.storage import task_files as kept_source
from quorate.storage.task_files import INDEX, SourcePage, keep_source, read_source
from storage.in_time import in_time

SOURCE = TaskSource("task.py", {"task.py": b"import nets\n", "nets.py": b"x = 1\n", "parts/inner.py": b"# \xe4\n"})


def test_it_is_kept_once_with_where_the_file_lay_relative_to_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a-0001"
    run.mkdir(parents=True)
    assert read_source(run) is None
    keep_source(run, SOURCE, tmp_path / "task.py")
    kept = read_source(run)
    assert kept is not None
    assert (kept.source, kept.found_at, kept.folder) == (SOURCE, "../../task.py", run / "source")
    assert (run / "source" / "parts" / "inner.py").read_bytes() == b"# \xe4\n"
    keep_source(run, TaskSource("other.py", {"other.py": b""}), None)
    assert read_source(run) == kept


def test_it_is_whole_or_not_there_and_what_a_writer_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".source-dead").mkdir()
    (tmp_path / ".source-dead" / "task.py").touch()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept_source, "move_into_place", no_space)
        with pytest.raises(JobError, match=r"cannot keep the task's source in .*: No space left"):
            keep_source(tmp_path, SOURCE, None)
    assert list(tmp_path.iterdir()) == []
    keep_source(tmp_path, SOURCE, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_not_as_it_was_written_counts_as_none_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_source(tmp_path, SOURCE, None)
    (tmp_path / "source" / "nets.py").unlink()
    assert read_source(tmp_path) is None
    assert "is not complete" in caplog.text
    (tmp_path / "source" / INDEX).write_text(json.dumps({"main": "../x.py", "found_at": None, "files": []}))
    assert read_source(tmp_path) is None
    assert "cannot be read: '../x.py' is no name of a file in it" in caplog.text


def test_it_travels_as_one_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    keep_source(here, SOURCE, tmp_path / "task.py")
    kept = read_source(here)
    assert kept is not None
    assert SourcePage.read(kept.to_page()[:-10]) is None
    assert list(there.iterdir()) == []
    assert "in the copy of the run is damaged, and is left out" in caplog.text
    page = SourcePage.read(kept.to_page())
    assert page is not None
    page.keep(there)
    arrived = read_source(there)
    assert arrived is not None
    assert (arrived.source, arrived.found_at) == (SOURCE, "../task.py")


@pytest.mark.parametrize("name", ["index.json", "task.py", "parts/inner.py"])
def test_a_fifo_in_it_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    keep_source(tmp_path, SOURCE, None)
    (tmp_path / "source" / name).unlink()
    os.mkfifo(tmp_path / "source" / name)
    with in_time():
        assert read_source(tmp_path) is None
    assert "a FIFO is in the place of the file" in caplog.text


@pytest.mark.parametrize("name", ["/dev/zero", "../outside.py", "sub/../../outside.py"])
def test_names_are_looked_at_before_anything_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    keep_source(tmp_path, SOURCE, None)
    os.mkfifo(tmp_path / "outside.py")
    (tmp_path / "source" / INDEX).write_text(json.dumps({"main": "task.py", "found_at": None, "files": [name]}))
    with in_time():
        assert read_source(tmp_path) is None
    assert f"{name!r} is no name of a file in it" in caplog.text


def test_a_file_of_any_size_is_not_read_into_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_source(tmp_path, SOURCE, None)
    with (tmp_path / "source" / "nets.py").open("r+b") as file:
        file.truncate(1 << 40)
    assert read_source(tmp_path) is None
    assert "nets.py has 1,099,511,627,776 bytes, and no more than 4,194,304 are kept" in caplog.text


def test_it_is_for_the_owner_only(tmp_path: Path) -> None:
    """There are passwords in people's code, and a folder of runs may be for all to read."""
    keep_source(tmp_path, SOURCE, None)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "source").rglob("*") if path.is_file()}
    assert modes == {"task.py": 0o600, "nets.py": 0o600, "inner.py": 0o600, "index.json": 0o600}
    assert (tmp_path / "source").stat().st_mode & 0o777 == 0o700

"""The source of a task in a run's folder."""

import json
from pathlib import Path

import pytest

from quorate.core.errors import JobError
from quorate.core.task_source import TaskSource
from quorate.storage import kept_source
from quorate.storage.kept_source import INDEX, keep_page, keep_source, read_source

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
    assert "is not whole" in caplog.text
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
    keep_page(there, kept.to_page()[:-10])
    assert list(there.iterdir()) == []
    assert "in the copy of the run is damaged, and is left out" in caplog.text
    keep_page(there, kept.to_page())
    arrived = read_source(there)
    assert arrived is not None
    assert (arrived.source, arrived.found_at) == (SOURCE, "../task.py")

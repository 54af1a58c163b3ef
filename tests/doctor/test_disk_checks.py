from pathlib import Path

import pytest

from quorate.doctor.checkup import (
    Trial,
    check_runs_folder,
    nearest_folder,
    try_to_write,
)
from quorate.doctor.report import Level

PLENTY = 10**12


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    trial = try_to_write(tmp_path)
    assert (trial.folder, trial.trouble) == (tmp_path, "")
    assert trial.free > 0
    assert list(tmp_path.iterdir()) == []


def test_a_trial_in_what_is_no_folder_tells_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert try_to_write(file).trouble == "Not a directory"
    assert try_to_write(tmp_path / "absent").trouble == "No such file or directory"


def test_a_folder_that_is_not_there_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("trial", "level", "words"),
    [
        (Trial(Path("/data/runs"), free=PLENTY), Level.OK, "/data/runs: 1 TB free"),
        (Trial(Path("/data"), free=PLENTY), Level.OK, "/data/runs, made by the first run: 1 TB free"),
        (Trial(Path("/data/runs"), free=10**9), Level.WARNING, "1 GB free; checkpoints may fill it"),
        (Trial(Path("/data/runs"), free=10**7), Level.PROBLEM, "10 MB free"),
        (Trial(Path("/data"), trouble="Read-only file system"), Level.PROBLEM, "in /data: Read-only file system"),
    ],
)
def test_the_runs_folder(trial: Trial, level: Level, words: str) -> None:
    found = check_runs_folder(Path("/data/runs"), trial)
    assert found.level is level
    assert words in found.text
    assert bool(found.remedy) is (level is not Level.OK)

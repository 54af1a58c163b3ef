import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from quorate.doctor.checkup import ADMINISTRATOR, check_memory, check_open_files, check_runs_folder
from quorate.doctor.report import Level

GIGABYTE = 10**9


@pytest.mark.parametrize(
    ("free", "level"), [(24 * GIGABYTE, Level.OK), (10**9, Level.WARNING), (4 * 10**8, Level.PROBLEM)]
)
def test_memory_has_to_hold_the_workers(free: int, level: Level) -> None:
    found = check_memory(free, 32 * GIGABYTE, workers=2)
    assert found.level is level
    assert ("--workers 1" in found.remedy) is (level is not Level.OK)
    assert ("540 MB" in found.text) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("limit", "highest", "level", "remedy"),
    [
        (math.inf, math.inf, Level.OK, ""),
        (20000, 20000, Level.OK, ""),
        (256, math.inf, Level.WARNING, "ulimit -n 4096"),
        (32, 512, Level.PROBLEM, "ulimit -n 512"),
        (32, 32, Level.PROBLEM, ADMINISTRATOR),
    ],
)
def test_open_files(limit: float, highest: float, level: Level, remedy: str) -> None:
    found = check_open_files(limit, highest)
    assert (found.level, found.remedy) == (level, remedy)


def test_the_runs_folder_is_tried_and_nothing_is_left_there(tmp_path: Path) -> None:
    found = check_runs_folder(tmp_path)
    assert found.text.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert ", made by the first run: " in check_runs_folder(tmp_path / "a" / "b").text


def test_a_folder_that_is_a_file_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = check_runs_folder(file)
    assert (found.level, found.text) == (Level.PROBLEM, f"nothing can be written in {file}: Not a directory")
    assert "another folder" in found.remedy


@pytest.mark.parametrize(
    ("free", "level", "words"),
    [
        (10**12, Level.OK, ": 1 TB free"),
        (10**9, Level.WARNING, "1 GB free; checkpoints may fill it"),
        (10**7, Level.PROBLEM, "10 MB free"),
    ],
)
def test_there_has_to_be_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: Level, words: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = check_runs_folder(tmp_path)
    assert found.level is level
    assert words in found.text
    assert bool(found.remedy) is (level is not Level.OK)

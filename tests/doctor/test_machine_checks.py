import math

import pytest

from quorate.doctor.checkup import ADMINISTRATOR, check_memory, check_open_files
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

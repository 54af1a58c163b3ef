import math

import pytest

from quorate.doctor.machine import (
    ADMINISTRATOR,
    check_cores,
    check_loopback,
    check_memory,
    check_open_files,
    talk_to_a_child,
)
from quorate.doctor.report import Level

GIGABYTE = 10**9


def test_cores_say_what_auto_makes_of_them() -> None:
    found = check_cores(present=16, allowed=4)
    assert (found.level, found.text) == (Level.OK, "4 of 16 may be used; `workers: auto` starts 4 for 8 lanes")
    assert "starts 8 for 8 lanes" in check_cores(present=64, allowed=64).text


@pytest.mark.parametrize(
    ("quota", "level", "text"),
    [
        (None, Level.OK, "4 of 16 may be used; `workers: auto` starts 4 for"),
        (4.0, Level.OK, "4 of 16 may be used; `workers: auto` starts 4 for"),
        (3.5, Level.OK, "4 of 16 may be used, for the time of 3.5; `workers: auto` starts 3 for"),
        (0.5, Level.WARNING, "4 of 16 may be used, for the time of 0.5; `workers: auto` starts 1 for"),
    ],
)
def test_a_container_with_less_time_than_cores(quota: float | None, level: Level, text: str) -> None:
    found = check_cores(present=16, allowed=4, quota=quota)
    assert found.level is level
    assert found.text.startswith(text)
    assert ("--cpus" in found.remedy) is (level is Level.WARNING)


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


def test_two_processes_of_this_machine_talk() -> None:
    found = check_loopback(lambda: talk_to_a_child(patience=40.0))
    assert found.level is Level.OK, found.text
    assert "127.0.0.1:" in found.text


def test_processes_that_cannot_talk() -> None:
    def refuses() -> int:
        raise PermissionError(13, "Permission denied")

    found = check_loopback(refuses)
    assert found.level is Level.PROBLEM
    assert "Permission denied" in found.text
    assert "firewall" in found.remedy


def test_a_call_that_never_comes_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.doctor.machine._CALLER", "pass")
    found = check_loopback(lambda: talk_to_a_child(patience=0.2))
    assert found.level is Level.PROBLEM
    assert "timed out" in found.text

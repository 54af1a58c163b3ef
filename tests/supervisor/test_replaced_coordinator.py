"""Whoever takes the place of a dead coordinator gets the time that a program needs to begin."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command import PATIENCE
from memory_engine import MemoryEngine
from quorate.core.timing import Timing
from quorate.storage.run_folder import RunFolder
from quorate.supervisor import coordinator_process
from quorate.supervisor.coordinator_process import CoordinatorProcess

TOKEN = "word"
HASTY = 0.01
"""Seconds in which no interpreter has begun."""


@pytest.fixture
def coordinator(cold: None, tmp_path: Path) -> Iterator[CoordinatorProcess]:
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    appointment = {
        "run": str(run.path),
        "lanes": 1,
        "workers": 1,
        "min_workers": 1,
        "failure_timeout": HASTY,
        "token": TOKEN,
        "port": 0,
        "log_level": "info",
    }
    coordinator = CoordinatorProcess(MemoryEngine(), appointment, TOKEN, Timing(HASTY))
    yield coordinator
    coordinator.close()


def test_the_next_one_may_take_longer_to_begin_than_the_failure_timeout(
    coordinator: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "LEAST_START", PATIENCE)
    coordinator.open()
    coordinator.kill()
    assert not coordinator.is_alive
    assert coordinator.replace({})
    assert coordinator.is_alive, "it listens, and was not killed before it did"

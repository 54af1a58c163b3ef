"""Whoever takes the place of a dead coordinator gets the time that a program needs to begin."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.core.timing import Timing
from quorate.engines.coordinator_keeper import CoordinatorKeeper
from quorate.storage.run_folder import RunFolder

TOKEN = "word"
HASTY = 0.01
"""Seconds in which no interpreter has begun."""


@pytest.fixture
def keeper(cold: None, tmp_path: Path) -> Iterator[CoordinatorKeeper]:
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
    keeper = CoordinatorKeeper(run.logs / "coordinator.log", appointment, TOKEN, Timing(HASTY))
    yield keeper
    keeper.close()


def test_the_next_one_may_take_longer_to_begin_than_the_failure_timeout(keeper: CoordinatorKeeper) -> None:
    keeper.open()
    keeper.kill()
    assert not keeper.is_alive
    assert keeper.replace({})
    assert keeper.is_alive, "it listens, and was not killed before it did"

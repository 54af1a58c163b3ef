"""A worker that becomes slow: it is named and never lost, and lanes can move away from it, all to the same bits."""

from typing import Any

import pytest

from command import Workplace
from trial import chaos, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.long]

KEYS: dict[str, Any] = {"lanes": 8, "batch_size": 16, "steps": 70, "workers": 1, "failure_timeout": 2.0}
SLOW = "slow worker 1 4x from step 5"
PAUSE = "0.012"


place = undisturbed_job(**KEYS)


def assert_undamaged(place: Workplace, document: dict[str, Any]) -> None:
    assert [fault["fired"] for fault in document["faults"]] == [True]
    assert document["same"]
    assert document["recoveries"] == []
    assert told(place, document, "lost") == []
    steps = [event["step"] for event in told(place, document, "step")]
    assert steps == list(range(1, KEYS["steps"] + 1)), "no step is missing, and none is done twice"


def shares(place: Workplace, document: dict[str, Any]) -> list[dict[int, int]]:
    """How many lanes each worker hosts, by generation."""
    return [
        {member["worker"]: len(member["lanes"]) for member in event["members"]}
        for event in told(place, document, "generation")
    ]


def logged(place: Workplace, document: dict[str, Any], level: str) -> list[str]:
    return [event["message"] for event in told(place, document, "log") if event["level"] == level]


def test_a_slow_worker_is_named_with_its_phase_and_lanes_stay(place: Workplace) -> None:
    document = chaos(place, SLOW, settings=("workers=3",), PAUSE=PAUSE)
    assert_undamaged(place, document)
    slow = [warning for warning in logged(place, document, "warning") if " is slow in " in warning]
    warning = next(warning for warning in slow if warning.startswith("worker 1 (pid "))
    assert "is slow in compute: each of its lanes 3 to 5 takes" in warning
    assert "`balance: speed`" in warning
    assert shares(place, document) == [{0: 3, 1: 3, 2: 2}]


def test_with_balance_by_speed_lanes_move_away_from_a_slow_worker(place: Workplace) -> None:
    document = chaos(place, SLOW, settings=("workers=3", "balance=speed"), PAUSE=PAUSE)
    assert_undamaged(place, document)
    even, *later = shares(place, document)
    assert even == {0: 3, 1: 3, 2: 2}
    assert later
    assert all(sharing[1] < even[1] and sum(sharing.values()) == KEYS["lanes"] for sharing in later)
    assert any(notice.startswith("the lanes are redistributed by speed") for notice in logged(place, document, "info"))

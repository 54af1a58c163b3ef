import os

import pytest

from quorate.core import machine
from quorate.core.machine import Limits, cores_within, usable_cores


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"),
    [(4, None, 4), (4, 8.0, 4), (4, 4.0, 4), (4, 2.5, 2), (4, 1.0, 1), (4, 0.5, 1), (1, 2.5, 1)],
)
def test_whole_cores_of_what_is_allowed_and_given(allowed: int, quota: float | None, usable: int) -> None:
    assert cores_within(allowed, quota) == usable


def test_the_mask_and_the_quota_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 7})
    monkeypatch.setattr(machine, "read_limits", lambda: Limits(cores=3.2))
    assert usable_cores() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert usable_cores() == 2

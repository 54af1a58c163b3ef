"""Workers of a gang killed while PowerSGD holds back what it has not sent of their gradients: the same bits."""

from collections.abc import Iterator
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from faults.test_ddp_faults import KEYS, assert_nobody_went_back
from trial import assert_recovered, chaos, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

WIDE = """

class Wide(Tiny):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    keys: dict[str, Any] = KEYS | {
        "task": "task.py:Wide",
        "strategy": {"kind": "ddp", "compress": {"rank": 1, "start": 4}},
    }
    with undisturbed_in(tmp_path_factory.mktemp("low-rank"), TASK_SOURCE + WIDE, **keys) as place:
        yield place


SHORT = [
    "kill worker 0 at step 9 in exchange after 1ms",
    "kill worker 1 at step 13 in apply",
    "kill worker 1 at step 20 in exchange",
    "kill worker 2 at step 20 in copy",
]
WHOLE = [
    "kill worker 1 at step 4 in exchange",
    "kill worker 1 at step 7 in forward",
    "kill worker 2 at step 11 in exchange after 3ms",
    "kill worker 0 at step 18 in evaluation",
    *SHORT,
]


@pytest.mark.parametrize("script", [SHORT, pytest.param(WHOLE, marks=pytest.mark.long)], ids=len)
def test_a_kill_in_every_phase_loses_nothing_that_was_held_back(place: Workplace, script: list[str]) -> None:
    document = chaos(place, *script)
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


@pytest.mark.long
def test_a_stopped_job_is_resumed_to_the_same_bits(place: Workplace) -> None:
    document = chaos(place, "kill worker 0 at step 15", "kill worker 1 at step 15", "kill worker 2 at step 15")
    assert_recovered(place, document)

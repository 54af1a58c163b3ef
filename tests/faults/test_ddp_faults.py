"""Workers of a gang killed and stopped: survivors keep process and state, and build another process group in place."""

from typing import Any

import pytest

from command import Workplace
from faults.test_every_phase import LOSS
from trial import recovered_forwards, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "steps": 24,
    "workers": 3,
    "min_workers": 3,
    "evaluate": {"every": 6},
    "checkpoint": {"every": 6, "keep": 3},
    "strategy": "ddp",
}


place = undisturbed_job(**KEYS)


EVERY_PHASE = [
    "kill worker 1 at step 3 in data",
    "kill worker 1 at step 6 in forward",
    "kill worker 0 at step 9 in exchange",
    "kill worker 1 at step 12 in apply",
    "kill worker 0 at step 18 in evaluation",
    LOSS.format(1, 21),
    "kill worker 2 at step 21 in join",
]
IN_A_ROW_AND_TWO_AT_ONCE = [
    *(f"kill worker {worker} at step {step}" for worker, step in ((1, 4), (1, 5), (0, 6), (2, 7))),
    *(f"kill worker {worker} at step 11 in exchange" for worker in (0, 2)),
]


@pytest.mark.parametrize(
    "script", [EVERY_PHASE, pytest.param(IN_A_ROW_AND_TWO_AT_ONCE, marks=pytest.mark.long)], ids=len
)
def test_kills_cost_no_step_and_no_bit(place: Workplace, script: list[str]) -> None:
    recovered_forwards(place, *script)


def test_a_worker_that_hangs_in_a_sum_is_named_in_time_and_replaced(place: Workplace) -> None:
    document = recovered_forwards(place, "stop worker 1 at step 5 in exchange for 60s", settings=("failure_timeout=2",))
    loss, *_ = told(place, document, "lost")
    assert "worker 1 " in loss["message"]
    assert 2.0 <= loss["detect_s"] < 30.0, "long before it goes on by itself"

"""Workers of a gang killed and stopped: survivors keep process and state, and build another process group in place."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from command import Workplace
from faults.test_every_phase import LOSS
from trial import assert_recovered, chaos, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "steps": 24,
    "workers": 3,
    "min_workers": 3,
    "evaluate": {"every": 6},
    "checkpoint": {"every": 6, "keep": 3},
    "strategy": "ddp",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with undisturbed_in(tmp_path_factory.mktemp("gang"), **KEYS) as place:
        yield place


def assert_nobody_went_back(place: Workplace, document: dict[str, Any]) -> None:
    """A step is done again only if whoever had completed it died before it could give it to the others."""
    begun = [event["from_step"] for event in told(place, document, "generation")]
    assert all(later >= earlier - 1 for earlier, later in pairwise(begun)), begun
    assert not told(place, document, "rollback")


def test_a_kill_in_every_phase_costs_no_step_and_no_bit(place: Workplace) -> None:
    script = [
        "kill worker 1 at step 3 in data",
        "kill worker 1 at step 6 in forward",
        "kill worker 0 at step 9 in exchange",
        "kill worker 1 at step 12 in apply",
        "kill worker 0 at step 18 in evaluation",
        LOSS.format(1, 21),
        "kill worker 2 at step 21 in join",
    ]
    document = chaos(place, *script)
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


@pytest.mark.long
def test_losses_in_a_row_and_two_at_once(place: Workplace) -> None:
    script = [
        *(f"kill worker {worker} at step {step}" for worker, step in ((1, 4), (1, 5), (0, 6), (2, 7))),
        "kill worker 0 at step 11 in exchange",
        "kill worker 2 at step 11 in exchange",
    ]
    document = chaos(place, *script)
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)


def test_a_worker_that_hangs_in_a_sum_is_named_in_time_and_replaced(place: Workplace) -> None:
    document = chaos(place, "stop worker 1 at step 5 in exchange for 60s", settings=("failure_timeout=2",))
    assert_recovered(place, document)
    assert_nobody_went_back(place, document)
    loss, *_ = told(place, document, "lost")
    assert "worker 1 " in loss["message"]
    assert 2.0 <= loss["detect_s"] < 30.0, "long before it goes on by itself"

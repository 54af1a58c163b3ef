"""A worker computes wrongly: an audit finds it within few lanes, it is named, and the job ends with the right bits."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from command import Workplace
from trial import chaos, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

EVERY, LANES = 4, 4
KEYS: dict[str, Any] = {
    "lanes": LANES,
    "steps": 24,
    "failure_timeout": 6.0,
    "audit": {"every": EVERY},
    "checkpoint": {"every": 3, "keep": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with undisturbed_in(tmp_path_factory.mktemp("audits"), **KEYS) as shared:
        yield shared


def assert_found(
    place: Workplace,
    fault: str,
    step: int,
    workers: int,
) -> list[dict[str, Any]]:
    document = chaos(place, fault, settings=(f"workers={workers}",))
    assert [each["fired"] for each in document["faults"]] == [True]
    assert document["same"], document
    assert document["digest"] == document["undisturbed_digest"]
    lost = [event for event in told(place, document, "lost") if "not to the same bits" in event["message"]]
    assert lost, told(place, document, "lost")
    # One lane in `every` is audited, each worker's in turn; in the first step of a generation, one of each.
    latest = step + -(-EVERY * workers // LANES)
    steps = [int(found[1]) for event in lost if (found := re.search(r"Lane \d+ of step (\d+)", event["message"]))]
    assert step <= min(steps) <= latest
    return lost


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("bit", ["", " in one bit"])
@pytest.mark.parametrize(("worker", "step"), [(1, 5), (0, 8)])
def test_a_worker_that_computes_wrongly_is_found_and_named(
    place: Workplace, workers: int, bit: str, worker: int, step: int
) -> None:
    found = assert_found(place, f"corrupt worker {worker} from step {step}{bit}", step, workers)
    named = re.compile(rf"worker {worker} (that was replaced )?is wrong")
    assert any(named.search(event["message"]) for event in found), found

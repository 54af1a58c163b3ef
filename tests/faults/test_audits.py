"""A worker computes wrongly: an audit finds it within few lanes, it is named, and the job ends with the right bits."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import chaos, told, undisturbed_in, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

EVERY, LANES = 4, 4
KEYS: dict[str, Any] = {
    "lanes": LANES,
    "steps": 24,
    "failure_timeout": 6.0,
    "audit": {"every": EVERY},
    "checkpoint": {"every": 3, "keep": 1},
}


# Servers take only optimizers that say that each parameter is updated by itself.
BY_ITSELF = "class TroubledSgd(torch.optim.SGD):\n    per_parameter = True\n"
TASK = TASK_SOURCE.replace("class TroubledSgd(torch.optim.SGD):\n", BY_ITSELF)


place = undisturbed_job(TASK, **KEYS)


def assert_found(
    place: Workplace,
    fault: str,
    step: int,
    workers: int,
    *settings: str,
) -> list[dict[str, Any]]:
    document = chaos(place, fault, settings=(f"workers={workers}", *settings))
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
    assert_named(place, worker, step, workers, bit)


def test_over_links_too(place: Workplace) -> None:
    assert_named(place, 1, 5, 2, "", "links=tcp")


# With as many workers as lanes each computes what it audits in the place of its only lane.
@pytest.mark.parametrize("keys", [{"strategy": "parameter-server"}, {"lanes": 2, "audit": {"every": 2}}])
def test_with_servers_and_with_a_lane_each(keys: dict[str, Any], tmp_path: Path) -> None:
    with undisturbed_in(tmp_path, TASK, **KEYS | keys) as other:
        assert_named(other, 1, 5, 2, "")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_times_at_random(place: Workplace) -> None:
    chance = random.Random(50)
    for _ in range(50):
        workers = chance.choice([2, 3])
        worker, step, bit = chance.randrange(workers), chance.randint(2, 18), chance.choice(["", " in one bit"])
        assert_named(place, worker, step, workers, bit)


def assert_named(place: Workplace, worker: int, step: int, workers: int, bit: str, *settings: str) -> None:
    found = assert_found(place, f"corrupt worker {worker} from step {step}{bit}", step, workers, *settings)
    named = re.compile(rf"worker {worker} (that was replaced )?is wrong")
    assert any(named.search(event["message"]) for event in found), found

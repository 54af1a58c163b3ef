"""`min_workers`: with fewer, training waits for a replacement; and ends, clearly, if none can come."""

from collections.abc import Iterator
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from trial import chaos, recovered, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {"steps": 16, "workers": 2, "failure_timeout": 1.0, "checkpoint": {"every": 4, "keep": 3}}

# Once a worker has been killed on purpose, those who take its place build their model only if they are let.
HINDRANCE = """
def hinder_replacements() -> None:
    newest = max(Path("runs").glob("*-[0-9]*"))
    if any(newest.glob("logs/*.fired")):
        if os.environ.get("REPLACEMENTS") == "die":
            os._exit(7)
        time.sleep(float(os.environ.get("REPLACEMENTS", "0")))


class Tiny"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    source = TASK_SOURCE.replace("\nclass Tiny", HINDRANCE, 1)
    source = source.replace('        print("a word from the task")\n', "        hinder_replacements()\n", 1)
    assert source.count("hinder_replacements()") == 2
    with undisturbed_in(tmp_path_factory.mktemp("fewest"), source, **KEYS) as place:
        yield place


def crowds(place: Workplace, document: dict[str, Any]) -> list[int]:
    """How many workers each generation had."""
    return [len(event["members"]) for event in told(place, document, "generation")]


@pytest.mark.long
def test_below_min_workers_training_waits_for_the_replacement(place: Workplace) -> None:
    document = recovered(place, "kill worker 1 at step 6 in exchange", settings=("min_workers=2",))
    assert crowds(place, document) == [2, 2]
    (recovery,) = document["recoveries"]
    assert recovery["steps_lost"] == 0
    assert recovery["reform_s"] == recovery["refill_s"]


@pytest.mark.long
def test_from_min_workers_on_training_does_not_wait(place: Workplace) -> None:
    document = recovered(place, "kill worker 1 at step 6 in exchange", PAUSE="0.1", REPLACEMENTS="1.5")
    assert crowds(place, document)[:2] == [2, 1]
    (recovery,) = document["recoveries"]
    assert recovery["refill_s"] is None or recovery["refill_s"] >= 1.5 > recovery["reform_s"]


@pytest.mark.long
def test_when_no_replacement_comes_up_a_job_below_min_workers_ends_and_says_so(place: Workplace) -> None:
    document = chaos(
        place, "kill worker 1 at step 6 in exchange", code=1, settings=("min_workers=2",), REPLACEMENTS="die"
    )
    assert document["faults"][0]["fired"]
    assert (document["status"], document["digest"], document["same"]) == ("failed", None, False)
    assert document["failure"]["worker"] == 1
    message = document["failure"]["message"]
    assert "worker 1 (pid " in message
    assert "exited with code 7" in message
    assert "so the job is stopped." in message
    assert crowds(place, document) == [2]
    # What it leaves can be gone on with, once replacements come up again.
    resumed = place.run("resume", document["run"], "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.document["weights_digest"] == document["undisturbed_digest"]


@pytest.mark.long
def test_when_no_replacement_comes_up_a_job_with_min_workers_left_completes(place: Workplace) -> None:
    document = recovered(place, "kill worker 1 at step 6 in exchange", PAUSE="0.1", REPLACEMENTS="die")
    assert crowds(place, document) == [2, 1]


@pytest.mark.long
def test_survivors_that_wait_for_the_next_fault_do_not_count_as_hung(place: Workplace) -> None:
    document = recovered(
        place,
        "kill worker 1 at step 4",
        "kill worker 1 at step 5",
        settings=("step_timeout=2",),
        REPLACEMENTS="3.5",
    )
    assert [event["worker"] for event in told(place, document, "lost")] == [1, 1]

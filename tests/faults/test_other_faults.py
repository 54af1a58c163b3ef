"""Whatever else can fail besides a worker, by the real command: coordinator, launcher, and workers that come and go."""

from typing import Any

import pytest

from command import Workplace, in_step
from trial import chaos, held_until_saved, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "steps": 24,
    "workers": 2,
    "evaluate": {"every": 6},
    "checkpoint": {"every": 8, "keep": 3},
}


place = undisturbed_job(**KEYS)


def assert_same(place: Workplace, document: dict[str, Any]) -> None:
    """Every fault came about, it has not changed a bit, and every step is told."""
    assert [fault["fault"] for fault in document["faults"] if not fault["fired"]] == []
    assert document["same"]
    assert document["ledger_whole"]
    assert {event["step"] for event in told(place, document, "step")} == set(range(1, KEYS["steps"] + 1))


@pytest.mark.long
@pytest.mark.parametrize("phase", ["exchange", "checkpoint", "data", "forward", "apply", "evaluation", "join"])
def test_a_coordinator_killed_in_a_phase_costs_nobody_anything(place: Workplace, phase: str) -> None:
    document = chaos(place, f"kill coordinator at step {1 if phase == 'join' else 8} in {phase}")
    assert_same(place, document)
    assert document["recoveries"] == []
    (replaced,) = told(place, document, "coordinator")
    assert replaced["incarnation"] == 2


@pytest.mark.long
def test_a_coordinator_killed_while_a_newcomer_takes_up_the_state(place: Workplace) -> None:
    document = chaos(place, "kill worker 1 at step 6", "kill coordinator at step 7 in copy")
    assert_same(place, document)
    assert len(document["recoveries"]) == 1


@pytest.mark.long
def test_a_killed_launcher_is_followed_by_another_that_resumes(place: Workplace) -> None:
    # Step 10 waits for the save of step 8, which goes on beside the training.
    with held_until_saved(place, 8):
        document = chaos(place, "kill launcher at step 12", HOLD=in_step(10, workers=2))
    assert_same(place, document)
    begun, resumed = [event["from_step"] for event in told(place, document, "run")]
    # The workers live on for a moment, in which step 12 may be done, evaluated and saved.
    assert (begun, resumed in (8, 12)) == (0, True)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["exchange", "apply", "evaluation", "checkpoint"])
def test_a_launcher_killed_in_a_phase(place: Workplace, phase: str) -> None:
    assert_same(place, chaos(place, f"kill launcher at step 16 in {phase}"))


def test_workers_that_come_and_go(place: Workplace) -> None:
    document = chaos(place, "term worker 1 at step 3 in exchange", "add worker at step 8", "remove worker at step 16")
    assert_same(place, document)
    assert document["recoveries"] == []
    assert [(event["before"], event["workers"]) for event in told(place, document, "resize")] == [(2, 3), (3, 2)]


@pytest.mark.long
def test_everything_at_once(place: Workplace) -> None:
    document = chaos(
        place,
        "term worker 1 at step 3",
        "kill coordinator at step 4 in exchange",
        "kill worker 0 at step 5 in apply",
        "kill launcher at step 10 in evaluation",
        "kill all at step 13",
        "kill coordinator at step 14",
        "slow worker 0 3x from step 15",
        "stop worker 1 at step 17 in forward for 300ms",
        "kill launcher at step 20 in checkpoint",
    )
    assert_same(place, document)


@pytest.mark.long
@pytest.mark.usefixtures("namespaces_allowed")
def test_a_worker_that_is_cut_off_for_a_while(place: Workplace) -> None:
    document = chaos(place, "cut worker 1 at step 9 for 4s")
    assert_same(place, document)
    (loss,) = told(place, document, "lost")
    assert loss["worker"] == 1
    assert "has sent no heartbeat for" in loss["message"]


@pytest.mark.parametrize(
    "fault",
    [
        "starve worker 1 at step 10 in exchange",
        pytest.param("kill loader of worker 0 at step 10", marks=pytest.mark.long),
    ],
)
def test_what_a_worker_lacks_costs_a_generation(place: Workplace, fault: str) -> None:
    document = chaos(place, fault, settings=("loader_workers=1",))
    assert_same(place, document)
    ((recovery,), (loss,)) = document["recoveries"], told(place, document, "lost")
    assert recovery["steps_lost"] == 0
    assert "gave up" in loss["message"]

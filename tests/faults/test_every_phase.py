"""Workers killed in every phase that a fault can name, once and five times in a row: the same bits each time."""

from itertools import pairwise
from typing import Any

import pytest

from command import Workplace
from trial import firings, recovered, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "steps": 24,
    "workers": 3,
    "evaluate": {"every": 2},
    "average": {"decay": 0.9, "evaluate": True},
    "checkpoint": {"every": 3, "keep": 3},
}

# A copy or a join takes a loss before it, at the same step: whoever meets then, and whenever, it is due.
LOSS = "kill worker {} at step {}"

FIVE_IN_A_ROW = {
    # Whoever is killed twice is waited for in between; so there are losses with everybody there and with few left.
    **{
        phase: [
            f"kill worker {worker} at step {step} in {phase}"
            for worker, step in ((1, 5), (1, 6), (2, 9), (2, 10), (0, 13))
        ]
        for phase in ("data", "forward", "exchange", "apply")
    },
    "evaluation": [
        f"kill worker {worker} at step {step} in evaluation"
        for worker, step in ((1, 4), (1, 6), (2, 8), (0, 12), (2, 14))
    ],
    "checkpoint": [
        f"kill worker {worker} at step {step} in checkpoint"
        for worker, step in ((1, 3), (0, 6), (2, 9), (2, 12), (0, 18))
    ],
    **{
        phase: [
            fault
            for lost, worker, step in ((1, 1, 4), (1, 0, 7), (0, 2, 10), (2, 2, 13), (2, 1, 18))
            for fault in (LOSS.format(lost, step), f"kill worker {worker} at step {step} in {phase}")
        ]
        for phase in ("copy", "join")
    },
}

# So much later than the beginning of its phase: in the middle of it, or of what comes after it.
LATER = {
    "data": "0.2ms",
    "forward": "25ms",
    "exchange": "5ms",
    "apply": "0.3ms",
    "evaluation": "1ms",
    "checkpoint": "2ms",
    "copy": "1ms",
    "join": "3ms",
}


place = undisturbed_job(**KEYS)


def assert_no_step_was_lost_while_somebody_held_it(place: Workplace, document: dict[str, Any]) -> None:
    """A generation goes back only if nobody who held the state of the one before is in it."""
    lost = [(event["worker"], event["time"]) for event in told(place, document, "lost")]
    generations = told(place, document, "generation")
    holders = {member["worker"] for member in generations[0]["members"]}
    for before, after in pairwise(generations):
        gone = {worker for worker, time in lost if before["time"] <= time <= after["time"]}
        if after["from_step"] > before["from_step"]:  # whoever was behind has taken the state up, and gone on
            holders |= {member["worker"] for member in before["members"]}
        holders -= gone
        assert after["from_step"] >= before["from_step"] or not holders, (before, after)
        holders = holders or {member["worker"] for member in after["members"]}


def test_one_fault_in_each_phase_of_one_run(place: Workplace) -> None:
    script = [
        "kill worker 1 at step 3 in data",
        "kill worker 1 at step 5 in forward",
        "kill worker 1 at step 7 in exchange",
        "kill worker 2 at step 9 in apply",
        "kill worker 2 at step 12 in evaluation",
        "kill worker 2 at step 15 in checkpoint",
        LOSS.format(1, 17),
        "kill worker 0 at step 17 in copy",
        LOSS.format(1, 20),
        "kill worker 2 at step 20 in join",
    ]
    document = recovered(place, *script)
    assert_no_step_was_lost_while_somebody_held_it(place, document)
    for fault in script:
        phase = fault.partition(" in ")[2] or "data"
        ((_, met),) = firings(document, fault)
        assert met == phase


@pytest.mark.long
@pytest.mark.parametrize("phase", list(FIVE_IN_A_ROW))
def test_five_faults_in_a_row_in_a_phase(place: Workplace, phase: str) -> None:
    script = FIVE_IN_A_ROW[phase]
    document = recovered(place, *script)
    assert_no_step_was_lost_while_somebody_held_it(place, document)
    met = [at for fault in script if fault.endswith(f" in {phase}") for at in firings(document, fault)]
    assert [name for _, name in met] == [phase] * 5
    assert len(document["recoveries"]) >= 5


@pytest.mark.long
@pytest.mark.parametrize("phase", list(FIVE_IN_A_ROW))
def test_five_faults_in_a_row_in_the_middle_of_a_phase(place: Workplace, phase: str) -> None:
    script = [f"{fault} after {LATER[phase]}" if " in " in fault else fault for fault in FIVE_IN_A_ROW[phase]]
    # A lane takes its time, so that forwards, and the exchanges of those who have fewer lanes, take long.
    document = recovered(place, *script, PAUSE="0.05")
    assert_no_step_was_lost_while_somebody_held_it(place, document)
    assert len(document["recoveries"]) >= 5

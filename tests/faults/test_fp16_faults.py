"""Gradients overflow, and then somebody dies: whoever takes over has the loss scale of those who stay."""

import json
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from quorate.observe.screen import summary_rows
from trial import recovered, told, undisturbed_job

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {
    "batch_size": 16,
    "steps": 14,
    "workers": 2,
    "device": "cpu",
    "precision": "fp16",
    "loss_scale": {"initial": 2**22, "growth_interval": 2},
    "evaluate": {"every": "end"},
    "checkpoint": {"every": 5, "keep": 9},
}


place = undisturbed_job(TASK_SOURCE, **KEYS)


def scales(events: list[dict[str, Any]]) -> dict[int, tuple[float, bool]]:
    return {event["step"]: (event["loss_scale"], event.get("overflow", False)) for event in events}


def reference(place: Workplace) -> dict[int, tuple[float, bool]]:
    return scales([event for event in place.events(place.folder / "runs" / "tiny-0001") if event["kind"] == "step"])


def test_overflows_are_told_and_counted(place: Workplace) -> None:
    run = place.folder / "runs" / "tiny-0001"
    steps = reference(place)
    count = sum(overflow for _, overflow in steps.values())
    assert 1 < count < len(steps) - 1
    result = json.loads((run / "result.json").read_text())
    assert result["loss_scale"] == {"final": steps[14][0], "overflow_steps": count}
    assert f"{count} steps overflowed and changed no weight" in dict(summary_rows(result))["loss scale"]


@pytest.mark.parametrize(
    "fault",
    [
        "kill worker 1 at step 3",
        pytest.param("kill worker 0 at step 8", marks=pytest.mark.long),
        pytest.param("kill all at step 7", marks=pytest.mark.long),
    ],
)
def test_kills_leave_the_same_bits_and_the_same_scales(place: Workplace, fault: str) -> None:
    document = recovered(place, fault)
    assert scales(told(place, document, "step")) == reference(place)

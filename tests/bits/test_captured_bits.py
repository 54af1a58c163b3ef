"""A lane that is captured and replayed gives the bits of one whose Python runs each time."""

from pathlib import Path
from typing import Any

import pytest

from bits import bit_tasks as tasks
from bits.shapes import Shape, trained
from bits.test_bits import CASES, Case, alone
from gpu.host_memory import HostMemory
from gpu.recording_capture import RecordingCapture
from quorate.replica.device import Device

CAPTURED = "is captured in a graph"
pytestmark = pytest.mark.usefixtures("unmeasured")


REFUSED = {
    "ConstantBuffers": "a buffer is assigned",
    "LaneZeroBuffer": "a buffer is assigned",
    "LeavesEvaluationMode": "another mode",
    "RefinesLater": "is assigned while a lane runs",
    "SometimesUsed": "waits for the device",
}
"""Tasks whose Python does what no graph would repeat."""
QUICK = {0, 4, 12, 16, 20, 24, 32}


@pytest.mark.parametrize(
    ("number", "lanes"),
    [
        # Some of them, and all that cannot be captured; the others among the long tests.
        pytest.param(
            number,
            lanes,
            id=f"{case.name}-{lanes}",
            marks=() if number in QUICK or case.task.__name__ in REFUSED else pytest.mark.long,
        )
        for number, case in enumerate(CASES)
        for lanes in ([1] if number % 3 else [4])
    ],
)
def test_a_captured_lane_has_the_bits_of_an_eager_one(
    number: int, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, eager = CASES[number], alone(number, lanes)
    monkeypatch.setattr(Device, "capture", RecordingCapture())
    captured = trained(case.task, tmp_path, lanes=lanes, **case.keys)
    assert captured.digest == eager.digest
    assert captured.losses == eager.losses
    assert captured.progress == eager.progress
    assert REFUSED.get(case.task.__name__, CAPTURED) in captured.log
    assert (CAPTURED in captured.log) == (case.task.__name__ not in REFUSED)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(
            tasks.BatchNormAndDropout, {"accumulate": 2, "batch_size": 24, "clip_norm": 0.5, "evaluate": {"every": 2}}
        ),
        Case(tasks.TwoOptimizers),
        Case(tasks.Adam, {"accumulate": 3, "batch_size": 30, "lanes": 1}),
    ],
    ids=lambda case: case.name,
)
def test_captured_interrupted_and_resumed_with_and_without(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on without graphs goes on to the same bits, so workers need not agree on them."""
    eager = trained(case.task, tmp_path / "eager", **case.keys)
    workers = min(3, case.keys.get("lanes", 4))
    for after in (RecordingCapture(), None):
        folder = tmp_path / str(after is None)
        monkeypatch.setattr(Device, "capture", RecordingCapture())
        stopped = trained(case.task, folder, Shape(workers), stop_at=4, **case.keys)
        monkeypatch.setattr(Device, "capture", after)
        resumed = trained(case.task, folder, **case.keys)
        assert resumed.digest == eager.digest
        assert stopped.losses + resumed.losses == eager.losses
        assert CAPTURED in stopped.log


@pytest.mark.parametrize("lanes", [1, 4])
def test_captured_lanes_of_steps_that_are_read_late(
    lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"accumulate": 2, "batch_size": 24, "clip_norm": 0.5, "lanes": lanes}
    eager = trained(tasks.BatchNormAndDropout, tmp_path / "eager", **keys)
    monkeypatch.setattr(Device, "is_host", False)
    monkeypatch.setattr(Device, "shareable", HostMemory())
    monkeypatch.setattr(Device, "capture", RecordingCapture())
    captured = trained(tasks.BatchNormAndDropout, tmp_path / "captured", **keys)
    assert captured.digest == eager.digest
    assert captured.losses == eager.losses
    assert CAPTURED in captured.log

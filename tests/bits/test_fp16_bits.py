"""`precision: fp16`: overflow is judged on the sum of all lanes, and the scale is part of the state. One digest comes
out of any number of workers, of steps that are read late, of captured lanes, and of a job that was resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from gpu.recording_capture import RecordingCapture
from quorate.replica.device import Device
from quorate.replica.replica import Replica
from quorate.task.run_mode import RunMode
from quorate.task.task import Task
from quorate.training.late_loop import MOST_AHEAD
from replica.away_device import AwayDevice
from training.recorded import Run, on_one_and_on_three, run
from training.test_skipping import PoisonedPoints

pytestmark = pytest.mark.usefixtures("unmeasured")

KEYS: dict[str, Any] = {
    "precision": "fp16",
    "loss_scale": {"initial": 2**20, "growth_interval": 3},
    "steps": 24,
    "batch_size": 24,
    "evaluate": {"every": 10},
}
"""The first steps overflow, and so does one whenever the scale has grown too far again."""


@pytest.fixture(params=["cpu", "away"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device() if request.param == "cpu" else AwayDevice()
    made.precision = "fp16"
    monkeypatch.setattr(gang, "CPU", made)
    return made


quick_away = pytest.mark.parametrize("device", ["away", pytest.param("cpu", marks=pytest.mark.long)], indirect=True)
"""Away from the host steps are read late as well, so that is where these are tested each time."""


def overflows(ran: Run) -> list[int | None]:
    """The steps that did, after checking that there were others, and that they are counted."""
    found = [step for step, has in ran.fields("step", "overflow").items() if has]
    assert 2 < len(found) < KEYS["steps"] // 2
    assert ran.ended.progress["overflows"] == len(found)
    norms = ran.fields("step", "gradient_norm")
    assert [step for step, norm in norms.items() if norm is None] == found
    return found


@quick_away
@pytest.mark.parametrize(
    ("task", "keys"),
    [
        pytest.param(tasks.Momentum, {"clip_norm": 0.5}, marks=pytest.mark.long),
        (tasks.BatchNormAndDropout, {"accumulate": 2, "schedule": {"kind": "cosine", "warmup": 2}}),
        pytest.param(tasks.Adam, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_digest_on_any_number_of_workers_and_after_a_resume(
    task: type[Task], keys: dict[str, Any], tmp_path: Path, device: Device
) -> None:
    keys = KEYS | keys
    ran = on_one_and_on_three(task, tmp_path, **keys)
    first = overflows(ran)
    scales = ran.fields("step", "loss_scale")
    assert scales[1] == 2**19 and max(scales[step] for step in range(first[1] or 0, 25)) > min(scales.values())
    run(task, tmp_path / "resumed", 2, stop_at=8, **keys)
    resumed = run(task, tmp_path / "resumed", 1, **keys)
    assert resumed.ended.digest == ran.ended.digest
    assert resumed.ended.progress == ran.ended.progress
    assert resumed.fields("step", "loss_scale") == {step: scales[step] for step in range(9, 25)}


@quick_away
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_captured_lane_reads_the_scale_of_each_replay(
    lanes: int, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = run(tasks.Momentum, tmp_path / "eager", lanes=lanes, **KEYS)
    monkeypatch.setattr(Device, "capture", RecordingCapture())
    captured = run(tasks.Momentum, tmp_path / "captured", lanes=lanes, **KEYS)
    assert "is captured in a graph" in captured.ended.log
    assert not isinstance(device, AwayDevice) or 2 < device.longest_lag <= MOST_AHEAD
    assert captured.told == eager.told
    assert captured.ended.digest == eager.ended.digest
    assert overflows(captured)


class Poisoned(tasks.Regression):
    """Without momentum, which a step must have made before steps can lag."""

    def datasets(self) -> Any:
        return PoisonedPoints(), tasks.Points(21)


@quick_away
def test_a_loss_that_is_not_finite_is_poison_and_says_nothing_of_the_scale(tmp_path: Path, device: Device) -> None:
    ran = on_one_and_on_three(Poisoned, tmp_path, on_nonfinite_loss="skip", **KEYS | {"batch_size": 8})
    skipped = [step for step, loss in ran.fields("step", "loss").items() if loss is None]
    told = ran.fields("step", "loss_scale")
    assert skipped and not any(told[step] for step in skipped)
    assert not set(skipped) & {step for step, has in ran.fields("step", "overflow").items() if has}


class Huge(tasks.Regression):
    """Its loss is finite in float32, and no gradient is in float16. Without momentum, steps lag from the second on."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * 1e25


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_overflow_at_any_scale_end_the_job(workers: int, tmp_path: Path, device: Device) -> None:
    keys = KEYS | {"loss_scale": {"initial": 4}, "checkpoint": {"every": 2}}
    ran = run(Huge, tmp_path / "huge", workers, **keys)
    assert "The gradients of step 3 overflow float16 even with a loss scale of 1." in ran.ended.failure.message
    assert ran.fields("step", "overflow") == {1: True, 2: True}
    assert ran.saved_steps == [2]


class Half(tasks.Momentum):
    def model(self) -> nn.Module:
        return super().model().half()


class Complex(tasks.Momentum):
    def model(self) -> nn.Module:
        model = super().model()
        model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        return model


@pytest.mark.parametrize(("task", "named"), [(Half, "'0.weight' is float16."), (Complex, "'turn' is complex64,")])
def test_parameters_that_cannot_be_trained_so_are_refused(task: type[Task], named: str, tmp_path: Path) -> None:
    failure = gang.train(task, gang.job(task, precision="fp16"), 1, tmp_path).failure
    assert f"Parameter {named}" in failure.message


class FrozenHalf(tasks.Momentum):
    """What is not trained loses no updates."""

    def model(self) -> nn.Module:
        model = super().model()
        model.table = nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
        return model


def test_a_state_without_a_scale_begins_with_the_first_one_whatever_was_before() -> None:
    scale = Replica(FrozenHalf(), gang.job(FrozenHalf, precision="fp16"), Device("fp16")).loss_scale
    assert scale is not None
    scale.load({"scale": torch.tensor(8.0), "good_steps": torch.tensor(7)})
    scale.load({})
    assert [float(value) for value in scale.state().values()] == [65536, 0]


def test_the_search_for_a_batch_makes_what_optimizers_keep(tmp_path: Path, device: Device) -> None:
    seen = tmp_path / "states"

    def attach(_: int, loop: Any) -> None:
        loop.mode, advance = RunMode(batch_for=1), loop.strategy.advance

        def look(*step: Any) -> Any:
            outcome = advance(*step)
            seen.write_text(str(loop.replica.optimizers.states))
            return outcome

        loop.strategy.advance = look

    keys = KEYS | {"loss_scale": {"initial": 2**40}}
    gang.train(tasks.Adam, gang.job(tasks.Adam, **keys), 1, tmp_path, sabotage=attach)
    assert int(seen.read_text()) > 0

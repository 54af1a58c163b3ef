"""With one lane a job gives the bits of the loop that one would write by hand."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.digests import derive_seed
from quorate.replica.device import Device, digests
from quorate.task.task import Task

pytestmark = pytest.mark.usefixtures("unmeasured")

STEPS = 7
BATCH = 12


def by_hand(
    task: Task,
    seed: int,
    clip_norm: float | None,
    accumulate: int,
    decay: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, str]:
    """A plain PyTorch loop; of Quorate only the seeds and the order of samples, which are the job's own choice."""
    seed_everything(derive_seed(seed, "build"))
    model = task.model()
    averaged = copy.deepcopy(model)
    scaler, is_half = scaler or torch.amp.GradScaler("cpu", enabled=False), scaler is not None
    optimizer = task.optimizer(model)
    training, _ = task.datasets()
    per_epoch = len(training) // BATCH
    for step in range(1, STEPS + 1):
        epoch, position = divmod(step - 1, per_epoch)
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        order = torch.randperm(len(training), generator=generator)[position * BATCH : (position + 1) * BATCH].tolist()
        samples = []
        for index in order:
            seed_everything(derive_seed(seed, "sample", "training", epoch, index))
            samples.append(training[index])
        seed_everything(derive_seed(seed, "lane", step, 0))
        optimizer.zero_grad()
        for part in range(accumulate):
            micro = samples[part * BATCH // accumulate : (part + 1) * BATCH // accumulate]
            with torch.autocast("cpu", torch.float16, enabled=is_half):
                loss = task.loss(model, task.collate(micro))
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        seed_everything(derive_seed(seed, "apply", step))
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for average, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 1 - (decay or 0.0))
    averages = [] if decay is None else [(f"{name} (averaged)", p) for name, p in averaged.named_parameters()]
    return digests([*model.named_parameters(), *model.named_buffers(), *averages])


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


by_turns = pytest.mark.parametrize(
    ("clip_norm", "accumulate"),
    [
        (None, 1),
        (0.3, 4),
        pytest.param(None, 4, marks=pytest.mark.long),
        pytest.param(0.3, 1, marks=pytest.mark.long),
    ],
)
"""Neither and both each time; one of them alone among the long tests."""


@by_turns
@pytest.mark.parametrize(
    "task",
    [
        tasks.Regression,
        tasks.Momentum,
        tasks.Adam,
        tasks.BatchNormAndDropout,
        tasks.FrozenAndUnused,
        tasks.RandomTransform,
        tasks.NoisyOptimizer,
        tasks.ConstantBuffers,
        tasks.LaneZeroBuffer,
        tasks.AveragesInside,
    ],
)
def test_one_lane_gives_the_bits_of_a_loop_written_by_hand(
    task: type[Task], clip_norm: float | None, accumulate: int, tmp_path: Path
) -> None:
    spec = gang.job(task, lanes=1, batch_size=BATCH, steps=STEPS, clip_norm=clip_norm, accumulate=accumulate)
    ended = gang.train(task, spec, 1, tmp_path)
    torch.set_num_threads(1)
    expected = by_hand(task(), spec.seed, clip_norm, accumulate)
    assert ended.digest
    assert ended.tensors == expected


@pytest.mark.parametrize("task", [tasks.Adam, tasks.BatchNormAndDropout])
def test_an_average_has_the_bits_of_one_kept_by_hand(task: type[Task], tmp_path: Path) -> None:
    spec = gang.job(task, lanes=1, batch_size=BATCH, steps=STEPS, average={"decay": 0.7})
    ended = gang.train(task, spec, 1, tmp_path)
    torch.set_num_threads(1)
    expected = by_hand(task(), spec.seed, None, 1, 0.7)
    assert ended.digest
    assert ended.tensors == expected
    plain = gang.train(task, gang.job(task, lanes=1, batch_size=BATCH, steps=STEPS), 1, _folder(tmp_path / "plain"))
    assert plain.tensors == {name: digest for name, digest in expected.items() if "averaged" not in name}


@by_turns
@pytest.mark.parametrize("task", [tasks.Momentum, tasks.BatchNormAndDropout])
def test_half_precision_has_the_bits_of_a_grad_scaler(
    task: type[Task], clip_norm: float | None, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers and averages included: as there, only the optimizer leaves out a step that overflows."""
    monkeypatch.setattr(gang, "CPU", Device("fp16"))
    keys: dict[str, Any] = {"precision": "fp16", "loss_scale": {"initial": 2**16, "growth_interval": 2}}
    keys |= {"clip_norm": clip_norm, "accumulate": accumulate, "average": {"decay": 0.7}}
    ended = gang.train(task, gang.job(task, lanes=1, batch_size=BATCH, steps=STEPS, **keys), 1, tmp_path)
    torch.set_num_threads(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    expected = by_hand(task(), 11, clip_norm, accumulate, 0.7, scaler)
    assert ended.digest
    assert 0 < ended.progress["overflows"] < STEPS
    assert ended.tensors == expected


def _folder(path: Path) -> Path:
    path.mkdir()
    return path

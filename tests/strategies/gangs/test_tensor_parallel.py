"""Models that are cut across real processes, over Gloo, in float64: they compute what the whole ones compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from quorate.strategies.gangs.cut_functions import AsInOneProcess
from strategies.gangs import cut_models

ROOT = Path(__file__).parents[3]


def run(size: int, models: list[str], folder: Path) -> list[dict[str, Any]]:
    """What each process found."""
    paths = [str(ROOT / place) for place in ("tests/strategies/gangs", "tests", ".", "examples/models")]
    script = folder / "cut.py"  # which finds the modules itself: with a PYTHONPATH no interpreter is warm
    script.write_text(
        f"import sys, runpy\nsys.path[:0] = {paths}\nrunpy.run_module('cut_models', run_name='__main__')\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(folder), *models],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def check(told: list[dict[str, Any]]) -> None:
    for name in told[0]:
        assert all(each[name]["difference"] <= 1e-12 * each[name]["scale"] for each in told), name
        assert told[0][name]["scale"] > 0.1, f"{name} has next to no gradients to compare"
        assert told[0][name]["held"] < told[0][name]["of"], name


@pytest.mark.long
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    told = run(
        2, ["gpt2", "bert", "vit-dropout", "llama", "split-dropout", "encoder", "gated-by-hand", "odd"], tmp_path
    )
    check(told)
    # Nothing is exchanged beyond what cutting needs: of two blocks each adds up twice, and deals out once.
    for name in ("gpt2", "bert", "vit-dropout", "split-dropout"):
        assert told[0][name]["exchanges"] == {"all_reduce": 4, "all_to_all_single": 2}, name
    assert told[0]["llama"]["exchanges"] == {"all_reduce": 4}


@pytest.mark.long
def test_every_other_model_too(tmp_path: Path) -> None:
    check(run(2, list(cut_models.MODELS), tmp_path))


@pytest.mark.long
def test_four_processes_compute_what_one_does_also_with_shards(tmp_path: Path) -> None:
    check(run(4, ["gpt2", "llama", "split-dropout", "gated-by-hand", "gpt2+shard", "llama+shard"], tmp_path))


def test_what_holds_several_maps_is_laid_open_however_its_shape_is_asked_for() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        content = torch.randn(3, 6, 8)
        two = DTensor.from_local(content, mesh, [_StridedShard(2, split_factor=2)], run_check=False)
        with AsInOneProcess(mesh):
            opened = [torch.reshape(two, (3, 6, 2, 4)), torch.reshape(input=two, shape=(3, 6, 2, 4))]
        assert all(torch.equal(each.to_local(), content.view(3, 6, 2, 4)) for each in opened)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()

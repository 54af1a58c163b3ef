"""What `quorate plan` says of a job with `strategy: fsdp`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # makes the backend of an imagined mesh known
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf

from gpt2 import Gpt2Pretraining
from quorate.core.generation import MeshShape
from quorate.replica.footprint import Footprint, footprint
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.sharded_plan import ShardedPlan, imagined_mesh
from quorate.task.hints import hint_for
from quorate.task.task import Task, configure

SHAPE = {"vocabulary": 100, "pad_vocabulary": False, "window": 12, "width": 16, "heads": 4, "layers": 3}
BLOCK, OUTSIDE = 4 * (3 * 16 * 17 + 16 * 17 + 2 * 4 * 16 * 16 + 5 * 16 + 4 * 16), 4 * (100 * 16 + 12 * 16 + 2 * 16)
"""Bytes of a block and of what is outside of the blocks."""


def planned(strategy: dict[str, Any], shape: MeshShape) -> tuple[ShardedPlan, Footprint]:
    spec = JobSpec.model_validate(
        {
            "task": "gpt2.py:Gpt2Pretraining",
            "batch_size": 2 * shape.groups,
            "steps": 1,
            "lanes": shape.groups,
            "workers": shape.size,
            "strategy": {"kind": "fsdp", **strategy},
        }
    )
    task: Task = configure(Gpt2Pretraining, SHAPE, "the test", 1)
    batch = [torch.arange(26).reshape(2, 13)]
    plan = ShardedPlan(task, spec, shape)
    return plan, plan.traced(lambda cut: footprint(task, spec, batch, 2, cut=cut))


def parts(plan: ShardedPlan, found: Footprint) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.parts(found, "fp32")}


def test_shards_hold_a_part_of_the_state_and_gather_the_rest() -> None:
    plan, found = planned({"shard": 4}, MeshShape(1, 4, 1))
    told, whole = parts(plan, found), 3 * BLOCK + OUTSIDE
    assert (told["weights"], told["gradients"]) == (whole // 4, whole // 4)
    # AdamW keeps two averages, and a number of steps for each tensor.
    assert 2 * whole // 4 <= told["optimizer"] < 2 * whole // 4 + 100
    assert told["gathered"] == 2 * BLOCK + OUTSIDE + max(BLOCK, OUTSIDE)
    assert plan.spread.units == (("blocks.*", 3),)
    # All weights twice and all gradients once, of which a worker has a quarter itself.
    assert {each.sends for each in plan.traffic(found)} == {3 * whole * 3 // 4}


def test_weights_and_activations_that_are_cut_across_take_less() -> None:
    whole_plan, whole = planned({"shard": 1}, MeshShape(1, 1, 1))
    plan, cut = planned({"shard": 2, "tensor": 2}, MeshShape(1, 2, 2))
    across = 4 * (2 * 4 * 16 * 16 + 4 * 16)
    assert cut.weights == 3 * (BLOCK - across // 2) + OUTSIDE
    assert parts(plan, cut)["weights"] == cut.weights // 2
    assert whole.kept / 2 < cut.kept < whole.kept
    assert whole_plan.whole(whole).weights == plan.whole(cut).weights == whole.weights
    # A block adds up 2 × 12 × 16 numbers once on the way there and once on the way back.
    _, alone = planned({"shard": 1, "tensor": 2}, MeshShape(1, 1, 2))
    assert planned({"shard": 1, "tensor": 2}, MeshShape(1, 1, 2))[0].traffic(alone)[0].sends == 3 * 4 * 2 * 12 * 16 * 2


def test_what_offload_and_reshard_change() -> None:
    plan, found = planned({"shard": 2, "offload": True}, MeshShape(1, 2, 1))
    told = parts(plan, found)
    assert [told[name] for name in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    plan, found = planned({"shard": 2, "reshard": False}, MeshShape(1, 2, 1))
    assert parts(plan, found)["gathered"] == found.weights + max(BLOCK, OUTSIDE)
    assert any(line.startswith("strategy.reshard: true") for line in plan.advice(found, "fp32", 0))


def test_advice_names_a_number_of_shards_that_fits() -> None:
    plan, found = planned({"shard": 2}, MeshShape(1, 2, 1))
    need = sum(parts(plan, found).values())
    advice = next(plan.advice(found, "fp32", need - found.weights))
    shards = int(advice.split()[1])
    assert sum(part.bytes for part in plan.parts(found, "fp32", shards)) <= need - found.weights
    assert f"({shards} workers)" in advice


def test_who_calls_a_part_of_a_sharded_model_is_told_to_call_the_model() -> None:
    with imagined_mesh(2) as mesh:
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [ShardOf(0)])
        with pytest.raises(Exception) as raised:
            F.embedding(torch.tensor([1, 2]), weight)
        assert "call the model itself" in hint_for(raised.value)

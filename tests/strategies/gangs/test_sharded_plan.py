"""What `quorate plan` says of a job with `strategy: fsdp`."""

from typing import Any

import pytest
import torch

from gpt2 import Gpt2Pretraining
from quorate.core.errors import TaskError
from quorate.core.mesh import MeshShape
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.sharded_plan import ShardedPlan, spread_lines
from quorate.training.footprint import Footprint, footprint
from quorate.training.task import Task, configure

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
    plan = ShardedPlan(task, spec, shape, batch)
    return plan, plan.traced(lambda cut: footprint(task, spec, lambda _: batch, 2, cut=cut))


def parts(plan: ShardedPlan, found: Footprint) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.parts(found, "fp32")}


def test_shards_hold_a_part_of_the_state_and_gather_the_rest() -> None:
    plan, found = planned({"shard": 4}, MeshShape(1, 4, 1))
    told, whole = parts(plan, found), 3 * BLOCK + OUTSIDE
    assert (told["weights"], told["gradients"]) == (whole // 4, whole // 4)
    # AdamW keeps two averages, and a number of steps for each tensor.
    assert 2 * whole // 4 <= told["optimizer"] < 2 * whole // 4 + 100
    assert told["gathered"] == 2 * BLOCK + OUTSIDE + max(BLOCK, OUTSIDE)
    assert dict(spread_lines(plan.spread))["units"] == "blocks.* (3), then the rest"
    # All weights twice and all gradients once, of which a worker has a quarter itself.
    assert {each.sends for each in plan.traffic(found)} == {3 * whole * 3 // 4}


@pytest.mark.long
def test_weights_and_activations_that_are_cut_across_take_less() -> None:
    whole_plan, whole = planned({"shard": 1}, MeshShape(1, 1, 1))
    plan, cut = planned({"shard": 2, "tensor": 2}, MeshShape(1, 2, 2))
    # Norms, and the biases of rows, are whole on every worker; so are the tables.
    uncut = 4 * 6 * 16
    assert cut.weights == 3 * ((BLOCK - uncut) // 2 + uncut) + OUTSIDE
    assert parts(plan, cut)["weights"] == cut.weights // 2
    assert whole.kept / 2 < cut.kept < whole.kept
    assert whole_plan.whole(whole).weights == plan.whole(cut).weights == whole.weights
    # A block adds up 2 × 12 × 16 numbers twice on the way there and twice on the way back, and deals out thrice as many
    # once each; a worker of two sends as much as it adds up, and half of half of what is dealt out.
    exchanged = 3 * 4 * (2 * 12 * 16) * (4 + 2 * 3 / 4)
    _, alone = planned({"shard": 1, "tensor": 2}, MeshShape(1, 1, 2))
    assert planned({"shard": 1, "tensor": 2}, MeshShape(1, 1, 2))[0].traffic(alone)[0].sends == exchanged


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


def test_a_plan_that_cannot_be_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"strategy\.plan: 'embed' and 'score' share a weight"):
        planned({"shard": 1, "tensor": 2, "plan": {"score": "column"}}, MeshShape(1, 1, 2))

import random
from dataclasses import replace

import pytest

from quorate.api.mesh import ModelNeeds, memory_each, propose_mesh

GB = 10**9


def drawn(seed: int) -> ModelNeeds:
    draw = random.Random(seed)
    weights = draw.randrange(1, 400 * GB)
    share = draw.choice([1, 2])
    return ModelNeeds(
        weights=weights,
        gradients=weights,
        optimizer=draw.choice([0, 1, 2]) * weights,
        weight_copies=0 if share == 1 else weights // draw.choice([2, 50]),
        gathered=weights // draw.choice([2, 10, 40]) // share,
        travelling=weights // share,
        activations=draw.randrange(0, 200 * GB),
    )


@pytest.mark.parametrize("seed", range(50))
def test_what_is_proposed_uses_all_gpus_and_says_truly_whether_it_fits(seed: int) -> None:
    needs = drawn(seed)
    for gpus in (1, 2, 3, 6, 8, 12, 16, 32, 40):
        mesh = propose_mesh(needs, gpus, 72 * GB)
        assert mesh.shape.size == gpus
        assert mesh.shape.shard <= gpus
        assert mesh.bytes == memory_each(needs, mesh.shape.shard, mesh.shape.tensor)
        assert mesh.fits == (mesh.bytes <= 72 * GB)
        if not mesh.fits:  # then nothing does that needs no cut of tensors
            shards = [shard for shard in range(1, gpus + 1) if gpus % shard == 0]
            assert min(memory_each(needs, shard) for shard in shards) > 72 * GB


@pytest.mark.parametrize("seed", range(50))
def test_more_gpus_never_need_more_memory_each(seed: int) -> None:
    needs = drawn(seed)
    sharded = [memory_each(needs, shard) for shard in range(2, 65)]
    assert sharded == sorted(sharded, reverse=True)
    for gpus in (1, 2, 3, 4, 6, 8, 16):
        for times in (2, 3, 4):
            least, less = propose_mesh(needs, gpus, 0), propose_mesh(needs, gpus * times, 0)
            assert less.bytes <= least.bytes
            if propose_mesh(needs, gpus, 72 * GB).fits:
                assert propose_mesh(needs, gpus * times, 72 * GB).fits


def test_ten_billion_parameters_on_gpus_of_80_gb() -> None:
    needs = ModelNeeds(40 * GB, 40 * GB, 80 * GB, 1 * GB, 3 * GB, 20 * GB, 10 * GB)
    meshes = [propose_mesh(needs, gpus, 72 * GB) for gpus in (1, 2, 8, 16, 32)]
    assert [mesh.fits for mesh in meshes] == [False, False, True, True, True]
    assert [(mesh.shape.shard, mesh.shape.replicate, mesh.shape.tensor) for mesh in meshes[2:]] == [
        (8, 1, 1),
        (8, 2, 1),
        (8, 4, 1),
    ]
    assert meshes[2].bytes == 20 * GB + 3 * GB + 10 * GB
    assert meshes[3].strategy == "strategy: {kind: fsdp, shard: 8, replicate: 2}"
    in_bf16 = propose_mesh(replace(needs, in_bf16=True), 8, 72 * GB)
    assert in_bf16.strategy == "strategy: {kind: fsdp, shard: 8, gather: bf16}"


def test_a_model_that_fits_whole_is_not_sharded() -> None:
    needs = ModelNeeds(GB, GB, 2 * GB, 0, GB, GB, 30 * GB)
    mesh = propose_mesh(needs, 16, 72 * GB)
    assert (mesh.shape.shard, mesh.shape.replicate, mesh.bytes) == (1, 16, 34 * GB)
    assert mesh.sends == 2 * GB * 15 // 16


def test_activations_that_are_too_large_are_cut_across() -> None:
    needs = ModelNeeds(GB, GB, GB, 0, GB, GB, 100 * GB)
    mesh = propose_mesh(needs, 8, 72 * GB)
    assert (mesh.shape.tensor, mesh.fits) == (2, True)


def test_no_gpu_is_no_mesh() -> None:
    with pytest.raises(ValueError, match="not 0"):
        propose_mesh(drawn(1), 0, GB)

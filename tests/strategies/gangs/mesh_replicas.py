"""Replicas over a mesh whose members take turns in one process: torch's fake process group says yes to everything, and
nothing here needs an answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import gang
import quorate
from quorate.checkpoint.pieces import Box
from quorate.core.generation import MeshShape
from quorate.replica.device import assign
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated
from quorate.strategies.gangs.sharded_layout import DIMENSIONS, Sharded, box_of
from quorate.task.task import configure


class Uneven(quorate.Task):
    """Sizes that no mesh divides, tied weights, buffers; some shards are empty."""

    mesh: ClassVar[DeviceMesh | None] = None

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 9, bias=False)
        )
        model.append(nn.Linear(3, 9, bias=False))
        model[5].weight = model[4].weight
        if self.mesh is not None:
            replicate, _, tensor = self.mesh.shape
            whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            if tensor > 1:
                plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(model, self.mesh["tensor"], plan)
            fully_shard(model, mesh=self.mesh["replicate", "shard"] if replicate > 1 else self.mesh["shard"])
            for name, parameter in model.named_parameters():
                assign(parameter, part_of(whole[name], parameter))  # what a process group would have done
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)


def part_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    box = box_of(parameter) or Box.whole(whole.shape)
    return whole[box.within(Box.whole(whole.shape))]


def replica() -> Replica:
    spec = gang.job(Uneven, average={"decay": 0.9})
    return Replica(configure(Uneven, spec.params, "test", spec.seed), spec)


def train(trained: Replica, steps: int = 2) -> None:
    """Steps whose gradients are the same, whoever holds which part of them."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for _, parameter in trained.parameters:
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter)
            assign(parameter.grad, part_of(whole, parameter))
        trained.optimizers.update()
        assert trained.average is not None
        trained.average.update()
        trained.buffers.commit({name: value + 1 for name, value in trained.buffers.committed()})


@contextmanager
def member(shape: MeshShape, rank: int) -> Iterator[Sharded]:
    """One of a mesh; only one at a time, since torch takes equal meshes for one and the same."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.size)
    try:
        sizes = (shape.replicate, shape.shard, shape.tensor)
        Uneven.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=DIMENSIONS)
        yield Sharded(replica(), shape, rank)
    finally:
        Uneven.mesh = None
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def alone() -> Replicated:
    return Replicated(replica())

"""A model that is cut across several workers, and computes what it computes on one.

Weights become DTensors. A column gives a DTensor of the shape that its output has in one process, of which each worker
holds some of the columns, and a row takes it: so a model's own code in between may reshape it, with the number of heads
and the width that it knows. Outside of such regions all tensors are plain and whole, and equal on all workers of the
tensor dimension. Parameters that are not cut stay plain as well; their gradients are equal everywhere.

Where query, key and value lie one after the other in one weight, consecutive columns would give one worker queries and
another values. The weight is cut so all the same, since shards and checkpoints are consecutive; then the workers
exchange columns, less than what the row adds up later, so that each has the heads of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from quorate.core.errors import TaskError
from quorate.strategies.gangs.cut_functions import AsInOneProcess, contiguous, gathered, whole_of
from quorate.strategies.gangs.tensor_plan import Cut, TensorPlan, cut_dimension


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Cut a model across a mesh of one dimension, in place; its tensors may be on the meta device.

    Every worker has the whole of it before, and keeps its part: nothing is sent. It comes before activation
    checkpointing and `fully_shard`, and before the optimizer is made.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tensor:
        raise ValueError(f"a plan for {plan.tensor} workers in one dimension does not fit a mesh of shape {mesh.shape}")
    cut_before: dict[int, nn.Parameter] = {}
    shared = _SharedInput(mesh)
    for cut in plan.cuts:
        module = model.get_submodule(cut.module)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                # Modules that share a weight go on sharing it.
                if id(parameter) not in cut_before:
                    cut_before[id(parameter)] = _cut_parameter(module, name, parameter, mesh, cut)
                module.register_parameter(name, cut_before[id(parameter)])
        if cut.how == "column":
            _make_column(module, mesh, cut, shared)
        else:
            _make_row(module, mesh, shared)
    for name in plan.regions:
        _open_region(model.get_submodule(name), mesh)


@contextmanager
def imagined_mesh(tensor: int) -> Iterator[DeviceMesh]:
    """A mesh on which this is the first worker and the others are not there, for tensors without content: what is to
    come from them has the right shape."""
    if dist.is_initialized():
        raise TaskError("torch.distributed is in use in this process: how a model is cut cannot be tried in it.")
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=tensor)
    try:
        yield init_device_mesh("cpu", (tensor,))
    finally:
        dist.destroy_process_group()


def _cut_parameter(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, cut: Cut) -> nn.Parameter:
    if name == "weight":
        placement: Any = Shard(cut_dimension(module, cut.how))
    else:
        placement = Shard(0) if cut.how == "column" else Replicate()
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


class _SharedInput:
    """What several columns read is one DTensor, so that its gradient is added up over the workers once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[torch.Tensor, int, DTensor] | None = None

    def whole(self, tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return gathered(tensor).redistribute(self._mesh, [Replicate()])
        # What was changed in place since has another graph.
        version = -1 if tensor.is_inference() else tensor._version
        if self._last is not None and self._last[0] is tensor and self._last[1] == version:
            shared = self._last[2]
            if shared.requires_grad == tensor.requires_grad:
                return shared
        shared = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        self._last = tensor, version, shared
        return shared

    def forget(self) -> None:
        """It would otherwise keep the graph of the whole pass alive."""
        self._last = None


def _make_column(module: nn.Module, mesh: DeviceMesh, cut: Cut, shared: _SharedInput) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        whole = shared.whole(_input(arguments, named))
        if cut.whole:
            shared.forget()
        return (whole,), {}

    def after(_module: nn.Module, _arguments: Any, output: DTensor) -> torch.Tensor:
        if cut.whole:
            return whole_of(output)
        output = output.redistribute(mesh, [Shard(output.ndim - 1)])
        return _deal_out(output, mesh, cut.parts) if cut.parts > 1 else output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _input(arguments: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """All that a map is given, by whichever name."""
    (given,) = (*arguments, *named.values())
    assert isinstance(given, torch.Tensor)
    return given


def _make_row(module: nn.Module, mesh: DeviceMesh, shared: _SharedInput) -> None:
    is_table = isinstance(module, nn.Embedding)

    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        shared.forget()
        given = _input(arguments, named)
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
        placement: Any = Replicate() if is_table else Shard(given.ndim - 1)
        return (gathered(given).redistribute(mesh, [placement]),), {}

    def after(_module: nn.Module, _arguments: Any, output: DTensor) -> torch.Tensor:
        return whole_of(output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _deal_out(output: DTensor, mesh: DeviceMesh, parts: int) -> DTensor:
    """From consecutive columns to a share of each of the parts.

    Cut into parts × workers pieces, worker w has the pieces from w·parts on, and needs every one whose number is w
    modulo the number of workers.
    """
    workers, own = mesh.size(), mesh.get_local_rank()
    local = output.to_local()
    pieces = local.view(*local.shape[:-1], parts, -1).movedim(-2, 0)
    mine = range(own * parts, (own + 1) * parts)
    order = sorted(range(parts), key=lambda at: (mine[at] % workers, at))
    sent = [sum(piece % workers == worker for piece in mine) for worker in range(workers)]
    received = [
        sum(piece % workers == own for piece in range(worker * parts, (worker + 1) * parts))
        for worker in range(workers)
    ]
    # They arrive in the order of the parts: a worker's pieces are consecutive, and so are the workers.
    arrived = collectives.all_to_all_single_autograd(pieces[order].contiguous(), received, sent, mesh.get_group())
    dealt = collectives.wait_tensor(arrived).movedim(0, -2).flatten(-2)  # type: ignore[no-untyped-call]
    placement = _StridedShard(output.ndim - 1, split_factor=parts)
    return DTensor.from_local(
        dealt, mesh, [placement], run_check=False, shape=output.shape, stride=contiguous(output.shape)
    )


def _open_region(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have its forward() see cut tensors as whole ones; nothing cut leaves it."""
    forward = module.forward

    def inside(*arguments: Any, **named: Any) -> Any:
        with AsInOneProcess(mesh):
            result = forward(*arguments, **named)
        return tree_map_only(DTensor, whole_of, result)

    module.forward = inside

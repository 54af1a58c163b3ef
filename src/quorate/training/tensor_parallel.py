"""A model that is cut across several workers, and computes what it computes on one.

Weights become DTensors. A column gives a DTensor of the shape that its output has in one process, of which each worker
holds some of the columns, and a row takes it: so a model's own code in between may reshape it, with the number of heads
and the width that it knows. Outside of such regions all tensors are plain and whole, and equal on all workers of the
tensor dimension. Parameters that are not cut stay plain as well; their gradients are equal everywhere.

Where query, key and value lie one after the other in one weight, consecutive columns would give one worker queries and
another values. The weight is cut so all the same, since shards and checkpoints are consecutive; then the workers
exchange columns, less than what the row adds up later, so that each has the heads of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quorate.core.errors import TaskError
from quorate.training.tensor_plan import Cut, TensorPlan, cut_dimension


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
        self._last: tuple[torch.Tensor, DTensor] | None = None

    def whole(self, tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor.redistribute(self._mesh, [Replicate()])
        if self._last is None or self._last[0] is not tensor or self._last[1].requires_grad != tensor.requires_grad:
            self._last = tensor, DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return self._last[1]

    def forget(self) -> None:
        """It would otherwise keep the graph of the whole pass alive."""
        self._last = None


def _make_column(module: nn.Module, mesh: DeviceMesh, cut: Cut, shared: _SharedInput) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = shared.whole(arguments[0])
        if cut.whole:
            shared.forget()
        return (whole, *arguments[1:])

    def after(_module: nn.Module, _arguments: Any, output: DTensor) -> torch.Tensor:
        if cut.whole:
            return whole_of(output)
        output = output.redistribute(mesh, [Shard(output.ndim - 1)])
        return _deal_out(output, mesh, cut.parts) if cut.parts > 1 else output

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _make_row(module: nn.Module, mesh: DeviceMesh, shared: _SharedInput) -> None:
    is_table = isinstance(module, nn.Embedding)

    def before(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        shared.forget()
        given = arguments[0]
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
        placement: Any = Replicate() if is_table else Shard(given.ndim - 1)
        return (given.redistribute(mesh, [placement]), *arguments[1:])

    def after(_module: nn.Module, _arguments: Any, output: DTensor) -> torch.Tensor:
        return whole_of(output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor, which all workers have."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(tensor.device_mesh, [Replicate()]).to_local()


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
        dealt, mesh, [placement], run_check=False, shape=output.shape, stride=_contiguous(output.shape)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _open_region(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have its forward() see cut tensors as whole ones; nothing cut leaves it."""
    forward = module.forward

    def inside(*arguments: Any, **named: Any) -> Any:
        with _AsInOneProcess(mesh):
            result = forward(*arguments, **named)
        return tree_map_only(DTensor, whole_of, result)

    module.forward = inside


class _AsInOneProcess(TorchFunctionMode):
    """Functions of cut tensors. Most of them DTensor knows; here is what it does not, or does with other random numbers
    than one process would draw. Plain tensors that meet a cut one are the same on all workers."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return function(*arguments, **named)
        if function in _ANSWERS:
            answer = _ANSWERS[function](*arguments, **named)
            if answer is not NotImplemented:
                return answer
        _refuse_what_differs(function, arguments)
        if any(_is_dealt(tensor) for tensor in tensors) and function not in _OF_DEALT:
            arguments, named = tree_map_only(DTensor, _gathered, (arguments, named))
        if any(tensor.ndim and not isinstance(tensor, DTensor) for tensor in tensors):
            arguments, named = tree_map_only(torch.Tensor, self._as_cut, (arguments, named))
        return function(*arguments, **named)

    def _as_cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.ndim:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)


_T = torch.Tensor
_OF_DEALT = {_T.view, _T.reshape, torch.reshape, _T.unflatten, torch.unflatten}
"""What DTensor does with parts that are each cut; attributes besides. For all else they are gathered first."""
_RANDOM = {torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, _T.bernoulli}


def _refuse_what_differs(function: Any, arguments: Sequence[Any]) -> None:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE
    if is_in_place and isinstance(arguments[0], torch.Tensor) and not isinstance(arguments[0], DTensor):
        raise TaskError(
            f"{name}() writes what is cut across workers into a tensor that is not. Write it without changing a tensor "
            "in place, or have strategy.plan leave the modules before it whole (replicate)."
        )
    if function in _RANDOM or (is_in_place and name in _RANDOM_IN_PLACE):
        raise TaskError(
            f"{name}() draws random numbers for a tensor that is cut across workers, which would not be those of one "
            "process. Use nn.functional.dropout, or have strategy.plan leave the modules before it whole."
        )


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__", "__ipow__"}
_RANDOM_IN_PLACE = {"bernoulli_", "uniform_", "normal_", "random_", "exponential_"}


def _is_dealt(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[0], _StridedShard)


def _gathered(tensor: DTensor) -> DTensor:
    return tensor.redistribute(tensor.device_mesh, [Replicate()]) if _is_dealt(tensor) else tensor


def _split(tensor: Any, size: int | Sequence[int], dim: int = 0) -> Any:
    """Equal pieces, of each of which a worker has its share."""
    if not _is_dealt(tensor) or dim not in (-1, tensor.ndim - 1):
        return NotImplemented
    factor = tensor.placements[0].split_factor
    whole = tensor.shape[-1]
    sizes = [size] * (whole // size) if isinstance(size, int) else list(size)
    if sizes != [whole // factor] * factor or sum(sizes) != whole:
        return NotImplemented
    shape = torch.Size((*tensor.shape[:-1], whole // factor))
    return tuple(
        DTensor.from_local(
            piece, tensor.device_mesh, [Shard(tensor.ndim - 1)], run_check=False, shape=shape, stride=_contiguous(shape)
        )
        for piece in (each.contiguous() for each in tensor.to_local().chunk(factor, dim=-1))
    )


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> Any:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The mask is drawn whole, as one process would; each worker takes its part of it."""
    if not training or not p:
        return input
    if inplace:
        _refuse_what_differs(_T.bernoulli_, (input,))
    mask = nn.functional.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
    whole = DTensor.from_local(mask, input.device_mesh, [Replicate()], run_check=False)
    gathered = _gathered(input)
    if isinstance(gathered.placements[0], Partial):
        gathered = gathered.redistribute(gathered.device_mesh, [Replicate()])
    return gathered * whole.redistribute(input.device_mesh, gathered.placements)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Any:
    """Of heads of its own by each worker; whole by all of them where it draws random numbers, or heads are not cut."""
    cut = next(each for each in (query, key, value) if isinstance(each, DTensor))
    mesh, heads = cut.device_mesh, Shard(query.ndim - 3)
    named["is_causal"] = is_causal
    attend: Any = nn.functional.scaled_dot_product_attention
    given = (query, key, value)
    is_shared = all(isinstance(each, DTensor) and each.placements == (heads,) for each in given)
    if not is_shared or dropout_p or isinstance(attn_mask, DTensor):
        mask = None if attn_mask is None else whole_of(attn_mask)
        seen = attend(*(whole_of(each) for each in given), attn_mask=mask, dropout_p=dropout_p, **named)
        return DTensor.from_local(seen, mesh, [Replicate()], run_check=False)
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] > 1:
        whole = DTensor.from_local(attn_mask, mesh, [Replicate()], run_check=False)
        attn_mask = whole.redistribute(mesh, [Shard(attn_mask.ndim - 3)]).to_local()
    elif attn_mask is not None and attn_mask.requires_grad:
        # Each worker has a part of its gradient.
        whole = DTensor.from_local(attn_mask, mesh, [Replicate()], run_check=False)
        attn_mask = whole.to_local(grad_placements=[Partial()])
    seen = attend(*(each.to_local() for each in given), attn_mask=attn_mask, **named)
    return DTensor.from_local(seen, mesh, [heads], run_check=False)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.split: _split,
    _T.split: _split,
    torch.chunk: _chunk,
    _T.chunk: _chunk,
    nn.functional.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    nn.functional.scaled_dot_product_attention: _attention,
}

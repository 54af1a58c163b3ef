"""What functions do with tensors that are cut across workers, so that a model's own code computes what it does in one
process."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quorate.core.errors import TaskError


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor, which all workers have."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _replicated(tensor).to_local()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class AsInOneProcess(TorchFunctionMode):
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
        if getattr(function, "__name__", "") in _READS:
            arguments, named = tree_map_only(DTensor, whole_of, (arguments, named))
            return function(*arguments, **named)
        _refuse_what_differs(function, arguments, named)
        if any(_is_dealt(tensor) for tensor in tensors):
            if function in _OF_DEALT:
                arguments, named = _laid_open(function, arguments, named)
            else:
                arguments, named = tree_map_only(DTensor, gathered, (arguments, named))
        if any(tensor.ndim and not isinstance(tensor, DTensor) for tensor in tensors):
            arguments, named = tree_map_only(torch.Tensor, self._as_cut, (arguments, named))
        try:
            return function(*arguments, **named)
        except RuntimeError as error:
            # Found by all workers: parts of one row become parts of several, or this torch does not know better.
            if "Sharding propagation failed" not in str(error) or _writes(function):
                raise
        arguments, named = tree_map_only(DTensor, _replicated, (arguments, named))
        return function(*arguments, **named)

    def _as_cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.ndim:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)


_T = torch.Tensor
_OF_DEALT = {_T.view, _T.reshape, torch.reshape, _T.unflatten, torch.unflatten}
"""What DTensor does with parts that are each cut; attributes besides. For all else they are gathered first."""
_READS = {
    *("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
    *("equal", "allclose", "is_nonzero"),
}
"""What Python is told of a tensor: DTensor would tell each worker of its own part."""
_RANDOM = {
    *("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson", "binomial"),
    *("gumbel_softmax", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_"),
    *("geometric_", "native_dropout"),
}
"""By their names, since torch.nn.functional has most of torch's once more, and calls those unseen."""
_RANDOM_IN_TRAINING = {"alpha_dropout", "feature_alpha_dropout", "rrelu", "rrelu_", "dropout_", "feature_dropout_"}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__", "__ipow__"}


def _refuse_what_differs(function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return
    written = arguments[0] if _writes(function) and arguments else None
    if isinstance(written, torch.Tensor) and not isinstance(written, DTensor):
        raise TaskError(
            f"{name}() writes what is cut across workers into a tensor that is not. Write it without changing a tensor "
            "in place, or have strategy.plan leave the modules before it whole (replicate)."
        )
    if isinstance(written, torch.Tensor) and _is_dealt(written):
        # It would be done to a copy.
        raise TaskError(
            f"{name}() changes in place what holds several maps, each of which is cut across workers. Split it first, "
            "write it without changing a tensor in place, or have strategy.plan leave the module before it whole."
        )
    trains = named.get("training", next((flag for flag in arguments[1:] if isinstance(flag, bool)), True))
    if name in _RANDOM or (name in _RANDOM_IN_TRAINING and trains):
        raise TaskError(
            f"{name}() draws random numbers for a tensor that is cut across workers, which would not be those of one "
            "process. Use nn.functional.dropout, or have strategy.plan leave the modules before it whole."
        )


def _writes(function: Any) -> bool:
    """Whether it changes its first argument."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE


def _is_dealt(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[0], _StridedShard)


def gathered(tensor: DTensor) -> DTensor:
    """The same, whole where it holds several maps that are each cut."""
    return _replicated(tensor) if _is_dealt(tensor) else tensor


def _replicated(tensor: DTensor) -> DTensor:
    if _is_dealt(tensor):
        # Not every torch gathers such a one as it lies.
        return _replicated(_opened(tensor)).flatten(-2)  # type: ignore[return-value]
    return tensor.redistribute(tensor.device_mesh, [Replicate()])


def _opened(tensor: DTensor) -> DTensor:
    """What holds several maps, with a dimension for them: of each, a worker has some consecutive columns."""
    placement: Any = tensor.placements[0]
    maps = placement.split_factor
    shape = torch.Size((*tensor.shape[:-1], maps, tensor.shape[-1] // maps))
    return DTensor.from_local(
        tensor.to_local().reshape(*tensor.shape[:-1], maps, -1),
        tensor.device_mesh,
        [Shard(tensor.ndim)],
        run_check=False,
        shape=shape,
        stride=contiguous(shape),
    )


def _laid_open(function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Where a model asks for a dimension of its maps, a tensor that has one: every torch can cut that further."""
    if named or function in (_T.unflatten, torch.unflatten):
        return arguments, named
    tensor, *rest = arguments
    placement: Any = tensor.placements[0]
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if not all(isinstance(size, int) for size in sizes):
        return arguments, named
    if -1 in sizes and tensor.numel():
        sizes[sizes.index(-1)] = -tensor.numel() // math.prod(sizes)
    rows = math.prod(tensor.shape[:-1])
    is_asked = any(size == placement.split_factor and math.prod(sizes[:at]) == rows for at, size in enumerate(sizes))
    return ((_opened(tensor), sizes), named) if is_asked else (arguments, named)


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
            piece, tensor.device_mesh, [Shard(tensor.ndim - 1)], run_check=False, shape=shape, stride=contiguous(shape)
        )
        for piece in (each.contiguous() for each in tensor.to_local().chunk(factor, dim=-1))
    )


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> Any:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _dropout(draw: Callable[..., torch.Tensor], input: Any, p: float, training: bool, inplace: bool = False) -> Any:
    """The mask is drawn whole, as one process would; each worker takes its part of it."""
    if not training or not p:
        return input
    if inplace:
        raise TaskError(
            "Dropout in place is not possible in a tensor that is cut across workers: leave inplace=True out, or have "
            "strategy.plan leave the modules before it whole (replicate)."
        )
    # Numbers are drawn in the order in which the tensor lies in memory, which another view of it does not change.
    laid_out = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    mask = draw(torch.ones_like(laid_out, device=input.device), p, True)
    whole = DTensor.from_local(mask, input.device_mesh, [Replicate()], run_check=False)
    held = gathered(input)
    if isinstance(held.placements[0], Partial):
        held = _replicated(held)
    return held * whole.redistribute(input.device_mesh, held.placements)


def _drop_out(draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """With the defaults of torch.nn.functional, where all but alpha dropout multiply by a mask."""

    def answer(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return _dropout(draw, input, p, training, inplace)

    return answer


def _rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """Over all that it is a norm of, also where that is cut; what comes out is cut as before."""
    if not isinstance(input, DTensor):
        return NotImplemented
    placement: Any = gathered(input).placements[0]
    if not placement.is_shard() or placement.dim < input.ndim - len(normalized_shape):
        return NotImplemented
    whole = _replicated(input)
    if weight is not None and not isinstance(weight, DTensor):
        weight = DTensor.from_local(weight, input.device_mesh, [Replicate()], run_check=False)
    normed: Any = nn.functional.rms_norm(whole, list(normalized_shape), weight, eps)
    return normed.redistribute(input.device_mesh, [placement])


def _matmul(left: Any, right: Any) -> Any:
    """Of heads of its own by each worker: not every torch can fold a dimension that is cut with another one."""
    if not (isinstance(left, DTensor) and isinstance(right, DTensor)) or left.ndim != right.ndim:
        return NotImplemented
    placement: Any = left.placements[0]
    is_batch = placement.is_shard() and not _is_dealt(left) and placement.dim < left.ndim - 2
    if not is_batch or right.placements != left.placements or left.shape[:-2] != right.shape[:-2]:
        return NotImplemented
    shape = torch.Size((*left.shape[:-1], right.shape[-1]))
    product = torch.matmul(left.to_local(), right.to_local())
    return DTensor.from_local(
        product, left.device_mesh, [placement], run_check=False, shape=shape, stride=contiguous(shape)
    )


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
    nn.functional.dropout: _drop_out(nn.functional.dropout),
    nn.functional.dropout1d: _drop_out(nn.functional.dropout1d),
    nn.functional.dropout2d: _drop_out(nn.functional.dropout2d),
    nn.functional.dropout3d: _drop_out(nn.functional.dropout3d),
    torch.dropout: lambda input, p, train: _dropout(torch.dropout, input, p, train),
    torch.feature_dropout: lambda input, p, train: _dropout(torch.feature_dropout, input, p, train),
    nn.functional.rms_norm: _rms_norm,
    torch.matmul: _matmul,
    _T.matmul: _matmul,
    _T.__matmul__: _matmul,
    nn.functional.scaled_dot_product_attention: _attention,
}

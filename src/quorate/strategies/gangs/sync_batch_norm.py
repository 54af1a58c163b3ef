"""Batch norm over the micro-batches of all workers that are computed at the same time (`strategy.sync_batch_norm`).

Torch's SyncBatchNorm is a module of its own, for GPUs alone. Here batch norms stay what they are, with their names and
buffers, and only compute otherwise while they train: a checkpoint is that of any other strategy. Every worker has to
run the same batch norms in the same order, or one would wait for a sum that the others do not take part in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from quorate.core.errors import UnsupportedModelError
from quorate.strategies.gangs.process_group import ProcessGroup


class SyncedNorms:
    """The batch norms of a model. While workers are `joined`, those that train take the statistics of all of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.group: ProcessGroup | None = None
        self.position, self.workers = 0, 1
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        for number, (name, module) in enumerate(named):
            module.__dict__["forward"] = _synced(module, number, name, self)
        self.count = len(named)

    def join(self, group: ProcessGroup, position: int, workers: int) -> None:
        """Of one generation."""
        self.group, self.position, self.workers = group, position, workers

    def leave(self) -> None:
        """Nobody else is there."""
        self.group = None


def _synced(module: _BatchNorm, number: int, name: str, norms: SyncedNorms) -> Callable[[torch.Tensor], torch.Tensor]:
    alone = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if norms.group is None or not module.training:
            return alone(inputs)
        module._check_input_dim(inputs)  # type: ignore[no-untyped-call]
        outputs, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            inputs, module.weight, module.bias, module.eps, (norms, number, name)
        )
        if module.track_running_stats:
            _track(module, mean, variance, count)
        normalized: torch.Tensor = outputs
        return normalized

    # What a compiler has seen of it without the others would be all that it ever does.
    synced: Callable[[torch.Tensor], torch.Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return synced


@torch.no_grad()
def _track(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    assert module.running_mean is not None and module.running_var is not None
    factor: float | torch.Tensor = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            factor = 1.0 / module.num_batches_tracked.to(mean.dtype)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, value in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.copy_(running * (1 - factor) + value.to(running.dtype) * factor)


class _Normalize(torch.autograd.Function):
    """Forward one sum, of a row for each worker with its mean, its squared deviations and its count: how these are put
    together depends on nobody's order. Backward one, of what the gradient of the inputs needs of all."""

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        place: tuple[SyncedNorms, int, str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        norms, number, name = place
        values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        own = values.numel() // max(1, values.shape[1])
        local = values.sum(_others(values)) / max(1, own)
        deviations = (values - _spread(local, values)).square().sum(_others(values))
        table = values.new_zeros(norms.workers, 2 * len(local) + 2)
        table[norms.position] = torch.cat([local, deviations, values.new_tensor([own, number])])
        _summed(norms, table)
        _check_same(table[:, -1], number, name)
        counts = table[:, -2:-1]
        count, size = counts.sum(), len(local)
        mean = (table[:, :size] * counts).sum(0) / count
        variance = (table[:, size:-2] + counts * (table[:, :size] - mean).square()).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        normalized = (values - _spread(mean, values)) * _spread(scale, values)
        context.place = place
        context.dtypes = (inputs.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
        context.save_for_backward(normalized, weight, scale, count)
        outputs = normalized if weight is None else normalized * _spread(weight, values)
        if bias is not None:
            outputs = outputs + _spread(bias, values)
        context.mark_non_differentiable(mean, variance, count)
        return outputs.to(inputs.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        normalized, weight, scale, count = context.saved_tensors
        norms, number, name = context.place
        of_inputs, of_weight, of_bias = context.dtypes
        gradient = gradient.to(normalized.dtype)
        sums, products = gradient.sum(_others(gradient)), (gradient * normalized).sum(_others(gradient))
        table = torch.cat([sums, products, sums.new_tensor([number])])
        _summed(norms, table)
        _check_same(table[-1:] / norms.workers, number, name)
        mean, product = (_spread(part / count, gradient) for part in table[:-1].chunk(2))
        factor = scale if weight is None else scale * weight
        inputs = _spread(factor, gradient) * (gradient - mean - normalized * product)
        return (
            inputs.to(of_inputs),
            # Of this worker's own samples: gradients are summed later.
            None if of_weight is None else products.to(of_weight),
            None if of_bias is None else sums.to(of_bias),
            None,
            None,
        )


def _others(values: torch.Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(values.dim()) if dimension != 1]


def _spread(channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, *[1] * (values.dim() - 2))


def _summed(norms: SyncedNorms, table: torch.Tensor) -> None:
    assert norms.group is not None, "a pass outlives its generation"
    norms.group.sum(table)


def _check_same(numbers: torch.Tensor, number: int, name: str) -> None:
    if bool((numbers != number).any()):
        raise UnsupportedModelError(
            f"strategy.sync_batch_norm: this worker is at '{name}', and others are at another batch norm. All must "
            "run the same layers in the same order: leave out what depends on the batch, or sync_batch_norm."
        )

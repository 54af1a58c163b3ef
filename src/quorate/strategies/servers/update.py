"""The gradients of an update that is spread over several servers, with the bits of an update in one place."""

from collections.abc import Collection, Mapping, Sequence
from functools import reduce

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import ALIGNMENT, Bucket
from quorate.replica.device import Device
from quorate.replica.flat_gradients import shaped
from quorate.replica.gradients import LoneGradients, total_norm
from quorate.replica.optimizers import SOLE, Optimizers
from quorate.strategies.servers.rows import Rows
from quorate.strategies.servers.share import Share
from quorate.training.update import Update


class HeldGradients(LoneGradients):
    """The summed gradients of the blocks that a server holds, each in a flat tensor of its own. It has no lanes.

    Each begins at as many bytes behind a cache line as in the ring's memory, whose `plan` it is: what a device reads in
    one go, and so in which order it adds up a norm, depends on that. Without a plan they begin at one, as those of a
    single lane do. Those `by_rows` are sparse, and others in every step.
    """

    def __init__(self, share: Share, plan: Sequence[Bucket] = ()) -> None:
        super().__init__(share.replica.trainable)
        held = {block: self.parameters[block] for block in sorted(share.placed) if block not in share.by_rows}
        self._rows: dict[int, Rows] = {}
        self._sparse: dict[int, torch.Tensor] = {}
        if share.by_rows:
            # Rows are checked where they come from; torch would warn of it in every process.
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._device = device = share.replica.device
        offsets = {slot.index: slot.offset for bucket in plan for slot in bucket.slots}
        self.totals = {}
        for block, one in held.items():
            shift = offsets.get(block, 0) % (ALIGNMENT // one.itemsize)
            self.totals[block] = device.zeros(shift + one.numel(), one.dtype)[shift:]
        self._views = {
            block: shaped(total, self.parameters[block], as_they_lie=share.as_they_lie)
            for block, total in self.totals.items()
        }

    def install(self, present: int, to_be_written: bool = False) -> None:  # noqa: ARG002
        """Where the optimizers look for them; what has no gradient, or is on another server, has none here."""
        for block, parameter in enumerate(self.parameters):
            parameter.grad = self._gradient(block) if present >> block & 1 else None

    def take_rows(self, sums: Mapping[int, Rows]) -> None:
        """The sums of a step of what has gradients by rows."""
        self._rows = dict(sums)
        self._sparse = {block: rows.as_gradient(self.parameters[block]) for block, rows in sums.items()}

    def changed_rows(self, blocks: Collection[int]) -> dict[int, Rows]:
        """The rows of these blocks that the step has changed, as they are now."""
        return {
            block: Rows.of_table(self.parameters[block], rows.indices)
            for block, rows in self._rows.items()
            if block in blocks
        }

    def clip(self, parameters: Sequence[torch.Tensor], present: int, norm: float, clip: float | None) -> None:
        """Clip the gradients of one optimizer's parameters, as far as they are held here, by the norm of all."""
        numbers = {id(one): block for block, one in enumerate(self.parameters)}
        updated = [one for one in parameters if present >> numbers[id(one)] & 1]
        held = [one for one in updated if one.grad is not None]
        if held and clip is not None:
            dtype = reduce(torch.promote_types, (one.dtype for one in updated))
            clip_grads_with_norm_(held, clip, self._device.move(torch.tensor(norm, dtype=dtype)))

    def _gradient(self, block: int) -> torch.Tensor | None:
        dense = self._views.get(block)
        return dense if dense is not None else self._sparse.get(block)

    def close(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def total_norms(
    update: Update, parameters: Sequence[torch.Tensor], norms: Mapping[int, float], device: Device
) -> dict[str, float]:
    """The norm of each optimizer's gradient from those of all its blocks, as the ring finds it."""
    if update.has_plain_norm:
        told = [norms[block] for block in sorted(norms)]
        there = device.move(torch.tensor(told, dtype=torch.float64 if device.is_host else torch.float32))
        return {SOLE: total_norm(there.unbind(), device)}
    numbers = {id(parameter): block for block, parameter in enumerate(parameters)}
    totals = {}
    for name in update.replica.optimizers.by_name:
        present = [one for one in update.parameters_of(name) if numbers.get(id(one)) in norms]
        totals[name] = _total_norm(present, [norms[numbers[id(one)]] for one in present], device)
    return dict(zip(totals, device.numbers(list(totals.values()))(), strict=True))


def _total_norm(parameters: list[torch.Tensor], norms: Sequence[float], device: Device) -> torch.Tensor:
    if not parameters:
        return torch.tensor(0.0)
    grouped = _group_tensors_by_device_and_dtype([parameters], with_indices=True)  # type: ignore[list-item]
    in_order = [
        torch.tensor(norms[index], dtype=parameters[index].dtype)
        for _, indices in grouped.values()
        for index in indices
    ]
    total: torch.Tensor = torch.linalg.vector_norm(device.move(torch.stack(in_order)), 2.0)
    return total


def check_optimizers(optimizers: Optimizers) -> None:
    """Refuse what does not update each parameter by itself, or may not: a server has only some of them."""
    for name, optimizer in optimizers.by_name.items():
        kind = type(optimizer)
        called = f"{kind.__name__}{f' ({name})' if name else ''}"
        if not kind.__module__.startswith("torch.optim.") and not getattr(kind, "per_parameter", False):
            raise UnsupportedModelError(
                f"{called} is not one of torch's optimizers: with `strategy: parameter-server` each server updates "
                "only the parameters that it holds. If it updates each parameter by itself, and draws no random "
                f"numbers, set `per_parameter = True` on {kind.__name__}; otherwise use `strategy: ring`."
            )
    if optimizers.hooks:
        raise UnsupportedModelError(
            "an optimizer has hooks, which would see only some of the parameters with `strategy: parameter-server`. "
            "Use `strategy: ring`, or leave them out."
        )

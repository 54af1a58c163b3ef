"""From summed gradients to new values on several servers, with the bits of an update in one place."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import ALIGNMENT, Bucket
from quorate.strategies.servers.compress import Answers
from quorate.strategies.servers.rows import Rows
from quorate.strategies.servers.share import Share
from quorate.training.activity import Activity
from quorate.training.device import Device
from quorate.training.flat_gradients import shaped
from quorate.training.gradients import LoneGradients, norms_of, total_norm
from quorate.training.optimizers import SOLE, Optimizers
from quorate.training.strategy import Agreement
from quorate.training.update import Update

BlockNorms = Mapping[int, float]
"""The norm of each block's gradient."""


class HeldGradients(LoneGradients):
    """The summed gradients of the blocks that a server holds, each in a flat tensor of its own. It has no lanes.

    Each begins at as many bytes behind a cache line as in the ring's memory, whose `plan` it is: what a device reads in
    one go, and so in which order it adds up a norm, depends on that. Without a plan they begin at one, as those of a
    single lane do. Those `by_rows` are sparse, and others in every step.
    """

    def __init__(self, share: Share, by_rows: Collection[int] = (), plan: Sequence[Bucket] = ()) -> None:
        super().__init__(share.replica.trainable)
        held = {block: self.parameters[block] for block in sorted(share.placed) if block not in by_rows}
        self._rows: dict[int, Rows] = {}
        self._sparse: dict[int, torch.Tensor] = {}
        if by_rows:
            # Rows are checked where they come from; torch would warn of it in every process.
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        device = share.replica.device
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

    def _gradient(self, block: int) -> torch.Tensor | None:
        dense = self._views.get(block)
        return dense if dense is not None else self._sparse.get(block)

    def close(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class ServerUpdate:
    """Updates the blocks that a server holds, in two halves: between them all servers tell each other their norms."""

    def __init__(
        self,
        update: Update,
        share: Share,
        gradients: HeldGradients,
        clip: float | None,
        activity: Activity,
        answers: Answers | None = None,
    ) -> None:
        self._answers = answers
        self._update = update
        self._share = share
        self._gradients = gradients
        self._clip = clip
        self._activity = activity

    def prepare(self, agreed: Agreement) -> dict[int, float]:
        """Make the sums gradients of a mean; the norms of those of which this server is the primary."""
        if agreed.is_void:
            return {}
        self._update.install(agreed)
        blocks = [block for block in self._share.primary if agreed.present >> block & 1]
        gradients = [self._share.parameter(block).grad for block in blocks]
        values = [one._values() if one.is_sparse else one for one in gradients if one is not None]
        return dict(zip(blocks, self._share.replica.device.numbers(norms_of(values))(), strict=True))

    def complete(self, step: int, agreed: Agreement, norms: Mapping[str, float]) -> None:
        """Clip by the norms of all, and update."""
        update, optimizers = self._update, self._share.replica.optimizers
        update.begin()
        if agreed.is_void:
            update.leave_out(step)
        else:
            self._share.begin_update(agreed)
            self._gradients.install(agreed.present)
            for name, norm in norms.items() if self._clip is not None else ():
                self._scale(agreed, name, norm)
            answers = self._answers
            update.change(
                step, agreed, optimizers.update if answers is None else partial(answers.update, step, optimizers.update)
            )
        self._share.commit(step, agreed)
        self._activity.leave()

    def _scale(self, agreed: Agreement, name: str, norm: float) -> None:
        numbers = {id(one): block for block, one in enumerate(self._gradients.parameters)}
        present = [one for one in self._update.parameters_of(name) if agreed.present >> numbers[id(one)] & 1]
        held = [one for one in present if one.grad is not None]
        if held and self._clip is not None:
            dtype = reduce(torch.promote_types, (one.dtype for one in present))
            there = self._share.replica.device.move(torch.tensor(norm, dtype=dtype))
            clip_grads_with_norm_(held, self._clip, there)


class PulledUpdate:
    """What a worker does instead: it takes the new values, and everything else changes as on the servers."""

    def __init__(self, update: Update, activity: Activity, optimizers: Optimizers) -> None:
        self._update = update
        self._activity = activity
        for optimizer in optimizers.by_name.values():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or its schedule warns that it never steps

    def complete(
        self,
        step: int,
        agreed: Agreement,
        values: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Sequence[tuple[torch.Tensor, Rows]] = (),
    ) -> None:
        """`values` are parameters with what they are to be, `rows` those of which only some rows are new."""
        self._update.begin()
        if agreed.is_void:
            self._update.leave_out(step)
        else:
            self._update.change(step, agreed, lambda: _copy(values, rows))
        self._activity.leave()


def _copy(values: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: Sequence[tuple[torch.Tensor, Rows]]) -> None:
    with torch.no_grad():
        if values:
            torch._foreach_copy_([parameter for parameter, _ in values], [value for _, value in values])
        for parameter, changed in rows:
            changed.put_into(parameter)


def total_norms(
    update: Update, parameters: Sequence[torch.Tensor], norms: BlockNorms, device: Device
) -> dict[str, float]:
    """The norm of each optimizer's gradient from those of all its blocks, as the ring finds it."""
    if update.has_plain_norm:
        told = [norms[block] for block in sorted(norms)]
        there = device.move(torch.tensor(told, dtype=torch.float64 if device.is_host else torch.float32))
        return {SOLE: total_norm(there.unbind(), device)}
    numbers = {id(parameter): block for block, parameter in enumerate(parameters)}
    totals = {}
    for name in update.optimizer_names:
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

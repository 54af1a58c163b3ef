"""Losses: what loss() may give, the same as numbers, and how those are brought from the device to the host."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quorate.core.errors import LossError
from quorate.core.user_code import given, likely_slip
from quorate.replica.optimizers import SOLE
from quorate.task.task import is_scalar, loss_in

Number = Callable[[torch.Tensor], float]
"""Reads the only element of a tensor."""


@dataclass
class LossSum:
    """A loss on the way to its mean. `per_item`: the count is of something other than samples, so the gradient is
    that of the sum and is divided once all lanes' counts are known."""

    total: float = 0.0
    count: float = 0.0
    per_item: bool = False

    def add(self, other: "LossSum") -> None:
        if self.count and self.per_item != other.per_item:
            raise LossError(
                "loss() returned a mean for some batches and (sum, count) for others; give one kind always."
            )
        self.total += other.total
        self.count += other.count
        self.per_item = other.per_item

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def summed(parts: Iterable[tuple[str, LossSum]]) -> dict[str, LossSum]:
    """The sums of all parts of a name, added in their order."""
    totals: dict[str, LossSum] = {}
    for name, part in parts:
        totals.setdefault(name, LossSum()).add(part)
    return totals


class GivenLoss(NamedTuple):
    """What loss() gave for one optimizer and micro-batch. It is still on the device."""

    name: str
    samples: int
    value: torch.Tensor
    items: float | torch.Tensor
    per_item: bool

    def kept(self) -> "GivenLoss":
        """A copy: whatever runs next may write to the tensors of the last one."""
        return self._replace(value=self.value.detach().clone())


@dataclass
class Unread:
    """The losses and logged numbers of a lane, micro-batch by micro-batch, as the device has them; and, in halves, the
    digests of its gradient."""

    losses: list[GivenLoss] = field(default_factory=list)
    logged: list[tuple[int, dict[str, list[float | torch.Tensor]]]] = field(default_factory=list)
    digests: list[torch.Tensor] = field(default_factory=list)

    def scalars(self) -> Iterator[torch.Tensor]:
        """All that is to be read, in the order in which `sums` and `logged_sums` ask for it."""
        for loss in self.losses:
            yield loss.value
            if isinstance(loss.items, torch.Tensor):
                yield loss.items
        for _, values in self.logged:
            yield from (each for given in values.values() for each in given if isinstance(each, torch.Tensor))
        yield from self.digests

    def sums(self, number: Number) -> dict[str, LossSum]:
        """The losses by optimizer."""
        totals: dict[str, LossSum] = {}
        for name, samples, value, items, per_item in self.losses:
            total = number(value) if per_item else number(value) * samples
            count = number(items) if isinstance(items, torch.Tensor) else items
            own = LossSum(0.0 + total, 0.0 + count, per_item)  # a sum of one, in which −0.0 becomes 0.0
            if totals.setdefault(name, own) is not own:
                totals[name].add(own)
        return totals

    def logged_sums(self, number: Number) -> dict[str, tuple[float, float]]:
        """What the task has logged, as sums over samples with their count."""
        parts = []
        for samples, logged in self.logged:
            for name, values in logged.items():
                read = [number(value) if isinstance(value, torch.Tensor) else value for value in values]
                parts.append((name, LossSum(sum(read) / len(read) * samples, samples)))
        return {name: (each.total, each.count) for name, each in summed(parts).items()}


def checked_losses(loss: Any, samples: int, names: Mapping[str, Any]) -> list[GivenLoss]:
    """What loss() gave, by optimizer; all that cannot be a loss is refused."""
    if SOLE in names and not isinstance(loss, torch.Tensor):
        loss = loss_in(loss)
    by_name = {SOLE: loss} if isinstance(loss, torch.Tensor) or not isinstance(loss, Mapping) else dict(loss)
    if by_name.keys() != names.keys() and loss is not None:
        raise LossError(
            f"loss() returned {_named(by_name)} and optimizer() {_named(names)}: both must have the same names."
        )
    losses = []
    for name, each in by_name.items():
        whose = "" if name == SOLE else f" for '{name}'"
        tensor, count, per_item = (
            _sum_and_count(each, whose) if isinstance(each, tuple) else (each, float(samples), False)
        )
        if not isinstance(tensor, torch.Tensor):
            raise LossError(
                f"loss() returned {given(tensor)}{whose}; it must return a tensor with one element.{_slip(tensor)}"
            )
        if tensor.numel() != 1:
            raise LossError(
                f"loss() returned a tensor of shape {tuple(tensor.shape)}{whose}; it must have one element: the mean "
                "over the samples of the batch (such as loss.mean()), or (sum, count)."
            )
        if not tensor.requires_grad:
            raise LossError(
                f"loss() returned a tensor{whose} that does not depend on the parameters. Return it as it comes out of "
                "the model: .detach(), .item(), torch.tensor() and torch.no_grad() cut it off."
            )
        losses.append(GivenLoss(name, samples, tensor, count, per_item))
    return losses


def not_finite(losses: Mapping[str, LossSum]) -> tuple[str, float] | None:
    """The first loss that is not a number any more: what to call it, and its value."""
    for name, loss in losses.items():
        if not math.isfinite(loss.total):
            return called(name), loss.total
    return None


def called(name: str) -> str:
    """What to call a loss in a message."""
    return f"loss '{name}'" if name else "loss"


def _sum_and_count(pair: tuple[Any, ...], whose: str) -> tuple[Any, float | torch.Tensor, bool]:
    if len(pair) != 2:
        raise LossError(f"loss() returned {given(pair)}{whose}; a tuple must be (sum, count).")
    total, count = pair
    if is_scalar(count):
        return total, count.detach().clone(), True
    try:
        return total, float(count), True
    except (TypeError, ValueError, RuntimeError):
        raise LossError(
            f"loss() returned {given(count)}{whose} as the count of (sum, count); it must be a number."
        ) from None


def _slip(value: Any) -> str:
    if isinstance(value, float | int):
        return " Return the tensor itself, not its .item()."
    return likely_slip(value)


def _named(mapping: Mapping[str, Any]) -> str:
    names = ", ".join(f"'{name}'" for name in mapping if name != SOLE)
    return f"a dict with {names}" if names else "a single one"

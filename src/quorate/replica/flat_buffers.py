"""Buffers that lie together on a device: what is done to all of them takes one kernel for each type.

A model with batch norms has hundreds of small buffers. Restored, copied and compared one by one, they take longer than
the lane that changes them; and whoever asks whether they have changed waits for the device. Here nobody asks: all are
restored, all are copied, and what lanes have made of them is agreed on where it lies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from quorate.collectives.reduction import sum_lanes
from quorate.lanes.buckets import LANE_0, MEAN, padding
from quorate.replica.device import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Slot:
    name: str
    offset: int
    numel: int
    shape: torch.Size


def can_lie_flat(buffers: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all of them are plain tensors with memory of their own."""
    are_plain = all(
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.itemsize in _BITS
        and not (value.is_conj() or value.is_neg() or value.is_quantized or value.requires_grad)
        for value in buffers.values()
    )
    if not are_plain:
        return False
    memory = [value.untyped_storage().data_ptr() for value in buffers.values() if value.numel()]
    others = {value.untyped_storage().data_ptr() for value in map(local, parameters) if value.numel()}
    return len({*memory, *others}) == len(memory) + len(others)


class FlatBuffers:
    """The buffers of a model by type: those with the rule "mean" first, then those of "lane 0", then those without one,
    each by name."""

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        rules: Mapping[str, str],
        zeros: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name in sorted(buffers, key=lambda name: (_place(buffers[name], rules.get(name)), name)):
            by_type.setdefault(buffers[name].dtype, []).append(name)
        self._flats = [_Flat([(name, buffers[name]) for name in names], rules, zeros) for names in by_type.values()]
        self.homes = {name: home for flat in self._flats for name, home in flat.cut(flat.home).items()}
        # Each with a storage of its own: a compiler takes views of one for aliases, and looks at every pair of them.
        self.homes = {name: torch.from_dlpack(home) if home.numel() else home for name, home in self.homes.items()}  # type: ignore[attr-defined]
        self.committed = {name: value for flat in self._flats for name, value in flat.cut(flat.committed).items()}

    @property
    def all_committed(self) -> Sequence[torch.Tensor]:
        """The committed values, all together."""
        return tuple(flat.committed for flat in self._flats)

    def restore(self) -> None:
        for flat in self._flats:
            flat.home.copy_(flat.committed)

    def take(self) -> Sequence[torch.Tensor]:
        return tuple(flat.home.clone() for flat in self._flats)

    def cut(self, taken: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What was taken, by name."""
        pairs = zip(self._flats, taken, strict=True)
        return {name: value for flat, values in pairs for name, value in flat.cut(values).items()}

    def agree(
        self, lanes: Sequence[tuple[int, Sequence[torch.Tensor] | None]]
    ) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        """What is to be committed, of all lanes with their samples; and, as numbers, which buffer has no rule although
        lanes differ in it: `refused` reads them."""
        agreed, refused = [], []
        for index, flat in enumerate(self._flats):
            values = [(samples, None if taken is None else taken[index]) for samples, taken in lanes]
            value, first_refused = flat.agree(values)
            agreed.append(value)
            if first_refused is not None:
                refused.append(first_refused)
        return tuple(agreed), refused

    def refused(self, numbers: Sequence[float]) -> str | None:
        """The first buffer by name that cannot be agreed on."""
        able = (flat for flat in self._flats if flat.can_refuse)
        named = (flat.name_of(int(number)) for flat, number in zip(able, numbers, strict=False))
        return min((name for name in named if name is not None), default=None)

    def commit_unless(self, void: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Make these the committed values, but not where the device finds the step void."""
        for flat, value in zip(self._flats, values, strict=True):
            flat.committed.copy_(torch.where(void, flat.committed, value))


class _Flat:
    """The buffers of one type."""

    def __init__(
        self,
        buffers: Sequence[tuple[str, torch.Tensor]],
        rules: Mapping[str, str],
        zeros: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        slots, size, self._averaged, self._unruled = [], 0, 0, len(buffers)
        for number, (name, value) in enumerate(buffers):
            slots.append(_Slot(name, size, value.numel(), value.shape))
            size += value.numel() + padding(value.nbytes, value.itemsize)
            place = _place(value, rules.get(name))
            if place == 0:
                self._averaged = size
            elif place == 2:
                self._unruled = min(self._unruled, number)
        self._slots = slots
        dtype = buffers[0][1].dtype
        self.home, self.committed = zeros(size, dtype), zeros(size, dtype)
        for (_, value), part in zip(buffers, self.cut(self.committed).values(), strict=True):
            part.copy_(value)
        self.home.copy_(self.committed)
        device = self.home.device
        begins = torch.tensor([slot.offset for slot in slots])
        self._begins = begins.to(device)
        self._ends = torch.tensor([slot.offset + slot.numel for slot in slots]).to(device)
        # Which slot an element that is averaged lies in; padding counts to the slot before it.
        owners = torch.searchsorted(begins, torch.arange(self._averaged), right=True) - 1
        self._owners = owners.to(device)
        self._numbers = torch.arange(len(slots), device=device)

    @property
    def can_refuse(self) -> bool:
        return self._unruled < len(self._slots)

    def cut(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {s.name: flat[s.offset : s.offset + s.numel].view(s.shape) for s in self._slots}

    def name_of(self, number: int) -> str | None:
        return self._slots[number].name if number < len(self._slots) else None

    def agree(self, lanes: Sequence[tuple[int, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        first, *rest = (value for _, value in lanes if value is not None)
        if not rest:
            return first, self._numbers.new_full((), len(self._slots)) if self.can_refuse else None
        bits = _BITS[first.itemsize]
        differs = reduce(or_, (value.view(bits) != first.view(bits) for value in rest))
        so_far = torch.nn.functional.pad(differs.cumsum(0), (1, 0))
        differing = so_far[self._ends] != so_far[self._begins]
        agreed = first
        if self._averaged:
            agreed = first.clone()
            mean = self._mean(lanes, first)
            agreed[: self._averaged] = torch.where(differing[self._owners], mean, first[: self._averaged])
        if not self.can_refuse:
            return agreed, None
        numbers, unruled = self._numbers, slice(self._unruled, None)
        return agreed, torch.where(differing[unruled], numbers[unruled], len(self._slots)).amin()

    def _mean(self, lanes: Sequence[tuple[int, torch.Tensor | None]], like: torch.Tensor) -> torch.Tensor:
        """The bits of `StepAgreement`: the same values in the same places, weighted by samples and summed in order."""
        total, part = sum(samples for samples, _ in lanes), slice(0, self._averaged)
        weighted = [
            torch.zeros_like(like[part]) if value is None else value[part].clone().mul_(samples / total)
            for samples, value in lanes
        ]
        mean = torch.empty_like(weighted[0])
        sum_lanes(weighted, mean)
        return mean


def _place(value: torch.Tensor, rule: str | None) -> int:
    if rule == MEAN and value.is_floating_point():
        return 0
    return 1 if rule == LANE_0 else 2

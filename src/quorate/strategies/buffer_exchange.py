"""Agreeing on the buffers that a step changed.

A buffer that is bitwise equal in all lanes is taken as it is: averaging a constant over eight lanes would change almost
half of its elements. Otherwise its rule decides, and without a rule the job is refused. A lane without samples has no
say: where "lane 0" decides and has none, the first lane that has some does.
"""

import json
from collections.abc import Sequence, Set

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.core.generation import Generation
from quorate.reduce.reduction import Reduction
from quorate.strategies.notes import LaneNote
from quorate.training.buffers import LANE_0, MEAN, Buffers
from quorate.training.device import CPU, Device
from quorate.training.lane import LaneResult

ADOPTED_INDEX = 1


class BufferExchange:
    """Carries out, over the ring, what the notes of all lanes call for."""

    def __init__(self, reduction: Reduction, generation: Generation, buffers: Buffers, first_index: int) -> None:
        self._reduction = reduction
        self._generation = generation
        self._buffers = buffers
        self._first_index = first_index

    def agree(self, step: int, results: Sequence[LaneResult], notes: Sequence[LaneNote]) -> dict[str, torch.Tensor]:
        """The values to commit, the same on every worker."""
        filled = [note for note in notes if note.samples]
        if not any(note.buffers for note in filled):
            return {}
        adopted, averaged, differing = [], [], False
        for name in sorted({name for note in filled for name in note.buffers}):
            if len({note.buffers.get(name) for note in filled}) == 1:
                adopted.append(name)
            elif self._buffers.rules.get(name) == MEAN:
                averaged.append(name)
            elif self._buffers.rules.get(name) == LANE_0:
                adopted.append(name)
                differing = True
            else:
                raise _refused(name, step)
        first = filled[0].lane
        holders = {first} if differing else {note.lane for note in filled}
        values = self._adopt(step, results, adopted, first, holders)
        values.update(self._average(step, results, averaged, sum(note.samples for note in notes)))
        return values

    def _adopt(
        self, step: int, results: Sequence[LaneResult], names: Sequence[str], first: int, holders: Set[int]
    ) -> dict[str, torch.Tensor]:
        """What all holders have, to the bit. Whoever hosts none of them is sent it by the host of the first."""
        if not names:
            return {}
        own = next((result for result in results if result.lane in holders), None)
        values = {} if own is None else {name: own.buffers.get(name, self._buffers.get(name)) for name in names}
        if not any(holders.isdisjoint(member.lanes) for member in self._generation.members):
            return values
        is_sender = any(result.lane == first for result in results)
        own_payload = _pack(values, self._buffers.device) if is_sender else b""
        payloads = self._reduction.gather(step, ADOPTED_INDEX, own_payload)
        return values if is_sender else next(_unpack(payload, self._buffers.device) for payload in payloads if payload)

    def _average(
        self, step: int, results: Sequence[LaneResult], names: Sequence[str], batch_samples: int
    ) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        by_type: dict[torch.dtype, list[str]] = {}
        for name in names:
            by_type.setdefault(self._buffers.get(name).dtype, []).append(name)
        for index, (dtype, group) in enumerate(by_type.items()):
            if not dtype.is_floating_point:
                raise UnsupportedModelError(f"Buffer '{group[0]}' is of type {dtype}, which has no mean over lanes.")
            flats = [self._weighted(result, group, batch_samples) for result in results]
            total = torch.empty_like(flats[0])
            self._reduction.all_reduce(step, self._first_index + index, flats, total)
            sizes = [self._buffers.get(name).numel() for name in group]
            for name, part in zip(group, torch.split(total, sizes), strict=True):
                values[name] = part.view(self._buffers.get(name).shape)
        return values

    def _weighted(self, result: LaneResult, names: Sequence[str], batch_samples: int) -> torch.Tensor:
        values = [result.buffers.get(name, self._buffers.get(name)) for name in names]
        flat = torch.cat([value.reshape(-1) for value in values])
        return flat.mul_(result.samples / batch_samples) if result.samples else flat.zero_()


def _refused(name: str, step: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Buffer '{name}' was changed differently by the lanes of step {step}, and there is no rule for what it should "
        f'become. Name one in the task: buffer_rules = {{"{name}": "{MEAN}"}} or {{"{name}": "{LANE_0}"}}.'
    )


def _pack(values: dict[str, torch.Tensor], device: Device = CPU) -> bytes:
    head = json.dumps(
        [[name, str(v.dtype).removeprefix("torch."), list(v.shape)] for name, v in values.items()]
    ).encode()
    return len(head).to_bytes(4) + head + b"".join(device.content(value) for value in values.values())


def _unpack(payload: bytes, device: Device = CPU) -> dict[str, torch.Tensor]:
    start = 4 + int.from_bytes(payload[:4])
    values = {}
    for name, dtype_name, shape in json.loads(payload[4:start]):
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        raw = (
            torch.frombuffer(bytearray(payload[start : start + size]), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        values[name] = device.move(raw.view(dtype).view(shape))
        start += size
    return values

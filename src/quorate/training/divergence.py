"""Replicas that should be equal: how they are compared all the time, and who is to blame where they differ.

Memory does flip bits on large fleets, and a replica that has changed would train on, and hand its state to whoever
copies from it. So every step compares a slice of the state, in turn, and all of the committed buffers, since the step
overwrites them with a mean that takes every worker's in; a save, a copy and a loss that is not finite compare all.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import repeat

import torch
import xxhash

from quorate.core.digests import first_difference, outvoted, weights_digest
from quorate.core.errors import ReplicasDiffer, SettingsDiffer
from quorate.core.generation import OTHERS, Role, names_of
from quorate.replica.device import Device, digests
from quorate.replica.replica import Replica
from quorate.training.activity import Activity

CYCLE = 64
"""Steps within which every byte of the state is compared."""

COMPARE_INDEX = 4
"""Tells the digests of a whole state from what else is gathered in a step."""

Source = Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class Voucher:
    """The state that a worker has, by the digest of each tensor; `is_partial`: others have tensors that it has not.
    `settings` are those of its optimizers, which all of its role have alike; none where it vouches for tensors only."""

    worker: int
    digests: dict[str, str]
    is_partial: bool = False
    settings: dict[str, str] = field(default_factory=dict)


class ReplicaDigests:
    """Digests of one worker's replica, for the others to compare with theirs."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._slices: list[list[_Piece]] = []
        self._buffers: list[_Piece] = []
        self._cut_for: list[int] = []
        self._states = -1

    def of_slice(self, step: int) -> int:
        """Of the bytes whose turn it is at a step, and of all committed buffers."""
        turn = step % CYCLE
        # An optimizer has no state before its first step; afterwards it is looked once in a cycle whether it has more.
        if turn == 0 or self._states != self._replica.optimizers.states:
            self._cut_if_changed()
        digest = xxhash.xxh3_64()
        for piece in self._slices[turn]:
            digest.update(piece.content())
        for piece in self._buffers:
            digest.update(piece.content())
        return digest.intdigest()

    def of_all(self) -> dict[str, str]:
        return digests(self._replica.state_tensors().items(), self._replica.device)

    def _cut_if_changed(self) -> None:
        self._states = self._replica.optimizers.states
        averages = () if self._replica.average is None else self._replica.average.tensors()
        scaling = () if self._replica.loss_scale is None else self._replica.loss_scale.tensors().items()
        fixed = (repeat(tensor).__next__ for _, tensor in (*self._replica.parameters, *averages, *scaling))
        sources: list[Source] = [*fixed, *self._replica.optimizers.sources()]
        present = [0 if (tensor := source()) is None else tensor.data_ptr() for source in sources]
        if present != self._cut_for:
            self._cut_for = present
            device = self._replica.device
            self._buffers = [_Piece(device, source) for source in self._replica.buffers.sources()]
            self._slices = _cut([_Piece(device, source) for source in sources])


class _Piece:
    """Some bytes of a tensor. An optimizer may put another tensor in its place, so that is asked for each time."""

    def __init__(self, device: Device, source: Source, part: slice = slice(None)) -> None:
        self._device, self._source, self._part = device, source, part
        self._look(source())

    @property
    def size(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    @property
    def can_be_cut(self) -> bool:
        return self._tensor is not None and self._tensor.is_contiguous()

    def part(self, start: int, stop: int) -> "_Piece":
        return _Piece(self._device, self._source, slice(start, stop))

    def content(self) -> memoryview:
        tensor = self._source()
        if tensor is not self._tensor or (tensor is not None and tensor.data_ptr() != self._pointer):
            self._look(tensor)
        if self._view is not None:
            return self._view
        return memoryview(b"") if tensor is None else self._device.content(tensor, self._part)

    def _look(self, tensor: torch.Tensor | None) -> None:
        self._tensor, self._pointer = tensor, 0 if tensor is None else tensor.data_ptr()
        view = None if tensor is None else self._device.host_view(tensor)
        self._view = None if view is None else view[self._part]


def _cut(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Lay the state end to end, and cut it into as many slices of equal size as a cycle has steps."""
    slices: list[list[_Piece]] = [[] for _ in range(CYCLE)]
    total = sum(piece.size for piece in pieces)
    begin = 0
    for piece in pieces:
        for turn in range(begin * CYCLE // max(1, total), CYCLE):
            start, stop = turn * total // CYCLE - begin, (turn + 1) * total // CYCLE - begin
            if start >= piece.size:
                break
            if piece.can_be_cut and stop > 0:
                slices[turn].append(piece.part(max(0, start), min(piece.size, stop)))
            elif start <= 0 < stop:  # compared as a whole where it begins
                slices[turn].append(piece)
        begin += piece.size
    return slices


def compare_replicas(
    step: int, own: Voucher | None, gather: Callable[[bytes], Sequence[bytes]], what: str = "replicas"
) -> None:
    """Raise if those who vouch for a state, after a step, hold other bits than each other. All call it together."""
    told = gather(b"" if own is None else json.dumps(asdict(own)).encode())
    if error := divergence(step, [Voucher(**json.loads(payload)) for payload in told if payload], what):
        raise error


def divergence(step: int, vouchers: Sequence[Voucher], what: str = "replicas") -> ReplicasDiffer | None:
    """Names the first setting or tensor in which replicas differ, and who holds which; None if all are equal.

    Settings first: with others, tensors soon are others, too. Those who differ from more than half of all are the
    culprits; without such a majority nobody can say who is.
    """
    told = [Voucher(voucher.worker, voucher.settings) for voucher in vouchers if voucher.settings]
    # Servers and workers apart: only where parameters are updated does an optimizer's step() change its own settings.
    roles = ([voucher for voucher in told if Role.of(voucher.worker) is role] for role in (Role.SERVER, Role.WORKER))
    for odd, rest, culprits in filter(None, map(_odd_ones, roles)):
        setting = first_difference(odd[0].digests, rest[0].digests) or ""
        values = (of[0].digests.get(setting, "nothing") for of in (odd, rest))
        return SettingsDiffer(
            f"The settings of the optimizers differ after step {step}: {_workers(odd)} and {_workers(rest)} have "
            f"{' and '.join(values)} in {setting}; {_verdict(odd, culprits)}.",
            culprits,
        )
    if any(voucher.is_partial for voucher in vouchers):
        names = sorted({name for voucher in vouchers for name in voucher.digests})
        each = ([Voucher(v.worker, {name: v.digests[name]}) for v in vouchers if name in v.digests] for name in names)
        return next(filter(None, (divergence(step, holders, what) for holders in each)), None)
    if (found := _odd_ones(vouchers)) is None:
        return None
    odd, rest, culprits = found
    name = first_difference(odd[0].digests, rest[0].digests)
    when = "after" if what == "replicas" else "in"
    return ReplicasDiffer(
        f"The {what} differ {when} step {step}: {_workers(odd)} and {_workers(rest)} hold different bits, first in "
        f"'{name}'; {_verdict(odd, culprits)}.",
        culprits,
    )


def _odd_ones(vouchers: Sequence[Voucher]) -> tuple[list[Voucher], list[Voucher], tuple[int, ...]] | None:
    """Those who differ from most, the others, and who is wrong."""
    found = outvoted({voucher.worker: weights_digest(voucher.digests) for voucher in vouchers})
    if found is None:
        return None
    odd, rest = (
        [voucher for voucher in vouchers if (voucher.worker in found[0]) is is_odd] for is_odd in (True, False)
    )
    return odd, rest, found[1]


def _verdict(odd: Sequence[Voucher], culprits: Sequence[int]) -> str:
    return f"{_workers(odd)} {'are' if len(odd) > 1 else 'is'} wrong" if culprits else "nobody can say who is wrong"


def _workers(vouchers: Sequence[Voucher]) -> str:
    return names_of(voucher.worker for voucher in vouchers)


GRADIENTS_INDEX = 7
"""Tells the digests of gradients from what else is gathered in a step."""


def check_gradients(
    every: int,
    worker: int,
    trainable: Sequence[tuple[str, torch.nn.Parameter]],
    device: Device,
    gather: Callable[[int, int, bytes], Sequence[bytes]],
    activity: Activity,
    step: int,
) -> None:
    """Every so many steps, raise if a worker has another sum than the others, before that changes any weight: whoever
    adds something else is otherwise found only by what it has made of its weights. All call it together, with the sums
    in `.grad`."""
    if step % every:
        return
    held = {name: parameter.grad for name, parameter in trainable if parameter.grad is not None}
    own = Voucher(worker, digests(held.items(), device))
    with activity.waiting(OTHERS):
        compare_replicas(step, own, partial(gather, step, GRADIENTS_INDEX), "gradients")

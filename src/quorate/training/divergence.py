"""Replicas that should be equal: how they are compared all the time, and who is to blame where they differ.

Memory does flip bits on large fleets, and a replica that has changed would train on, and hand its state to whoever
copies from it. So every step compares a slice of the state, in turn, and all of the committed buffers, since the step
overwrites them with a mean that takes every worker's in; a save, a copy and a loss that is not finite compare all.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
import xxhash

from quorate.checkpoint.attempt import Voucher
from quorate.core.digests import first_difference, weights_digest
from quorate.core.errors import ReplicasDiffer
from quorate.training.replica import Replica
from quorate.training.tensors import content, digests

CYCLE = 64
"""Steps within which every byte of the state is compared."""

Source = Callable[[], torch.Tensor | None]


class ReplicaDigests:
    """Digests of one worker's replica, for the others to compare with theirs."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._slices: list[list[_Piece]] = []
        self._buffers: list[_Piece] = []
        self._states = -1

    def of_slice(self, step: int) -> int:
        """Of the bytes whose turn it is at a step, and of all committed buffers."""
        turn = step % CYCLE
        # An optimizer has no state before its first step; afterwards its tensors are looked for once in a cycle.
        if turn == 0 or self._states != self._replica.optimizers.states:
            self._cut()
        digest = xxhash.xxh3_64()
        for piece in self._slices[turn]:
            digest.update(piece.content())
        for piece in self._buffers:
            digest.update(piece.content())
        return digest.intdigest()

    def of_all(self) -> dict[str, str]:
        """Of every tensor of the state, by name."""
        return digests(self._replica.state_tensors().items())

    def _cut(self) -> None:
        """Lay the state end to end, and cut it into as many slices as a cycle has steps."""
        self._states = self._replica.optimizers.states
        self._buffers = [_Piece(source) for source in self._replica.buffers.sources()]
        pieces = [_Piece(source) for source in self._sources()]
        total = sum(piece.size for piece in pieces)
        self._slices = [[] for _ in range(CYCLE)]
        begin = 0
        for piece in pieces:
            for turn in range(begin * CYCLE // max(1, total), CYCLE):
                start, stop = turn * total // CYCLE - begin, (turn + 1) * total // CYCLE - begin
                if start >= piece.size:
                    break
                if part := piece.part(max(0, start), min(piece.size, stop)):
                    self._slices[turn].append(part)
                elif start <= 0 < stop:  # one that cannot be cut is compared where it begins
                    self._slices[turn].append(piece)
            begin += piece.size

    def _sources(self) -> Iterator[Source]:
        for _, parameter in self._replica.parameters:
            yield partial(_itself, parameter)
        yield from self._replica.optimizers.sources()


class _Piece:
    """Some bytes of a tensor. An optimizer may put another tensor in its place, so that is asked for each time."""

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        self._range = slice(start, stop)
        self._pointer = -1
        self._tensor: torch.Tensor | None = None
        self._view: memoryview | None = None
        self._look()
        self.size = 0 if self._tensor is None else self._tensor.numel() * self._tensor.element_size()

    def part(self, start: int, stop: int) -> "_Piece | None":
        """These bytes of it; None where there are none, or where its elements do not lie one after the other."""
        if start >= stop or self._view is None:
            return None
        return _Piece(self._source, start, stop)

    def content(self) -> memoryview:
        """Its bytes now."""
        tensor = self._source()
        if tensor is not self._tensor or (tensor is not None and tensor.data_ptr() != self._pointer):
            self._look()
        if self._view is not None:
            return self._view
        return memoryview(b"") if tensor is None else content(tensor)[self._range]

    def _look(self) -> None:
        self._tensor = tensor = self._source()
        self._view = None
        if tensor is not None and tensor.is_contiguous():
            self._pointer = tensor.data_ptr()
            self._view = content(tensor)[self._range]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def compare_replicas(step: int, own: Voucher | None, gather: Callable[[bytes], Sequence[bytes]]) -> None:
    """Raise if those who vouch for a state, after a step, hold other bits than each other. All call it together."""
    told = gather(b"" if own is None else json.dumps(asdict(own)).encode())
    if error := divergence(step, [Voucher(**json.loads(payload)) for payload in told if payload]):
        raise error


def divergence(step: int, vouchers: Sequence[Voucher]) -> ReplicasDiffer | None:
    """Names the first tensor in which replicas differ, and who holds which; None if all are equal.

    Those who differ from more than half of all are the culprits; without such a majority nobody can say who is.
    """
    brief = [weights_digest(voucher.digests) for voucher in vouchers]
    if len(set(brief)) <= 1:
        return None
    usual, count = Counter(brief).most_common(1)[0]
    odd, rest = (
        [voucher for voucher, told in zip(vouchers, brief, strict=True) if (told == usual) is same]
        for same in (False, True)
    )
    name = first_difference(odd[0].digests, rest[0].digests)
    culprits = [voucher.worker for voucher in odd] if count > len(vouchers) / 2 else []
    verdict = f"{_workers(odd)} {'are' if len(odd) > 1 else 'is'} wrong" if culprits else "nobody can say who is wrong"
    return ReplicasDiffer(
        f"The replicas differ after step {step}: {_workers(odd)} and {_workers(rest)} hold different bits, first in "
        f"'{name}'; {verdict}.",
        culprits,
    )


def _workers(vouchers: Sequence[Voucher]) -> str:
    return f"worker{'s' if len(vouchers) > 1 else ''} {', '.join(str(voucher.worker) for voucher in vouchers)}"

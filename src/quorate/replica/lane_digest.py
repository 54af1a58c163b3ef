"""The digest of the gradient that a lane has computed: in 64 bits, made where the gradient lies.

On a host it is xxh3 of the bytes. Elsewhere the device adds up the gradient as integers, each times an odd number of
its own, modulo 2^64: such a sum does not depend on its order, and a single bit that differs always changes it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import xxhash

from quorate.replica.device import Device
from quorate.replica.flat_gradients import FlatGradients, flattened
from quorate.replica.gradients import Gradients, LoneGradients

ROW = 4096
MANY = 4
_HALF = 0xFFFFFFFF
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_APART = -7046029254386353131
"""The golden ratio in 64 bits: multiples of it, made odd, are far apart, so that equal changes do not cancel out."""


def collected(gradients: Gradients, *, by_tensor: bool) -> list[tuple[torch.Tensor, ...]]:
    """What the lane that has just ended has collected: all of it as one, or what there is of each parameter."""
    if isinstance(gradients, LoneGradients):
        each: list[tuple[torch.Tensor, ...]] = [
            () if parameter.grad is None else (_in_a_row(parameter.grad),) for parameter in gradients.parameters
        ]
        return each if by_tensor else [tuple(part for parts in each for part in parts)]
    assert isinstance(gradients, FlatGradients), "other gradients are summed in no fixed order"
    beside = gradients.beside()
    if by_tensor:
        return [beside.get(index, (_in_a_row(view),)) for index, view in enumerate(gradients.latest.views)]
    return [(*gradients.latest.buckets, *(part for index in sorted(beside) for part in beside[index]))]


def lane_digests(groups: Iterable[Sequence[torch.Tensor]], device: Device) -> list[int] | list[torch.Tensor]:
    """One for each group of tensors. Where the device is not the host, they are still there: two numbers each."""
    if device.is_host:
        return [_on_host(group, device) for group in groups]
    return [half for group in groups for half in _halves(_on_device(group))]


def joined_halves(numbers: Sequence[float]) -> tuple[int, ...]:
    """The digests of a device, from the numbers that were read."""
    return tuple(int(high) << 32 | int(low) for high, low in zip(numbers[::2], numbers[1::2], strict=True))


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    return flattened(tensor, as_they_lie=True)


def _on_host(tensors: Sequence[torch.Tensor], device: Device) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(device.content(tensor))
    return digest.intdigest()


def _on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rows, whose numbers and whose sums each have an odd number: a product of two of these is odd, too. It costs to
    read the gradient once, and to write its products and read them."""
    flat = [tensor.reshape(-1).view(_INTEGERS[tensor.itemsize]) for tensor in tensors]
    if len(flat) > MANY and len({each.dtype for each in flat}) == 1:
        flat = [torch.cat(flat)]  # a kernel for each of them takes longer
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for each in flat:
        half = each[: len(each) // 2 * 2].view(torch.int64) if _is_paired(each) else each.to(torch.int64)
        rest = each[len(each) // 2 * 2 :].to(torch.int64) if _is_paired(each) else each[:0].to(torch.int64)
        whole = len(half) // ROW * ROW
        sums = (half[:whole].view(-1, ROW) * _odd(ROW, each.device)).sum(1)
        numbers = torch.cat((sums, half[whole:], rest))
        total = total * _APART + (numbers * _odd(len(numbers), each.device)).sum()
    return total


def _is_paired(numbers: torch.Tensor) -> bool:
    """Whether two of them can be taken for one of 64 bits."""
    return numbers.itemsize == 4 and numbers.data_ptr() % 8 == 0


@lru_cache(maxsize=64)
def _odd(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device).mul_(_APART).bitwise_or_(1)


def _halves(digest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers are read as float64, which has room for half of it."""
    return digest >> 32 & _HALF, digest & _HALF

"""The sum that the ring must give, straight from its definition: one element, one addition at a time."""

from collections.abc import Sequence

import torch


def reference_sum(lane_values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lanes are cut into as many chunks as there are; chunk c is lane c+1, plus lane c+2, … plus lane c."""
    lanes = len(lane_values)
    length = lane_values[0].numel()
    total = torch.empty_like(lane_values[0])
    begin = 0
    for chunk in range(lanes):
        end = begin + length // lanes + (1 if chunk < length % lanes else 0)
        partial = lane_values[(chunk + 1) % lanes][begin:end].clone()
        for distance in range(2, lanes + 1):
            partial = partial + lane_values[(chunk + distance) % lanes][begin:end]
        total[begin:end] = partial
        begin = end
    return total


def wide_values(lanes: int, length: int, seed: int) -> list[torch.Tensor]:
    """Float32 values over twelve orders of magnitude: any other order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand((lanes, length), generator=generator, dtype=torch.float64) * 12 - 6
    signs = torch.randint(0, 2, (lanes, length), generator=generator) * 2 - 1
    return list((signs * 10**exponents).to(torch.float32))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

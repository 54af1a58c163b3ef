"""Sums of what lies in the memory of a device, by way of the host's: for devices whose memory the others do not see."""

import weakref
from collections.abc import Sequence

import torch

from quorate.reduce.device_memory import DeviceMemory
from quorate.reduce.memory import GradientMemory, SharedMemory
from quorate.reduce.reduction import Reduction, sum_lanes
from quorate.reduce.wrapped import Wrapped


class Staged(Wrapped):
    """A `Reduction` of tensors on a device. The lanes are copied to the host, summed there in the ring's order, and the
    sum is copied back: additions are rounded alike here and there, so the bits are the same.

    A worker that is alone sums on the device.
    """

    def __init__(self, links: Reduction, host: GradientMemory, workers: int, device: DeviceMemory) -> None:
        super().__init__(links)
        self._host = host
        self._is_alone = workers == 1
        self._device = device
        self._sums = pinned_totals(self, host, device)

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        if self._is_alone:
            sum_lanes(lane_values, total)
            return
        lanes = [buckets[index] for buckets in self._host.lanes.values()]
        for staged, value in zip(lanes, lane_values, strict=True):
            staged.copy_(value, non_blocking=True)
        self._device.wait()
        super().all_reduce(step, index, lanes, self._host.total[index])
        # Until it is copied: something else may be passed through this memory next.
        total.copy_(self._sums[index])


def pinned_totals(owner: object, host: GradientMemory, device: DeviceMemory) -> tuple[torch.Tensor, ...]:
    """Where the device copies totals from. What is shared of the host's memory is pinned while the owner lives.

    A page of a private view that the device kept hold of would not change any more: so it is the view of all.
    """
    if not isinstance(host, SharedMemory):
        return host.total
    for region in host.regions:
        weakref.finalize(owner, device.pin(region)).atexit = False
    return host.shared_total

"""Between workers and parameter servers that compute on devices: by way of the host's memory, on either side."""

from collections.abc import Mapping, Sequence

import torch

from quorate.lanes.buckets import Bucket
from quorate.reduce.device_reduction import pinned_totals
from quorate.reduce.memory import DeviceMemory, GradientMemory
from quorate.strategies.servers.exchange import Exchange


class StagedExchange:
    """An `Exchange` of tensors on a device, by another one of tensors in the memory of the `host`.

    `there` are the lanes of a worker on its device, and the total; a server has none. Servers add up on the host, where
    additions are rounded as they are there. What an optimizer makes of the sums may not be: that is the device's part.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: Sequence[Bucket],
        host: GradientMemory,
        there: GradientMemory,
        device: DeviceMemory,
    ) -> None:
        self._exchange = exchange
        self._host = host
        self._there = there
        self._device = device
        self._totals = pinned_totals(self, host, device)
        self._places = {
            slot.index: (bucket, slice(slot.offset, slot.offset + slot.numel))
            for bucket, content in enumerate(plan)
            for slot in content.slots
        }
        self._sums: dict[int, torch.Tensor] = {}

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._exchange.bytes_received

    def room(self, block: int) -> torch.Tensor:
        """On a worker's device, where the sum over lanes would be: with servers it has no other use there."""
        bucket, place = self._places[block]
        return self._there.total[bucket][place]

    def push(self, step: int) -> None:
        for lane, buckets in self._there.lanes.items():
            for staged, bucket in zip(self._host.lanes[lane], buckets, strict=True):
                staged.copy_(bucket, non_blocking=True)
        self._device.wait()
        self._exchange.push(step)

    def receive(self, step: int) -> None:
        self._exchange.receive(step)

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:
        for block in totals.keys() - self._sums.keys():
            # Not in the shared total: there another server has the same block, and tells its values.
            self._sums[block] = self._device.zeros_on_host(totals[block].numel(), totals[block].dtype)
        sums = {block: self._sums[block] for block in totals}
        self._exchange.add_up(step, sums)
        for block, total in totals.items():
            # Nobody waits: before the next sums are written here, new values have been published, and waited for.
            total.copy_(sums[block], non_blocking=True)

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        staged = {block: self._on_host(block) for block in values}
        for block, value in values.items():
            staged[block].copy_(value, non_blocking=True)
        self._device.wait()
        self._exchange.publish(step, staged)

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        self._exchange.pull(step, {block: self._on_host(block) for block in values})
        for total, came in zip(self._there.total, self._totals, strict=True):
            total.copy_(came, non_blocking=True)
        # The servers write there again once they have heard of this worker.
        self._device.wait()
        for block, value in values.items():
            room = self.room(block)
            if room.data_ptr() != value.data_ptr():
                value.copy_(room)

    def close(self) -> None:
        self._exchange.close()

    def _on_host(self, block: int) -> torch.Tensor:
        bucket, place = self._places[block]
        return self._totals[bucket][place]

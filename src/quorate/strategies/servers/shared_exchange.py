"""Tensors between workers and parameter servers that run on one host: read where they lie, in shared memory."""

from collections.abc import Mapping, Sequence

import torch

from quorate.core.generation import Generation
from quorate.lanes.block_sums import plan_blocks
from quorate.lanes.buckets import Bucket
from quorate.reduce.reduction import add_up_block
from quorate.reduce.shared_memory import SharedMemoryReduction

PUBLISHED_INDEX = 9
"""Tells the gather after which new values may be read."""


class SharedExchange:
    """An `Exchange` in which servers read the lanes of all workers, and workers the values that servers have written.

    What a step has written is read before the next begins: members meet in the gathers of the `reduction` in between.
    """

    def __init__(self, generation: Generation, worker: int, reduction: SharedMemoryReduction, plan: Sequence[Bucket]):
        self._reduction = reduction
        self._blocks = plan_blocks(plan, generation.lanes)
        self._lanes = [reduction.memory.all_lanes[lane] for lane in range(generation.lanes)]
        self._hosted = len(generation.members[generation.position(worker)].lanes)
        self.bytes_sent = self.bytes_received = 0

    def room(self, block: int) -> torch.Tensor:
        """Where all members see it."""
        slot = self._blocks[block].slot
        return self._reduction.memory.shared_total[self._blocks[block].bucket][slot.offset : slot.offset + slot.numel]

    def push(self, step: int) -> None:  # noqa: ARG002
        """Nothing moves: servers read the lanes once all members have met."""
        self.bytes_sent += self._hosted * sum(bucket.nbytes for bucket in self._lanes[0])

    def receive(self, step: int) -> None:
        """The lanes are where they are."""

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:  # noqa: ARG002
        for index, total in totals.items():
            block = self._blocks[index]
            place = slice(block.slot.offset, block.slot.offset + block.slot.numel)
            add_up_block([lane[block.bucket][place] for lane in self._lanes], block.pieces, total)
            self.bytes_received += len(self._lanes) * total.nbytes

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        for block, value in values.items():
            _copy(value, self.room(block))
            self.bytes_sent += value.nbytes
        self._reduction.gather(step, PUBLISHED_INDEX, b"")

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        self._reduction.gather(step, PUBLISHED_INDEX, b"")
        for block, value in values.items():
            _copy(self.room(block), value)
            self.bytes_received += value.nbytes

    def close(self) -> None:
        self._reduction.close()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)

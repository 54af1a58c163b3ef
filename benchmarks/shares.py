"""The work of one process of the scaling benchmark: its share of a step, cut into the same pieces as Quorate's lanes.

Compared at equal micro-batches: a process that takes its share in one piece falls out of its cache.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it; before the fork, it is imported once for all
from torch import nn
from torch.utils.data import DataLoader, Subset

from benchmarks.blocks import Blocks
from benchmarks.cases import CASES, Batch, data_of, endless, loss_of, optimizer_of
from benchmarks.laps import Laps
from benchmarks.told import reading
from quorate.lanes.chunks import host_lanes

STEPS_PER_EPOCH = 16


def samples_of(order: dict[str, Any]) -> int:
    """The size of the dataset, which everybody reads again and again."""
    return STEPS_PER_EPOCH * int(order["batch_size"])


@dataclass(frozen=True)
class Share:
    """So many lanes of a step, on one process of several."""

    model: nn.Module
    batches: Iterator[Batch]
    own_lanes: int
    all_lanes: int

    @classmethod
    def of(cls, order: dict[str, Any], process: int, wrap: Callable[[nn.Module], nn.Module]) -> "Share":
        """The process's lanes, and the part of the data that belongs to them; `wrap` may put something around."""
        torch.set_num_threads(order["threads"])
        torch.manual_seed(0)
        case, lanes = CASES[order["case"]], order["lanes"]
        hosted = host_lanes(lanes, order["processes"])[process]
        samples, share = samples_of(order), samples_of(order) // lanes
        own = Subset(data_of(case, samples), range(share * hosted.start, share * hosted.stop))
        loader = DataLoader(own, batch_size=order["batch_size"] // lanes, shuffle=True, drop_last=True)
        return cls(wrap(case.build()), endless(loader), len(hosted), lanes)

    def train(self, blocks: Blocks, unless_last: Callable[[], AbstractContextManager[Any]]) -> list[list[float]]:
        """Steps of gradients summed over lanes; the ends of blocks, as JSON can carry them.

        All lanes but the last are computed within `unless_last`.
        """
        optimizer, laps = optimizer_of(self.model), Laps(blocks)
        for _ in range(blocks.total):
            optimizer.zero_grad()
            for lane in range(self.own_lanes):
                if lane < self.own_lanes - 1:
                    with unless_last():
                        self._backward()
                else:
                    self._backward()
            optimizer.step()
            laps.complete()
        return [[end, seconds] for end, seconds in laps.seconds.items()]

    def _backward(self) -> None:
        loss = loss_of(self.model, next(self.batches)) / self.all_lanes
        loss.backward()  # type: ignore[no-untyped-call]
        loss.item()


def scaling_reading(order: dict[str, Any], everyone: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """What all processes come to: a step is as slow as the slowest of them."""
    blocks = Blocks(order["warm_up"], order["steps"])
    by_process = [{int(end): seconds for end, seconds in process} for process in everyone]
    # Not block by block: without exchange, the blocks of one process are not those of another.
    slowest = max(statistics.median(blocks.ms(seconds)) for seconds in by_process)
    details = {"mean_ms": max(blocks.mean_ms(seconds) for seconds in by_process)}
    return reading(order["case"], order["processes"], [slowest], threads=order["threads"], details=details)

"""The clock of a training loop, and the script around it."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from benchmarks.blocks import Blocks
from benchmarks.cases import CASES, Case
from benchmarks.told import answer, read_order, reading


class Laps:
    """Counts steps, and takes the time at the end of each block."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.seconds: dict[int, float] = {}
        self._ends = iter(blocks.ends)
        self._end: int | None = next(self._ends)
        self._done = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the step that is about to be complete is the last of a block."""
        return self._done + 1 == self._end

    def complete(self) -> None:
        """One more step is complete. This is measured too, so it does next to nothing."""
        self._done += 1
        if self._done == self._end:
            self.seconds[self._done] = perf_counter()
            self._end = next(self._ends, None)


@dataclass(frozen=True)
class Training:
    """What the script of a peer has to train."""

    case: Case
    laps: Laps
    folder: str

    @property
    def samples(self) -> int:
        """Enough for every step to read others: an epoch never ends within the measurement."""
        return self.laps.blocks.total * self.case.batch_size


def measure_steps(train: Callable[[Training], None]) -> None:
    """Answer the launcher with the time that a step of this loop takes, on one thread."""
    order = read_order()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = Blocks(order["warm_up"], order["steps"])
    laps = Laps(blocks)
    train(Training(CASES[order["case"]], laps, order["folder"]))
    details = {"mean_ms": blocks.mean_ms(laps.seconds)}
    answer(reading(order["case"], 1, blocks.ms(laps.seconds), details=details))

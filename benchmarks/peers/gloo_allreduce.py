"""All-reduce of torch.distributed over Gloo: in place, as DistributedDataParallel uses it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange import exchange_all, readings_of
from benchmarks.gang import Seat, run_gang
from benchmarks.size import ELEMENT
from benchmarks.spans import Span
from benchmarks.store import fresh_store
from benchmarks.told import answer, read_order


class GlooExchange:
    """One process with one tensor."""

    def __init__(self, size: int) -> None:
        self._gradient = torch.zeros(size // ELEMENT)

    def fill(self, value: float) -> None:
        """Write the gradient."""
        self._gradient.fill_(value)

    def reduce(self) -> None:
        """Sum over all processes."""
        dist.all_reduce(self._gradient)

    def extremes(self) -> tuple[float, float]:
        """Of the sum, which has taken the gradient's place."""
        low, high = torch.aminmax(self._gradient)
        return float(low), float(high)


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    with fresh_store(order["folder"]) as store:
        answer(*readings_of(order, run_gang(order["processes"], lambda seat: _take_part(seat, order, store))))


def _take_part(seat: Seat, order: dict[str, Any], store: Path) -> list[list[Span]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=seat.position, world_size=order["processes"])
    spans = exchange_all(order, seat.position, lambda index: GlooExchange(order["sizes"][index]))
    dist.destroy_process_group()
    return spans


if __name__ == "__main__":
    main()

"""DistributedDataParallel over Gloo: gradients are exchanged with the last micro-batch of a step."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.blocks import Blocks
from benchmarks.gang import Seat, run_gang
from benchmarks.shares import Share, scaling_reading
from benchmarks.store import fresh_store
from benchmarks.told import answer, read_order


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with fresh_store(order["folder"]) as store:
        answer(scaling_reading(order, run_gang(order["processes"], lambda seat: _take_part(seat, order, store))))


def _take_part(seat: Seat, order: dict[str, Any], store: Path) -> list[list[float]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=seat.position, world_size=order["processes"])
    share = Share.of(order, seat.position, DistributedDataParallel)
    assert isinstance(share.model, DistributedDataParallel)
    times = share.train(Blocks(order["warm_up"], order["steps"]), share.model.no_sync)
    dist.destroy_process_group()
    return times


if __name__ == "__main__":
    main()

"""The same processes without any exchange, each for itself: what the machine can do at best."""

import contextlib
from typing import Any

from benchmarks.blocks import Blocks
from benchmarks.gang import Seat, run_gang
from benchmarks.shares import Share, scaling_reading
from benchmarks.told import answer, read_order


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    answer(scaling_reading(order, run_gang(order["processes"], lambda seat: _work(seat, order))))


def _work(seat: Seat, order: dict[str, Any]) -> list[list[float]]:
    share = Share.of(order, seat.position, wrap=lambda model: model)
    seat.gather(None)  # all begin at once, so that all have the machine to share
    return share.train(Blocks(order["warm_up"], order["steps"]), contextlib.nullcontext)


if __name__ == "__main__":
    main()

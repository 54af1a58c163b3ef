"""A job of several workers: wall time of a step, and how much of it is exchange."""

from benchmarks.blocks import Blocks
from benchmarks.own.jobs import train_case
from benchmarks.shares import samples_of
from benchmarks.told import answer, read_order, reading


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    blocks = Blocks(order["warm_up"], order["steps"])
    times = train_case(
        order["folder"],
        order["case"],
        samples_of(order),
        blocks,
        lanes=order["lanes"],
        workers=order["processes"],
        threads=order["threads"],
        batch_size=order["batch_size"],
        strategy=order.get("strategy", "ring"),
    )
    answer(reading(order["case"], order["processes"], times.ms, threads=order["threads"], details=times.details))


if __name__ == "__main__":
    main()

"""A job whose lanes are audited, or recorded, or neither."""

from benchmarks.blocks import Blocks
from benchmarks.own.jobs import train_case
from benchmarks.told import answer, read_order, reading

BATCH = 64


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    blocks, workers = Blocks(order["warm_up"], order["steps"]), order["processes"]
    times = train_case(
        order["folder"],
        order["case"],
        1000 * BATCH,
        blocks,
        lanes=order["lanes"],
        workers=workers,
        batch_size=BATCH,
        audit={"every": order["every"]},
        record=order["record"],
    )
    answer(reading(order["case"], workers, times.ms, details=times.details))


if __name__ == "__main__":
    main()

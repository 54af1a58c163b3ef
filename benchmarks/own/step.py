"""A job of one worker and one lane: the real loop, with its events, by a task or with a training loop of one's own."""

from benchmarks.blocks import Blocks
from benchmarks.cases import CASES
from benchmarks.own.jobs import LOOP, TASK, train_case
from benchmarks.told import answer, read_order, reading


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    blocks = Blocks(order["warm_up"], order["steps"])
    batch_size = CASES[order["case"]].batch_size
    samples = blocks.total * batch_size
    task = LOOP if order["system"] == "quorate-own-loop" else TASK
    keys = {"task": task, "lanes": 1, "workers": 1, "batch_size": batch_size}
    times = train_case(order["folder"], order["case"], samples, blocks, **keys)
    answer(reading(order["case"], 1, times.ms, details=times.details))


if __name__ == "__main__":
    main()

"""A job of one worker, with every sink switched on or with none."""

from benchmarks.blocks import Blocks
from benchmarks.own.jobs import train_case
from benchmarks.told import answer, read_order, reading

EVERYTHING = {
    "mlflow": True,
    "tensorboard": True,
    "wandb": "offline",
    "prometheus": 0,
    "trace": {"every": 100},
    "every": 10,
    "system": 1.0,
}


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    blocks = Blocks(order["warm_up"], order["steps"])
    keys = {"track": EVERYTHING} if order["is_tracked"] else {}
    # An epoch is a thousand steps.
    samples, batch_size = 1000 * order["batch_size"], order["batch_size"]
    times = train_case(
        order["folder"], order["case"], samples, blocks, lanes=1, workers=1, batch_size=batch_size, **keys
    )
    answer(reading(order["case"], 1, times.ms, details=times.details))


if __name__ == "__main__":
    main()

"""A job of two workers with `strategy: fsdp` that saves now and then; its own events tell what training waits."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import SIZED_BATCH
from benchmarks.own.checkpoint import TASK
from benchmarks.saving import BATCHES
from benchmarks.sharded import WAITED
from benchmarks.told import answer, read_order, reading
from quorate.api.job import Job
from quorate.api.train import train
from quorate.checkpoint.store import CheckpointFolder
from quorate.observe.events import CheckpointSaved
from quorate.observe.jsonl import EventTail


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with tempfile.TemporaryDirectory(dir=order["folder"]) as temporary:
        runs = Path(temporary)
        train(_job(order, runs), progress=False)
        (run,) = runs.glob("*/events.jsonl")
        told = [event for event in EventTail(run) if isinstance(event, CheckpointSaved)]
        # The first takes memory that the others find, and after the last nothing is trained.
        waited = [event.added_s * 1000 for event in told[1:-1] if event.added_s is not None]
        newest = CheckpointFolder(run.parent / "checkpoints").list()[-1]
        parts = [part.bytes for part in newest.manifest.parts]
    share = {"largest_share_percent": 100 * max(parts) / sum(parts)}
    answer(reading(WAITED, order["processes"], waited, size=order["size"], details=share))


def _job(order: dict[str, Any], runs: Path) -> Job:
    workers, every = order["processes"], order["every"]
    return Job(
        task=TASK,
        name="bench-sharded",
        params={"state_bytes": order["size"], "samples": BATCHES * SIZED_BATCH * workers},
        runs=str(runs),
        steps=every * (order["saves"] + 2),
        lanes=workers,
        workers=workers,
        batch_size=SIZED_BATCH * workers,
        strategy={"kind": "fsdp", "shard": workers},
        checkpoint={"every": every, "keep": 1},
        log_level="warning",
    )


if __name__ == "__main__":
    main()

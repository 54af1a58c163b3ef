"""The same job from a local folder, and from a store of which every request takes longer than the network alone."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.data import FOLDER
from benchmarks.feed_task import work
from benchmarks.flow import counted, samples_per_second
from benchmarks.interpreters import find_tool
from benchmarks.object_store import BUCKET, Relay, environment_of_client, running_store
from benchmarks.own.data import LANES, feed_job, indexed
from benchmarks.step_events import StepTimes, read_steps, step_times
from benchmarks.told import answer, read_order, reading
from quorate.api.train import train
from quorate.shards.index import load_index

BATCHES = {"parquet": 1024, "tar": 64}
"""Samples of a batch: with 20 ms of computing, a training reads about as much in a second as a GPU's would."""
MOST_STEPS = 600


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    program = find_tool("weed")
    assert program is not None, "the launcher has looked for it"
    place = indexed(order)
    # Not in the benchmark's folder: shards are measured there by others, and paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir=order["folder"]) as name:
        folder = Path(name)
        with running_store(folder, program) as port:
            _put(place, port)
            relay = Relay(port, order["delay_ms"] / 1000)
            relay.start()
            answer(*_readings(order, place, folder, relay))


def _readings(order: dict[str, Any], place: Path, folder: Path, relay: Relay) -> list[dict[str, Any]]:
    times = products(order["step_ms"] / 1000 / LANES)
    local = _train(order, folder / "local", str(place), times)
    os.environ.update(environment_of_client(relay.port))
    distant = _train(order, folder / "distant", f"s3://{BUCKET}/shards", times)
    if relay.passed < order["size"] / 10:
        raise SystemExit(f"only {relay.passed:,} bytes came from the store: the job has read elsewhere")
    rates = [samples_per_second(BATCHES[order["kind"]], each.ms) for each in (distant, local)]
    details = [{"samples_per_second": rate, **each.details} for rate, each in zip(rates, (distant, local), strict=True)]
    details[0]["of_folder_percent"] = 100 * rates[0] / rates[1]
    told = {"case": order["case"], "processes": 1, "size": order["size"]}
    return [
        reading(ms=distant.ms, details=details[0], **told),
        reading(ms=local.ms, details=details[1], system=FOLDER.name, **told),
    ]


def products(seconds: float) -> int:
    """How many products of matrices a lane computes in this time."""
    work(10)
    began = perf_counter()
    work(100)
    return max(1, round(seconds / ((perf_counter() - began) / 100)))


def _train(order: dict[str, Any], runs: Path, place: str, times: int) -> StepTimes:
    kind = order["kind"]
    batch = BATCHES[kind]
    samples = len(load_index(place))
    blocks = counted(min(MOST_STEPS, samples // batch))
    job = feed_job(kind, runs, blocks.total, place, batch_size=batch, params={"work": times})
    result = train(job, progress=False)
    return step_times(read_steps(result.folder / "events.jsonl"), blocks)


def _put(place: Path, port: int) -> None:
    """Put a folder into the store, by a process of its own."""
    code = "import sys, s3fs; s3fs.S3FileSystem().put(sys.argv[1] + '/', sys.argv[2] + '/', recursive=True)"
    command = [sys.executable, "-c", code, str(place), f"{BUCKET}/shards"]
    environment = os.environ | environment_of_client(port)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the shards could not be put into the store: {done.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()

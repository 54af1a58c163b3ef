"""Jobs on a Ray cluster of this machine, started as a user starts them, and watched by their events."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.blocks import Blocks
from benchmarks.own.jobs import train_case
from benchmarks.own.watched_run import WatchedRun, await_sight
from benchmarks.ray_nodes import RayNodes
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import GenerationFormed, StepCompleted

PATIENCE = 300.0
"""Seconds until a job has come somewhere: all nodes share the cores of this machine."""
ON_RAY = {"kind": "ray", "placement": "spread"}
TRACK = {"tensorboard": True, "prometheus": 0, "every": 1}
PEER = "benchmarks.peers.ray_train_first_step"
_MOST = re.compile(r"VmHWM:\s+(\d+) kB")


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    answer(*MEASURES[order["row"]](order))


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[RayNodes]:
    """Nodes with so many CPUs each, as Ray counts them. Commands find them by the environment."""
    nodes = RayNodes(*cpus)
    os.environ.update(nodes.environment)
    try:
        yield nodes
    finally:
        nodes.close()


def start(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Twice, of which the second counts: what the first has read lies in memory then, as on a machine that is used."""
    first_step = {"quorate-ray": _on_ray, "quorate-local": _locally, "ray-train": _by_ray_train}[order["system"]]
    with contextlib.nullcontext() if order["system"] == "quorate-local" else cluster(order["workers"]):
        first_step(order)
        began = time.time()
        ended = first_step(order)
    return [reading(order["case"], order["workers"], [1000 * (ended - began)])]


def _on_ray(order: dict[str, Any]) -> float:
    return _first_step(order, engine=ON_RAY)


def _locally(order: dict[str, Any]) -> float:
    return _first_step(order)


def _first_step(order: dict[str, Any], **keys: Any) -> float:
    """The moment of a job's first step, which is its last."""
    run = WatchedRun(order["folder"], _job("ray-start", order["workers"], steps=1, **keys))
    subprocess.run(run.command(), stdout=subprocess.DEVNULL, check=True)
    return run.step_times()[0]


def _by_ray_train(order: dict[str, Any]) -> float:
    command = [sys.executable, "-m", PEER, str(order["workers"]), tempfile.mkdtemp(dir=order["folder"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def nodes(order: dict[str, Any]) -> list[dict[str, Any]]:
    """One worker on each of three nodes."""
    pause = order["step_ms"] / 1000
    task = {"task": "benchmarks.tasks:PausingTask", "params": {"case": "tiny-mlp", "samples": 96, "pause_s": pause}}
    job = _job("ray-nodes", 3, steps=1_000_000, engine={**ON_RAY, "placement": "strict_spread"}) | task
    with cluster(1, 1, 1) as there, _trained(order, job) as (run, process):
        await_sight("all workers train", lambda: run.is_steady(3, 3), process, PATIENCE)
        killed = time.time()
        there.kill_last()
        went_on = await_sight("the others go on", lambda: _first_after(run, killed, 2), process, PATIENCE)
        there.add(1)
        added = time.time()
        await_sight("the new node is used", lambda: run.is_steady(3, 1, killed), process, PATIENCE)
        used = max(event.time for event in run.events() if isinstance(event, GenerationFormed))
    gone_ms, used_ms = 1000 * (went_on - killed), max(0.0, 1000 * (used - added))
    return [
        # Whoever hosts two lanes now takes twice as long.
        reading(
            order["case"],
            3,
            [gone_ms],
            details={"next_step_ms": gone_ms, "beyond_step_ms": gone_ms - 2 * order["step_ms"]},
        ),
        reading(order["added"], 3, [used_ms], details={"used_ms": used_ms}),
    ]


def _first_after(run: WatchedRun, killed: float, workers: int) -> float | None:
    """When the first step of the first generation of so many workers was complete."""
    events = [event for event in run.events() if event.time > killed]
    formed = [event.time for event in events if isinstance(event, GenerationFormed) and len(event.workers) == workers]
    steps = [event.time for event in events if isinstance(event, StepCompleted) and formed and event.time > formed[0]]
    return min(steps, default=None)


def crowd(order: dict[str, Any]) -> list[dict[str, Any]]:
    """From the command until all have formed a generation, and the memory of those who keep them together."""
    workers, count = order["workers"], order["nodes"]
    job = _job("ray-crowd", workers, steps=1_000_000, engine=ON_RAY, min_workers=workers)
    with cluster(*[-(-workers // count)] * count):
        began = time.time()
        with _trained(order, job) as (run, process):
            await_sight("all workers train", lambda: run.is_steady(workers, 3), process, PATIENCE)
            formed = max(event.time for event in run.events() if isinstance(event, GenerationFormed))
            coordinator = run.coordinator()
            assert coordinator is not None
            memory = {"launcher_mb": _most_memory(process.pid), "coordinator_mb": _most_memory(coordinator)}
    formed_ms = 1000 * (formed - began)
    details = {**memory, "together_mb": sum(memory.values()), "formed_ms": formed_ms}
    return [reading(order["case"], workers, [formed_ms], details=details)]


def _most_memory(pid: int) -> float:
    """Megabytes that a process has had in memory at most."""
    found = _MOST.search(Path(f"/proc/{pid}/status").read_text())
    return 0.0 if found is None else int(found[1]) * 1024 / 1e6


def metrics(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of about 50 ms."""
    blocks = Blocks(order["warm_up"], order["steps"])
    keys = {"track": TRACK} if order["is_tracked"] else {}
    with cluster(2):
        times = train_case(
            order["folder"], "cnn", 24_000, blocks, lanes=1, workers=1, batch_size=24, engine=ON_RAY, **keys
        )
    return [reading(order["case"], 1, times.ms, details=times.details)]


def _job(name: str, workers: int, **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": "benchmarks.tasks:CaseTask",
        "params": {"case": "tiny-mlp", "samples": 32 * workers},
        "lanes": workers,
        "workers": workers,
        "batch_size": 32 * workers,
        **keys,
    }


@contextlib.contextmanager
def _trained(order: dict[str, Any], job: dict[str, Any]) -> Iterator[tuple[WatchedRun, subprocess.Popen[bytes]]]:
    """A job under way; it is told to end, and waited for, at the end of the block."""
    run = WatchedRun(order["folder"], job)
    process = subprocess.Popen(run.command(), stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield run, process
    finally:
        process.terminate()
        process.wait()


MEASURES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "start": start,
    "nodes": nodes,
    "crowd": crowd,
    "metrics": metrics,
}


if __name__ == "__main__":
    main()

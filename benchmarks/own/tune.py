"""Searches on a Ray cluster of this machine, started as a user starts them, and read back from their folders."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.own.on_ray import cluster
from benchmarks.told import answer, read_order, reading

EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION_DATA = (EXAMPLES.parent / "data" / "fashion-mnist", Path("/usr/share/datasets/fashion-mnist"))
"""Where `scripts/datasets.py fashion-mnist` puts it, and where the Debian package does."""
RATES = {"params.learning_rate": {"loguniform": [1e-4, 1e-1]}}
PAUSING = {
    "name": "tune",
    "task": "benchmarks.tasks:TrialTask",
    "lanes": 1,
    "batch_size": 8,
    "steps": 10,
    "evaluate": {"every": "end"},
    "checkpoint": {"minutes": 0},
}


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with cluster(order["concurrent"]):
        answer(*MEASURES[order["row"]](order))


def long(order: dict[str, Any]) -> list[dict[str, Any]]:
    """The wall time against that of training, in as many rows as there are trials at a time."""
    steps = 100
    told, seconds, _ = _searched(order, _pausing(order, steps, order["seconds"] / steps))
    ideal = told["training_seconds"] / order["concurrent"]
    return [reading(order["case"], 1, [1000 * seconds], details={"of_training": seconds / ideal})]


def many(order: dict[str, Any]) -> list[dict[str, Any]]:
    """What the search took longer, for each trial, than training them in as many rows; and what a place did, too.

    The driver's memory at its most, and by how much it has grown since a quarter of the trials were done.
    """
    told, seconds, memory = _searched(order, _pausing(order, 10, 0.0))
    beyond = (seconds - told["training_seconds"] / order["concurrent"]) / order["trials"]
    early = max(used for done, used in memory.items() if done <= order["trials"] / 4)
    details = {
        "beyond_ms": 1000 * beyond,
        "in_place_ms": 1000 * beyond * order["concurrent"],
        "driver_mb": max(memory.values()) / 2**20,
        "growth_mb": (max(memory.values()) - early) / 2**20,
    }
    return [reading(order["case"], 1, [1000 * seconds / order["trials"]], details=details)]


def asha(order: dict[str, Any]) -> list[dict[str, Any]]:
    """By how much fewer steps, and by how much worse the best is, in points of accuracy."""
    return _against_asha(order, {"job": _digits(), "space": RATES})


def fashion(order: dict[str, Any]) -> list[dict[str, Any]]:
    """The same with a smaller network than that of the example, so that it ends within minutes."""
    data = next((folder for folder in FASHION_DATA if folder.is_dir()), FASHION_DATA[0])
    job = {
        **yaml.safe_load((EXAMPLES / "fashion_mnist.yaml").read_text()),
        "task": f"{EXAMPLES / 'fashion_mnist.py'}:FashionMnist",
        "params": {"data": str(data), "width": 4},
        "lanes": 1,
        "epochs": 1,
        "evaluate": {"every": 39, "batch_size": 1000, "metric": "accuracy", "mode": "max"},
        "checkpoint": {"minutes": 0},
    }
    return _against_asha(order, {"job": job, "space": RATES})


def pbt(order: dict[str, Any]) -> list[dict[str, Any]]:
    """In how many seeds a population is as good as as many random trials of as many steps, or better."""
    space = {**RATES, "params.dropout": {"uniform": [0.0, 0.5]}}
    search = {"job": _digits(), "metric": "accuracy", "mode": "max", "space": space, **_common(order)}
    won, took = [], []
    for seed in range(order["seeds"]):
        alone, _, _ = _searched(order, {**search, "seed": seed})
        together, seconds, _ = _searched(order, {**search, "seed": seed, "scheduler": "pbt"})
        assert together["steps"] == alone["steps"], "both train as many steps"
        won.append(100 * (_accuracy(together) - _accuracy(alone)))
        took.append(1000 * seconds)
        print(f"seed {seed}: pbt {_accuracy(together):.4f}, random {_accuracy(alone):.4f}", file=sys.stderr)
    details = {"not_worse": sum(points >= 0 for points in won), "points_won": sum(won) / len(won)}
    return [reading(order["case"], 1, took, details=details)]


MEASURES = {"long": long, "many": many, "asha": asha, "fashion": fashion, "pbt": pbt}


def _against_asha(order: dict[str, Any], of: dict[str, Any]) -> list[dict[str, Any]]:
    search = {**of, "metric": "accuracy", "mode": "max", **_common(order)}
    full, _, _ = _searched(order, search)
    short, seconds, _ = _searched(order, {**search, "scheduler": "asha"})
    lost = 100 * (_accuracy(full) - _accuracy(short))
    details = {"steps_percent": 100 * short["steps"] / full["steps"], "points_lost": lost}
    return [reading(order["case"], 1, [1000 * seconds], details=details)]


def _digits() -> dict[str, Any]:
    """The example with a smaller network, so that a search ends within minutes and trials are told apart: with its own
    most of them see all digits right."""
    return {
        **yaml.safe_load((EXAMPLES / "digits.yaml").read_text()),
        "task": f"{EXAMPLES / 'digits.py'}:Digits",
        "params": {"width": 8},
        "lanes": 1,
        "epochs": 8,
        "evaluate": {"every": 22, "metric": "accuracy", "mode": "max"},
    }


def _accuracy(told: dict[str, Any]) -> float:
    return float(told["best"]["values"]["accuracy"])


def _pausing(order: dict[str, Any], steps: int, pause: float) -> dict[str, Any]:
    job = {**PAUSING, "steps": steps, "params": {"case": "tiny-mlp", "samples": 96, "pause_s": pause}}
    pauses = {"params.pause_s": {"uniform": [pause, pause + 1e-4]}}
    return {"job": job, "metric": "loss", "mode": "min", "space": pauses, **_common(order)}


def _common(order: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "bench",
        "address": "auto",
        "concurrent": order["concurrent"],
        "trial": {"workers": 1, "cpu": 1},
        "budget": {"trials": order["trials"]},
    }


def _searched(order: dict[str, Any], search: dict[str, Any]) -> tuple[dict[str, Any], float, dict[int, int]]:
    """What a search says of itself, how long it took, and the most memory of its driver by trials that were done."""
    folder = Path(tempfile.mkdtemp(dir=order["folder"]))
    file = folder / "search.yaml"
    file.write_text(yaml.safe_dump({**search, "runs": str(folder / "runs")}))
    command = [sys.executable, "-m", "quorate", "tune", str(file), "--quiet", "--json"]
    began, memory = time.monotonic(), {0: 0}
    log = folder / "runs" / "bench-0001" / "trials.jsonl"
    with (folder / "answer.json").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, env=os.environ)
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            done = log.read_text().count('"kind": "finished"') if log.exists() else 0
            memory[done] = max(memory.get(done, 0), driver.memory_info().rss if driver.is_running() else 0)
            time.sleep(0.2)
        seconds = time.monotonic() - began
        assert process.returncode == 0, f"the search has failed with {process.returncode}"
        output.seek(0)
        return json.load(output), seconds, memory


if __name__ == "__main__":
    main()

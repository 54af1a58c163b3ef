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

DIGITS = Path(__file__).parents[2] / "examples" / "digits.yaml"
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
    search = _pausing(order, steps, order["seconds"] / steps)
    told, seconds, _ = _searched(order, search)
    ideal = told["training_seconds"] / order["concurrent"]
    return [reading(order["case"], 1, [1000 * seconds], details={"of_training": seconds / ideal})]


def many(order: dict[str, Any]) -> list[dict[str, Any]]:
    """What the search took longer, for each trial, than training them in as many rows; and what a place did, too."""
    told, seconds, peak = _searched(order, _pausing(order, 10, 0.0))
    beyond = (seconds - told["training_seconds"] / order["concurrent"]) / order["trials"]
    details = {
        "beyond_ms": 1000 * beyond,
        "in_place_ms": 1000 * beyond * order["concurrent"],
        "driver_mb": peak / 2**20,
    }
    return [reading(order["case"], 1, [1000 * seconds / order["trials"]], details=details)]


def asha(order: dict[str, Any]) -> list[dict[str, Any]]:
    """By how much fewer steps, and by how much worse the best is, in points of accuracy."""
    search = {"job": str(DIGITS), "metric": "accuracy", "mode": "max", "space": RATES, **_common(order)}
    full, _, _ = _searched(order, search)
    short, seconds, _ = _searched(order, {**search, "scheduler": "asha"})
    lost = 100 * (full["best"]["values"]["accuracy"] - short["best"]["values"]["accuracy"])
    details = {"steps_percent": 100 * short["steps"] / full["steps"], "points_lost": lost}
    return [reading(order["case"], 1, [1000 * seconds], details=details)]


MEASURES = {"long": long, "many": many, "asha": asha}


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


def _searched(order: dict[str, Any], search: dict[str, Any]) -> tuple[dict[str, Any], float, int]:
    """What a search says of itself, how long it took, and the most memory that its driver had."""
    folder = Path(tempfile.mkdtemp(dir=order["folder"]))
    file = folder / "search.yaml"
    file.write_text(yaml.safe_dump({**search, "runs": str(folder / "runs")}))
    command = [sys.executable, "-m", "quorate", "tune", str(file), "--quiet", "--json"]
    began, peak = time.monotonic(), 0
    with (folder / "answer.json").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, env=os.environ)
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, driver.memory_info().rss if driver.is_running() else 0)
            time.sleep(0.2)
        seconds = time.monotonic() - began
        assert process.returncode == 0, f"the search has failed with {process.returncode}"
        output.seek(0)
        return json.load(output), seconds, peak


if __name__ == "__main__":
    main()

"""A job with parameter servers in which one worker is slow: how long it takes for all its samples."""

import secrets
import subprocess
from typing import Any

from benchmarks.own.watched_run import WatchedRun
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import GenerationFormed, StepCompleted


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    run = WatchedRun(order["folder"], _job(order))
    subprocess.run(run.command(), check=True, stdout=subprocess.DEVNULL)
    events = run.events()
    began = next(event.time for event in events if isinstance(event, GenerationFormed))
    ended = max(event.time for event in events if isinstance(event, StepCompleted))
    answer(reading(order["case"], order["processes"], [(ended - began) * 1000]))


def _job(order: dict[str, Any]) -> dict[str, Any]:
    workers = order["processes"]
    strategy: dict[str, Any] = {"kind": "parameter-server", "mode": order["mode"], "servers": 1, "replicas": 1}
    if order["mode"] == "bounded":
        strategy["staleness"] = order["staleness"]
    return {
        "name": f"slowed-{order['mode']}",
        "task": "benchmarks.tasks:SlowedTask",
        "params": {
            "case": "tiny-mlp",
            "samples": 32 * workers,
            "pause_s": order["lane_ms"] / 1000,
            "factor": order["factor"],
            "mark": f"{order['folder']}/slow-{secrets.token_hex(8)}",
        },
        "lanes": workers,
        "workers": workers,
        "batch_size": 32 * workers,
        "steps": order["steps"],
        "strategy": strategy,
    }


if __name__ == "__main__":
    main()

"""Trains on CIFAR-10 to the end: the accuracy, and how long it took to come there."""

from pathlib import Path

from benchmarks.models import MODELS
from benchmarks.own.gpu_job import GpuRun
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import EvaluationDone, RunBegan


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    job, goal = order["job"], order["goal_percent"]
    data = (MODELS / Path(job["params"]["data"]).expanduser()).resolve()
    if order["needs_data"] and not data.is_dir():
        raise SystemExit(f"there is no {data}: python scripts/datasets.py cifar-10 fetches it")
    run = GpuRun(order, job)
    run.complete()
    events = run.events()
    began = next(event.time for event in events if isinstance(event, RunBegan))
    reached = {
        event.time - began: 100 * (event.metrics or {})["accuracy"]
        for event in events
        if isinstance(event, EvaluationDone)
    }
    details = {"accuracy_percent": list(reached.values())[-1], "best_percent": max(reached.values())}
    there = [seconds for seconds, accuracy in reached.items() if accuracy >= goal]
    if there:
        details |= {"seconds_to_goal": there[0], "epochs_to_goal": float(list(reached).index(there[0]) + 1)}
    answer(reading(order["case"], 1, [1000 * run.result()["wall_seconds"]], details=details))
    run.remove()


if __name__ == "__main__":
    main()

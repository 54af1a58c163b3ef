"""Folders of searches made by hand: as a driver would have left them, with or without the runs of their trials."""

import json
from pathlib import Path
from typing import Any

from history.run_builder import COMPLETE, Story, build_run
from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import dump_job
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import dump_search, read_mapping

JOB: dict[str, Any] = {
    "name": "tiny",
    "task": "/code/task.py:Tiny",
    "lanes": 4,
    "batch_size": 8,
    "steps": 100,
    "evaluate": {"every": 20},
}
SPACE: dict[str, Any] = {
    "params.learning_rate": {"loguniform": [1e-4, 1.0]},
    "params.kind": {"choice": ["sgd", "adam"]},
    "batch_size": {"randint": [8, 64], "step": 8},
}
BEGAN = 1_780_000_000.0


class Teller:
    """Writes lines of a log, one second after another."""

    def __init__(self, folder: SearchFolder) -> None:
        self.folder = folder
        self.time = BEGAN

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> "Teller":
        self.time += 1
        line = {"time": self.time, "kind": kind, **({} if trial is None else {"trial": trial}), **fields}
        with self.folder.log_file.open("a") as log:
            log.write(json.dumps(line) + "\n")
        return self

    def begin(self, trial: int, **params: Any) -> "Teller":
        """A trial is proposed and begins; params are the tiny space's."""
        held = {"params.learning_rate": 0.1, "params.kind": "sgd", "batch_size": 8} | params
        self.tell("proposed", trial, params=held)
        return self.tell("began", trial, run=f"trial-{trial:04d}")

    def report(self, trial: int, *values: float | None, every: int = 20, first: int = 1) -> "Teller":
        """Losses, one after another."""
        for place, value in enumerate(values, first):
            self.tell("reported", trial, step=every * place, metrics={"loss": value}, best=False, node="10.0.0.1")
        return self

    def finish(self, trial: int, loss: float = 0.5) -> "Teller":
        return self.tell("finished", trial, step=100, metrics={"loss": loss}, seconds=10.0, digest=f"{trial:02d}" * 32)


def search_folder(runs: Path, **keys: Any) -> Teller:
    """A search that has just begun, by the tiny job and space."""
    mapping = {"name": "find", "metric": "loss", "space": SPACE, "budget": {"trials": 6}} | keys
    job = resolve_mapping(JOB, "job.yaml", {}, [])
    resolved = read_mapping(mapping, "search.yaml", {}, job).accepted()
    teller = Teller(SearchFolder.create(runs, "find", dump_search(resolved), dump_job(resolved.job)))
    return teller.tell("search-began", reason="new")


def told_search(runs: Path) -> Teller:
    """A search with a trial of each kind: 1 finished, 2 the best, 3 stopped, 4 failed, 5 under way, 6 proposed."""
    teller = search_folder(runs)
    teller.begin(1).report(1, 0.9, 0.7, 0.6, 0.55, 0.5).finish(1, 0.5)
    teller.begin(2, **{"params.learning_rate": 0.01, "params.kind": "adam"}).report(2, 0.8, 0.4, 0.3, 0.35, 0.36)
    teller.finish(2, 0.36).begin(3, **{"params.learning_rate": 1.0}).report(3, 2.0, 1.9)
    teller.tell("stopped", 3, step=40, reason="asha: 1.9000 at step 40 is not among the best 1/4 there (cut 0.4000)")
    teller.begin(4).tell("failed", 4, message="RuntimeError: <b>no</b> | such thing")
    teller.begin(5, **{"params.learning_rate": 0.002}).report(5, 0.95)
    return teller.tell("proposed", 6, params={"params.learning_rate": 0.5, "params.kind": "sgd", "batch_size": 16})


def exploited_search(runs: Path) -> Teller:
    """Population-based training: 2 goes on from 1 at step 40, and 3 from 2 at step 80, which is the best in the end."""
    space = {"params.learning_rate": {"loguniform": [1e-4, 1.0]}}
    teller = search_folder(runs, space=space, scheduler={"kind": "pbt", "interval": 40}, budget={"trials": 4})
    for trial, rate in ((1, 0.1), (2, 0.9), (3, 0.0002)):
        teller.tell("proposed", trial, params={"params.learning_rate": rate})
        teller.tell("began", trial, run=f"trial-{trial:04d}")
    teller.report(1, 0.5, 0.4).report(2, 1.5, 1.4).report(3, 1.2, 1.1)
    branch = {"run": "trial-0002-b1", "params": {"params.learning_rate": 0.08}, "reason": "pbt: among the worst"}
    teller.tell("exploited", 2, step=40, **{"from": 1}, **branch)
    teller.report(1, 0.39, 0.38, first=3).report(2, 0.3, 0.2, first=3).report(3, 1.0, 0.9, first=3)
    branch = {"run": "trial-0003-b1", "params": {"params.learning_rate": 0.06}, "reason": "pbt: among the worst"}
    teller.tell("exploited", 3, step=80, **{"from": 2}, **branch)
    teller.report(1, 0.37, first=5).report(2, 0.15, first=5).report(3, 0.1, first=5)
    for trial, loss in ((1, 0.37), (2, 0.15), (3, 0.1)):
        teller.finish(trial, loss)
    return teller.tell("search-ended", reason="complete")


def decided_by_rate(teller: Teller, last: int, first: int = 1) -> None:
    """Trials whose loss is their learning rate, whatever else they have."""
    for trial in range(first, last + 1):
        rate = 10 ** (-4 + 4 * trial / 24)
        kind = "sgd" if trial % 2 else "adam"
        teller.begin(trial, **{"params.learning_rate": rate, "params.kind": kind}).report(trial, rate)


def add_run(teller: Teller, trial: int, evaluations: dict[int, float], complete: bool = False) -> None:
    """The run of a trial, as its launcher left it."""
    story = Story().begin(total_steps=100)
    for step, loss in evaluations.items():
        story.train(step - 19, step).evaluate(step, loss=loss)
    result = COMPLETE | {"steps": 100, "weights_digest": f"{trial:02d}" * 32} if complete else None
    run = build_run(teller.folder.trials, job={"name": "trial"}, story=story, result=result)
    run.path.rename(teller.folder.trials / f"trial-{trial:04d}")

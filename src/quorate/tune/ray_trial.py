"""A trial inside of Ray Tune: an actor that trains one run after the other, in its own share of the cluster."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ray import tune

from quorate.api.warm import WarmRunner
from quorate.coordinator.news import Outcome
from quorate.engines.engine import Prepared
from quorate.engines.ray.node_code import moved
from quorate.engines.ray.ray_cluster import working_folder
from quorate.observe.event import Event
from quorate.spec.search_load import ResolvedSearch
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch
from quorate.tune.trial_run import BUSY, Plan, Report, RunBusyError, TrialRun, run_name

METRIC = "metrics/"
"""What Tune calls a metric begins with this, where it has flattened a result."""


class TrialActor(tune.Trainable):  # type: ignore[misc] # Ray has no types here
    """Trains the trial of its configuration; `step` is an evaluation of it.

    It is told all that it needs each time, and knows nothing by itself: whichever actor gets a trial goes on with what
    is in the trial's run folder.
    """

    def setup(self, config: dict[str, Any], search: ResolvedSearch, manner: dict[str, Any], sent: Path | None) -> None:
        """`manner` are the keys of a job that say where and how all trials run. Of the folder `sent` on the driver's
        machine there is a copy here, in which this process stands."""
        self._search = search
        self._manner = manner
        self._sent = sent
        self._copy = working_folder()
        self._warm = WarmRunner()
        self._run = TrialRun(self._train_here)
        self._has_begun = False
        self._config = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial in the same process, in which all is imported already."""
        self._run.stop()
        self._has_begun = False
        self._config = new_config
        return True

    def step(self) -> dict[str, Any]:
        if "failed" in self._config:
            return result_of(Report(self._config.get("after", 0), ending="failed", message=self._config["failed"]))
        if not self._has_begun:
            self._has_begun = True
            self._run.begin(self._plan())
        report = self._run.next()
        if report.ending == BUSY:  # another actor may try again, elsewhere
            raise RunBusyError(report.message)
        return result_of(report)

    def save_checkpoint(self, checkpoint_dir: str) -> None:  # noqa: ARG002 (Tune's own; the run folder has it all)
        """Before a pause: the run ends in order, with a checkpoint of its own."""
        self._run.stop()

    def load_checkpoint(self, checkpoint: Any) -> None: ...

    def cleanup(self) -> None:
        self._run.close()
        self._warm.close()

    def _train_here(
        self,
        launch: Launch,
        show: Callable[[Event], None],
        accept: Callable[[Prepared], None],
        signals: Signals,
    ) -> Outcome:
        if self._sent is not None and self._copy is not None:
            there = moved(launch.preparation, self._sent, self._copy)
            launch = replace(launch, task=there.task, search_path=there.search_path)
        return self._warm(launch, show, accept, signals)

    def _plan(self) -> Plan:
        config, trial = self._config, self._config["trial"]
        manner = dict(self._manner)
        if "until" in config:
            manner["checkpoint.keep_every"] = config["interval"]  # others go on from them, and later
        return Plan(
            trials=Path(manner["runs"]),
            run=run_name(trial, config.get("branches", 0)),
            job=self._search.trial_job(config["params"], trial, manner),
            branch=tuple(config["branch"]) if config.get("branch") else None,
            after=config.get("after", 0),
            until=config.get("until"),
        )


def result_of(report: Report) -> dict[str, Any]:
    """A report as Tune passes it on."""
    return {**vars(report), "done": bool(report.ending)}


def report_of(result: dict[str, Any]) -> Report:
    """The report again."""
    flat = {key.removeprefix(METRIC): value for key, value in result.items() if key.startswith(METRIC)}
    return Report(**{each.name: result.get(each.name, flat) for each in fields(Report)})

"""What Ray Tune is given: a searcher, a scheduler that has a reason for what it decides, who hears of trials, and the
actor that trains them.

A scheduler ends trials early, or has a population wait for each other. A trial is judged by its evaluations, at the
steps that they are of.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from quorate.api.warm import WarmRunner
from quorate.coordinator.places import Outcome
from quorate.core.errors import JobError
from quorate.engines.engine import Prepared
from quorate.engines.ray.node_code import SentCode
from quorate.observe.event import Event
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch
from quorate.tune.driver import DEATHS, Driver, TrialSource
from quorate.tune.loading import ResolvedSearch
from quorate.tune.selection import Pruner, decide
from quorate.tune.spec import PbtSpec, SearchSpec
from quorate.tune.trial_run import BUSY, Plan, Report, RunBusyError, TrialRun, run_name
from quorate.tune.trials import Journal


class RaySearcher(Searcher):  # type: ignore[misc] # Ray has no types here
    """Gives Tune as many trials as may run at a time."""

    def __init__(self, source: TrialSource, limit: int | None) -> None:
        super().__init__()
        self.source = source
        self._limit = limit
        self._live: dict[str, int] = {}
        self._paused: set[str] = set()

    def pause(self, trial_id: str, is_paused: bool = True) -> None:
        """A paused trial leaves its place to another."""
        (self._paused.add if is_paused else self._paused.discard)(trial_id)

    @property
    def has_room(self) -> bool:
        """Whether one more may run."""
        return self._limit is None or len(self._live.keys() - self._paused) < self._limit

    def suggest(self, trial_id: str) -> Any:
        if not self.source.has_more:
            # To Tune, the end of proposals is the end of actors that nobody has a trial for: of a paused one, too.
            return None if self._paused and not self.source.is_over else Searcher.FINISHED
        if not self.has_room:
            return None
        number, params = self.source.next()
        self._live[trial_id] = number
        return {"trial": number, "params": params}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:  # noqa: ARG002
        number = self._live.pop(trial_id, None)
        self._paused.discard(trial_id)
        if number is not None:
            self.source.ended(number)

    def save(self, checkpoint_path: str) -> None: ...

    def restore(self, checkpoint_path: str) -> None: ...


class Pruned(FIFOScheduler):  # type: ignore[misc] # Ray has no types here
    """Ends the trials that the pruner is against; without a scheduler it is against none."""

    def __init__(self, spec: SearchSpec, journal: Journal) -> None:
        super().__init__()
        self._pruner = Pruner(spec, journal)
        self.reasons: dict[str, str] = {}

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:  # noqa: ARG002
        report = report_of(result)
        why = "" if report.ending else self._pruner.judge(trial.config["trial"], report)
        if why:
            self.reasons[trial.trial_id] = why
        return str(TrialScheduler.STOP if why else TrialScheduler.CONTINUE)


class Population(FIFOScheduler):  # type: ignore[misc]
    """Pauses each trial at the end of an interval, and lets all go on once the last has come as far."""

    def __init__(self, spec: SearchSpec, interval: int, journal: Journal, searcher: RaySearcher) -> None:
        super().__init__()
        assert isinstance(spec.scheduler, PbtSpec)
        self._spec = spec
        self._rule = spec.scheduler
        self._interval = interval
        self._journal = journal
        self._searcher = searcher
        self._members: dict[int, Any] = {}
        self._reached: dict[int, tuple[int, Any]] = {}
        self.reasons: dict[str, str] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        # Of trials that pause for each other, Tune keeps a single actor, and starts the others anew each time.
        tune_controller._tune_controller._actor_cache.increase_max(trial.placement_group_factory)
        self._members[trial.config["trial"]] = trial
        trial.config.setdefault("until", self._interval)
        trial.config["interval"] = self._interval

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:  # noqa: ARG002
        step, until = result["step"], trial.config["until"]
        if step < until or step >= (result.get("total_steps") or math.inf):
            return str(TrialScheduler.CONTINUE)
        self._reached[trial.config["trial"]] = step, report_of(result).metrics.get(self._spec.metrics[0])
        self._searcher.pause(trial.trial_id)
        return str(TrialScheduler.PAUSE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:  # noqa: ARG002
        self._members.pop(trial.config["trial"], None)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:  # noqa: ARG002
        self._members.pop(trial.config["trial"], None)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:  # noqa: ARG002
        self._go_on_if_all_wait()
        for number, trial in sorted(self._members.items()):
            waits = number in self._reached
            if trial.status == "PAUSED" and not waits and self._searcher.has_room:
                self._searcher.pause(trial.trial_id, False)
                return trial
        return None

    def _go_on_if_all_wait(self) -> None:
        members = self._members
        if not members or self._searcher.source.has_more or self._searcher.source.is_over:
            return
        if members.keys() != self._reached.keys() or any(trial.status != "PAUSED" for trial in members.values()):
            return
        step = max(step for step, _ in self._reached.values())
        values = {number: value for number, (_, value) in sorted(self._reached.items())}
        params = {number: dict(members[number].config["params"]) for number in values}
        runs = {number: run_name(number, members[number].config.get("branches", 0)) for number in values}
        for number in values:
            members[number].config |= {"after": step, "until": step + self._interval, "branch": None}
        for exploit in decide(self._spec, self._rule, step, values, params):
            config = members[exploit.trial].config
            branches = config.get("branches", 0) + 1
            config |= {"params": exploit.params, "branches": branches, "branch": [runs[exploit.donor], step]}
            self._journal.tell(
                "exploited",
                exploit.trial,
                step=step,
                **{"from": exploit.donor},
                run=run_name(exploit.trial, branches),
                params=exploit.params,
                reason=exploit.reason,
            )
        self._reached.clear()


class RayDriver(tune.Callback, tune.Stopper):  # type: ignore[misc] # Ray has no types here
    """Hears Tune, and ends its experiment when the driver ends the search."""

    def __init__(self, driver: Driver, scheduler: "Pruned | Population") -> None:
        self._driver = driver
        self._scheduler = scheduler
        self._trials: list[Any] = []

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        self._driver.began(trial.config["trial"], trial.config.get("branches", 0))

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        report = report_of(result)
        if not report.ending:
            # Whichever actor goes on with it need not tell this again.
            trial.config["after"] = report.step
        stopped = self._scheduler.reasons.get(trial.trial_id, "")
        self._driver.told(trial.config["trial"], report, node=result.get("hostname", ""), stopped=stopped)

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        """Of those that a scheduler stops while they are paused, nothing else is heard."""
        if reason := self._scheduler.reasons.get(trial.trial_id):
            step = trial.config.get("after", 0)
            self._driver.journal.tell("stopped", trial.config["trial"], step=step, reason=reason)

    def on_trial_recover(self, trial: Any, **_: Any) -> None:
        driver, number = self._driver, trial.config["trial"]
        if why := driver.died(number):
            trial.config["failed"] = why
        if driver.deaths[number] > DEATHS and driver.refusal is None:  # not even that can be told
            driver.refusal = JobError(f"trials cannot be started: {_last_line(trial.get_error())}")
            driver.end(driver.refusal.message)

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        message = str(trial.error_file or "Ray Tune gave it up")
        self._driver.journal.tell("failed", trial.config["trial"], message=message)

    def on_step_end(self, trials: list[Any], **_: Any) -> None:
        self._trials = trials
        self._driver.turn()

    def stop_all(self) -> bool:
        """When all that were under way have stopped in order, those that wait are dropped as well."""
        return bool(self._driver.reason) and not any(trial.status == "RUNNING" for trial in self._trials)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, and this is never read back


def _last_line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else "Ray says no more"


# --- a trial inside of Ray Tune: an actor that trains one run after the other, in its own share of the cluster

METRIC = "metrics/"
"""What Tune calls a metric begins with this, where it has flattened a result."""


class TrialActor(tune.Trainable):  # type: ignore[misc] # Ray has no types here
    """Trains the trial of its configuration; `step` is an evaluation of it.

    It is told all that it needs each time, and knows nothing by itself: whichever actor gets a trial goes on with what
    is in the trial's run folder.
    """

    def setup(self, config: dict[str, Any], search: ResolvedSearch, manner: dict[str, Any], sent: Path | None) -> None:
        """`manner` are the keys of a job that say where and how all trials run. Of the folder `sent` on the driver's
        machine this process stands in a copy."""
        self._search = search
        self._manner = manner
        self._code = SentCode(sent)
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
        there = self._code.moved(launch.preparation)
        return self._warm(replace(launch, task=there.task, search_path=there.search_path), show, accept, signals)

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

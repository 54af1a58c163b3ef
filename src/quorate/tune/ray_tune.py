"""What Ray Tune is given: a searcher, a scheduler that has a reason for what it decides, and who hears of trials.

The schedulers are none, ASHA, HyperBand, and populations. A trial is judged by its evaluations, at the steps that they
are of.
"""

import math
from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, HyperBandScheduler, TrialScheduler
from ray.tune.schedulers.async_hyperband import _Bracket
from ray.tune.search import Searcher

from quorate.core.errors import JobError
from quorate.history.search_log import ENDED
from quorate.observe.quantities import measure
from quorate.spec.search import AshaSpec, HyperbandSpec, PbtSpec, SearchSpec
from quorate.tune.driver import DEATHS, Driver
from quorate.tune.journal import Journal, reports_of
from quorate.tune.population import decide
from quorate.tune.ray_trial import METRIC, report_of
from quorate.tune.trial_run import run_name
from quorate.tune.trial_source import TrialSource


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


ENDLESS = 2**40
"""More steps than any trial has: how long they are is known only when the first has begun."""


class Explained(Protocol):
    """A scheduler of Tune's that says why: `reasons` has a sentence for each trial that it has stopped, by Tune's name
    for the trial."""

    reasons: dict[str, str]


class NoScheduler(FIFOScheduler):  # type: ignore[misc] # Ray has no types here
    """Every trial trains to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}


class Asha(AsyncHyperBandScheduler):  # type: ignore[misc]
    """Asynchronous successive halving. Without `grace` the first evaluation of the first trial is the first rung.

    A trial at its last step is let be: there is nothing to save. What trials of an earlier part of the search have come
    to counts as if they had told it now.
    """

    def __init__(self, spec: SearchSpec, journal: Journal) -> None:
        rule = spec.scheduler
        assert isinstance(rule, AshaSpec)
        self._rule = rule
        self._name = spec.metrics[0]
        self._earlier = {each.number: reports_of(each) for each in journal.trials.values() if each.status in ENDED}
        self.reasons: dict[str, str] = {}
        self._trial_info: dict[str, Any] = {}
        super().__init__(
            time_attr="step",
            metric=f"{METRIC}{self._name}",
            mode=spec.modes[0],
            max_t=ENDLESS,
            grace_period=rule.grace or 1,
            reduction_factor=rule.reduction,
            stop_last_trials=False,
        )
        self._has_rungs = rule.grace is not None
        if self._has_rungs:
            self._recall()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        step, value = result["step"], result.get(self._metric)
        if not self._has_rungs:
            first = min([step, *(told for reports in self._earlier.values() for told in reports)])
            bracket = _Bracket(first, ENDLESS, self._rule.reduction, 0, stop_last_trials=False)
            self._brackets = [bracket]
            self._trial_info = dict.fromkeys(self._trial_info, bracket)
            self._has_rungs = True
            self._recall()
        if step >= (result.get("total_steps") or ENDLESS):
            return str(TrialScheduler.CONTINUE)
        if value is None or math.isnan(value):
            self.reasons[trial.trial_id] = f"asha: {self._name} is not a number at step {step}"
            return str(TrialScheduler.STOP)
        cut = self._cut(trial, step)
        decision = str(super().on_trial_result(tune_controller, trial, result))
        if decision == TrialScheduler.STOP:
            self.reasons[trial.trial_id] = (
                f"asha: {value:.4g} at step {step} is not among the best 1/{self._rule.reduction} there "
                f"(cut {self._metric_op * (cut or 0.0):.4g})"
            )
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        value = result.get(self._metric)
        if value is not None and not math.isnan(value):
            super().on_trial_complete(tune_controller, trial, result)

    def _cut(self, trial: Any, step: int) -> float | None:
        """What a trial has to reach at this step."""
        for milestone, recorded in self._trial_info[trial.trial_id]._rungs:
            if step >= milestone and trial.trial_id not in recorded:
                return None if not recorded else float(self._brackets[0].cutoff(recorded))
        return None

    def _recall(self) -> None:
        for number, reports in self._earlier.items():
            for milestone, recorded in self._brackets[0]._rungs:
                told = [step for step in sorted(reports) if step >= milestone]
                value = reports[told[0]].get(self._name) if told else None
                if value is not None:
                    recorded[f"earlier-{number}"] = self._metric_op * value


class Hyperband(FIFOScheduler):  # type: ignore[misc]
    """HyperBand's brackets, counted in evaluations. It is made when the first evaluation has told how many there are;
    until then trials only wait."""

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__()
        assert isinstance(spec.scheduler, HyperbandSpec)
        self._reduction = spec.scheduler.reduction
        self._spec = spec
        self._unit = 1
        self._waiting: list[Any] = []
        self._bands: Any = None
        self.reasons: dict[str, str] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        keep_actors(tune_controller, trial)
        if self._bands is None:
            self._waiting.append(trial)
        else:
            self._bands.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        step, total = result["step"], result.get("total_steps") or result["step"]
        if self._bands is None:
            self._unit = step
            self._bands = HyperBandScheduler(
                time_attr="evaluations",
                metric=f"{METRIC}{self._spec.metrics[0]}",
                mode=self._spec.modes[0],
                max_t=max(1, math.ceil(total / step)),
                reduction_factor=self._reduction,
                stop_last_trials=False,
            )
            for waiting in self._waiting:
                self._bands.on_trial_add(tune_controller, waiting)
        if step >= total:
            return str(TrialScheduler.CONTINUE)
        stopped = _Stopping(tune_controller)
        decision = str(self._bands.on_trial_result(stopped, trial, {**result, "evaluations": step // self._unit}))
        name, value = self._spec.metrics[0], result.get(f"{METRIC}{self._spec.metrics[0]}")
        if decision == TrialScheduler.STOP:
            told = f"{name} {measure(value)} at step {step} is not among the best of its bracket"
            self.reasons[trial.trial_id] = f"hyperband: {told}"
        for other in stopped.trials:
            self.reasons[other.trial_id] = (
                f"hyperband: {name} {measure(other.last_result.get('metrics', {}).get(name))} at step "
                f"{other.last_result.get('step')} is not among the best of its bracket"
            )
            tune_controller.stop_trial(other)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._remove(tune_controller, trial, lambda: self._bands.on_trial_complete(tune_controller, trial, result))

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._remove(tune_controller, trial, lambda: self._bands.on_trial_remove(tune_controller, trial))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._remove(tune_controller, trial, lambda: self._bands.on_trial_error(tune_controller, trial))

    def _remove(self, _: Any, trial: Any, act: Any) -> None:
        if self._bands is not None:
            act()
        elif trial in self._waiting:
            self._waiting.remove(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if self._bands is None:
            return super().choose_trial_to_run(tune_controller)
        return self._bands.choose_trial_to_run(tune_controller)


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
        keep_actors(tune_controller, trial)
        self._members[trial.config["trial"]] = trial
        trial.config.setdefault("until", self._interval)
        trial.config["interval"] = self._interval

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:  # noqa: ARG002
        step, until = result["step"], trial.config["until"]
        if step < until or step >= (result.get("total_steps") or math.inf):
            return str(TrialScheduler.CONTINUE)
        self._reached[trial.config["trial"]] = step, result.get(f"{METRIC}{self._spec.metrics[0]}")
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


def keep_actors(controller: Any, trial: Any) -> None:
    """Of trials that pause for each other, Tune keeps a single actor, and starts the others anew each time."""
    controller._tune_controller._actor_cache.increase_max(trial.placement_group_factory)


class _Stopping:
    """Stands for Tune's controller, and notes which trials are to be stopped: that is told first."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self.trials: list[Any] = []

    def stop_trial(self, trial: Any) -> None:
        self.trials.append(trial)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


class RayDriver(tune.Callback, tune.Stopper):  # type: ignore[misc] # Ray has no types here
    """Hears Tune, and ends its experiment when the driver ends the search."""

    def __init__(self, driver: Driver, scheduler: Explained) -> None:
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

"""The driver of a search: hears from Ray Tune what its trials do, writes it down, and ends the search in order."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray import tune

from quorate.checkpoint.retention import Watched, best_of
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RequestError
from quorate.observe.quantities import count, plural
from quorate.spec.search import SearchSpec
from quorate.storage.atomic import write_atomically
from quorate.supervisor.signals import Signals
from quorate.tune.journal import Journal
from quorate.tune.ray_schedulers import Explained
from quorate.tune.ray_searcher import TrialSource
from quorate.tune.ray_trial import run_name
from quorate.tune.trial_run import AT_ONCE, IN_ORDER, STOPPING

COMPLETE, INTERRUPTED, TERMINATED = "complete", "interrupted", "terminated"
DEATHS = 8
"""So often an actor may die with a trial that tells nothing new in between: then the trial is to blame."""
_HOST_PATIENCE = 5.0


class Driver(tune.Callback, tune.Stopper):  # type: ignore[misc] # Ray has no types here
    """Writes the journal, and watches over budgets and signals. A search that is to end asks its trials to stop by a
    file that they look for, and waits for them."""

    def __init__(
        self,
        spec: SearchSpec,
        journal: Journal,
        source: TrialSource,
        scheduler: Explained,
        signals: Signals,
        tick: Callable[[], None],
    ) -> None:
        self.reason = ""
        """Why the search ends before all trials are done."""
        self.refusal: RequestError | None = None
        self._spec = spec
        self._journal = journal
        self._source = source
        self._scheduler = scheduler
        self._signals = signals
        self._tick = tick
        self._began = time.monotonic()
        self._trials: list[Any] = []
        self._deaths: Counter[int] = Counter()
        self._stopping = journal.folder.trials / STOPPING
        self._stopping.unlink(missing_ok=True)

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        number, name = trial.config["trial"], run_name(trial.config["trial"], trial.config.get("branches", 0))
        checkpoints = CheckpointFolder(self._journal.folder.run(name).checkpoints).list()
        if checkpoints:
            self._journal.tell("resumed", number, run=name, step=checkpoints[-1].cursor.step)
        else:
            self._journal.tell("began", number, run=name, node=_host_of(trial))

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        number, step, metrics = trial.config["trial"], result["step"], result["metrics"]
        self._deaths.pop(number, None)
        ending = result["ending"]
        if not ending:
            # Whichever actor goes on with it need not tell this again.
            trial.config["after"] = step
            self._refuse_missing_metric(metrics)
            self._tell_report(number, step, metrics)
            if reason := self._scheduler.reasons.get(trial.trial_id):
                self._journal.tell("stopped", number, step=step, reason=reason)
        elif ending == COMPLETE:
            self._journal.tell(
                "finished",
                number,
                step=step,
                metrics=metrics,
                seconds=result["seconds"],
                digest=result["digest"],
                **({"reason": result["message"]} if result["message"] else {}),
            )
        elif ending == "failed":
            self._journal.tell("failed", number, message=result["message"])
        elif self.reason not in ("", INTERRUPTED, TERMINATED):
            self._journal.tell("stopped", number, step=step, reason=self.reason)
        elif not self.reason:
            self._journal.tell("stopped", number, step=step, reason="its run was stopped by hand")

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        """Of those that a scheduler stops while they are paused, nothing else is heard."""
        reason = self._scheduler.reasons.get(trial.trial_id)
        if reason:
            self._journal.tell("stopped", trial.config["trial"], step=trial.config.get("after", 0), reason=reason)

    def on_trial_recover(self, trial: Any, **_: Any) -> None:
        number = trial.config["trial"]
        self._deaths[number] += 1
        if self._deaths[number] >= DEATHS:
            trial.config["failed"] = f"the process that trains it has died {DEATHS} times without any progress"

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        self._journal.tell("failed", trial.config["trial"], message=str(trial.error_file or "Ray Tune gave it up"))

    def on_step_end(self, trials: list[Any], **_: Any) -> None:
        self._trials = trials
        if self._signals.reason:
            self.end(self._signals.reason, at_once=self._signals.at_once)
        elif not self.reason:
            self._look_at_budget()
        self._tick()

    def end(self, reason: str, *, at_once: bool = False) -> None:
        """Propose no more trials, and have those under way stop in order."""
        order = AT_ONCE if at_once else IN_ORDER
        if not self._source.is_over or (at_once and self._stopping.read_text() != AT_ONCE):
            self._source.is_over = True
            write_atomically(self._stopping, order)
        self.reason = self.reason or reason

    def stop_all(self) -> bool:
        """When all that were under way have stopped in order, those that wait are dropped as well."""
        return bool(self.reason) and not any(trial.status == "RUNNING" for trial in self._trials)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, and this is never read back

    def _look_at_budget(self) -> None:
        budget = self._spec.budget
        seconds = self._journal.seconds + time.monotonic() - self._began
        if budget.steps is not None and self._journal.steps >= budget.steps:
            self.end(f"budget: {count(self._journal.steps)} of {plural(budget.steps, 'step')} are spent")
        elif budget.minutes is not None and seconds >= budget.minutes * 60:
            self.end(f"budget: {budget.minutes:g} minutes are over")

    def _refuse_missing_metric(self, metrics: dict[str, Any]) -> None:
        missing = [metric for metric in self._spec.metrics if metric not in metrics]
        if missing and self.refusal is None:
            known = " and ".join(sorted(metrics)) or "nothing"
            told = f"the task's evaluation reports {known}, and not {' or '.join(missing)}"
            self.refusal = RequestError(f"metric: {told}.")

            self.end(self.refusal.message)

    def _tell_report(self, number: int, step: int, metrics: dict[str, Any]) -> None:
        is_best = self._is_best(number, step, metrics)
        self._journal.tell("reported", number, step=step, metrics=metrics, best=is_best)

    def _is_best(self, number: int, step: int, metrics: dict[str, Any]) -> bool:
        """Whether it is the trial's best so far, by the first metric."""
        known = self._journal.trials[number].reports | {step: metrics}
        best = best_of(known, Watched(self._spec.metrics[0], self._spec.modes[0]))
        return best is not None and best.step == step


def _host_of(trial: Any) -> str:
    with contextlib.suppress(ray.exceptions.RayError, AttributeError):
        return str(ray.get(trial.temporary_state.ray_actor.host.remote(), timeout=_HOST_PATIENCE))
    return ""

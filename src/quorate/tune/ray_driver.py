"""The driver of a search: hears from Ray Tune what its trials do, writes it down, and ends the search in order."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ray import tune

from quorate.checkpoint.retention import Watched, best_of, better_of
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import JobError, JobFileError, QuorateError, RequestError
from quorate.observe.quantities import count, plural
from quorate.spec.search_load import ResolvedSearch
from quorate.storage.atomic import explaining, write_atomically
from quorate.supervisor.signals import Signals
from quorate.tune.journal import Journal, reports_of
from quorate.tune.proposal import refuse_unreported
from quorate.tune.ray_schedulers import Explained
from quorate.tune.ray_searcher import TrialSource
from quorate.tune.ray_trial import run_name
from quorate.tune.trial_run import AT_ONCE, IN_ORDER, NO_SPACE, STOPPING

COMPLETE, INTERRUPTED, TERMINATED = "complete", "interrupted", "terminated"
DEATHS = 8
"""So often an actor may die with a trial that tells nothing new in between: then the trial is to blame."""
_NO_METRIC = "evaluate.metric:"


class Driver(tune.Callback, tune.Stopper):  # type: ignore[misc] # Ray has no types here
    """Writes the journal, and watches over budgets and signals. A search that is to end asks its trials to stop by a
    file that they look for, and waits for them."""

    def __init__(
        self,
        search: ResolvedSearch,
        journal: Journal,
        source: TrialSource,
        scheduler: Explained,
        signals: Signals,
        tick: Callable[[], None],
    ) -> None:
        self.reason = ""
        """Why the search ends before all trials are done."""
        self.refusal: QuorateError | None = None
        self._search = search
        self._spec = search.spec
        self._journal = journal
        self._source = source
        self._scheduler = scheduler
        self._signals = signals
        self._tick = tick
        self._began = time.monotonic()
        self._earlier = journal.log.active_seconds
        self._trials: list[Any] = []
        self._deaths: Counter[int] = Counter()
        self._watched = Watched(search.spec.metrics[0], search.spec.modes[0])
        self._best = better_of(best_of(reports_of(trial), self._watched) for trial in journal.trials.values())
        self._stopping = journal.folder.trials / STOPPING
        self._stopping.unlink(missing_ok=True)

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        number, name = trial.config["trial"], run_name(trial.config["trial"], trial.config.get("branches", 0))
        checkpoints = CheckpointFolder(self._journal.folder.run(name).checkpoints).list()
        if checkpoints:
            self._journal.tell("resumed", number, run=name, step=checkpoints[-1].cursor.step)
        else:
            self._journal.tell("began", number, run=name)

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        number, step, metrics = trial.config["trial"], result["step"], result["metrics"]
        self._deaths.pop(number, None)
        ending = result["ending"]
        if not ending:
            # Whichever actor goes on with it need not tell this again.
            trial.config["after"] = step
            self._refuse_missing_metric(metrics)
            self._tell_report(number, step, metrics, result.get("hostname", ""))
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
        elif ending == NO_SPACE:
            self.refusal = self.refusal or JobError(result["message"])
            self.end(result["message"])
        elif ending == "failed":
            self._journal.tell("failed", number, message=result["message"])
            if result["message"].startswith(_NO_METRIC):  # the search has written that key: all others fail alike
                self.refusal = self.refusal or RequestError(result["message"].removeprefix("evaluate."))
                self.end("its metric is not reported")
        elif self.refusal is None and self.reason not in (INTERRUPTED, TERMINATED):
            self._journal.tell("stopped", number, step=step, reason=self.reason or "its run was stopped by hand")

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
        if self._deaths[number] > DEATHS and self.refusal is None:  # not even that can be told
            self.refusal = JobError(f"trials cannot be started: {_last_line(trial.get_error())}")
            self.end(self.refusal.message)

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
            with explaining(f"cannot write {self._stopping}"):
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
        seconds = self._earlier + time.monotonic() - self._began
        if budget.steps is not None and self._journal.steps >= budget.steps:
            self.end(f"budget: {count(self._journal.steps)} of {plural(budget.steps, 'step')} are spent")
        elif budget.minutes is not None and seconds >= budget.minutes * 60:
            self.end(f"budget: {budget.minutes:g} minutes are over")

    def _refuse_missing_metric(self, metrics: dict[str, Any]) -> None:
        try:
            refuse_unreported(self._search, list(metrics))
        except JobFileError as error:
            self.refusal = self.refusal or error
            self.end("its metric is not reported")

    def _tell_report(self, number: int, step: int, metrics: dict[str, Any], node: str) -> None:
        """With whether it is the best of the search so far, by the first metric."""
        found = best_of({step: metrics}, self._watched)
        is_best = found is not None and (self._best is None or found.rank < self._best.rank)
        self._best = found if is_best else self._best
        self._journal.tell("reported", number, step=step, metrics=metrics, best=is_best, node=node)


def _last_line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else "Ray says no more"

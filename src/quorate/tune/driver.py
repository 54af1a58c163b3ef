"""The driver of a search: which trials there are, what is written down of them, and when the search ends.

Trials are numbered in order of proposal, drawn by the search itself or chosen by Optuna.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from quorate.checkpoint.retention import Watched, best_of, better_of
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import JobError, JobFileError, QuorateError, RequestError
from quorate.observe.quantities import count, plural
from quorate.storage.atomic import explaining, write_atomically
from quorate.supervisor.signals import Signals
from quorate.tune.loading import ResolvedSearch
from quorate.tune.proposal import refuse_unreported
from quorate.tune.selection import ByOptuna
from quorate.tune.spec import OptunaSpec, SearchSpec
from quorate.tune.trial_run import AT_ONCE, BUSY, IN_ORDER, NO_SPACE, STOPPING, Report, run_name
from quorate.tune.trials import ENDED, Journal, Trial


class TrialSource:
    """Gives the trials that have not ended, those that were proposed before first; with `replay` all of these.

    It has no state of its own to be restored: the journal has all.
    """

    def __init__(self, spec: SearchSpec, journal: Journal, replay: bool = False) -> None:
        self._spec = spec
        self._journal = journal
        self._optuna = ByOptuna(spec) if isinstance(spec.algorithm, OptunaSpec) else None
        known = sorted(journal.trials.values(), key=lambda trial: trial.number)
        self._again = deque(trial.number for trial in known if replay or trial.status not in ENDED)
        for trial in known:
            if trial.status in ENDED and not replay:
                self._learn(trial)
        self._next = max(journal.trials, default=0) + 1
        self.is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there are trials that have not begun."""
        return not self.is_over and (bool(self._again) or self._spec.trials is None or self._next <= self._spec.trials)

    def next(self) -> tuple[int, dict[str, Any]]:
        """The number of a trial, which is in the journal then, and its params."""
        if self._again:
            number = self._again.popleft()
            return number, self._journal.trials[number].parts[0].params
        number, self._next = self._next, self._next + 1
        # Random and grid: each trial by itself.
        params = self._spec.params(number) if self._optuna is None else self._optuna.choose(number)
        self._journal.tell("proposed", number, params=params)
        return number, params

    def again(self, number: int) -> None:
        """Give a trial again, before all others: the process that trained it has died."""
        self._again.appendleft(number)

    def ended(self, number: int) -> None:
        """Learn what a trial has come to."""
        if not self.is_over or self._journal.trials[number].status in ENDED:
            self._learn(self._journal.trials[number])

    def _learn(self, trial: Trial) -> None:
        if self._optuna is not None:
            self._optuna.learn(trial)


COMPLETE, INTERRUPTED, TERMINATED = "complete", "interrupted", "terminated"
DEATHS = 8
"""So often a process may die with a trial that tells nothing new in between: then the trial is to blame."""
_NO_METRIC = "evaluate.metric:"


class Driver:
    """Writes the journal, and watches over budgets and signals. A search that is to end asks its trials to stop by a
    file that they look for, and waits for them.

    Whoever runs the trials tells it what becomes of them, and calls `turn` several times a second.
    """

    def __init__(
        self,
        search: ResolvedSearch,
        journal: Journal,
        source: TrialSource,
        signals: Signals,
        tick: Callable[[], None],
    ) -> None:
        self.search = search
        self.journal = journal
        self.source = source
        self.signals = signals
        self.reason = ""
        """Why the search ends before all trials are done."""
        self.refusal: QuorateError | None = None
        self.deaths: Counter[int] = Counter()
        self._tick = tick
        self._began = time.monotonic()
        self._earlier = journal.active_seconds
        self._watched = Watched(search.spec.metrics[0], search.spec.modes[0])
        self._best = better_of(best_of(trial.reports, self._watched) for trial in journal.trials.values())
        self._stopping = journal.folder.trials / STOPPING
        self._stopping.unlink(missing_ok=True)

    def began(self, number: int, branches: int = 0) -> None:
        """A trial begins, or goes on from its newest checkpoint."""
        name = run_name(number, branches)
        checkpoints = CheckpointFolder.at(self.journal.folder.run(name).checkpoints).list()
        if checkpoints:
            self.journal.tell("resumed", number, run=name, step=checkpoints[-1].cursor.step)
        else:
            self.journal.tell("began", number, run=name)

    def told(self, number: int, report: Report, *, node: str = "", stopped: str = "") -> None:
        """An evaluation of a trial, or its end; `stopped` is why it is stopped there by a scheduler."""
        self.deaths.pop(number, None)
        if not report.ending:
            self._refuse_missing_metric(report)
            self._tell_report(number, report, node)
            if stopped:
                self.journal.tell("stopped", number, step=report.step, reason=stopped)
        elif report.ending == COMPLETE:
            self.journal.tell(
                "finished",
                number,
                step=report.step,
                metrics=report.metrics,
                seconds=report.seconds,
                digest=report.digest,
                **({"reason": report.message} if report.message else {}),
            )
        elif report.ending in (NO_SPACE, BUSY):
            self.refusal = self.refusal or JobError(report.message)
            self.end(report.message)
        elif report.ending == "failed":
            self.journal.tell("failed", number, message=report.message)
            if report.message.startswith(_NO_METRIC):  # the search has written that key: all others fail alike
                self.refusal = self.refusal or RequestError(report.message.removeprefix("evaluate."))
                self.end("its metric is not reported")
        elif self.refusal is None and self.reason not in (INTERRUPTED, TERMINATED):
            reason = self.reason or "its run was stopped by hand"
            self.journal.tell("stopped", number, step=report.step, reason=reason)

    def died(self, number: int) -> str:
        """The process that trains a trial has died. Returns why it has failed with that; empty if it may go on."""
        self.deaths[number] += 1
        often = self.deaths[number] >= DEATHS
        return f"the process that trains it has died {DEATHS} times without any progress" if often else ""

    def turn(self) -> None:
        """See whether the search is to end, and have it shown."""
        if self.signals.reason:
            self.end(self.signals.reason, at_once=self.signals.at_once)
        elif not self.reason:
            self._look_at_budget()
        self._tick()

    def end(self, reason: str, *, at_once: bool = False) -> None:
        """Propose no more trials, and have those under way stop in order."""
        order = AT_ONCE if at_once else IN_ORDER
        if not self.source.is_over or (at_once and self._stopping.read_text() != AT_ONCE):
            self.source.is_over = True
            with explaining(f"cannot write {self._stopping}"):
                write_atomically(self._stopping, order)
        self.reason = self.reason or reason

    def _look_at_budget(self) -> None:
        budget = self.search.spec.budget
        seconds = self._earlier + time.monotonic() - self._began
        if budget.steps is not None and self.journal.steps >= budget.steps:
            self.end(f"budget: {count(self.journal.steps)} of {plural(budget.steps, 'step')} are spent")
        elif budget.minutes is not None and seconds >= budget.minutes * 60:
            self.end(f"budget: {budget.minutes:g} minutes are over")

    def _refuse_missing_metric(self, report: Report) -> None:
        try:
            refuse_unreported(self.search, list(report.metrics))
        except JobFileError as error:
            self.refusal = self.refusal or error
            self.end("its metric is not reported")

    def _tell_report(self, number: int, report: Report, node: str) -> None:
        """With whether it is the best of the search so far, by the first metric."""
        found = best_of({report.step: report.metrics}, self._watched)
        is_best = found is not None and (self._best is None or found.rank < self._best.rank)
        self._best = found if is_best else self._best
        self.journal.tell("reported", number, step=report.step, metrics=report.metrics, best=is_best, node=node)

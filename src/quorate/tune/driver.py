"""The driver of a search: hears what its trials do, writes it down, and ends the search in order."""

import time
from collections import Counter
from collections.abc import Callable

from quorate.checkpoint.retention import Watched, best_of, better_of
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import JobError, JobFileError, QuorateError, RequestError
from quorate.observe.quantities import count, plural
from quorate.spec.search_load import ResolvedSearch
from quorate.storage.atomic import explaining, write_atomically
from quorate.supervisor.signals import Signals
from quorate.tune.proposal import refuse_unreported
from quorate.tune.trial_run import AT_ONCE, BUSY, IN_ORDER, NO_SPACE, STOPPING, Report, run_name
from quorate.tune.trial_source import Journal, TrialSource, reports_of

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
        self._earlier = journal.log.active_seconds
        self._watched = Watched(search.spec.metrics[0], search.spec.modes[0])
        self._best = better_of(best_of(reports_of(trial), self._watched) for trial in journal.trials.values())
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

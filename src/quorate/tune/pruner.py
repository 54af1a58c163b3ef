"""Which trials end early, here and on Ray."""

import math
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.search_log import ENDED
from quorate.observe.quantities import measure
from quorate.spec.search import AshaSpec, HyperbandSpec, SearchSpec
from quorate.tune.journal import Journal, reports_of
from quorate.tune.trial_run import Report


class Pruner:
    """Which trials end early, by Optuna's pruners: they judge by the evaluations that are in a study in memory.

    Without `grace` the first evaluation of the first trial is the first rung. A trial at its last step is let be: there
    is nothing to save. What trials of an earlier part of the search have come to counts as if they had told it now.
    """

    def __init__(self, spec: SearchSpec, journal: Journal) -> None:
        self._spec = spec
        self._earlier = {each.number: reports_of(each) for each in journal.trials.values() if each.status in ENDED}
        self._study: Any = None
        self._trials: list[Any] = []

    def judge(self, number: int, report: Report) -> str:
        """Why a trial ends with this evaluation; empty if it goes on."""
        rule, name, total = self._spec.scheduler, self._spec.metrics[0], report.total_steps or report.step
        if not isinstance(rule, AshaSpec | HyperbandSpec) or report.step >= total:
            return ""
        if self._study is None:
            self._begin(rule, report.step, total)
        value = report.metrics.get(name)
        if not self._is_pruned(number, report.step, value):
            return ""
        return (
            f"{rule.kind}: {name} {measure(value)} at step {report.step} is not among the best 1/{rule.reduction} there"
        )

    def _begin(self, rule: AshaSpec | HyperbandSpec, step: int, total: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = min([step, *(told for reports in self._earlier.values() for told in reports)])
        pruner = (
            optuna.pruners.SuccessiveHalvingPruner(rule.grace or first, rule.reduction)
            if isinstance(rule, AshaSpec)
            else optuna.pruners.HyperbandPruner(first, total, rule.reduction)
        )
        direction = "minimize" if self._spec.modes[0] == "min" else "maximize"
        # By its name Hyperband distributes the trials over its brackets.
        self._study = optuna.create_study(direction=direction, pruner=pruner, study_name=self._spec.name)
        for number, reports in sorted(self._earlier.items()):
            for at in sorted(reports):
                if at < total:
                    self._is_pruned(number, at, reports[at].get(self._spec.metrics[0]))

    def _is_pruned(self, number: int, step: int, value: Any) -> bool:
        while len(self._trials) < number:
            self._trials.append(self._study.ask())
        self._trials[number - 1].report(value if is_number(value) else math.nan, step)
        return bool(self._trials[number - 1].should_prune())

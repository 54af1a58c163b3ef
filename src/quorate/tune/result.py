"""What a search leaves behind: its best trial, all others, its best job and its report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.api.job import Job
from quorate.api.result import EXIT_CODES, Result, open_run, pandas_here
from quorate.core.errors import RunError
from quorate.core.runs_folder import runs_folder
from quorate.history.search_findings import job_of
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.notebook import html_table
from quorate.observe.quantities import measure, plural
from quorate.spec.yaml_document import write_value
from quorate.storage.run_folder import LAST, why_untrusted
from quorate.storage.search_folder import SearchFolder


@dataclass(frozen=True)
class Trial:
    """A trial. `params` are by dotted key of the job, and `metrics` those of its best evaluation, at `step`.

    `status` is finished, stopped, failed, unfinished, running or proposed, and `reason` says why it was stopped or
    failed.
    """

    number: int
    params: Mapping[str, Any]
    status: str
    reason: str
    metrics: Mapping[str, float]
    step: int | None
    curve: tuple[tuple[int, float], ...]
    steps: int
    seconds: float | None
    weights_digest: str
    _of: tuple[SearchRecord, TrialRecord] = field(repr=False, compare=False)
    _untrusted: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, record: SearchRecord, trial: TrialRecord, untrusted: str = "") -> "Trial":
        """As the search's folder tells it, which may be others' (`untrusted` says why)."""
        return cls(
            number=trial.number,
            params=dict(trial.params),
            status=trial.status.value,
            reason=trial.why,
            metrics={name: math.nan if value is None else value for name, value in trial.metrics.items()},
            step=None if trial.best is None else trial.best.step,
            curve=trial.curve,
            steps=trial.steps,
            seconds=trial.seconds,
            weights_digest=trial.digest,
            _of=(record, trial),
            _untrusted=untrusted,
        )

    @property
    def job(self) -> Job:
        """The base job with its params: `quorate.train` gives its weights again."""
        return Job.of(job_of(*self._of))

    @property
    def run(self) -> Result:
        """Its run: ``trial.run.load_model("best")``."""
        record, trial = self._of
        if not trial.has_run:
            raise RunError(f"trial {self.number} of {record.name} has no run: it has not begun, or its folder is gone.")
        return replace(open_run(record.folder.run(trial.run).path), untrusted=self._untrusted)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The result of a search: how it ended, or its state so far.

    ::

        result = quorate.tune(search)
        result.best.params, result.best.metrics["accuracy"]
        model = result.best.run.load_model("best")
        quorate.train(result.best.job.replace(epochs=50))
        result.to_dataframe()

    `best` is None before the first evaluation. With several metrics, `front` is the Pareto front: the trials that no
    other trial beats in all metrics. `best_job` and `report` are files in the folder of the search.
    """

    search: str
    folder: Path
    status: str
    reason: str
    best: Trial | None
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    record: SearchRecord = field(compare=False)

    @classmethod
    def read(cls, folder: SearchFolder, untrusted: str = "") -> "SearchResult":
        """From a search's folder, whatever state that is in; `untrusted` says why it may be others'."""
        record = SearchRecord.read(folder)
        trials = {trial.number: Trial.of(record, trial, untrusted) for trial in record.trials}
        return cls(
            search=folder.name,
            folder=folder.path,
            status=record.status.value,
            reason=record.reason,
            best=None if record.best is None else trials[record.best.number],
            trials=tuple(trials.values()),
            front=tuple(trials[trial.number] for trial in record.front) if len(record.objectives) > 1 else (),
            record=record,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this status."""
        return EXIT_CODES.get(self.status, 0)

    @property
    def best_job(self) -> Path:
        """The job file of the best trial, which `quorate train` trains to the same weights."""
        return self.record.folder.best_job_file

    @property
    def report(self) -> Path:
        """The report as an HTML page; `report.md` beside it is the same in Markdown."""
        return self.record.folder.report_page

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each trial: params, metrics of its best evaluation, steps, seconds."""
        pandas = pandas_here()
        rows = [
            {
                "trial": trial.number,
                "status": trial.status,
                **trial.params,
                **trial.metrics,
                "step": trial.step,
                "steps": trial.steps,
                "seconds": trial.seconds,
                "weights_digest": trial.weights_digest or None,
                "reason": trial.reason or None,
            }
            for trial in self.trials
        ]
        return pandas.DataFrame(rows).set_index("trial") if rows else pandas.DataFrame()

    def __repr__(self) -> str:
        told = [self.status, plural(len(self.trials), "trial")]
        if self.best is not None:
            metrics = ", ".join(f"{each.metric} {measure(self.best.metrics[each.metric])}" for each in self._objectives)
            told.append(f"best is trial {self.best.number}: {metrics}")
        return f"<SearchResult {self.search}: {', '.join(told)}>"

    def _repr_html_(self) -> str:
        rows = [("search", self.search), ("status", self.status), ("trials", f"{len(self.trials):,}")]
        if self.best is not None:
            rows.append(("best", f"trial {self.best.number}"))
            rows += [(each.metric, measure(self.best.metrics[each.metric])) for each in self._objectives]
            rows += [(key, write_value(value)) for key, value in self.best.params.items()]
        return html_table(rows)

    @property
    def _objectives(self) -> Any:
        return self.record.objectives


def conclude(folder: SearchFolder) -> SearchResult:
    """Write what a search ends with into its folder, and say how it stands."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.history.report.search_page import write_search_files

    result = SearchResult.read(folder)
    write_search_files(result.record, datetime.now(UTC))
    return result


def open_search(search: str | Path = LAST, runs: str | Path | None = None) -> SearchResult:
    """Open an existing search by its name, a unique prefix of it, its path, or ``"last"``. It may still be running."""
    looked_in = runs_folder(runs)
    folder = SearchFolder(SearchFolder.find(looked_in, str(search)).path.absolute())
    return SearchResult.read(folder, why_untrusted(looked_in, str(search), folder.path))

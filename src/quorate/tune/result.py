"""The result of a search, and how one stands, as its folder tells: its trials, which is the best, and what all of it
has cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quorate.api.result import EXIT_CODES, pandas_here
from quorate.checkpoint.retention import Watched, best_of, is_number
from quorate.core.cached import cached_property
from quorate.core.errors import QuorateError
from quorate.core.runs_folder import runs_folder
from quorate.history.event_index import glance
from quorate.history.run_record import Attempts, RunRecord, Status
from quorate.observe.console import html_table
from quorate.observe.quantities import measure, plural
from quorate.spec.override import renamed
from quorate.spec.resolved import glance_at_recorded
from quorate.spec.yaml_document import write_value
from quorate.storage.run_folder import LAST, why_untrusted
from quorate.tune.folder import SearchFolder
from quorate.tune.spec import DimensionSpec, SearchSpec
from quorate.tune.trials import SearchLog, Trial, TrialStatus

ENDINGS = {
    "complete": Status.COMPLETE,
    "budget": Status.COMPLETE,
    "interrupted": Status.INTERRUPTED,
    "terminated": Status.TERMINATED,
}
"""By the first word of why a search has ended. Whatever else it says was a failure."""


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
    other trial beats in all metrics. `best_job` and `report` are files in the folder of the search. Where the search
    file cannot be read, `spec` is None, and `problems` say why.
    """

    search: str
    folder: Path
    status: Status
    reason: str
    trials: tuple[Trial, ...]
    spec: SearchSpec | None
    keys_of_job: Mapping[str, Any] = field(compare=False)
    created: datetime
    active_seconds: float
    resumed: int
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: SearchFolder, untrusted: str = "", with_runs: bool = True) -> "SearchResult":
        """From a search's folder, whatever state that is in; `untrusted` says why it may be others'. Without its runs
        it is there at once: as the log says."""
        attempt, spec = Attempts(), None
        log = attempt(lambda: SearchLog().read(folder.log_file), SearchLog())
        problems = attempt.problems
        if log.unreadable_lines:
            problems.append(f"{log.unreadable_lines:,} of the lines of {folder.log_file} cannot be read")
        is_held = attempt(folder.holder, None) is not None
        job = attempt(lambda: glance_at_recorded(folder.job_file), dict[str, Any]())
        try:
            spec = SearchSpec.model_validate(glance_at_recorded(folder.search_file))
            spec = spec.model_copy(update={"space": spec.space and renamed(spec.space)})
        except QuorateError as error:
            problems.append(error.message)
        except ValidationError as error:
            places = ", ".join(".".join(map(str, each["loc"])) for each in error.errors()[:3])
            problems.append(f"{folder.search_file} was edited, or is of another version: {places} cannot be read")
        for trial in log.trials.values():
            trial.untrusted = untrusted
            if not is_held and trial.status is TrialStatus.RUNNING:
                trial.status = TrialStatus.UNFINISHED
        return result_of(folder, log, spec, job, is_held, with_runs, problems)

    @property
    def files(self) -> SearchFolder:
        """The folder with its files by name."""
        return SearchFolder(self.folder)

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for this status."""
        return EXIT_CODES.get(self.status, 0)

    @property
    def best_job(self) -> Path:
        """The job file of the best trial, which `quorate train` trains to the same weights."""
        return self.files.best_job_file

    @property
    def report(self) -> Path:
        """The report as an HTML page; `report.md` beside it is the same in Markdown."""
        return self.files.report_page

    @property
    def objectives(self) -> tuple[Watched, ...]:
        """What is searched for; the first decides which is the best."""
        return objectives_of(self.spec)

    @property
    def space(self) -> Mapping[str, DimensionSpec]:
        """The values that each key of the job may have."""
        return {} if self.spec is None else self.spec.dimensions

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the job that trials differ in, by the space, or as they were given."""
        return tuple(dict.fromkeys([*self.space, *(key for trial in self.trials for key in trial.params)]))

    @cached_property
    def ranked(self) -> tuple[Trial, ...]:
        """The trials that have been evaluated and have not failed, the best first."""
        valued = [trial for trial in self.trials if trial.values and trial.status is not TrialStatus.FAILED]
        return tuple(sorted(valued, key=lambda trial: trial.rank(self.objectives)))

    @property
    def in_order(self) -> tuple[Trial, ...]:
        """All trials, those that are ranked first."""
        ranked = {trial.number for trial in self.ranked}
        return (*self.ranked, *(trial for trial in self.trials if trial.number not in ranked))

    @property
    def best(self) -> Trial | None:
        """The best trial by the first metric."""
        return next(iter(self.ranked), None)

    @cached_property
    def front(self) -> tuple[Trial, ...]:
        """The Pareto front: no other trial is as good in all metrics and better in one. By the first metric."""
        if len(self.objectives) < 2:
            return ()
        ranks = {trial.number: trial.rank(self.objectives)[:-1] for trial in self.ranked}
        return tuple(
            trial
            for trial in self.ranked
            if not any(_dominates(other, ranks[trial.number]) for other in ranks.values())
        )

    @property
    def counts(self) -> Counter[TrialStatus]:
        """How many trials have each status."""
        return Counter(trial.status for trial in self.trials)

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return sum(trial.has_ended for trial in self.trials)

    @property
    def planned(self) -> int | None:
        """How many trials there are to be; None where another budget ends the search."""
        return None if self.spec is None else self.spec.trials

    @property
    def steps(self) -> int:
        """Of all trials together."""
        return sum(trial.steps for trial in self.trials)

    @property
    def training_seconds(self) -> float:
        """Of all trials together."""
        return sum(trial.seconds or 0.0 for trial in self.trials)

    @property
    def saved_steps(self) -> int:
        """Those that stopped trials have not trained."""
        stopped = (trial for trial in self.trials if trial.status is TrialStatus.STOPPED)
        return sum(max(0, (trial.total_steps or 0) - trial.steps) for trial in stopped)

    @property
    def share_done(self) -> float | None:
        """Of the trials that there are to be, by their steps; None where that is not known."""
        if not self.planned:
            return None
        done = (1.0 if t.has_ended else t.steps / t.total_steps if t.total_steps else 0.0 for t in self.trials)
        return min(1.0, sum(done) / self.planned)

    def seconds_left(self, elapsed: float) -> float | None:
        """At the speed so far, or until the time that it may take is over; None where nothing is known yet."""
        known = []
        if share := self.share_done:
            known.append(elapsed * (1 - share) / share)
        budget = None if self.spec is None else self.spec.budget
        if budget is not None and budget.minutes is not None:
            known.append(max(0.0, budget.minutes * 60 - elapsed))
        if budget is not None and budget.steps is not None and self.steps:
            known.append(elapsed * max(0.0, budget.steps / self.steps - 1))
        return min(known, default=None)

    def values_in_words(self, trial: Trial) -> str:
        """What a trial came to by each metric of the search."""
        found = zip(self.objectives, trial.values, strict=True)
        return ", ".join(f"{watched.metric} {measure(value)}" for watched, value in found)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each trial: params, metrics of its best evaluation, steps, seconds."""
        pandas = pandas_here()
        rows = [
            {
                "trial": trial.number,
                "status": trial.status.value,
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
        told = [self.status.value, plural(len(self.trials), "trial")]
        if self.best is not None:
            told.append(f"best is trial {self.best.number}: {self.values_in_words(self.best)}")
        return f"<SearchResult {self.search}: {', '.join(told)}>"

    def _repr_html_(self) -> str:
        rows = [("search", self.search), ("status", self.status.value), ("trials", f"{len(self.trials):,}")]
        if self.best is not None:
            rows.append(("best", f"trial {self.best.number}"))
            rows += [(w.metric, measure(value)) for w, value in zip(self.objectives, self.best.values, strict=True)]
            rows += [(key, write_value(value)) for key, value in self.best.params.items()]
        return html_table(rows)


def open_search(search: str | Path = LAST, runs: str | Path | None = None) -> SearchResult:
    """Open an existing search by its name, a unique prefix of it, its path, or ``"last"``. It may still be running."""
    looked_in = runs_folder(runs)
    folder = SearchFolder(SearchFolder.find(looked_in, str(search)).path.absolute())
    return SearchResult.read(folder, why_untrusted(looked_in, str(search), folder.path))


def result_of(
    folder: SearchFolder,
    log: SearchLog,
    spec: SearchSpec | None,
    job: Mapping[str, Any],
    is_held: bool,
    with_runs: bool,
    problems: Sequence[str] = (),
) -> SearchResult:
    """By a log that was read already, whose trials are completed; `job` has the keys of the base job, and `is_held`
    says whether a driver is at work on it."""
    status, reason = _status(is_held, log, spec is None)
    for trial in log.trials.values():
        _complete(trial, folder, objectives_of(spec), job, with_runs)
    return SearchResult(
        search=folder.name,
        folder=folder.path,
        status=status,
        reason=reason,
        trials=tuple(sorted(log.trials.values(), key=lambda trial: trial.number)),
        spec=spec,
        keys_of_job=job,
        created=folder.created,
        active_seconds=log.active_seconds,
        resumed=log.resumed,
        problems=tuple(problems),
    )


def objectives_of(spec: SearchSpec | None) -> tuple[Watched, ...]:
    """Each metric of a search with its mode; by default the lowest loss."""
    if spec is None:
        return (Watched("loss", "min"),)
    return tuple(Watched(metric, mode) for metric, mode in zip(spec.metrics, spec.modes, strict=True))


def _status(is_held: bool, log: SearchLog, is_damaged: bool) -> tuple[Status, str]:
    if is_held:
        return Status.RUNNING, ""
    if is_damaged:
        return Status.DAMAGED, "what was searched for is not known"
    if log.began is None:
        return Status.LOST, "it was ended before its first trial, or could not reach Ray"
    if log.ending is None:
        return Status.LOST, "its driver was killed before it could write how it ended"
    word = log.ending.partition(":")[0]
    if word in ENDINGS:
        return ENDINGS[word], "" if word == log.ending == Status.COMPLETE else log.ending
    return Status.FAILED, log.ending


def _complete(
    trial: Trial, folder: SearchFolder, objectives: Sequence[Watched], job: Mapping[str, Any], with_runs: bool
) -> None:
    """What a trial came to by the metrics of the search, and what its run has that the log does not tell."""
    trial.folder, now, record = folder, trial.now, None
    # A driver that asks every second does not look at the disk for each of its trials.
    trial.has_run = bool(now.run) and (not with_runs or (folder.trials / now.run).is_dir())
    if trial.has_run and with_runs:
        record = _complete_from_run(trial)
    trial.best = best_of(now.reports, objectives[0])
    metrics = {} if trial.best is None else now.reports[trial.best.step]
    trial.metrics = {name: math.nan if value is None else value for name, value in metrics.items()}
    values = tuple(float(value) for each in objectives if is_number(value := trial.metrics.get(each.metric)))
    trial.values = values if len(values) == len(objectives) and all(map(math.isfinite, values)) else ()
    trial.curve = tuple(
        (step, float(value))
        for part in trial.parts
        for step, reported in sorted(part.reports.items())
        if is_number(value := reported.get(objectives[0].metric)) and math.isfinite(value)
    )
    earlier = sum(max(0, part.step - part.from_step) for part in trial.parts[:-1])
    trial.steps = earlier + max(now.step, record.steps if record is not None else 0) - now.from_step
    told_steps = job.get("steps")
    trial.total_steps = (record and record.total_steps) or (told_steps if type(told_steps) is int else None)


def _complete_from_run(trial: Trial) -> RunRecord | None:
    """Add what the run has and the driver was not there to hear. Returns None of a run that cannot be read."""
    assert trial.folder is not None
    run, now = trial.folder.run(trial.run_name), trial.now
    try:
        timeline = glance(run.events_file)
        record = RunRecord.read(run, timeline)
    except QuorateError:
        return None
    # What came after it was stopped says nothing, since how much that is depends on how quickly it was.
    until = now.step if trial.status is TrialStatus.STOPPED else math.inf
    for step, metrics in timeline.evaluations.items():
        if now.from_step < step <= until:
            now.reports.setdefault(step, metrics)
    if trial.seconds is None:
        trial.seconds = timeline.active_seconds
    if record.status is Status.COMPLETE:
        trial.weights_digest = trial.weights_digest or record.weights_digest
    return record


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)

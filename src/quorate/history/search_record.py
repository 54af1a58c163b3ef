"""A search as its folder tells it: its trials with their curves, which is the best, and what all of it has cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from quorate.checkpoint.retention import BestEvaluation, Watched, best_of, is_number
from quorate.core.cached import cached_property
from quorate.core.errors import QuorateError
from quorate.history.event_index import glance
from quorate.history.run_record import Attempts, RunRecord, Status
from quorate.history.search_log import LoggedTrial, Part, SearchLog, TrialStatus
from quorate.spec.migration import renamed
from quorate.spec.resolved import glance_at_recorded
from quorate.spec.search import DimensionSpec, SearchSpec
from quorate.storage.search_folder import SearchFolder

ENDINGS = {
    "complete": Status.COMPLETE,
    "budget": Status.COMPLETE,
    "interrupted": Status.INTERRUPTED,
    "terminated": Status.TERMINATED,
}
"""By the first word of why a search has ended. Whatever else it says was a failure."""


@dataclass
class TrialRecord(LoggedTrial):
    """What is known of a trial, from the log and its runs. `best` is its best evaluation by the first metric and
    `values` all metrics of the search there; of a trial of population-based training only what it trains now counts,
    since what was before is given up.

    `curve` has every evaluation of the first metric, `lineage` what led to the checkpoint that it has gone on from.
    """

    has_run: bool = False
    best: BestEvaluation | None = None
    values: tuple[float, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    steps: int = 0
    total_steps: int | None = None

    def rank(self, objectives: Sequence[Watched]) -> tuple[float, ...]:
        """The lower, the better; of two equals the earlier is."""
        values = zip(self.values, objectives, strict=True)
        return (*(value if each.mode == "min" else -value for value, each in values), self.number)


@dataclass(frozen=True)
class Recorded:
    """What a search was asked to do, as its folder has it: its spec, its job's keys, and what cannot be read."""

    spec: SearchSpec | None
    job: dict[str, Any]
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: SearchFolder) -> "Recorded":
        """It does not change while a search runs."""
        attempt, spec = Attempts(), None
        job = attempt(lambda: glance_at_recorded(folder.job_file), dict[str, Any]())
        problems = attempt.problems
        try:
            spec = SearchSpec.model_validate(glance_at_recorded(folder.search_file))
            spec = spec.model_copy(update={"space": spec.space and renamed(spec.space)})
        except QuorateError as error:
            problems.append(error.message)
        except ValidationError as error:
            places = ", ".join(".".join(map(str, each["loc"])) for each in error.errors()[:3])
            problems.append(f"{folder.search_file} was edited, or is of another version: {places} cannot be read")
        return cls(spec, job, tuple(problems))


@dataclass(frozen=True)
class SearchRecord:
    """What is known of a search. `spec` is None, and `problems` say why, where its file cannot be read."""

    folder: SearchFolder
    status: Status
    reason: str
    created: datetime
    spec: SearchSpec | None
    job: dict[str, Any]
    trials: tuple[TrialRecord, ...]
    active_seconds: float
    resumed: int
    problems: tuple[str, ...]

    @classmethod
    def read(cls, folder: SearchFolder, with_runs: bool = True) -> "SearchRecord":
        """From a search's folder, whatever state that is in. Without its runs it is there at once: as the log says."""
        attempt = Attempts()
        log = attempt(lambda: SearchLog.read(folder.log_file), SearchLog())
        if log.unreadable_lines:
            attempt.problems.append(f"{log.unreadable_lines:,} of the lines of {folder.log_file} cannot be read")
        return cls.of(folder, log, attempt(folder.holder, None) is not None, with_runs, attempt.problems)

    @classmethod
    def of(
        cls,
        folder: SearchFolder,
        log: SearchLog,
        is_held: bool,
        with_runs: bool,
        problems: Sequence[str] = (),
        recorded: Recorded | None = None,
    ) -> "SearchRecord":
        """From a log that was read already; `is_held`: whether a driver is at work on it. Who asks often gives what is
        `recorded`, too."""
        known = recorded or Recorded.read(folder)
        spec, job = known.spec, known.job
        status, reason = _status(is_held, log, spec is None)
        objectives = objectives_of(spec)
        trials = [_trial(folder, each, objectives, job, is_held, with_runs) for each in log.trials.values()]
        return cls(
            folder=folder,
            status=status,
            reason=reason,
            created=folder.created,
            spec=spec,
            job=job,
            trials=tuple(sorted(trials, key=lambda trial: trial.number)),
            active_seconds=log.active_seconds,
            resumed=log.resumed,
            problems=(*problems, *known.problems),
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def objectives(self) -> tuple[Watched, ...]:
        """What is searched for; the first decides which is the best."""
        return objectives_of(self.spec)

    @property
    def space(self) -> Mapping[str, DimensionSpec]:
        return {} if self.spec is None else self.spec.dimensions

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the job that trials differ in, by the space, or as they were given."""
        return tuple(dict.fromkeys([*self.space, *(key for trial in self.trials for key in trial.params)]))

    @cached_property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """The trials that have been evaluated and have not failed, the best first."""
        valued = [trial for trial in self.trials if trial.values and trial.status is not TrialStatus.FAILED]
        return tuple(sorted(valued, key=lambda trial: trial.rank(self.objectives)))

    @property
    def best(self) -> TrialRecord | None:
        return next(iter(self.ranked), None)

    @cached_property
    def front(self) -> tuple[TrialRecord, ...]:
        """The Pareto front: no other trial is as good in all metrics and better in one. By the first metric."""
        ranks = {trial.number: trial.rank(self.objectives)[:-1] for trial in self.ranked}
        return tuple(
            trial
            for trial in self.ranked
            if not any(_dominates(other, ranks[trial.number]) for other in ranks.values())
        )

    @property
    def counts(self) -> Counter[TrialStatus]:
        return Counter(trial.status for trial in self.trials)

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


def _trial(
    folder: SearchFolder,
    told: LoggedTrial,
    objectives: Sequence[Watched],
    job: Mapping[str, Any],
    is_held: bool,
    with_runs: bool,
) -> TrialRecord:
    # What the runs add is not the log's: a driver goes on with that.
    parts = [replace(part, reports=dict(part.reports)) for part in told.parts]
    status, now = told.status, parts[-1]
    if not is_held and status is TrialStatus.RUNNING:
        status = TrialStatus.UNFINISHED
    # A driver that asks every second does not look at the disk for each of its trials.
    has_run = bool(now.run) and (not with_runs or (folder.trials / now.run).is_dir())
    record, seconds = None, told.seconds
    if has_run and with_runs:
        record, evaluations, active = _look_into(folder.run(now.run))
        seconds = active if seconds is None else seconds
        _complete(now, evaluations, None if told.status is not TrialStatus.STOPPED else now.step)
    best = best_of(now.reports, objectives[0])
    metrics = {} if best is None else now.reports[best.step]
    values = tuple(float(value) for each in objectives if is_number(value := metrics.get(each.metric)))
    told_steps = job.get("steps")
    known = {
        "parts": parts,
        "status": status,
        "seconds": seconds,
        "digest": told.digest or (record.weights_digest if record and record.status is Status.COMPLETE else ""),
    }
    return TrialRecord(
        **vars(told) | known,
        has_run=has_run,
        best=best,
        values=values if len(values) == len(objectives) and all(map(math.isfinite, values)) else (),
        metrics=metrics,
        curve=tuple(_curve(parts, objectives[0].metric)),
        steps=_steps(parts, record),
        total_steps=(record and record.total_steps) or (told_steps if type(told_steps) is int else None),
    )


def _look_into(run: Any) -> tuple[RunRecord | None, dict[int, dict[str, Any]], float | None]:
    """A run as it stands, its evaluations and how long it trained; nothing of one that cannot be read."""
    try:
        timeline = glance(run.events_file)
        return RunRecord.read(run, timeline), timeline.evaluations, timeline.active_seconds
    except QuorateError:
        return None, {}, None


def _complete(part: Part, evaluations: Mapping[int, dict[str, Any]], until: int | None) -> None:
    """Add what the run has evaluated and the driver was not there to hear; what came after it was stopped says nothing,
    since how much that is depends on how quickly it was."""
    for step, metrics in evaluations.items():
        if part.from_step < step and (until is None or step <= until):
            part.reports.setdefault(step, metrics)


def _curve(parts: Sequence[Part], metric: str) -> list[tuple[int, float]]:
    points = []
    for part in parts:
        for step, metrics in sorted(part.reports.items()):
            if is_number(value := metrics.get(metric)) and math.isfinite(value):
                points.append((step, float(value)))
    return points


def _steps(parts: Sequence[Part], record: RunRecord | None) -> int:
    """Those that it has trained itself, in all its parts."""
    earlier = sum(max(0, part.step - part.from_step) for part in parts[:-1])
    now = parts[-1]
    return earlier + max(now.step, record.steps if record is not None else 0) - now.from_step


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)

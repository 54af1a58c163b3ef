"""The trials of a search: what the driver has decided about each, read back line by line from `trials.jsonl`, and
what its run adds to that."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.api.job import Job
from quorate.api.result import Result, open_run
from quorate.checkpoint.retention import BestEvaluation, Watched
from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.observe.quantities import measure
from quorate.spec.changes import chained
from quorate.spec.load import load_recorded
from quorate.spec.override import renamed
from quorate.spec.resolved import ResolvedJob
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import trial_job

Params = dict[str, Any]
Listener = Callable[[dict[str, Any]], None]


class TrialStatus(StrEnum):
    """How a trial stands."""

    PROPOSED = "proposed"  # its params are known, and it waits for room
    RUNNING = "running"
    FINISHED = "finished"  # trained to its end
    STOPPED = "stopped"  # by the scheduler or a budget, with its checkpoint kept
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the search ended before it: it goes on when that is resumed


def params_in_words(params: Params) -> str:
    """Each key with its value, in one line."""
    return ", ".join(f"{key.removeprefix('params.')} {measure(value)}" for key, value in params.items())


ENDED = frozenset({TrialStatus.FINISHED, TrialStatus.STOPPED, TrialStatus.FAILED})


@dataclass
class Part:
    """What a trial trains in one run, with the same params: all of it, or up to where population-based training lets
    it go on from the checkpoint of `donor`."""

    params: Params
    run: str = ""
    from_step: int = 0
    donor: int | None = None
    step: int = 0
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ancestor:
    """Until which step whose run trained what a trial has inherited, and with which params."""

    until: int
    trial: int
    run: str
    params: Params


@dataclass
class Trial:
    """A trial. `params` are by dotted key of the job, and `metrics` those of its best evaluation, at `step`.

    `status` is finished, stopped, failed, unfinished, running or proposed, and `reason` says why it was stopped or
    failed. `curve` has every evaluation of the first metric, `seconds` are those of training, and `lineage` is what led
    to the checkpoint that it has gone on from.
    """

    number: int
    parts: list[Part]
    status: TrialStatus = TrialStatus.PROPOSED
    node: str = ""
    reason: str = ""
    seconds: float | None = None
    weights_digest: str = ""
    ended: float | None = None
    lineage: tuple[Ancestor, ...] = ()

    # What its log does not say by itself: `SearchResult` finds it by the metrics of the search, and in the trial's run.
    has_run: bool = False
    best: BestEvaluation | None = None
    """By the first metric. In population-based training only what it trains now counts: what was before is given up."""
    values: tuple[float, ...] = ()
    """Of all metrics of the search, at its best evaluation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    steps: int = 0
    total_steps: int | None = None
    folder: SearchFolder | None = field(default=None, repr=False, compare=False)
    untrusted: str = field(default="", repr=False, compare=False)

    @property
    def now(self) -> Part:
        """What it trains, or has trained last."""
        return self.parts[-1]

    @property
    def params(self) -> Params:
        return self.now.params

    @property
    def run_name(self) -> str:
        return self.now.run

    @property
    def step(self) -> int | None:
        return None if self.best is None else self.best.step

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def reports(self) -> dict[int, dict[str, Any]]:
        """All its evaluations, by step."""
        return {step: metrics for part in self.parts for step, metrics in part.reports.items()}

    def rank(self, objectives: Sequence[Watched]) -> tuple[float, ...]:
        """The lower, the better; of two equals the earlier is."""
        values = zip(self.values, objectives, strict=True)
        return (*(value if each.mode == "min" else -value for value, each in values), self.number)

    @property
    def resolved_job(self) -> ResolvedJob:
        """The base job with its params, and what those were before as its lineage."""
        assert self.folder is not None
        base = load_recorded(self.folder.job_file, {}, [])
        params = [*(ancestor.params for ancestor in self.lineage), self.params]
        jobs = [trial_job(base, each, self.number) for each in params]
        return chained(jobs, [ancestor.until for ancestor in self.lineage])

    @property
    def job(self) -> Job:
        """The base job with its params: `quorate.train` gives its weights again."""
        return Job.of(self.resolved_job)

    @property
    def run(self) -> Result:
        """Its run: ``trial.run.load_model("best")``."""
        assert self.folder is not None
        if not self.has_run:
            text = f"trial {self.number} of {self.folder.name} has no run: it has not begun, or its folder is gone."
            raise RunError(text)
        return replace(open_run(self.folder.run(self.run_name).path), untrusted=self.untrusted)


class SearchLog:
    """Takes in lines, and knows all trials, when the search began and ended, and why.

    `active_seconds` leaves out the time in which no driver worked on it.
    """

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}
        self.began: float | None = None
        self.last: float | None = None
        self.ending: str | None = None
        self.resumed = 0
        self.unreadable_lines = 0
        self._part_began: float | None = None
        self._earlier_seconds = 0.0

    def read(self, path: Path) -> "SearchLog":
        """Take in a file: one that is not there tells nothing, and a line that cannot be read is only counted."""
        try:
            with opened_regular(path) as file:
                self.take_all(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror or error}") from error
        return self

    @property
    def active_seconds(self) -> float:
        since = 0.0 if self.last is None or self._part_began is None else self.last - self._part_began
        return self._earlier_seconds + max(0.0, since)

    def take_all(self, lines: Iterable[bytes]) -> None:
        """Take in lines of a file. The last may be in the middle of being written: then it says nothing yet."""
        for line in lines:
            if not line.strip():
                continue
            try:
                told = json.loads(line)
                if not isinstance(told, dict):
                    raise ValueError("not an object")
                self.take(told)
            except (ValueError, KeyError, TypeError, RecursionError):
                self.unreadable_lines += line.endswith(b"\n")

    def take(self, told: dict[str, Any]) -> None:
        """Take in one line. Raises ValueError, KeyError or TypeError where it is none that a driver writes."""
        time, kind = _number(told["time"]), told["kind"]
        reason = str(told.get("reason") or "")
        if kind == "search-ended":
            self.ending = reason
        elif kind in ("search-began", "search-resumed"):
            if kind == "search-resumed":
                self._earlier_seconds, self._part_began = self.active_seconds, time
                self.resumed += 1
            self.ending = None
        elif kind == "proposed":
            number = _whole(told["trial"])
            self.trials[number] = Trial(number, [Part(renamed(_mapping(told["params"])))])
        else:
            self._take_trial(self.trials[_whole(told["trial"])], kind, time, reason, told)
        self.began = time if self.began is None else self.began
        self._part_began = time if self._part_began is None else self._part_began
        self.last = time

    def _take_trial(self, trial: Trial, kind: str, time: float, reason: str, told: dict[str, Any]) -> None:
        now = trial.now
        match kind:
            case "began" | "resumed":
                trial.status, trial.reason, trial.ended = TrialStatus.RUNNING, "", None
                now.run = str(told.get("run") or now.run)
            case "reported":
                step, metrics = _whole(told["step"]), _mapping(told["metrics"])
                now.reports[step] = metrics
                now.step = max(now.step, step)
                trial.node = str(told.get("node") or trial.node)
            case "stopped":
                now.step = max(now.step, _whole(told["step"]))
                trial.status, trial.reason, trial.ended = TrialStatus.STOPPED, reason, time
            case "exploited":
                step, donor = _whole(told["step"]), self.trials[_whole(told["from"])]
                params = renamed(_mapping(told["params"]))
                led_here = (*donor.lineage, Ancestor(step, donor.number, donor.run_name, donor.params))
                trial.lineage = tuple(_up_to(step, led_here))
                trial.parts.append(Part(params, str(told.get("run") or ""), step, donor.number, step))
                trial.status = TrialStatus.RUNNING
            case "finished":
                step, metrics = _whole(told["step"]), _mapping(told.get("metrics") or {})
                seconds = told.get("seconds")
                trial.seconds = None if seconds is None else _number(seconds)
                trial.status, trial.reason, trial.ended = TrialStatus.FINISHED, reason, time
                trial.weights_digest = str(told.get("digest") or "")
                now.step = step
                if metrics:
                    now.reports.setdefault(step, metrics)
            case "failed":
                message = str(told.get("message") or "")
                trial.status, trial.reason, trial.ended = TrialStatus.FAILED, message, time
            case _:
                raise ValueError(f"no line is of the kind {kind!r}")


class Journal(SearchLog):
    """The log as its driver has it, who writes decisions to it. What is known is not written again: a trial that is
    resumed tells once more what it has told before."""

    def __init__(self, folder: SearchFolder, listener: Listener | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._listener = listener
        self.read(folder.log_file)

    @property
    def steps(self) -> int:
        """Steps of all trials together, as far as they were told."""
        return sum(trial.now.step for trial in self.trials.values())

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> None:
        """Write a line, unless it is known."""
        if trial is not None and trial in self.trials and _is_known(self.trials[trial], kind, fields.get("step")):
            return
        line = self.folder.tell(kind, trial, **fields)
        self.take(line)
        if self._listener is not None:
            self._listener(line)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, with all that hangs on it, and this is never read back


def _is_known(trial: Trial, kind: str, step: int | None) -> bool:
    if kind == "proposed" or trial.status in ENDED:
        return True
    if kind == "exploited":
        return any(part.donor is not None and part.from_step == step for part in trial.parts)
    return kind == "reported" and step in trial.reports


def _up_to(step: int, lineage: Iterable[Ancestor]) -> Iterator[Ancestor]:
    """Without what begins only there: the donor's own branch may be as young as the checkpoint."""
    begin = 0
    for ancestor in lineage:
        if begin < step and ancestor.until > begin:
            yield replace(ancestor, until=min(step, ancestor.until))
            begin = min(step, ancestor.until)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no mapping")
    return value

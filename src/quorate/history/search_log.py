"""What the driver of a search has decided, read back from its `trials.jsonl` line by line."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.spec.migration import renamed

Params = dict[str, Any]


class TrialStatus(StrEnum):
    """How a trial stands."""

    PROPOSED = "proposed"  # its params are known, and it waits for room
    RUNNING = "running"
    FINISHED = "finished"  # trained to its end
    STOPPED = "stopped"  # by the scheduler or a budget, with its checkpoint kept
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the search ended before it: it goes on when that is resumed


ENDED = frozenset({TrialStatus.FINISHED, TrialStatus.STOPPED, TrialStatus.FAILED})


@dataclass
class Part:
    """What a trial trains in one run, with the same params: all of it, or up to where population-based training lets
    it go on from the checkpoint of `donor`."""

    params: Params
    run: str = ""
    from_step: int = 0
    donor: int | None = None
    reason: str = ""
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
class LoggedTrial:
    """A trial as the log tells it. `seconds` are those of training, as told at its end."""

    number: int
    parts: list[Part]
    status: TrialStatus = TrialStatus.PROPOSED
    node: str = ""
    reason: str = ""
    message: str = ""
    seconds: float | None = None
    digest: str = ""
    began: float | None = None
    ended: float | None = None
    lineage: tuple[Ancestor, ...] = ()

    @property
    def now(self) -> Part:
        """What it trains, or has trained last."""
        return self.parts[-1]

    @property
    def params(self) -> Params:
        return self.now.params

    @property
    def run(self) -> str:
        return self.now.run

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def why(self) -> str:
        """Why it was stopped or failed."""
        return self.message if self.status is TrialStatus.FAILED else self.reason


class SearchLog:
    """Takes in lines, and knows all trials, when the search began and ended, and why.

    `active_seconds` leaves out the time in which no driver worked on it.
    """

    def __init__(self) -> None:
        self.trials: dict[int, LoggedTrial] = {}
        self.began: float | None = None
        self.last: float | None = None
        self.ending: str | None = None
        self.resumed = 0
        self.unreadable_lines = 0
        self._part_began: float | None = None
        self._earlier_seconds = 0.0

    @classmethod
    def read(cls, path: Path) -> "SearchLog":
        """All that a file tells: one that is not there nothing, and a line that cannot be read is only counted."""
        log = cls()
        try:
            with opened_regular(path) as file:
                log.take_all(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror or error}") from error
        return log

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
        if kind in ("search-began", "search-resumed", "search-ended"):
            self._take_search(kind, time, str(told.get("reason") or ""))
        elif kind == "proposed":
            number = _whole(told["trial"])
            self.trials[number] = LoggedTrial(number, [Part(renamed(_mapping(told["params"])))])
        elif kind in _TAKEN:
            trial = self.trials[_whole(told["trial"])]
            _TAKEN[kind](self, trial, time, told)
        else:
            raise ValueError(f"no line is of the kind {kind!r}")
        self.began = time if self.began is None else self.began
        self._part_began = time if self._part_began is None else self._part_began
        self.last = time

    def _take_search(self, kind: str, time: float, reason: str) -> None:
        if kind == "search-ended":
            self.ending = reason
            return
        if kind == "search-resumed":
            self._earlier_seconds, self._part_began = self.active_seconds, time
            self.resumed += 1
        self.ending = None

    # --- of a trial

    def _began(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        trial.status, trial.reason, trial.message, trial.ended = TrialStatus.RUNNING, "", "", None
        trial.began = time if trial.began is None else trial.began
        trial.now.run = str(told.get("run") or trial.now.run)

    def _reported(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        del time
        step, metrics = _whole(told["step"]), _mapping(told["metrics"])
        trial.now.reports[step] = metrics
        trial.node = str(told.get("node") or trial.node)
        trial.now.step = max(trial.now.step, step)

    def _stopped(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        trial.status, trial.reason, trial.ended = TrialStatus.STOPPED, str(told.get("reason") or ""), time
        trial.now.step = max(trial.now.step, _whole(told["step"]))

    def _exploited(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        del time
        step, donor = _whole(told["step"]), self.trials[_whole(told["from"])]
        params = renamed(_mapping(told["params"]))
        run, reason = str(told.get("run") or ""), str(told.get("reason") or "")
        led_here = (*donor.lineage, Ancestor(step, donor.number, donor.now.run, donor.now.params))
        trial.lineage = tuple(_up_to(step, led_here))
        trial.parts.append(Part(params, run, step, donor.number, reason, step))
        trial.status = TrialStatus.RUNNING

    def _finished(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        step, metrics = _whole(told["step"]), _mapping(told.get("metrics") or {})
        trial.status, trial.reason, trial.ended = TrialStatus.FINISHED, str(told.get("reason") or ""), time
        trial.seconds = None if told.get("seconds") is None else _number(told["seconds"])
        trial.digest = str(told.get("digest") or "")
        trial.now.step = step
        if metrics:
            trial.now.reports.setdefault(step, metrics)

    def _failed(self, trial: LoggedTrial, time: float, told: dict[str, Any]) -> None:
        trial.status, trial.message, trial.ended = TrialStatus.FAILED, str(told.get("message") or ""), time


_TAKEN: dict[str, Callable[[SearchLog, LoggedTrial, float, dict[str, Any]], None]] = {
    "began": SearchLog._began,
    "resumed": SearchLog._began,
    "reported": SearchLog._reported,
    "stopped": SearchLog._stopped,
    "exploited": SearchLog._exploited,
    "finished": SearchLog._finished,
    "failed": SearchLog._failed,
}


def _up_to(step: int, lineage: Iterable[Ancestor]) -> Iterator[Ancestor]:
    """Without what begins only there: the donor's own branch may be as young as the checkpoint."""
    begin = 0
    for ancestor in lineage:
        if begin < step and ancestor.until > begin:
            yield Ancestor(min(step, ancestor.until), ancestor.trial, ancestor.run, ancestor.params)
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

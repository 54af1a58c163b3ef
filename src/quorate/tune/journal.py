"""What a search has decided so far, by its `trials.jsonl`; the driver writes it, and reads it when it is resumed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quorate.core.regular_file import read_regular
from quorate.storage.search_folder import SearchFolder

ENDINGS = ("finished", "stopped", "failed")

Listener = Callable[[dict[str, Any]], None]


@dataclass
class Trial:
    """What the journal knows of a trial: the params that it began with, and the metrics of its evaluations by step."""

    number: int
    params: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    exploited: set[int] = field(default_factory=set)
    ending: str = ""

    @property
    def step(self) -> int:
        return max(self.reports, default=0)


class Journal:
    """Writes decisions down and knows them all. What is known is not written again: a trial that is resumed tells once
    more what it has told before."""

    def __init__(self, folder: SearchFolder, listener: Listener | None = None) -> None:
        self.folder = folder
        self.trials: dict[int, Trial] = {}
        self.seconds = 0.0
        """How long the search was under way in its earlier parts."""
        self._listener = listener
        began = last = 0.0
        for line in self._lines():
            if line["kind"] in ("search-began", "search-resumed"):
                self.seconds += last - began
                began = line["time"]
            last = line["time"]
            self._note(line)
        self.seconds += last - began

    @property
    def steps(self) -> int:
        """Steps of all trials together, as far as they were told."""
        return sum(trial.step for trial in self.trials.values())

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> None:
        """Write a line, unless it is known."""
        if trial is None or not self._is_known({"kind": kind, "trial": trial, **fields}):
            line = self.folder.tell(kind, trial, **fields)
            self._note(line)
            if self._listener is not None:
                self._listener(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            content = read_regular(self.folder.log_file)
        except FileNotFoundError:
            return
        for text in content.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # a crash has left half a line
            if isinstance(line, dict) and isinstance(line.get("time"), int | float) and "kind" in line:
                yield line

    def _is_known(self, line: dict[str, Any]) -> bool:
        kind, trial = line["kind"], self.trials.get(line["trial"])
        if trial is None:
            return False
        if kind == "proposed" or trial.ending:
            return True
        if kind == "began":
            return bool(trial.run)
        if kind == "exploited":
            return line["step"] in trial.exploited
        return kind == "reported" and line["step"] in trial.reports

    def _note(self, line: dict[str, Any]) -> None:
        number = line.get("trial")
        if not isinstance(number, int):
            return
        trial = self.trials.setdefault(number, Trial(number))
        kind = line["kind"]
        if kind == "proposed":
            trial.params = dict(line.get("params") or {})
        if kind in ("began", "resumed", "exploited"):
            trial.run = line.get("run") or trial.run
        if kind == "exploited":
            trial.exploited.add(line["step"])
        if kind == "reported":
            trial.reports[line["step"]] = line.get("metrics") or {}
        if kind in ENDINGS:
            trial.ending = kind

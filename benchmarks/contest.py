"""Taking turns: every system in every round, none of them always first."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.bench import Bench
from benchmarks.interpreters import Interpreters
from benchmarks.machine import Machine
from benchmarks.report import Line, Report
from benchmarks.row import Reading, compared, rows_of
from benchmarks.script import Scripts, Trouble, script_command
from benchmarks.system import Absence, System, Turn, absence_of
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from quorate.supervisor.signals import Signals

Item = TypeVar("Item")


class Contest:
    """Measures the systems of a benchmark. `tell` hears which of them has its turn."""

    def __init__(self, bench: Bench, interpreters: Interpreters, scripts: Scripts, tell: Callable[[str], None]) -> None:
        self._bench = bench
        self._interpreters = interpreters
        self._scripts = scripts
        self._tell = tell
        self._machine = Machine.here()
        self._readings: list[Reading] = []
        self.absences: list[Absence] = []
        self._done = 0

    def run(self, rounds: int, after: Callable[[Turn, Sequence[Reading]], None] = lambda *_: None) -> None:
        """Measure so many rounds, or fewer if the benchmark is to end; what is missing or fails is left out.

        `after` hears what a turn has measured.
        """
        turns = self._possible(self._bench.turns())
        for number in range(rounds):
            for turn in rotated(turns, number):
                self._tell(f"round {number + 1} of {rounds}: {turn.label}")
                before = len(self._readings)
                is_done = not self._take(turn) or turn.once
                after(turn, self._readings[before:])
                if is_done:
                    turns = [other for other in turns if other != turn]
                if self._scripts.stop():
                    return
            self._done += 1

    def report(self, signals: Signals) -> Report:
        """What was measured so far."""
        turns = self._bench.turns()
        systems = list(dict.fromkeys(system for turn in turns for system in turn.systems))
        ours = frozenset(system.name for system in systems if system.is_ours)
        order = [system.name for system in systems]
        rows = sorted(rows_of(self._bench.name, self._readings), key=lambda row: order.index(row.system))
        explained = self._bench.explained(compared(rows, ours, self._bench.label))
        return Report(
            bench=self._bench.name,
            headline=self._bench.headline,
            machine=self._machine,
            rounds=self._done,
            lines=[Line(row, self._bench.label(row), self._bench.remarks(row)) for row in explained],
            absences=self.absences,
            judgements=judge(TARGETS, self._bench.name, explained, self._machine.cores),
            stopped=None if signals.reason is None else (signals.reason, signals.exit_code),
        )

    def _possible(self, turns: list[Turn]) -> list[Turn]:
        systems = list(dict.fromkeys(system for turn in turns for system in turn.systems))
        installed = self._interpreters.look(systems)
        absent: dict[System, Absence] = {}
        for system in systems:
            absence = absence_of(system, installed)
            if absence is not None:
                absent[system] = absence
        self.absences += absent.values()
        return [turn for turn in turns if turn.system not in absent]

    def _take(self, turn: Turn) -> bool:
        """Whether it went well."""
        system = turn.system
        order = {**turn.order, "folder": str(self._scripts.folder)}
        answer = self._scripts.run(script_command(self._interpreters.of(system), system.script, order, turn.prefix))
        if not isinstance(answer, Trouble):
            self._readings += [Reading.of(system.name, fields) for fields in answer["readings"]]
            return True
        if not self._scripts.stop():
            self.absences.append(Absence(turn.label, answer.reason, is_ours=system.is_ours))
        return False


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The same items, beginning with another one each time."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]

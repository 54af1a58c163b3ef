"""Turns, rounds, and what becomes of those who cannot be measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contest import Contest, rotated
from benchmarks.interpreters import Interpreters
from benchmarks.report import Report
from benchmarks.row import Row
from benchmarks.script import Scripts, Trouble
from benchmarks.system import Needs, System, Turn
from quorate.supervisor.signals import Signals

OURS = System("ours", "module.ours", is_ours=True)
PEER = System("peer", "module.peer")
VARIANT = System("variant", "module.ours", is_ours=True)
ABSENT = System("absent", "module.absent", needs=Needs(programs=("no-such-program",)))


@dataclass(frozen=True)
class Pair:
    """A benchmark of two cases."""

    systems: Sequence[System]
    name: str = "step"
    headline: str = "Something."

    def turns(self) -> list[Turn]:
        return [Turn(system, case, {"case": case}) for case in ("small", "large") for system in self.systems]

    def label(self, row: Row) -> str:
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        return [row.with_details(seen=1.0) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        return {"peers": str(len(row.ratio_to))}


@dataclass(frozen=True)
class Staged(Scripts):
    """Scripts that are not run: each answers by its module, and is written down."""

    answers: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str]) -> dict[str, Any] | Trouble:
        module, order = command[-2:]
        case = "small" if "small" in order else "large"
        self.ran.append(f"{module.removeprefix('module.')} {case}")
        answer = self.answers.get(module, 1.0)
        if isinstance(answer, Trouble):
            return answer
        return {"readings": [{"case": case, "processes": 1, "ms": [answer]}]}


def contest(systems: Sequence[System], staged: Staged, rounds: int = 2, signals: Signals | None = None) -> Report:
    told: list[str] = []
    held = Contest(Pair(systems), Interpreters("python", "python"), staged, told.append)
    held.run(rounds)
    assert len(told) == len(staged.ran)
    return held.report(signals or Signals())


def test_everyone_has_its_turn_in_every_round_and_nobody_is_always_first(tmp_path: Path) -> None:
    staged = Staged(tmp_path, stop=lambda: False)
    report = contest([OURS, PEER], staged)
    first, second = staged.ran[:4], staged.ran[4:]
    assert first == ["ours small", "peer small", "ours large", "peer large"]
    assert second == ["peer small", "ours large", "peer large", "ours small"]
    assert (report.rounds, report.status, report.exit_code) == (2, "complete", 0)
    assert rotated([], 3) == []


def test_rows_stand_by_case_and_have_ratios_and_remarks(tmp_path: Path) -> None:
    report = contest(
        [OURS, PEER], Staged(tmp_path, stop=lambda: False, answers={"module.ours": 2.0, "module.peer": 3.0})
    )
    assert [(line.label, line.row.system) for line in report.lines] == [
        ("small", "ours"),
        ("small", "peer"),
        ("large", "ours"),
        ("large", "peer"),
    ]
    assert report.lines[0].row.ratio_to == {"peer": 1.5}
    assert report.lines[0].row.details == {"seen": 1.0}
    assert report.lines[0].remarks == {"peers": "1"}


class Both(Pair):
    """A benchmark whose script measures two systems at once."""

    def turns(self) -> list[Turn]:
        return [Turn(OURS, "small", {"case": "small"}, also=(VARIANT,))]


@dataclass(frozen=True)
class Naming(Staged):
    """Scripts that say of which system each reading is."""

    def run(self, command: Sequence[str]) -> dict[str, Any] | Trouble:
        answer = super().run(command)
        assert isinstance(answer, dict)
        (reading,) = answer["readings"]
        return {"readings": [{**reading, "system": "variant", "ms": [2.0]}, reading]}


def test_one_script_may_measure_several_systems(tmp_path: Path) -> None:
    held = Contest(Both([]), Interpreters("python", "python"), Naming(tmp_path, stop=lambda: False), lambda _: None)
    held.run(2)
    report = held.report(Signals())
    assert [(line.row.system, line.row.rounds_ms) for line in report.lines] == [
        ("ours", (1.0, 1.0)),
        ("variant", (2.0, 2.0)),
    ]
    assert [line.row.ratio_to for line in report.lines] == [{}, {}], "a variant of our own is not a peer"


def test_a_peer_that_is_not_installed_is_not_started(tmp_path: Path) -> None:
    staged = Staged(tmp_path, stop=lambda: False)
    report = contest([OURS, ABSENT], staged)
    assert not [turn for turn in staged.ran if "absent" in turn]
    assert [(each.what, each.reason) for each in report.absences] == [("absent", "no-such-program is not installed")]
    assert report.exit_code == 0


def test_a_peer_that_fails_has_no_more_turns_and_is_told_once(tmp_path: Path) -> None:
    staged = Staged(tmp_path, stop=lambda: False, answers={"module.peer": Trouble("it broke")})
    report = contest([OURS, PEER], staged, rounds=3)
    assert staged.ran.count("peer small") == 1
    assert [(each.what, each.reason) for each in report.absences] == [
        ("peer, small", "it broke"),
        ("peer, large", "it broke"),
    ]
    assert (report.status, report.exit_code) == ("complete", 0)


def test_a_failure_of_our_own_fails_the_benchmark(tmp_path: Path) -> None:
    report = contest([OURS, PEER], Staged(tmp_path, stop=lambda: False, answers={"module.ours": Trouble("it broke")}))
    assert (report.status, report.exit_code) == ("failed", 1)


def test_a_signal_ends_it_with_the_figures_so_far(tmp_path: Path) -> None:
    ran: list[str] = []
    staged = Staged(tmp_path, stop=lambda: len(ran) == 3, ran=ran)
    report = contest([OURS, PEER], staged, signals=Signals([2]))
    assert len(ran) == 3
    assert [line.label for line in report.lines] == ["small", "small", "large"]
    assert (report.rounds, report.status, report.exit_code, report.absences) == (0, "interrupted", 130, [])

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.audits import Audits
from benchmarks.row import Row, compared
from benchmarks.scaling import Scaling
from benchmarks.selection import Crowd
from benchmarks.servers import SERVER_KILLED, SLOWED, TABLE, Servers
from benchmarks.startup import Startup
from benchmarks.step import Step
from benchmarks.target import Judgement, Target, judge
from benchmarks.targets import TARGETS
from benchmarks.tracking import Tracking

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
MB = 2**20


def row(
    system: str, ms: float, *, case: str = "cnn", processes: int = 2, threads: int = 1, size: int | None = None
) -> Row:
    return Row("bench", case, system, processes, threads, size, ms, (ms,))


def verdicts(bench: str, rows: list[Row], cores: int = 2) -> dict[str, str]:
    return {judgement.target.text: judgement.verdict for judgement in judge(TARGETS, bench, rows, cores)}


def exchanges(ours: float, gloo: float) -> list[Row]:
    rows = [row("quorate-shm", ours, size=MB), row("gloo", gloo, size=MB)]
    return compared(rows, frozenset({"quorate-shm"}), lambda each: each.case)


def step_rows(ours: str, ms: float, other: str, reference: float) -> list[Row]:
    return Step().explained([row(ours, ms, case="tiny-mlp"), row(other, reference, case="tiny-mlp")])


def audited(ms: float) -> list[Row]:
    return Audits().explained([row("audited", ms, processes=1), row("unaudited", 50.0, processes=1)])


def tracked(ms: float) -> list[Row]:
    return Tracking().explained([row("tracked", ms), row("untracked", 50.0)])


HELD: dict[str, tuple[str, Callable[[float], list[Row]], float, float]] = {
    "shm, 2 processes, 1 MB: gloo ÷ ours": ("allreduce", lambda gloo: exchanges(1.0, gloo), 4.0, 3.9),
    "tiny MLP: µs over the best hand-written step": (
        "step",
        lambda ms: step_rows("quorate", ms, "hand-written", 1.0),
        1.05,
        1.07,
    ),
    "tiny MLP: µs of a training loop of one's own over the same as a task": (
        "step",
        lambda ms: step_rows("quorate", 1.05, "quorate-own-loop", ms),
        1.065,
        1.075,
    ),
    "CNN, 1 worker: % more with audits": ("audits", audited, 50.2, 50.4),
    "CNN: % more with all sinks on": ("tracking", tracked, 50.4, 50.6),
}


def test_what_is_beyond_the_reference_is_told_in_microseconds() -> None:
    for rows, name in ((step_rows("quorate", 1.05, "hand-written", 1.0), "overhead_us"), (tracked(50.05), "cost_us")):
        assert rows[0].details[name] == pytest.approx(50)
        assert rows[1].details == {}


@pytest.mark.parametrize("target", HELD)
def test_a_figure_is_held_against_its_target(target: str) -> None:
    bench, rows_of, good, bad = HELD[target]
    assert [verdicts(bench, rows_of(value))[target] for value in (good, bad)] == ["met", "missed"]


def test_what_was_not_measured_is_never_met() -> None:
    only_ours = compared([row("quorate-shm", 0.0001, size=MB)], frozenset({"quorate-shm"}), lambda each: each.case)
    for bench in {target.bench for target in TARGETS}:
        assert set(verdicts(bench, only_ours, cores=16).values()) == {"not measured"}


def test_startup_is_held_against_plain_python() -> None:
    rows = compared([row("quorate", 1.3), row("plain-python", 1.0)], frozenset({"quorate"}), lambda each: each.case)
    judgement, warm, *_ = judge(TARGETS, "startup", rows, 2)
    assert judgement.value == pytest.approx(1.3)
    assert (judgement.verdict, warm.verdict) == ("met", "not measured")


@pytest.mark.parametrize(("ms", "verdict"), [(480.0, "met"), (620.0, "missed")])
def test_a_run_after_another_is_held_to_what_it_costs_beside_its_steps(ms: float, verdict: str) -> None:
    rows = [row("quorate", 4000.0), replace(row("quorate-warm", 300.0), details={"beyond_ms": ms, "cpu_ms": 700.0})]
    assert verdicts("startup", rows)["a run after another: ms beside its 20 steps"] == verdict
    assert Startup().remarks(rows[1])["beyond"] == f"{ms:.0f} ms"


def test_a_crowd_is_held_against_one_that_fits_the_cores() -> None:
    rows = [row("quorate", 100.0), row("quorate", 131.0, processes=4, threads=2)]
    (judgement,) = judge(TARGETS, "scaling", rows, 2)
    assert (judgement.value, judgement.verdict) == (1.31, "missed")
    assert not [each for each in judge(TARGETS, "scaling", rows, 16) if "2 cores" in each.target.text]


def test_scaling_is_held_against_one_worker_and_against_the_ceiling() -> None:
    rows = Scaling([Crowd(1)]).explained(
        [
            row("quorate", 800.0, processes=1),
            row("quorate", 110.0, processes=8).with_details(exchange_ms=11.0, mean_ms=110.0),
            row("no-exchange", 99.0, processes=8),
        ]
    )
    eight = rows[1].details
    assert eight["efficiency_percent"] == pytest.approx(90.9, abs=0.1)
    assert eight["ceiling_percent"] == pytest.approx(90.0)
    assert eight["exchange_percent"] == pytest.approx(10.0)
    assert eight["samples_per_second"] == pytest.approx(256 / 0.110)
    assert "ceiling_percent" not in rows[2].details
    assert verdicts("scaling", rows, cores=16) == {
        "4 workers on 16 cores: efficiency in %": "not measured",
        "8 workers on 16 cores: efficiency in %": "met",
        "8 workers on 16 cores: % of the ceiling": "missed",
    }


def test_servers_are_held_against_grpc_and_against_the_ring() -> None:
    rows = [row(name, ms, case="25 MB", size=25 * MB) for name, ms in (("quorate-shm", 4.0), ("quorate-ring", 2.0))]
    rows.append(row("grpc", 17.0, case="25 MB", size=25 * MB))
    ours = frozenset({"quorate-shm", "quorate-ring"})
    explained = Servers().explained(compared(rows, ours, lambda each: each.case))
    assert list(verdicts("servers", explained).values())[:2] == ["met", "missed"]
    assert [Servers().remarks(each) for each in explained] == [{"of ring": "0.50×", "grpc": "4.25×"}, {}, {}]


def test_a_slow_worker_is_held_against_the_synchronous_mode_and_rows_against_the_table() -> None:
    rows = [row(f"quorate-{mode}", ms, case=SLOWED) for mode, ms in (("synchronous", 9.0), ("bounded", 4.0))]
    rows.append(row("quorate-asynchronous", 5.0, case=SLOWED))
    for name, ms, sent in (("sparse", 2.0, 10.0), ("dense", 38.0, 900.0)):
        rows.append(row(f"quorate-{name}", ms, case=TABLE).with_details(sent_bytes=sent, received_bytes=sent))
    rows.append(row("quorate-killed", 300.0, case=SERVER_KILLED).with_details(worst_ms=1001.0))
    assert list(verdicts("servers", Servers().explained(rows)).values())[2:] == [
        "missed",
        "met",
        "missed",
        "met",
        "missed",
    ]


def test_a_target_says_what_is_wanted_in_the_document() -> None:
    least, most = Target("x", "a", lambda _: 2.0, 1.0), Target("x", "b", lambda _: 2.0, 1.0, is_lowest=False)
    assert [each.to_dict() for each in judge([least, most], "x", [], 2)] == [
        {"target": "a", "at_least": 1.0, "value": 2.0, "verdict": "met"},
        {"target": "b", "at_most": 1.0, "value": 2.0, "verdict": "missed"},
    ]
    assert Judgement(least, None, "not measured").to_dict()["value"] is None


def test_the_documentation_has_all_targets() -> None:
    told = re.findall(r"^\| `(\w+)` \| (.+?) \| (at (?:least|most) [\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert told == [
        (target.bench, target.text, f"at {'least' if target.is_lowest else 'most'} {target.limit:g}")
        for target in TARGETS
    ]

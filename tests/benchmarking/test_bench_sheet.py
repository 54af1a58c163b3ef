import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.machine import Machine
from benchmarks.report import Line, Report
from benchmarks.row import Row
from benchmarks.run import check_output, write_document
from benchmarks.sheet import milliseconds, print_report, report_lines
from benchmarks.system import Absence
from benchmarks.target import Judgement, Target
from quorate.core.errors import OutputError, RequestError
from quorate.observe.screen import Screen
from schemas import validate

MACHINE = Machine("Fast Processor", 2, 24 * 10**9, "6.1.0", "3.11.7", "2.13.0+cpu", "0.1.0", load=0.1)
TARGET = Target("allreduce", "shm, 2 processes, 1 MB: gloo ÷ ours", lambda _: None, 4.0)


def line(system: str, ms: float, label: str = "2 processes, 1 MB", remarks: Mapping[str, str] | None = None) -> Line:
    row = Row("allreduce", "1 MB", system, 2, 1, 2**20, ms, (ms, ms * 1.1))
    return Line(row, label, remarks or {})


REPORT = Report(
    bench="allreduce",
    headline="From a gradient in each process to their sum, readable in each. × is a peer's time divided by ours.",
    machine=MACHINE,
    rounds=2,
    lines=[
        line("quorate-shm", 0.4567, remarks={"gloo": "4.20×", "openmpi": "0.70×"}),
        line("gloo", 1.918),
        line("openmpi", 12.34, label="4 processes, 100 MB"),
    ],
    absences=[Absence("openmpi", "mpirun is not installed", "apt install openmpi-bin")],
    judgements=[
        Judgement(TARGET, 4.2, "met"),
        Judgement(TARGET, 3.9, "missed"),
        Judgement(TARGET, None, "not measured"),
    ],
)


def shown(report: Report, width: int) -> list[str]:
    return [text.plain for text in report_lines(report, width)]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_report_fits_the_screen_and_loses_nothing(width: int) -> None:
    lines = shown(REPORT, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for word in ("0.457", "1.92", "12.3", "5%", "4.20×", "0.70×", "Fast Processor", "mpirun is not installed"):
        assert word in text
    for verdict in ("met 4.20 at least 4", "missed 3.90 at least 4", "not measured at least 4"):
        assert verdict in text


def test_the_table_names_a_case_once_and_aligns_its_numbers() -> None:
    lines = shown(REPORT, 80)
    start = next(place for place, text in enumerate(lines) if text.startswith("case"))
    assert lines[start : start + 4] == [
        "case                 system          ms   ±   gloo  openmpi",
        "2 processes, 1 MB    quorate-shm  0.457  5%  4.20×    0.70×",
        "                     gloo          1.92  5%",
        "4 processes, 100 MB  openmpi       12.3  5%",
    ]


def test_a_column_that_would_be_empty_is_left_out() -> None:
    single = [replace(each, row=replace(each.row, rounds_ms=(each.row.ms,))) for each in REPORT.lines]
    assert not [text for text in shown(replace(REPORT, lines=single), 80) if "±" in text]


def test_a_narrow_screen_has_a_heading_for_each_case() -> None:
    lines = shown(REPORT, 40)
    start = lines.index("2 processes, 1 MB")
    assert lines[start + 1 : start + 3] == ["  quorate-shm: 0.457 ms ± 5%", "    gloo 4.20×, openmpi 0.70×"]


def test_in_a_file_no_line_is_broken_and_nothing_is_coloured() -> None:
    stream = io.StringIO()
    print_report(Screen(stream, is_terminal=False), REPORT, is_terminal=False)
    assert f"{REPORT.headline}\n" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_an_end_by_a_signal_is_told() -> None:
    assert shown(replace(REPORT, stopped=("interrupted", 130)), 80)[-1] == "interrupted: these are the figures so far"
    nothing = replace(REPORT, lines=[], stopped=("interrupted", 130))
    assert shown(nothing, 80) == ["interrupted before anything was measured"]


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0042, "0.004"), (0.81, "0.810"), (4.8, "4.80"), (58.04, "58.0"), (3254.0, "3,254")]
)
def test_milliseconds_have_the_digits_that_can_be_trusted(ms: float, text: str) -> None:
    assert milliseconds(ms) == text


@pytest.mark.parametrize("stopped", [None, ("terminated", 143)])
def test_the_document_follows_its_schema(stopped: tuple[str, int] | None) -> None:
    document = replace(REPORT, stopped=stopped).to_document()
    validate("bench", json.loads(json.dumps(document)))
    assert document["not_measured"] == [
        {"what": "openmpi", "reason": "mpirun is not installed", "command": "apt install openmpi-bin"}
    ]


def test_a_file_that_could_not_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    check_output(None)
    check_output(tmp_path / "new.json")
    with pytest.raises(RequestError, match="is a folder"):
        check_output(tmp_path)
    with pytest.raises(RequestError, match=r"the folder .*absent does not exist"):
        check_output(tmp_path / "absent" / "new.json")


def test_the_document_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    write_document(None, {})
    write_document(tmp_path / "new.json", {"a": 1})
    assert json.loads((tmp_path / "new.json").read_text()) == {"a": 1}
    with pytest.raises(OutputError, match="could not be written"):
        write_document(tmp_path / "absent" / "new.json", {})

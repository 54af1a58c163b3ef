import io

import pytest

from quorate.doctor.report import Finding, Level, exit_code, lines_of, print_findings, to_document, verdict
from quorate.observe.screen import Screen

WELL = Finding("python", Level.OK, "3.11.7")
BAD = Finding(
    "shared memory",
    Level.WARNING,
    "67.1 MB free in /dev/shm: batches of loader_workers may not fit in",
    "Keep loader_workers: 0, or give more: docker run --shm-size=1g",
)
WORSE = Finding("QUORATE_CHECKPOINT__EVERY", Level.PROBLEM, "is wrong", "unset it")


def plain(finding: Finding, width: int) -> list[str]:
    return [line.plain for line in lines_of(finding, width)]


def test_a_finding_at_80_columns() -> None:
    assert plain(WELL, 80) == ["ok       python            3.11.7"]
    assert plain(BAD, 80) == [
        "warning  shared memory     67.1 MB free in /dev/shm: batches of loader_workers",
        "                           may not fit in",
        "                           → Keep loader_workers: 0, or give more: docker run",
        "                             --shm-size=1g",
    ]


def test_a_long_name_takes_the_room_it_needs() -> None:
    assert plain(WORSE, 80)[0] == "problem  QUORATE_CHECKPOINT__EVERY  is wrong"


@pytest.mark.parametrize("width", [40, 59, 60, 80, 200])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert all(len(line) <= width for finding in (WELL, BAD, WORSE) for line in plain(finding, width))


def test_a_narrow_screen_has_the_text_below_the_name() -> None:
    assert plain(BAD, 40)[:3] == [
        "warning  shared memory",
        "  67.1 MB free in /dev/shm: batches of",
        "  loader_workers may not fit in",
    ]


def test_a_word_is_never_broken() -> None:
    path = Finding("runs", Level.OK, f"/{'x' * 90} is free")
    assert any(f"/{'x' * 90}" in line for line in plain(path, 40))


def test_a_file_gets_whole_lines_without_colours() -> None:
    stream = io.StringIO()
    assert print_findings(iter([WELL, BAD]), Screen(stream)) == [WELL, BAD]
    first, second, third, *_ = stream.getvalue().splitlines()
    assert first == "ok       python            3.11.7"
    assert second.endswith(BAD.text)
    assert third.strip() == f"→ {BAD.remedy}"
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("findings", "words", "code"),
    [
        ([WELL], "All is well: jobs can run here.", 0),
        ([WELL, BAD], "No problem, 1 warning: jobs can run here.", 0),
        ([WORSE, WORSE, WELL], "2 problems and no warnings.", 1),
        ([WORSE, BAD, BAD], "1 problem and 2 warnings.", 1),
    ],
)
def test_what_findings_come_to(findings: list[Finding], words: str, code: int) -> None:
    assert verdict(findings).plain == words
    assert exit_code(findings) == code
    assert to_document(findings)["exit_code"] == code

"""`quorate show`, `report` and `runs` where a search is meant; and a search on a terminal while it runs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import RenderableType
from typer.testing import CliRunner, Result

from history.run_builder import complete_run
from quorate.cli.app import app
from quorate.cli.search_view import live_view, told_in_words
from quorate.observe.screen import Screen
from quorate.tune.result import SearchResult
from quorate.tune.search import conclude
from schemas import validate
from tune.search_builder import Teller, exploited_search, search_folder, told_search


def invoked(*arguments: object) -> Result:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def shown(view: RenderableType, width: int = 100) -> list[str]:
    file = io.StringIO()
    Screen(file, is_terminal=True, width=width).print(view)
    return file.getvalue().splitlines()


def test_a_search_is_shown_by_name_prefix_path_and_last(tmp_path: Path) -> None:
    complete_run(tmp_path)
    teller = told_search(tmp_path)
    for reference in ("find-0001", "fi", "last", teller.folder.path):
        text = invoked("show", reference, "--runs", tmp_path).stdout
        assert text.startswith("find-0001  lost  4 of 6 trials"), reference
    assert "quorate tune --resume" in text
    assert "report" not in text
    assert "asha: 1.9000" in text
    assert "\nbest\n  trial 2      loss 0.3000 at step 60\n" in text
    # A run of that folder is still a run.
    assert invoked("show", "tiny", "--runs", tmp_path).stdout.startswith("tiny-0001  complete")


def test_a_search_that_has_ended_says_where_its_report_and_its_best_job_are(tmp_path: Path) -> None:
    folder = told_search(tmp_path).tell("search-ended", reason="complete").folder
    conclude(folder)
    lines = [line.split() for line in invoked("show", folder.path).stdout.splitlines()]
    assert ["next", "quorate", "train", str(folder.best_job_file)] in lines
    assert ["report", str(folder.report_page)] in lines


def test_its_document(tmp_path: Path) -> None:
    for teller in (told_search(tmp_path / "one"), exploited_search(tmp_path / "two")):
        document = json.loads(invoked("show", teller.folder.path, "--json").stdout)
        validate("search", document)
    assert [each["until"] for each in document["best"]["lineage"]] == [40, 80]


def test_what_is_about_a_run_is_refused(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    with pytest.raises(Exception, match="is a search; --ledger"):
        invoked("show", teller.folder.path, "--ledger")
    with pytest.raises(Exception, match="is a search: quorate show"):
        invoked("runs", "--runs", teller.folder.path)


def test_searches_stand_below_the_runs(tmp_path: Path) -> None:
    complete_run(tmp_path)
    teller = told_search(tmp_path)
    search_folder(tmp_path).tell("search-ended", reason="interrupted")
    lines = invoked("runs", "--runs", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.strip()] == [
        "name",
        "tiny-0001",
        "search",
        "find-0002",
        "find-0001",
    ]
    one = invoked("runs", "--runs", tmp_path, "--status", "lost", "--json").stdout
    document = json.loads(one)
    validate("runs", document)
    assert [each["search"] for each in document["searches"]] == [teller.folder.name]


def test_a_folder_with_searches_only(tmp_path: Path) -> None:
    told_search(tmp_path)
    lines = invoked("runs", "--runs", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["search", "find-0001"]


@pytest.mark.parametrize(("name", "begins"), [("page.html", "<!doctype html>"), ("page.md", "# find-0001")])
def test_a_report_where_it_is_asked_for(tmp_path: Path, name: str, begins: str) -> None:
    teller = told_search(tmp_path)
    done = invoked("report", teller.folder.path, "-o", tmp_path / name, "--json")
    document = json.loads(done.stdout)
    validate("report", document)
    text = (tmp_path / name).read_text()
    assert text.startswith(begins)
    assert document["bytes"] == len(text.encode())


@pytest.mark.parametrize("width", [60, 100, 200])
def test_on_a_terminal_while_it_runs(tmp_path: Path, width: int) -> None:
    teller = told_search(tmp_path)
    with teller.folder.lock():
        lines = shown(live_view(SearchResult.read(teller.folder), 60.0, width), width)
    assert max(map(len, map(_plain, lines))) <= width
    text = "\n".join(map(_plain, lines))
    assert text.startswith("find-0001  running  4 of 6 trials")
    assert "best loss 0.3000 (trial 2)" in text
    assert "left" in text
    # What is under way comes first, then the best.
    plain = list(map(_plain, lines))
    table = plain[next(at for at, line in enumerate(plain) if line.startswith("trial  status")) :]
    assert [line.split()[0] for line in table[1:3]] == ["5", "2"]
    assert "trial 3 stopped: asha" in text


def test_a_search_that_has_just_begun_can_be_looked_at(tmp_path: Path) -> None:
    teller = search_folder(tmp_path)
    assert _plain(shown(live_view(SearchResult.read(teller.folder), 0.0, 80))[0]).startswith("find-0001")


def test_without_a_terminal_each_decision_is_a_sentence(tmp_path: Path) -> None:
    teller = exploited_search(tmp_path)
    record = SearchResult.read(teller.folder)
    said = [told_in_words(json.loads(line), record) for line in teller.folder.log_file.read_text().splitlines()]
    assert "trial 3 finished, loss 0.1000" in said
    assert "trial 2 continues from step 40 of trial 1: learning_rate 0.08000" in said
    stopped = told_in_words({"kind": "stopped", "trial": 1, "step": 20, "reason": "asha: \x1b[31m"}, record)
    assert stopped == "trial 1 stopped at step 20: asha: \\x1b[31m"


def _plain(line: str) -> str:
    from rich.text import Text

    return Text.from_ansi(line).plain


def test_names_that_a_terminal_would_obey_are_shown_as_text(tmp_path: Path) -> None:
    teller: Teller = search_folder(tmp_path)
    teller.begin(1, **{"params.kind": "\x1b[2J"}).report(1, 0.5).tell("failed", 1, message="\x1b[31mred")
    text = invoked("show", teller.folder.path).stdout
    assert "\x1b" not in text

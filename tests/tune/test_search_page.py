"""A search as a page of HTML and as Markdown: all its parts, whatever has become of it, and nothing that runs."""

import re
from datetime import UTC, datetime
from pathlib import Path

from history.test_report_page import Checked
from quorate.tune.report import search_html, search_markdown, write_search_files
from quorate.tune.result import SearchResult
from tune.search_builder import Teller, exploited_search, search_folder, told_search

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def as_markdown_of(teller: Teller) -> str:
    return search_markdown(SearchResult.read(teller.folder))


def checked_page(teller: Teller) -> Checked:
    text = search_html(SearchResult.read(teller.folder), "find-0001", NOW)
    page = Checked(text)
    assert not {name for name, _ in page.elements} & {"script", "img", "iframe", "object", "form", "a"}
    assert not [key for _, given in page.elements for key in given if key.startswith("on")]
    assert "url(" not in text
    assert "nan" not in re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL).lower().split()
    return page


def test_all_sections_of_a_search(tmp_path: Path) -> None:
    page = checked_page(told_search(tmp_path))
    charts = ("Learning curves", "Parameters")
    assert page.headings == ["Warnings", "Best job", *charts, "Importance", "Trials", "Search"]
    text = " ".join(page.text)
    for said in ("Trial 2: loss 0.3000", "asha: 1.9000", "<b>no</b> | such thing", "too few trials", "quorate tune"):
        assert said in text, said
    assert "coloured: the best; pale: stopped early" in text


def test_a_search_without_a_trial_and_one_without_an_evaluation(tmp_path: Path) -> None:
    teller = search_folder(tmp_path)
    assert checked_page(teller).headings == ["Search"]
    teller.begin(1)
    page = checked_page(teller)
    assert "No trial has been evaluated yet." in " ".join(page.text)
    assert "Learning curves" not in page.headings


def test_a_damaged_search(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    teller.folder.search_file.write_text("{metric: [")
    page = checked_page(teller)
    assert "Warnings" in page.headings
    assert "Trials" in page.headings


def test_the_best_trials_come_first_and_those_without_a_value_last(tmp_path: Path) -> None:
    text = as_markdown_of(told_search(tmp_path)).split("## Trials")[1]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["| trial", "loss"]
    assert [row[0].removeprefix("| ") for row in rows[2:5]] == ["2", "1", "5"]
    assert rows[7][1] == "–"


def test_population_based_training_shows_who_went_on_from_whom(tmp_path: Path) -> None:
    page = checked_page(exploited_search(tmp_path))
    assert "Lineage" in page.headings
    assert "0–40" in page.text


def test_several_metrics_are_drawn_against_each_other(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric=["accuracy", "loss"], mode=["max", "min"])
    for trial in range(1, 7):
        metrics = {"accuracy": 0.5 + trial / 20, "loss": (trial - 3) ** 2 + 0.01}
        teller.begin(trial).tell("reported", trial, step=20, metrics=metrics, best=False)
    page = checked_page(teller)
    assert "Pareto front" in page.headings
    assert len([name for name, _ in page.elements if name == "circle"]) == 4 + 6 + 1 + 6 * 4, (
        "front, curves, best, params"
    )


def test_the_files_of_a_search(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    folder = teller.folder
    write_search_files(SearchResult.read(folder), NOW)
    text = folder.report_text.read_text()
    assert folder.report_page.read_text().startswith("<!doctype html>")
    assert "Trial 2: loss 0.3000" in text
    assert f"`quorate train {folder.best_job_file}`" in text
    assert r"RuntimeError: \<b\>no\</b\> \| such thing" in text
    rows = [line for line in text.split("## Trials")[1].split("##")[0].splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 6
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1

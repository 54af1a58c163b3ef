"""A search as a page of HTML and as Markdown: all its parts, whatever has become of it, and nothing that runs."""

import re
from datetime import UTC, datetime
from pathlib import Path

from history.search_builder import Teller, exploited_search, search_folder, told_search
from history.test_report_page import Checked
from quorate.history.report.search_charts import Scale
from quorate.history.report.search_files import page_of, write_search_files
from quorate.history.report.search_table import columns_of
from quorate.history.search_record import SearchRecord
from quorate.spec.space import DimensionSpec

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def checked_page(teller: Teller) -> Checked:
    text = page_of(SearchRecord.read(teller.folder), "find-0001", NOW)
    page = Checked(text)
    assert not {name for name, _ in page.elements} & {"script", "img", "iframe", "object", "form", "a"}
    assert not [key for _, given in page.elements for key in given if key.startswith("on")]
    assert "url(" not in text
    assert "nan" not in re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL).lower().split()
    return page


def drawn(page: Checked, kind: str) -> list[dict[str, str | None]]:
    return [given for name, given in page.elements if name == "path" and kind in str(given.get("class")).split()]


def test_all_sections_of_a_search(tmp_path: Path) -> None:
    page = checked_page(told_search(tmp_path))
    assert page.headings == [
        *("Warnings", "Best job", "Learning curves", "Parameters", "Importance", "Trials", "Search")
    ]
    text = " ".join(page.text)
    for said in ("Trial 2: loss 0.3000", "asha: 1.9000", "<b>no</b> | such thing", "too few trials", "quorate tune"):
        assert said in text, said
    assert len(drawn(page, "winner")) >= 2
    assert len(drawn(page, "stopped")) >= 1
    assert len(drawn(page, "way")) == 4


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
    assert len(drawn(page, "way")) == 4


def test_each_row_has_a_place_in_every_order(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    record = SearchRecord.read(teller.folder)
    page = checked_page(teller)
    columns = list(columns_of(record))
    rows = [given for name, given in page.elements if name == "tr" and "--o0" in str(given.get("style"))]
    orders = [[int(place) for place in re.findall(r"--o\d+:(\d+)", str(row["style"]))] for row in rows]
    assert len(rows) == len(record.trials)
    for at in range(len(columns)):
        assert sorted(order[at] for order in orders) == list(range(len(rows)))
    # Where nobody has chosen, the best comes first, and what has no value last.
    names = [column.name for column in columns]
    assert names[:2] == ["trial", "loss"]
    assert [order[1] for order in orders] == list(range(len(rows)))
    by_rate = sorted(orders, key=lambda order: order[names.index("learning_rate")])
    assert [record.trials[order[0]].number for order in by_rate] == [5, 2, 1, 4, 6, 3]
    inputs = [given for name, given in page.elements if name == "input"]
    assert [given.get("id") for given in inputs if "checked" in given] == ["sort-1"]


def test_population_based_training_shows_who_went_on_from_whom(tmp_path: Path) -> None:
    page = checked_page(exploited_search(tmp_path))
    assert "Lineage" in page.headings
    assert len(drawn(page, "leap")) == 2
    # Two ancestors with a way to the next, and what the best has trained itself.
    assert len([given for given in drawn(page, "life") if "winner" in str(given["class"])]) == 5
    assert "0–40" in page.text


def test_several_metrics_are_drawn_against_each_other(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric=["accuracy", "loss"], mode=["max", "min"])
    for trial in range(1, 7):
        metrics = {"accuracy": 0.5 + trial / 20, "loss": (trial - 3) ** 2 + 0.01}
        teller.begin(trial).tell("reported", trial, step=20, metrics=metrics, best=False)
    page = checked_page(teller)
    assert "Pareto front" in page.headings
    assert len([given for name, given in page.elements if name == "i" and given.get("class") == "dot front"]) == 4


def test_an_axis_follows_the_space() -> None:
    log = Scale.of_key("params.rate", DimensionSpec(loguniform=[1e-4, 1.0]), [0.01])
    assert (log.title, log.note) == ("rate", "log")
    assert log.place(0.01) == 0.5
    words = Scale.of_key("params.kind", DimensionSpec(choice=["b", "a", True]), ["a"])
    assert [said for _, said in words.ticks] == ["b", "a", "True"]
    assert words.place("nothing") is None
    numbers = Scale.of_key("batch_size", DimensionSpec(grid=[64, 16, 32]), [16])
    assert [said for _, said in numbers.ticks] == ["16", "32", "64"]
    moved = Scale.of_key("params.rate", DimensionSpec(uniform=[0.0, 1.0]), [1.2])
    assert moved.place(1.2) == 1.0
    unknown = Scale.of_key("params.x", None, [1, 3, 2])
    assert unknown.place(2) == 0.5
    alone = Scale.of_key("params.x", None, [None])
    assert alone.place(None) == 0.5


def test_the_files_of_a_search(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    folder = teller.folder
    write_search_files(SearchRecord.read(folder), NOW)
    text = folder.report_text.read_text()
    assert folder.report_page.read_text().startswith("<!doctype html>")
    assert "## Best job: trial 2" in text
    assert "`quorate train best-job.yaml`" in text
    assert r"RuntimeError: \<b\>no\</b\> \| such thing" in text
    rows = [line for line in text.split("## Trials")[1].splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 6
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1

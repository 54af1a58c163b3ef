"""The page of a search, opened from a disk in a real browser."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from history.search_builder import exploited_search, search_folder, told_search
from quorate.history.report.search_files import page_of
from quorate.history.search_record import SearchRecord
from services.browser import Browser

pytestmark = pytest.mark.services


def page_file(folder: Path, kind: str) -> Path:
    if kind == "several metrics":
        teller = search_folder(folder, metric=["accuracy", "loss"], mode=["max", "min"])
        for trial in range(1, 7):
            metrics = {"accuracy": 0.5 + trial / 20, "loss": (trial - 3) ** 2 + 0.01}
            teller.begin(trial).tell("reported", trial, step=20, metrics=metrics, best=False)
    else:
        teller = exploited_search(folder) if kind == "population" else told_search(folder)
    page = folder / "page.html"
    page.write_text(page_of(SearchRecord.read(teller.folder), "find-0001", datetime.now(UTC)))
    return page


@pytest.mark.parametrize("kind", ["usual", "several metrics", "population"])
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_it_opens_without_a_complaint_and_fits(
    browser: Browser,
    tmp_path: Path,
    kind: str,
    width: int,
    scheme: str,
) -> None:
    file = page_file(tmp_path, kind)
    visit = browser.open(file, width, scheme)
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [file.as_uri()]
    # Nothing sticks out at the side: tables and wide charts scroll by themselves.
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    lengths = visit.page.locator("figure path.way, figure path.trial").evaluate_all(
        "all => all.map(each => each.getTotalLength())"
    )
    assert lengths
    # A name beside the drawing is not cut off by the window.
    for label in visit.page.locator("#learning-curves .label").all():
        box = label.bounding_box()
        assert box["x"] + box["width"] <= width
    visit.page.close()


def test_a_heading_sorts_the_trials(browser: Browser, tmp_path: Path) -> None:
    visit = browser.open(page_file(tmp_path, "usual"))

    def in_order() -> list[str]:
        rows = visit.page.locator(".trials tbody tr")
        seen = [(row.bounding_box()["y"], row.locator("td").first.inner_text()) for row in rows.all()]
        return [number for _, number in sorted(seen)]

    assert in_order()[:3] == ["2", "1", "5"]
    visit.page.locator(".trials th").get_by_text("trial", exact=True).click()
    assert in_order() == ["1", "2", "3", "4", "5", "6"]
    visit.page.locator(".trials th").get_by_text("learning_rate").click()
    assert in_order() == ["5", "2", "1", "4", "6", "3"]
    visit.page.close()

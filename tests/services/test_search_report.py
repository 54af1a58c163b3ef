"""The page of a search, opened from a disk in a real browser."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from quorate.tune.report import search_html
from quorate.tune.result import SearchResult
from services.browser import Browser
from tune.search_builder import exploited_search, search_folder, told_search

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
    page.write_text(search_html(SearchResult.read(teller.folder), "find-0001", datetime.now(UTC)))
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
    assert visit.page.locator("#learning-curves figure path").count()
    visit.page.close()

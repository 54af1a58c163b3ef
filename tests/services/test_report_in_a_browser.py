"""The page of a run, opened from a disk in a real browser."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from history.run_builder import Story, add_checkpoint, build_run
from quorate.history.report.page import report_page
from quorate.history.run_detail import RunDetail
from services.browser import Browser

pytestmark = pytest.mark.services

EVIL = "<script>document.title='hacked'</script><img src=http://127.0.0.1:9/x>"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    story = Story().begin(total_steps=60).train(1, 20, gradient_norm=2.0, learning_rate=0.1, data_s=0.01)
    story.tell("checkpoint", 20, path="p", bytes=300, seconds=0.5).evaluate(20, accuracy=0.5)
    story.lose(1, 21, from_step=20).train(21, 25).come_back(25).train(26, 30, warnings=[EVIL])
    story.pause(50).begin(from_step=25).train(26, 40, log={EVIL: 1.0}).evaluate(40, accuracy=0.75)
    run = build_run(folder, story=story)
    run.write_environment({"python": "3.11", "digest": "ab" * 60})
    add_checkpoint(run, 20)
    page = folder / "page.html"
    page.write_text(report_page(RunDetail.read(run, as_rows=True), None, datetime.now(UTC)))
    return page


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_complaint_and_asks_nobody_for_anything(
    browser: Browser,
    page_file: Path,
    width: int,
    scheme: str,
) -> None:
    visit = browser.open(page_file, width, scheme)
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [page_file.as_uri()]
    assert visit.page.title() == "tiny-0001 – lost"
    headings = visit.page.locator("h2").all_inner_texts()
    assert {"Curves", "Where the time goes", "What happened", "Recoveries", "Configuration"} <= {*headings}
    # Nothing sticks out at the side: tables scroll by themselves.
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    for figure in visit.page.locator("figure.chart svg").all():
        box = figure.bounding_box()
        assert box["width"] > 120
        assert box["height"] > 120
    lines = visit.page.locator("figure.chart path[stroke]").evaluate_all(
        "all => all.map(each => each.getTotalLength())"
    )
    assert len(lines) >= 6
    assert min(lines) > 0
    visit.page.close()


def test_by_day_and_by_night_the_words_can_be_read(browser: Browser, page_file: Path) -> None:
    for scheme in ("light", "dark"):
        visit = browser.open(page_file, 1400, scheme)
        ink, paper = (
            _lightness(visit.page.evaluate(f"getComputedStyle(document.body).{name}"))
            for name in ("color", "backgroundColor")
        )
        assert abs(ink - paper) > 150
        assert (ink < paper) == (scheme == "light")
        visit.page.close()


def _lightness(colour: str) -> float:
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue

"""A run as a page of HTML: all its parts, whatever has become of the run, and nothing that runs or is fetched."""

import math
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.run_builder import COMPLETE, Story, add_checkpoint, build_run, complete_run
from quorate.core.failure import Failure
from quorate.history.report.charts import Axis, Html, Line, round_numbers, short, tag
from quorate.history.report.page import report_page
from quorate.history.run_detail import RunDetail, advise
from quorate.storage.run_folder import RunFolder

NOW = datetime(2026, 6, 1, tzinfo=UTC)
EVIL = "<script>alert(1)</script><img src=x onerror=y>\"'&\x1b[31m"
VOID = {"meta", "link", "br", "input"}


class Checked(HTMLParser):
    """Reads a page: its text, its headings, and whether every element is closed by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.headings: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def page_of(run: RunFolder) -> Checked:
    detail = RunDetail.read(run, as_rows=True)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, run.name)
    page = report_page(detail, advice, NOW)
    checked = Checked(page)
    names = {name for name, _ in checked.elements}
    assert not names & {"script", "img", "iframe", "object", "form", "a"}
    addresses = [
        str(given.get("href") or given.get("src")) for _, given in checked.elements if "href" in given or "src" in given
    ]
    assert addresses == ["data:,"]
    assert not [key for _, given in checked.elements for key in given if key.startswith("on")]
    assert "url(" not in page
    assert "nan" not in re.sub(r"<[^>]*>|<style>.*</style>", "", page).lower().split()
    assert "NaN" not in page.replace("alert", "")
    return checked


def eventful(runs: Path) -> RunFolder:
    story = Story().begin(total_steps=40)
    story.train(1, 20, learning_rate=0.1, gradient_norm=2.0, data_s=0.01, exchange_s=0.02)
    story.tell("checkpoint", 20, path="p", bytes=300, seconds=0.5, added_s=0.1).evaluate(20, loss=0.4, accuracy=0.5)
    story.lose(1, 21, from_step=20).train(21, 25).come_back(25).train(
        26, 30, warnings=[f"sample 7 {EVIL}"], bad_samples=1
    )
    story.tell("checkpoint_failed", 30, reason=EVIL).pause(50).begin(from_step=25, total_steps=40)
    story.train(26, 35, log={EVIL: 0.5}, **{f"loss.{EVIL}": 0.5})
    failure = Failure("UserCodeError", f"it went wrong {EVIL}", step=36, traceback=f"Traceback\n{EVIL}")
    run = build_run(runs, story=story, result={"status": "failed", "failure": failure.to_dict()})
    run.write_environment({"python": "3.11", EVIL: EVIL})
    add_checkpoint(run, 20)
    return run


def test_all_parts_of_an_eventful_run_and_everything_escaped(tmp_path: Path) -> None:
    page = page_of(eventful(tmp_path))
    assert page.headings == [
        "Warnings",
        "Curves",
        "Where the time goes",
        "Recoveries",
        "Checkpoints",
        "What happened",
        "Configuration",
        "Environment",
    ]
    text = "".join(page.text)
    for part in ("tiny-0001", "failed", "it went wrong <script>alert(1)</script>", "Learning rate", "Gradient norm"):
        assert part in text
    for part in (
        "Evaluation: accuracy",
        "Throughput",
        "worker 0 lanes 0-1",
        "job.yaml line 1",
        "changes the bits",
        "3.11",
    ):
        assert part in text
    assert "\x1b" not in text


def test_the_same_number_is_the_same_wherever_it_stands(tmp_path: Path) -> None:
    """In steps of unlike length a mean of shares is not the share of the whole."""
    story = Story().begin().train(1, 4, samples_per_second=80.0, compute_s=0.05, exchange_s=0.02)
    story.train(5, 8, samples_per_second=8.0, compute_s=0.05, exchange_s=0.9).evaluate(8, loss=0.5)
    run = build_run(tmp_path, story=story, result=COMPLETE | {"wall_seconds": 60.0})
    text = page_of(run).text
    table = {name: text[at + 2] for at, name in enumerate(text) if name in ("compute", "exchange", "other")}
    assert table == {"compute": "9.1%", "exchange": "83.6%", "other": "7.3%"}
    told = "\n".join(text)
    assert "training loss\n0.1250\n" in told
    assert "best evaluation loss\n0.5000\n" in told
    assert "14.5/s\nsamples; 0.55 s a step" in told
    assert "1:00 with start-up" in told


@pytest.mark.parametrize(
    "story",
    [
        None,
        Story(),
        Story().begin(),
        Story().begin().train(1, 1),
        Story().begin().train(1, 5, loss=math.nan),
        Story().begin().train(1, 3, loss=math.inf).train(4, 6),
        Story().begin().train(1, 4, loss=0.0, samples_per_second=0.0),
        Story().begin().train(1, 4, loss=1e308).train(5, 8, loss=-1e308),
        Story().begin().train(1, 4, samples=None, samples_per_second=None, compute_s=None),
        Story().train(1, 3),
        Story().begin().train(1, 900).evaluate(900, accuracy=math.nan),
    ],
)
def test_a_run_in_any_state(tmp_path: Path, story: Story | None) -> None:
    page_of(build_run(tmp_path, story=story))


def test_a_run_whose_events_cannot_be_read_says_so(tmp_path: Path) -> None:
    run = build_run(tmp_path, story=Story())
    run.events_file.unlink(missing_ok=True)
    run.events_file.mkdir()
    assert "events.jsonl: Is a directory" in report_page(RunDetail.read(run, as_rows=True), None, NOW)


def test_a_running_one_tells_what_is_left(tmp_path: Path) -> None:
    run = build_run(tmp_path, story=Story().begin(total_steps=100).train(1, 5))
    with run.lock():
        text = "".join(page_of(run).text)
    assert "running" in text
    assert "at this speed" in text


def test_a_complete_one(tmp_path: Path) -> None:
    text = "".join(page_of(complete_run(tmp_path)).text)
    assert COMPLETE["weights_digest"] in text
    assert "best: 0.5000" in text


class TestMarkup:
    @given(st.text())
    def test_text_comes_out_as_text(self, text: str) -> None:
        page = Checked(tag("p", text, title=text))
        plain = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
        assert "".join(page.text) == plain
        assert page.elements == [("p", {"title": plain})]

    def test_markup_stays(self) -> None:
        assert tag("p", tag("b", "<"), None, ["a", Html("<br>")], class_="x", hidden=False) == (
            '<p class="x"><b>&lt;</b>a<br></p>'
        )


class TestCharts:
    @given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=3000), st.integers(2, 50))
    def test_a_thinned_line_keeps_its_ends_its_least_and_its_greatest(self, values: list[float], most: int) -> None:
        line = Line.of("x", range(10, 10 + len(values)), values, most)
        assert len(line.xs) <= 2 * most
        assert (line.xs[0], line.xs[-1], line.last) == (10, 9 + len(values), values[-1])
        assert (line.low.min(), line.high.max()) == (min(values), max(values))
        # Of numbers so large, the last bits of a mean are lost.
        slack = 1e-9 * max(abs(each) for each in values)
        assert (line.low - slack <= line.ys).all()
        assert (line.ys <= line.high + slack).all()

    @given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
    def test_round_numbers_lie_between(self, least: float, span: float, most: int) -> None:
        found = round_numbers(least, least + span, most)
        assert len(found) <= most + 2
        assert all(least - span * 1e-6 <= each <= least + span * (1 + 1e-6) for each in found)

    def test_a_steep_curve_is_drawn_by_its_logarithm(self) -> None:
        line = Line.of("x", [1, 2, 3], [1000.0, 1.0, 10.0])
        axis = Axis.around([line], may_be_log=True)
        assert axis.is_log
        assert axis.place(np.array([1.0, 1000.0])).tolist() == [0.0, 1.0]
        assert axis.ticks() == [1, 10, 100, 1000]
        assert not Axis.around([line], may_be_log=False).is_log

    @pytest.mark.parametrize(
        ("value", "said"),
        [(0, "0"), (0.02, "0.02"), (250_000, "250k"), (1_500_000, "1.5M"), (1e-7, "1e-07"), (999, "999")],
    )
    def test_numbers_on_an_axis(self, value: float, said: str) -> None:
        assert short(value) == said

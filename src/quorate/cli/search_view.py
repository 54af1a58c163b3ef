"""A search for people: while it runs, and when it is looked at."""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.cli.layout import GAP, STATUS_STYLES, Page, headed_table
from quorate.cli.output import NONE, print_document
from quorate.core.runs_folder import as_typed
from quorate.observe.quantities import age, blocks_for, duration, measure, plural, sparkline, visible
from quorate.observe.screen import Screen, lines_of
from quorate.spec.yaml_document import write_value
from quorate.tune.findings import advise_on_search, importance_of, search_document
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import ResolvedSearch
from quorate.tune.result import SearchResult, result_of
from quorate.tune.trials import SearchLog, Trial, TrialStatus, params_in_words

TRIAL_STYLES = {
    TrialStatus.RUNNING: "cyan",
    TrialStatus.FINISHED: "green",
    TrialStatus.STOPPED: "dim",
    TrialStatus.FAILED: "red",
    TrialStatus.UNFINISHED: "yellow",
    TrialStatus.PROPOSED: "dim",
}
ROWS = 12
SHOWN = 50
_SPARK = 16
_REFRESH = 1.0
"""Seconds between two pictures of a search on a terminal."""


def show_search(folder: SearchFolder, as_json: bool) -> None:
    """Print everything about a search."""
    result, reference = SearchResult.read(folder), as_typed(folder.path)
    if as_json:
        print_document(search_document(result, reference))
    else:
        print_search(Page(), result, reference)


def search_report(folder: SearchFolder, *, as_markdown: bool) -> bytes:
    """A search as a page of HTML, or as Markdown."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.tune.report import search_html, search_markdown

    result = SearchResult.read(folder)
    if as_markdown:
        return search_markdown(result).encode()
    return search_html(result, as_typed(folder.path), datetime.now(UTC)).encode()


class RunningView:
    """A search while it runs: a table on a terminal, elsewhere a line for what is worth one."""

    def __init__(self, search: ResolvedSearch, folder: SearchFolder, is_quiet: bool) -> None:
        self._spec = search.spec
        self._job = search.job.spec.model_dump()
        self._folder = folder
        self._is_quiet = is_quiet
        self._log = SearchLog().read(folder.log_file)
        self._screen = Screen(sys.stderr)
        self._next = 0.0
        self._live: Live | None = None
        if not is_quiet and self._screen.is_terminal:
            self._live = Live(console=self._screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def handle(self, line: dict[str, Any]) -> None:
        """Take in a line of the search's log."""
        self._log.take(line)
        is_news = line["kind"] != "reported" or line.get("best")
        if self._live is None and not self._is_quiet and is_news and (said := told_in_words(line, self._so_far())):
            self._screen.print(said, soft_wrap=True)

    def tick(self) -> None:
        """Draw it anew, now and then."""
        if self._live is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _REFRESH
            view = live_view(self._so_far(), self._log.active_seconds, self._screen.width, self._screen.encoding)
            self._live.update(view, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _so_far(self) -> SearchResult:
        return result_of(self._folder, self._log, self._spec, self._job, is_held=True, with_runs=False)


def live_view(result: SearchResult, elapsed: float, width: int, encoding: str = "utf-8", rows: int = ROWS) -> Group:
    """How a search stands: how far it is, the trials under way, the best, and what was stopped last, and why."""
    parts: list[RenderableType] = [_title(result)]
    if (share := result.share_done) is not None:
        bar = Table.grid()
        bar.add_row(ProgressBar(1.0, share, min(width, 100), complete_style="cyan"))
        parts.append(bar)
    parts += [Text(line) for line in lines_of(_facts(result, result.seconds_left(elapsed)), width)]
    running = [trial for trial in result.trials if trial.status is TrialStatus.RUNNING]
    under_way = {trial.number for trial in running}
    best = [trial for trial in result.ranked if trial.number not in under_way]
    shown = [*running[:rows], *best[: max(3, rows - len(running))]]
    if shown:
        parts += [Text(), trial_table(result, shown, width, encoding)]
    stopped = sorted((trial for trial in result.trials if trial.reason), key=lambda trial: trial.ended or 0.0)
    if stopped:
        parts.append(Text())
    for trial in stopped[-3:]:
        said = visible(f"trial {trial.number} {trial.status.value}: {trial.reason}")
        parts.append(Text(said, style=TRIAL_STYLES[trial.status], no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def told_in_words(told: dict[str, Any], result: SearchResult) -> str | None:
    """A line of the log as a sentence, for a driver that nobody watches on a terminal; None where it is not news."""
    number, step = told.get("trial"), told.get("step")
    trial = next((each for each in result.trials if each.number == number), None)
    if trial is None:
        return None
    value = "" if not trial.values else f", {result.values_in_words(trial)}"
    at = "" if step is None else f"step {step:,}"
    said = {
        "began": f"began: {_params(result, trial)}",
        "resumed": f"resumes from {at}",
        "finished": f"finished{value}",
        "stopped": f"stopped at {at}: {told.get('reason')}",
        "exploited": f"continues from {at} of trial {told.get('from')}: {_params(result, trial)}",
        "failed": f"failed: {told.get('message')}",
        "reported": f"is the best so far at {at}{value}" if told.get("best") else "",
    }.get(told["kind"])
    return visible(f"trial {number} {said}") if said else None


def print_search(page: Page, result: SearchResult, reference: str) -> None:
    """Print all sections that there is something to say in; `reference` names the search on a command line."""
    importance, advice = importance_of(result), advise_on_search(result, reference)
    page.title(_title(result))
    if result.reason:
        page.row("why", result.reason)
    for problem in result.problems:
        page.row("problem", problem)
    page.items("so far" if result.best is None else "found", _facts(result, None))
    if advice is not None:
        page.whole("next", Text(advice.command or "", style="bold"))
        page.row("", Text(advice.purpose, style="dim"))
    if result.report.is_file():
        page.whole("report", str(result.report))
    _print_best(page, result)
    if importance.shares:
        page.section("importance")
        for key, share in importance.shares.items():
            page.row(f"{share:.0%}", key)
        page.row("", Text(importance.method, style="dim"))
    if result.trials:
        page.section("trials")
        trials = result.in_order
        page.table(trial_table(result, trials[:SHOWN], page.screen.width - 2, page.screen.encoding, with_why=True), 2)
        if len(trials) > SHOWN:
            page.line(f"  and {len(trials) - SHOWN:,} more; --json has all")


def _print_best(page: Page, result: SearchResult) -> None:
    best = result.best
    if best is None:
        return
    page.section("best")
    at = "" if best.best is None else f" at step {best.best.step:,}"
    page.row(f"trial {best.number}", f"{result.values_in_words(best)}{at}")
    page.columns([(key, write_value(value)) for key, value in best.params.items()])
    if best.weights_digest:
        page.whole("weights", best.weights_digest)
    if best.has_run:
        page.whole("run", str(result.files.run(best.run_name).path))
    for ancestor in best.lineage:
        page.row(f"to {ancestor.until:,}", f"trial {ancestor.trial}: {visible(params_in_words(ancestor.params))}")


def trial_table(
    result: SearchResult, trials: Sequence[Trial], width: int, encoding: str = "utf-8", with_why: bool = False
) -> Table:
    """As many columns as fit, the important ones first: with each trial's params and its curve."""
    best, blocks = result.best, blocks_for(encoding)
    columns: dict[str, list[Text]] = {
        "trial": [Text(str(t.number), style="bold" if t is best else "") for t in trials],
        "status": [Text(t.status.value, style=TRIAL_STYLES[t.status]) for t in trials],
        "steps": [Text(f"{t.steps:,}" + (f"/{t.total_steps:,}" if t.total_steps else "")) for t in trials],
    }
    for at, watched in enumerate(result.objectives):
        columns[watched.metric] = [Text(measure(t.values[at]) if t.values else NONE) for t in trials]
    for key in result.keys:
        name = key.removeprefix("params.")
        columns[name] = [Text(visible(measure(t.params[key])) if key in t.params else NONE) for t in trials]
    columns["curve"] = [Text(sparkline([v for _, v in t.curve], _SPARK, blocks), style="cyan") for t in trials]
    if with_why:
        columns["why"] = [Text(visible(t.reason), style="dim") for t in trials]
    shown: list[str] = []
    room = width
    for name, cells in columns.items():
        needed = min(24, max(len(name), *(len(cell.plain) for cell in cells)))
        if len(shown) < 4 or needed <= room:
            shown.append(name)
            room -= needed + GAP
    whole = [name for name in shown if name != "why"]
    return headed_table(shown, whole=whole, rows=zip(*(columns[name] for name in shown), strict=True))


def search_table(results: Sequence[SearchResult], now: datetime) -> Table:
    """The searches of a folder, one a row."""
    rows = []
    for result in results:
        best = result.best
        found = NONE if best is None else result.values_in_words(best)
        ended = result.ended
        rows.append(
            (
                Text(result.search),
                Text(result.status.value, style=STATUS_STYLES[result.status]),
                Text(f"{ended:,}" + ("" if result.planned is None else f"/{result.planned:,}")),
                Text(found),
                Text(age((now - result.created).total_seconds())),
            )
        )
    headings = ("search", "status", "trials", "best", "age")
    return headed_table(headings, whole=headings[1:], rows=rows)


def _title(result: SearchResult) -> Text:
    status = Text(result.status.value, style=STATUS_STYLES[result.status])
    ended = result.ended
    planned = "" if result.planned is None else f" of {result.planned:,}"
    return Text.assemble((result.search, "bold"), "  ", status, f"  {ended:,}{planned} trials")


def _facts(result: SearchResult, left: float | None) -> list[str]:
    facts = []
    if result.best is not None:
        facts.append(f"best {result.values_in_words(result.best)} (trial {result.best.number})")
    counts = result.counts
    facts += [f"{counts[status]:,} {status.value}" for status in TrialStatus if counts[status]]
    facts.append(plural(result.steps, "step"))
    if result.saved_steps:
        facts.append(f"{result.saved_steps:,} saved by stopping")
    if result.training_seconds:
        facts.append(f"{duration(result.training_seconds)} of training")
    if left is not None:
        facts.append(f"{duration(left)} left")
    return facts


def _params(result: SearchResult, trial: Trial) -> str:
    return params_in_words({key: trial.params[key] for key in result.keys if key in trial.params})

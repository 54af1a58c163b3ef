"""A search for people: while it runs, and when it is looked at."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.cli.layout import GAP, STATUS_STYLES, Page, headed_table
from quorate.cli.output import NONE, print_document
from quorate.core.runs_folder import as_typed
from quorate.history.documents import search_document
from quorate.history.run_detail import Advice
from quorate.history.search_findings import Importance, advise_on_search, importance_of
from quorate.history.search_log import TrialStatus
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.quantities import age, blocks_for, duration, measure, plural, sparkline, visible
from quorate.observe.screen import lines_of
from quorate.spec.yaml_document import write_value
from quorate.storage.search_folder import SearchFolder

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


def show_search(folder: SearchFolder, as_json: bool) -> None:
    """Print everything about a search."""
    record = SearchRecord.read(folder)
    importance, advice = importance_of(record), advise_on_search(record, as_typed(folder.path))
    if as_json:
        print_document(search_document(record, importance, advice))
    else:
        print_search(Page(), record, importance, advice)


def search_report(folder: SearchFolder, *, as_markdown: bool) -> bytes:
    """A search as a page of HTML, or as Markdown."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.history.report.search_page import search_html, search_markdown

    record = SearchRecord.read(folder)
    if as_markdown:
        return search_markdown(record).encode()
    return search_html(record, as_typed(folder.path), datetime.now(UTC)).encode()


def live_view(record: SearchRecord, elapsed: float, width: int, encoding: str = "utf-8", rows: int = ROWS) -> Group:
    """How a search stands: how far it is, the trials under way, the best, and what was stopped last, and why."""
    parts: list[RenderableType] = [_title(record)]
    if (share := record.share_done) is not None:
        bar = Table.grid()
        bar.add_row(ProgressBar(1.0, share, min(width, 100), complete_style="cyan"))
        parts.append(bar)
    parts += [Text(line) for line in lines_of(_facts(record, record.seconds_left(elapsed)), width)]
    running = [trial for trial in record.trials if trial.status is TrialStatus.RUNNING]
    under_way = {trial.number for trial in running}
    best = [trial for trial in record.ranked if trial.number not in under_way]
    shown = [*running[:rows], *best[: max(3, rows - len(running))]]
    if shown:
        parts += [Text(), trial_table(record, shown, width, encoding)]
    stopped = sorted((trial for trial in record.trials if trial.why), key=lambda trial: trial.ended or 0.0)
    if stopped:
        parts.append(Text())
    for trial in stopped[-3:]:
        said = visible(f"trial {trial.number} {trial.status.value}: {trial.why}")
        parts.append(Text(said, style=TRIAL_STYLES[trial.status], no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def told_in_words(told: dict[str, Any], record: SearchRecord) -> str | None:
    """A line of the log as a sentence, for a driver that nobody watches on a terminal; None where it is not news."""
    number, step = told.get("trial"), told.get("step")
    trial = next((each for each in record.trials if each.number == number), None)
    if trial is None:
        return None
    value = "" if not trial.values else f", {_values(record, trial)}"
    at = "" if step is None else f"step {step:,}"
    said = {
        "began": f"began: {_params(record, trial)}",
        "resumed": f"resumes from {at}",
        "finished": f"finished{value}",
        "stopped": f"stopped at {at}: {told.get('reason')}",
        "exploited": f"continues from {at} of trial {told.get('from')}: {_params(record, trial)}",
        "failed": f"failed: {told.get('message')}",
        "reported": f"is the best so far at {at}{value}" if told.get("best") else "",
    }.get(told["kind"])
    return visible(f"trial {number} {said}") if said else None


def print_search(page: Page, record: SearchRecord, importance: Importance, advice: Advice | None) -> None:
    """Print all sections that there is something to say in."""
    page.title(_title(record))
    if record.reason:
        page.row("why", record.reason)
    for problem in record.problems:
        page.row("problem", problem)
    page.items("so far" if record.best is None else "found", _facts(record, None))
    if advice is not None:
        page.whole("next", Text(advice.command or "", style="bold"))
        page.row("", Text(advice.purpose, style="dim"))
    if record.folder.report_page.is_file():
        page.whole("report", str(record.folder.report_page))
    _print_best(page, record)
    if importance.shares:
        page.section("importance")
        for key, share in importance.shares.items():
            page.row(f"{share:.0%}", key)
        page.row("", Text(importance.method, style="dim"))
    if record.trials:
        page.section("trials")
        ranked = {trial.number for trial in record.ranked}
        trials = [*record.ranked, *(trial for trial in record.trials if trial.number not in ranked)]
        page.table(trial_table(record, trials[:SHOWN], page.screen.width - 2, page.screen.encoding, with_why=True), 2)
        if len(trials) > SHOWN:
            page.line(f"  and {len(trials) - SHOWN:,} more; --json has all")


def _print_best(page: Page, record: SearchRecord) -> None:
    best = record.best
    if best is None:
        return
    page.section("best")
    at = "" if best.best is None else f" at step {best.best.step:,}"
    page.row(f"trial {best.number}", f"{_values(record, best)}{at}")
    page.columns([(key, write_value(value)) for key, value in best.params.items()])
    if best.digest:
        page.whole("weights", best.digest)
    if best.has_run:
        page.whole("run", str(record.folder.run(best.run).path))
    for ancestor in best.lineage:
        page.row(f"to {ancestor.until:,}", f"trial {ancestor.trial}: {_listed(ancestor.params)}")


def trial_table(
    record: SearchRecord, trials: Sequence[TrialRecord], width: int, encoding: str = "utf-8", with_why: bool = False
) -> Table:
    """As many columns as fit, the important ones first: with each trial's params and its curve."""
    best, blocks = record.best, blocks_for(encoding)
    columns: dict[str, list[Text]] = {
        "trial": [Text(str(t.number), style="bold" if t is best else "") for t in trials],
        "status": [Text(t.status.value, style=TRIAL_STYLES[t.status]) for t in trials],
        "steps": [Text(f"{t.steps:,}" + (f"/{t.total_steps:,}" if t.total_steps else "")) for t in trials],
    }
    for at, watched in enumerate(record.objectives):
        columns[watched.metric] = [Text(measure(t.values[at]) if t.values else NONE) for t in trials]
    for key in record.keys:
        name = key.removeprefix("params.")
        columns[name] = [Text(visible(measure(t.params[key])) if key in t.params else NONE) for t in trials]
    columns["curve"] = [Text(sparkline([v for _, v in t.curve], _SPARK, blocks), style="cyan") for t in trials]
    if with_why:
        columns["why"] = [Text(visible(t.why), style="dim") for t in trials]
    shown: list[str] = []
    room = width
    for name, cells in columns.items():
        needed = min(24, max(len(name), *(len(cell.plain) for cell in cells)))
        if len(shown) < 4 or needed <= room:
            shown.append(name)
            room -= needed + GAP
    whole = [name for name in shown if name != "why"]
    return headed_table(shown, whole=whole, rows=zip(*(columns[name] for name in shown), strict=True))


def search_table(records: Sequence[SearchRecord], now: datetime) -> Table:
    """The searches of a folder, one a row."""
    rows = []
    for record in records:
        best = record.best
        found = NONE if best is None else _values(record, best)
        ended = sum(trial.has_ended for trial in record.trials)
        rows.append(
            (
                Text(record.name),
                Text(record.status.value, style=STATUS_STYLES[record.status]),
                Text(f"{ended:,}" + ("" if record.planned is None else f"/{record.planned:,}")),
                Text(found),
                Text(age((now - record.created).total_seconds())),
            )
        )
    headings = ("search", "status", "trials", "best", "age")
    return headed_table(headings, whole=headings[1:], rows=rows)


def _title(record: SearchRecord) -> Text:
    status = Text(record.status.value, style=STATUS_STYLES[record.status])
    ended = sum(trial.has_ended for trial in record.trials)
    planned = "" if record.planned is None else f" of {record.planned:,}"
    return Text.assemble((record.name, "bold"), "  ", status, f"  {ended:,}{planned} trials")


def _facts(record: SearchRecord, left: float | None) -> list[str]:
    facts = []
    if record.best is not None:
        facts.append(f"best {_values(record, record.best)} (trial {record.best.number})")
    counts = record.counts
    facts += [f"{counts[status]:,} {status.value}" for status in TrialStatus if counts[status]]
    facts.append(plural(record.steps, "step"))
    if record.saved_steps:
        facts.append(f"{record.saved_steps:,} saved by stopping")
    if record.training_seconds:
        facts.append(f"{duration(record.training_seconds)} of training")
    if left is not None:
        facts.append(f"{duration(left)} left")
    return facts


def _values(record: SearchRecord, trial: TrialRecord) -> str:
    return ", ".join(f"{w.metric} {measure(value)}" for w, value in zip(record.objectives, trial.values, strict=True))


def _params(record: SearchRecord, trial: TrialRecord) -> str:
    return _listed({key: trial.params[key] for key in record.keys if key in trial.params})


def _listed(params: dict[str, Any]) -> str:
    return ", ".join(f"{key.removeprefix('params.')} {visible(measure(value))}" for key, value in params.items())

"""The report of a search: its best job first, then how the trials went and what made the difference."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.report.charts import Line, Plot
from quorate.history.report.layout import Block, Command, Report, Table, Words, as_html, as_markdown, at_minute
from quorate.history.report.page import job_tables
from quorate.history.run_detail import Advice
from quorate.history.run_record import Status
from quorate.observe.quantities import duration, measure, plural
from quorate.spec.resolved import ResolvedJob
from quorate.spec.yaml_document import write_value
from quorate.storage.atomic import write_atomically
from quorate.tune.findings import Importance, advise_on_search, importance_of, job_of_best, write_best_job
from quorate.tune.result import SearchResult
from quorate.tune.spec import DimensionSpec
from quorate.tune.trials import Trial, TrialStatus, params_in_words

MOST_LINES = 300
"""Of one chart: more cannot be told apart, and the best are among them."""
_STOPPED, _TRAINED = "#cccccc", "#888888"
NOTHING = "–"


def search_html(result: SearchResult, reference: str, now: datetime) -> str:
    """A search as HTML, with what to type next; `reference` names it on a command line."""
    report = _report(result, importance_of(result), job_of_best(result), advise_on_search(result, reference))
    return as_html(report, result.folder, now)


def search_markdown(result: SearchResult) -> str:
    """The same as Markdown."""
    return as_markdown(_report(result, importance_of(result), None, None))


def write_search_files(result: SearchResult, now: datetime) -> None:
    """Write what a search ends with into its folder: its best job, and its report as a page and as Markdown."""
    files = result.files
    write_best_job(result)
    write_atomically(files.report_page, search_html(result, str(result.folder), now))
    write_atomically(files.report_text, search_markdown(result))


def _report(result: SearchResult, importance: Importance, job: ResolvedJob | None, advice: Advice | None) -> Report:
    sections: tuple[tuple[str, Sequence[Block]], ...] = (
        ("Warnings", list(_warnings(result))),
        ("Best job", list(_best(result, job))),
        ("Learning curves", list(_learning_curves(result))),
        ("Pareto front", list(_front(result))),
        ("Parameters", list(_parameters(result))),
        ("Importance", list(_importance(importance)) if result.ranked else []),
        ("Lineage", list(_lineage(result))),
        ("Trials", [_trials(result)] if result.trials else []),
        ("Search", list(_search(result))),
    )
    task = str(result.keys_of_job.get("task", "")).rpartition("/")[2]
    about = (task, _how_it_searches(result), f"created {at_minute(result.created)}", result.reason)
    following: list[Block] = []
    if advice is not None and advice.command and result.status is not Status.COMPLETE:
        following = [Command(advice.command, advice.purpose)]
    return Report(
        result.search,
        result.status.value,
        " · ".join(filter(None, about)),
        list(_facts(result)),
        following,
        [(title, blocks) for title, blocks in sections if blocks],
    )


def _how_it_searches(result: SearchResult) -> str:
    if result.spec is None:
        return ""
    scheduler = result.spec.scheduler.kind
    return result.spec.algorithm.kind + ("" if scheduler == "none" else f" with {scheduler}")


def _facts(result: SearchResult) -> Iterator[tuple[str, str, str]]:
    best, counts = result.best, result.counts
    if best is not None:
        for watched, value in zip(result.objectives, best.values, strict=True):
            at = "" if best.best is None else f" at step {best.best.step:,}"
            yield f"best {watched.metric}", measure(value), f"trial {best.number}{at}"
    told = ", ".join(f"{counts[status]:,} {status.value}" for status in TrialStatus if counts[status])
    ended = result.ended
    planned = max(result.planned or 0, len(result.trials))
    yield "trials", f"{ended:,}" + (f" of {planned:,}" if planned > ended else ""), told
    saved = result.saved_steps
    share = f"stopping saved {saved / (saved + result.steps):.0%} of them" if saved else "of all trials"
    yield "steps", f"{result.steps:,}", share
    if result.training_seconds:
        yield "training time", duration(result.training_seconds), "of all trials"
    parts = f"in {result.resumed + 1} parts" if result.resumed else "from first to last"
    yield "took", duration(result.active_seconds), parts


def _warnings(result: SearchResult) -> Iterator[Block]:
    found = [("search", problem) for problem in result.problems]
    failed = [trial for trial in result.trials if trial.status is TrialStatus.FAILED]
    found += [(f"trial {trial.number}", f"failed: {trial.reason}") for trial in failed]
    gone = [trial.number for trial in result.trials if trial.run_name and not trial.has_run]
    if gone:
        found.append(("trials", f"the folders of {plural(len(gone), 'run')} are gone, such as that of trial {gone[0]}"))
    if found:
        yield Table(("where", "what"), found)


def _best(result: SearchResult, job: ResolvedJob | None) -> Iterator[Block]:
    best = result.best
    if best is None:
        if result.trials:
            yield Words("No trial has been evaluated yet.")
        return
    where = "" if best.best is None else f", evaluated at step {best.best.step:,} of {best.steps:,}"
    stopped = ""
    if best.status is not TrialStatus.FINISHED:
        stopped = f" It is {best.status.value}: {best.reason or 'it has not trained to its end'}."
    yield Words(f"Trial {best.number}: {result.values_in_words(best)}{where}.{stopped}")
    yield Words("\n".join(f"{key}: {write_value(value)}" for key, value in best.params.items()), "code")
    if result.best_job.is_file():
        yield Command(f"quorate train {result.best_job}", "trains it again, to the same bits")
    if best.weights_digest:
        yield Words(f"weights {best.weights_digest}")
    if job is not None:
        yield from job_tables(job)


def _learning_curves(result: SearchResult) -> Iterator[Block]:
    """The first metric of every trial over its steps: the best stands out, those that were stopped are pale."""
    best, ranked = result.best, list(result.ranked[:MOST_LINES])
    others = [trial for trial in result.trials if trial not in ranked][: MOST_LINES - len(ranked)]
    # The best is drawn on top of all others.
    shown = [trial for trial in (*others, *ranked[::-1]) if trial.curve]
    lines = [_line(trial, best, *zip(*trial.curve, strict=True)) for trial in shown]
    if lines:
        watched = result.objectives[0]
        note = "coloured: the best; pale: stopped early"
        points = [] if best is None or best.best is None else [("", best.best.step, best.best.value)]
        yield Plot(watched.metric, "step", lines, points, y_may_be_log=watched.mode == "min", note=note)


def _line(trial: Trial, best: Trial | None, xs: Sequence[float], ys: Sequence[float]) -> Line:
    if trial is best:
        return Line.of(f"trial {trial.number}", xs, ys)
    return Line.of("", xs, ys, colour=_STOPPED if trial.status is TrialStatus.STOPPED else _TRAINED)


def _parameters(result: SearchResult) -> Iterator[Block]:
    """Parallel coordinates: each trial is a line through its params and its first metric."""
    trials = [trial for trial in result.ranked[:MOST_LINES] if result.keys]
    if not trials:
        return
    columns = [_placed([trial.params.get(key) for trial in trials], result.space.get(key)) for key in result.keys]
    columns.append(_placed([trial.values[0] for trial in trials], None))
    labels = [*(key.removeprefix("params.") for key in result.keys), result.objectives[0].metric]
    # The best is the first, and is drawn on top of all others.
    rows = [*zip(trials, zip(*columns, strict=True), strict=True)][::-1]
    lines = [_line(trial, result.best, range(len(labels)), places) for trial, places in rows]
    yield Plot("Params and metric of each trial", "", lines, x_labels=labels)


def _placed(values: Sequence[Any], dimension: DimensionSpec | None) -> list[float]:
    """Values on an axis from 0 to 1: numbers by their size, logarithmic where the space is, others by their names."""
    if not all(is_number(value) for value in values):
        names = sorted({repr(value) for value in values})
        return [names.index(repr(value)) / max(1, len(names) - 1) for value in values]
    numbers = [math.log(value) if dimension is not None and dimension.is_log else float(value) for value in values]
    least, span = min(numbers), max(numbers) - min(numbers)
    return [(number - least) / span if span else 0.5 for number in numbers]


def _front(result: SearchResult) -> Iterator[Block]:
    if not result.front:
        return
    names = [watched.metric for watched in result.objectives]
    points = [(str(trial.number), *trial.values[:2]) for trial in result.front[:MOST_LINES]]
    yield Plot(f"{names[0]} and {names[1]} of the front", names[0], [], points)  # type: ignore[arg-type]
    rows = [(str(each.number), *map(measure, each.values), params_in_words(each.params)) for each in result.front]
    yield Table(("trial", *names, "params"), rows, range(len(names) + 1))
    yield Words("Each trial stands with all its metrics at the step at which the first of them is best.")


def _importance(importance: Importance) -> Iterator[Block]:
    if importance.missing:
        yield Words(f"Which keys matter is not known: {importance.missing}.")
        return
    yield Table(("key", "share"), [(key, f"{share:.0%}") for key, share in importance.shares.items()], (1,))
    yield Words(f"By {plural(importance.trials, 'trial')}: {importance.method}.")


def _lineage(result: SearchResult) -> Iterator[Block]:
    """Which trial continued from which, and the way to the best."""
    leaps = [
        (str(trial.number), str(part.donor), f"{part.from_step:,}")
        for trial in result.trials
        for part in trial.parts
        if part.donor is not None
    ]
    if not leaps:
        return
    if (best := result.best) is not None and best.lineage:
        begin, rows = 0, []
        for ancestor in best.lineage:
            rows.append((f"{begin:,}–{ancestor.until:,}", str(ancestor.trial), params_in_words(ancestor.params)))
            begin = ancestor.until
        rows.append((f"{begin:,}–{best.parts[-1].step:,}", str(best.number), params_in_words(best.params)))
        yield Words("The way to the best:")
        yield Table(("steps", "trial", "params"), rows)
    yield Table(("trial", "continues from trial", "at step"), leaps, (0, 1, 2))


def _trials(result: SearchResult) -> Table:
    """All trials, or as many as a page can hold: the best of them first."""
    metrics, keys = [watched.metric for watched in result.objectives], result.keys
    names = ["trial", *metrics, "at step", *(key.removeprefix("params.") for key in keys), "steps", "time", "status"]
    rows = [
        (
            str(trial.number),
            *(map(measure, trial.values) if trial in result.ranked else [NOTHING] * len(metrics)),
            NOTHING if trial.best is None else f"{trial.best.step:,}",
            *(measure(trial.params[key]) if key in trial.params else NOTHING for key in keys),
            f"{trial.steps:,}",
            duration(trial.seconds) if trial.seconds else NOTHING,
            trial.status.value,
            trial.reason,
        )
        for trial in result.in_order
    ]
    return Table((*names, "why"), rows, range(len(names) - 1))


def _search(result: SearchResult) -> Iterator[Block]:
    if result.spec is None:
        return
    space = (result.spec.space or {}).items()
    if rows := [(key, write_value(dimension.model_dump(exclude_none=True))) for key, dimension in space]:
        yield Table(("key", "space"), rows)
    fields = result.spec.model_dump(exclude={"space", "job", "name", "version"})
    others = [(key, write_value(value)) for key, value in fields.items()]
    yield Table(("key", "value"), others, folded="how it searched")

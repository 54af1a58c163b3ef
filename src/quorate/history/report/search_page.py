"""The whole page of a search: its best job first, then how the trials went and what made the difference."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version

from quorate.history.importance import Importance
from quorate.history.report import tables
from quorate.history.report.markup import Content, Html, document, section, tag
from quorate.history.report.search_charts import (
    curve_charts,
    lineage_chart,
    parallel_coordinates,
    pareto_chart,
    short_key,
)
from quorate.history.report.search_table import trial_table
from quorate.history.run_detail import Advice
from quorate.history.run_record import Status
from quorate.history.search_log import TrialStatus
from quorate.history.search_record import SearchRecord
from quorate.observe.quantities import duration, measure, plural
from quorate.spec.resolved import ResolvedJob
from quorate.spec.yaml_document import write_value


def search_page(
    record: SearchRecord, importance: Importance, best_job: ResolvedJob | None, advice: Advice | None, now: datetime
) -> str:
    """A search as HTML; `best_job` is that of its best trial, if there is one."""
    parts: tuple[tuple[str, Content], ...] = (
        ("Warnings", _warnings(record)),
        ("Best job", _best(record, best_job)),
        ("Learning curves", curve_charts(record)),
        ("Pareto front", _front(record)),
        ("Parameters", parallel_coordinates(record)),
        ("Importance", _importance(importance) if record.ranked else None),
        ("Lineage", _lineage(record)),
        ("Trials", trial_table(record) if record.trials else None),
        ("Search", _search(record)),
    )
    content: list[Content] = [_head(record, advice)]
    content += [section(title, inside) for title, inside in parts if inside]
    made = f"Made by quorate {version('quorate')} on {tables.at_minute(now)} from {record.folder.path.absolute()}"
    return document(f"{record.name} – {record.status.value}", content, made, ("style.css", "search.css"))


def how_it_searches(record: SearchRecord) -> str:
    """The algorithm, and the scheduler if there is one."""
    if record.spec is None:
        return ""
    scheduler = record.spec.scheduler.kind
    return record.spec.algorithm.kind + ("" if scheduler == "none" else f" with {scheduler}")


def _head(record: SearchRecord, advice: Advice | None) -> Html:
    task = str(record.job.get("task", "")).rpartition("/")[2]
    about = (task, how_it_searches(record), f"created {tables.at_minute(record.created)}")
    following = None
    if advice is not None and record.status is not Status.COMPLETE:
        command = [tag("code", advice.command), " "] if advice.command else []
        following = tag("p", "Next: ", command, advice.purpose, class_="next")
    tiles = [tag("div", tag("span", name), tag("b", value), tag("em", more)) for name, value, more in facts(record)]
    return tag(
        "header",
        tag("h1", record.name, " ", tag("span", record.status.value, class_=f"status {record.status.value}")),
        tag("p", " · ".join(each for each in about if each), class_="about"),
        tag("p", record.reason, class_="about") if record.reason else None,
        tag("div", tiles, class_="tiles"),
        following,
    )


def facts(record: SearchRecord) -> Iterator[tuple[str, str, str]]:
    """What somebody wants to know first: name, value, and what more there is to it."""
    best, counts = record.best, record.counts
    if best is not None:
        for watched, value in zip(record.objectives, best.values, strict=True):
            at = "" if best.best is None else f" at step {best.best.step:,}"
            yield f"best {watched.metric}", measure(value), f"trial {best.number}{at}"
    told = ", ".join(f"{counts[status]:,} {status.value}" for status in TrialStatus if counts[status])
    ended = sum(trial.has_ended for trial in record.trials)
    planned = max(record.planned or 0, len(record.trials))
    yield "trials", f"{ended:,}" + (f" of {planned:,}" if planned > ended else ""), told
    saved = record.saved_steps
    share = f"stopping saved {saved / (saved + record.steps):.0%} of them" if saved else "of all trials"
    yield "steps", f"{record.steps:,}", share
    if record.training_seconds:
        yield "training time", duration(record.training_seconds), "of all trials"
    parts = f"in {record.resumed + 1} parts" if record.resumed else "from first to last"
    yield "took", duration(record.active_seconds), parts


def _warnings(record: SearchRecord) -> Html | None:
    found: list[Sequence[Content]] = [("search", problem) for problem in record.problems]
    failed = [trial for trial in record.trials if trial.status is TrialStatus.FAILED]
    found += [(f"trial {trial.number}", f"failed: {trial.message}") for trial in failed]
    gone = [trial.number for trial in record.trials if trial.run and not trial.has_run]
    if gone:
        found.append(("trials", f"the folders of {plural(len(gone), 'run')} are gone, such as that of trial {gone[0]}"))
    return tables.table(("where", "what"), found) if found else None


def _best(record: SearchRecord, best_job: ResolvedJob | None) -> Html | None:
    best = record.best
    if best is None:
        return tag("p", "No trial has been evaluated yet.") if record.trials else None
    rows: list[Sequence[Content]] = [
        (tag("code", key), tag("code", write_value(value))) for key, value in best.params.items()
    ]
    where = "" if best.best is None else f", evaluated at step {best.best.step:,} of {best.steps:,}"
    stopped = ""
    if best.status is not TrialStatus.FINISHED:
        stopped = f" It is {best.status.value}: {best.why or 'it has not trained to its end'}."
    found = ", ".join(
        f"{watched.metric} {measure(value)}" for watched, value in zip(record.objectives, best.values, strict=True)
    )
    job_file = record.folder.best_job_file
    command = tag("p", tag("code", f"quorate train {job_file}"), " trains it again, to the same bits", class_="next")
    digest = tag("p", "weights ", tag("code", best.digest), class_="digest") if best.digest else None
    whole = None
    if best_job is not None:
        whole = tag("details", tag("summary", "the whole job"), tables.job(best_job))
    return tag(
        "div",
        tag("p", tag("b", f"Trial {best.number}: {found}"), f"{where}.{stopped}"),
        tables.table(("key", "value"), rows, is_flowing=True),
        command if job_file.is_file() else None,
        digest,
        whole,
    )


def _front(record: SearchRecord) -> Html | None:
    chart = pareto_chart(record)
    if chart is None:
        return None
    names = [watched.metric for watched in record.objectives]
    rows = [
        (str(trial.number), *(measure(value) for value in trial.values), params_in_words(trial.params))
        for trial in record.front
    ]
    numbers = frozenset(range(len(names) + 1))
    note = "Each trial stands with all its metrics at the step at which the first of them is best."
    return tag(
        "div",
        tag("div", chart, tables.table(("trial", *names, "params"), rows, numbers), class_="charts"),
        tag("p", note, class_="about"),
    )


def params_in_words(params: dict[str, object]) -> str:
    """Each key with its value, in one line."""
    return ", ".join(f"{short_key(key)} {measure(value)}" for key, value in params.items())


def _importance(importance: Importance) -> Html:
    if importance.missing:
        return tag("p", f"Which keys matter is not known: {importance.missing}.")
    greatest = max(importance.shares.values()) or 1.0
    rows = [
        (
            tag("code", key),
            f"{share:.0%}",
            tag("div", tag("i", style=f"width:{100 * share / greatest:.1f}%"), class_="share"),
        )
        for key, share in importance.shares.items()
    ]
    note = f"By {plural(importance.trials, 'trial')}: {importance.method}."
    return tag("div", tables.table(("key", "share", ""), rows, frozenset({1})), tag("p", note, class_="about"))


def _lineage(record: SearchRecord) -> Html | None:
    chart = lineage_chart(record)
    if chart is None:
        return None
    best = record.best
    rows: list[Sequence[Content]] = []
    if best is not None:
        begin = 0
        for ancestor in best.lineage:
            rows.append((f"{begin:,}–{ancestor.until:,}", str(ancestor.trial), params_in_words(ancestor.params)))
            begin = ancestor.until
        rows.append((f"{begin:,}–{best.parts[-1].step:,}", str(best.number), params_in_words(best.params)))
    way = tables.table(("steps", "trial", "params"), rows) if rows else None
    return tag("div", chart, tag("p", tag("b", "The way to the best")) if rows else None, way)


def _search(record: SearchRecord) -> Html | None:
    if record.spec is None:
        return None
    rows: list[Sequence[Content]] = []
    for key, dimension in (record.spec.space or {}).items():
        said = dimension.model_dump(exclude_none=True)
        rows.append((tag("code", key), tag("code", write_value(said))))
    fields = record.spec.model_dump(exclude={"space", "job", "name", "version"})
    others = [(tag("code", key), tag("code", write_value(value))) for key, value in fields.items()]
    return tag(
        "div",
        tables.table(("key", "space"), rows, is_flowing=True) if rows else None,
        tag("details", tag("summary", "how it searched"), tables.table(("key", "value"), others, is_flowing=True)),
    )

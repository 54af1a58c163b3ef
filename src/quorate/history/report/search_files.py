"""The files that a search ends with: its best job, and its report as a page and as Markdown."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from quorate.history.best_job import advise_on_search, best_job, write_best_job
from quorate.history.importance import Importance, importance_of
from quorate.history.report.search_page import facts, how_it_searches, params_in_words, search_page
from quorate.history.report.search_table import columns_of
from quorate.history.search_record import SearchRecord
from quorate.observe.quantities import measure
from quorate.spec.yaml_document import write_value
from quorate.storage.atomic import write_atomically

MOST_ROWS = 100
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")


def search_markdown(record: SearchRecord, importance: Importance) -> str:
    """A search for a pull request or a notebook: the figures of its page without the drawings."""
    return "\n".join([*_lines(record, importance), ""])


def page_of(record: SearchRecord, reference: str, now: datetime) -> str:
    """A search as HTML, with what to type next; `reference` names it on a command line."""
    return search_page(record, importance_of(record), best_job(record), advise_on_search(record, reference), now)


def write_search_files(record: SearchRecord, now: datetime) -> None:
    """Write all of them into the folder of the search."""
    folder, importance = record.folder, importance_of(record)
    job = write_best_job(record)
    advice = advise_on_search(record, str(folder.path))
    write_atomically(folder.report_page, search_page(record, importance, job, advice, now))
    write_atomically(folder.report_text, search_markdown(record, importance))


def plain(text: str) -> str:
    """A text as it is, in one line: nothing in it is markup, or ends a cell."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _lines(record: SearchRecord, importance: Importance) -> Iterator[str]:
    yield f"# {plain(record.name)}"
    yield ""
    task = str(record.job.get("task", "")).rpartition("/")[2]
    said = [record.status.value, how_it_searches(record), task, record.reason]
    yield plain(", ".join(each for each in said if each)) + "."
    yield ""
    yield from _table(("", "", ""), [(name, f"**{plain(value)}**", plain(more)) for name, value, more in facts(record)])
    yield from _best(record)
    if len(record.objectives) > 1 and record.ranked:
        yield from ("## Pareto front", "")
        names = [watched.metric for watched in record.objectives]
        rows = [
            (str(trial.number), *map(measure, trial.values), plain(params_in_words(trial.params)))
            for trial in record.front
        ]
        yield from _table(("trial", *map(plain, names), "params"), rows)
    yield from _importance(record, importance)
    yield from _lineage(record)
    if record.trials:
        yield from ("## Trials", "")
        yield from _trials(record)
    if record.problems:
        yield from ("## Warnings", "")
        yield from (f"- {plain(problem)}" for problem in record.problems)
        yield ""


def _best(record: SearchRecord) -> Iterator[str]:
    best = record.best
    if best is None:
        return
    yield from (f"## Best job: trial {best.number}", "", "```yaml")
    yield from (f"{key}: {write_value(value)}" for key, value in best.params.items())
    yield from ("```", "")
    if record.folder.best_job_file.is_file():
        yield from (f"`quorate train {record.folder.best_job_file.name}` trains it again, to the same bits.", "")
    if best.digest:
        yield from (f"Weights: `{best.digest}`", "")


def _importance(record: SearchRecord, importance: Importance) -> Iterator[str]:
    if not record.ranked:
        return
    yield from ("## Importance", "")
    if importance.missing:
        yield from (f"Which keys matter is not known: {importance.missing}.", "")
        return
    yield from _table(("key", "share"), [(f"`{key}`", f"{share:.0%}") for key, share in importance.shares.items()])
    yield from (f"By {importance.trials:,} trials: {importance.method}.", "")


def _lineage(record: SearchRecord) -> Iterator[str]:
    best = record.best
    if best is None or not best.lineage:
        return
    yield from ("## Lineage of the best", "")
    begin, rows = 0, []
    for ancestor in best.lineage:
        rows.append((f"{begin:,}–{ancestor.until:,}", str(ancestor.trial), plain(params_in_words(ancestor.params))))
        begin = ancestor.until
    rows.append((f"{begin:,}–{best.parts[-1].step:,}", str(best.number), plain(params_in_words(best.params))))
    yield from _table(("steps", "trial", "params"), rows)


def _trials(record: SearchRecord) -> Iterator[str]:
    columns = list(columns_of(record))
    ranked = {trial.number for trial in record.ranked}
    trials = [*record.ranked, *(trial for trial in record.trials if trial.number not in ranked)]
    rows = [(*(plain(str(column.cell(trial))) for column in columns), plain(trial.why)) for trial in trials[:MOST_ROWS]]
    yield from _table((*(plain(column.name) for column in columns), "why"), rows)
    if len(trials) > MOST_ROWS:
        yield from (f"and {len(trials) - MOST_ROWS:,} more", "")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""

"""The trials of a search as a table that can be sorted without a script: each row knows its place in every order, and
the style sheet puts it there, by which of the headings is chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.history.report.markup import Content, Html, tag
from quorate.history.report.search_charts import short_key
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.quantities import duration, measure

MOST_ROWS = 500
NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A heading, what stands below it, and by what it is sorted; None stands last."""

    name: str
    cell: Callable[[TrialRecord], Content]
    key: Callable[[TrialRecord], Any]
    is_number: bool = True


def columns_of(record: SearchRecord) -> Iterator[Column]:
    """The metrics first: by them it is sorted where nobody has asked for anything else."""
    ranks = {trial.number: trial.rank(record.objectives) for trial in record.ranked}

    def of_metric(at: int, name: str, mode: str) -> Column:
        def value(trial: TrialRecord) -> float | None:
            return trial.values[at] if trial.number in ranks else None

        def key(trial: TrialRecord) -> Any:
            if trial.number not in ranks:
                return None
            return ranks[trial.number] if at == 0 else (trial.values[at] if mode == "min" else -trial.values[at])

        return Column(name, lambda trial: NOTHING if value(trial) is None else measure(value(trial)), key)

    def of_param(key: str) -> Column:
        held = [trial.params.get(key) for trial in record.trials]
        numbers = all(each is None or is_number(each) for each in held)

        def sort_key(trial: TrialRecord) -> Any:
            value = trial.params.get(key)
            return value if numbers or value is None else str(value)

        return Column(
            short_key(key),
            lambda trial: measure(trial.params[key]) if key in trial.params else NOTHING,
            sort_key,
            numbers,
        )

    yield Column("trial", lambda trial: str(trial.number), lambda trial: trial.number)
    for at, watched in enumerate(record.objectives):
        yield of_metric(at, watched.metric, watched.mode)
    yield Column(
        "at step",
        lambda trial: NOTHING if trial.best is None else f"{trial.best.step:,}",
        lambda trial: None if trial.best is None else trial.best.step,
    )
    for key in record.keys:
        yield of_param(key)
    yield Column("steps", lambda trial: f"{trial.steps:,}", lambda trial: -trial.steps)
    yield Column(
        "time",
        lambda trial: duration(trial.seconds) if trial.seconds else NOTHING,
        lambda trial: -trial.seconds if trial.seconds else None,
    )
    statuses = {status: place for place, status in enumerate({trial.status: None for trial in record.trials})}
    yield Column(
        "status", lambda trial: trial.status.value, lambda trial: (statuses[trial.status], trial.number), False
    )


def trial_table(record: SearchRecord) -> Html:
    """All trials, or as many as a page can hold: the best of them."""
    columns = list(columns_of(record))
    ranked = {trial.number for trial in record.ranked}
    trials = [*record.ranked, *(trial for trial in record.trials if trial.number not in ranked)]
    shown, left = trials[:MOST_ROWS], len(trials) - MOST_ROWS
    orders = [_order(shown, column.key) for column in columns]
    name = "sort"
    rules = [
        f".trials:has(#{name}-{at}:checked) tbody tr{{order:var(--o{at})}}"
        f".trials:has(#{name}-{at}:checked) th:nth-child({at + 1}){{color:var(--ink);font-weight:700}}"
        for at in range(len(columns))
    ]
    heads = [
        tag(
            "th",
            tag(
                "label",
                Html(f'<input type="radio" name="{name}" id="{name}-{at}"{" checked" if at == 1 else ""}>'),
                column.name,
            ),
            class_="number" if column.is_number else None,
        )
        for at, column in enumerate(columns)
    ]
    best = record.best
    rows = [_row(trial, columns, [order[trial.number] for order in orders], trial is best) for trial in shown]
    table = tag(
        "table",
        tag("thead", tag("tr", heads, tag("th", "why"))),
        tag("tbody", rows),
        style=f"--columns:{len(columns)}",
    )
    more = tag("p", f"and {left:,} more; quorate show --json has all", class_="more") if left > 0 else None
    hint = tag("p", "A heading sorts by its column.", class_="about")
    return tag("div", tag("style", Html("".join(rules))), hint, tag("div", table, class_="table trials"), more)


def _row(trial: TrialRecord, columns: Sequence[Column], places: Sequence[int], is_best: bool) -> Html:
    cells = [tag("td", column.cell(trial), class_="number" if column.is_number else None) for column in columns]
    return tag(
        "tr",
        cells,
        tag("td", trial.why),
        class_=" ".join(["best-row" if is_best else "", trial.status.value]).strip(),
        style=";".join(f"--o{at}:{place}" for at, place in enumerate(places)),
    )


def _order(trials: Sequence[TrialRecord], key: Callable[[TrialRecord], Any]) -> dict[int, int]:
    """The place of each; those without a value last."""
    known = [trial for trial in trials if key(trial) is not None]
    missing = [trial for trial in trials if key(trial) is None]
    known.sort(key=lambda trial: (key(trial), trial.number))
    return {trial.number: place for place, trial in enumerate([*known, *missing])}

"""A run's ledger, as a page for people and as a document for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quorate.cli.page import Page
from quorate.data.indices import Ranges, count_in
from quorate.history.ledger import EpochEntry, EpochStatus, Ledger

EPOCHS_SHOWN = 20
LISTED = 8
NONE = "-"
_STYLES = {EpochStatus.WHOLE: "green", EpochStatus.INCOMPLETE: "yellow", EpochStatus.BROKEN: "red"}


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """All of it."""
    return {
        "whole": ledger.is_whole,
        "verdict": ledger.verdict,
        "samples": ledger.samples,
        "steps_told_again": ledger.told_again,
        "not_compared": ledger.unplanned or None,
        "validation_bad_samples": ledger.evaluated_bad_samples,
        "validation_bad": [list(each) for each in ledger.evaluated_bad],
        "epochs": [
            {
                **asdict(entry),
                "dropped": list(entry.dropped),
                "skipped_steps": list(entry.skipped_steps),
                "bad_samples": entry.bad_samples,
                "bad": [list(each) for each in entry.bad],
                "status": entry.status.value,
                "reason": entry.reason or None,
            }
            for entry in ledger.epochs
        ],
    }


def print_ledger(page: Page, run: str, ledger: Ledger) -> None:
    """Print its epochs, those that depart in any case, and the verdict."""
    word, style = ("whole", "green") if ledger.is_whole else ("broken", "red")
    page.title(Text.assemble((run, "bold"), "  ledger ", (word, style)))
    if ledger.epochs:
        shown = _shown(ledger)
        page.table(_table(shown))
        left_out = len(ledger.epochs) - len(shown)
        if left_out:
            page.line(f"{left_out:,} earlier epochs, none of them broken; --json has all")
    if ledger.told_again:
        again = "1 step was" if ledger.told_again == 1 else f"{ledger.told_again:,} steps were"
        page.line(f"{again} told again, after going on from a checkpoint; each counts once.")
    page.line(ledger.verdict)
    for place in ledger.bad_places[:LISTED]:
        page.line(f"  {place.in_words}")
    if len(ledger.bad_places) > LISTED:
        page.line("  and more")


def _shown(ledger: Ledger) -> list[EpochEntry]:
    earlier = ledger.epochs[:-EPOCHS_SHOWN]
    return [*(entry for entry in earlier if entry.status is EpochStatus.BROKEN), *ledger.epochs[-EPOCHS_SHOWN:]]


def _table(entries: list[EpochEntry]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("epoch", "steps", "samples", "status"):
        table.add_column(heading, no_wrap=True)
    table.add_column("dropped", overflow="fold")
    skips = any(entry.skipped_steps for entry in entries)
    if skips:
        table.add_column("skipped steps", overflow="fold")
    has_bad = any(entry.bad for entry in entries)
    if has_bad:
        table.add_column("bad samples", overflow="fold")
    for entry in entries:
        table.add_row(
            f"{entry.epoch:,}",
            f"{entry.first_step:,}-{entry.last_step:,}",
            f"{entry.samples:,}",
            Text(entry.status.value, style=_STYLES[entry.status]),
            _listed(entry.dropped),
            *([_listed(entry.skipped_steps)] if skips else []),
            *([_listed_ranges(entry.bad)] if has_bad else []),
        )
    return table


def _listed_ranges(ranges: Ranges) -> str:
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:LISTED]) or NONE
    more = count_in(ranges[LISTED:])
    return f"{listed} and {more:,} more" if more else listed


def _listed(numbers: tuple[int, ...]) -> str:
    more = len(numbers) - LISTED
    listed = ", ".join(map(str, numbers[:LISTED])) or NONE
    return f"{listed} and {more:,} more" if more > 0 else listed

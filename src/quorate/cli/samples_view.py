"""Which samples a run has used, epoch by epoch, and how far it is in its shards."""

from typing import Any

from rich.table import Table
from rich.text import Text

from quorate.cli.layout import Page, headed_table
from quorate.cli.output import NONE
from quorate.data.block_sampler import ReadCounts
from quorate.data.indices import Ranges, count_in
from quorate.history.ledger import EpochEntry, EpochStatus, Ledger, read_ledger
from quorate.history.streaming import DataProgress, read_data_progress, shown_place
from quorate.storage.run_folder import RunFolder

EPOCHS_SHOWN = 20
LISTED = 8
_STYLES = {EpochStatus.WHOLE: "green", EpochStatus.INCOMPLETE: "yellow", EpochStatus.BROKEN: "red"}


def show_samples(folder: RunFolder, with_data: bool, with_ledger: bool, as_json: bool) -> tuple[dict[str, Any], int]:
    """What a run has done with its samples: printed, or as parts of its document; and the exit code."""
    document: dict[str, Any] = {}
    page, code = Page(), 0
    if with_data:
        progress = read_data_progress(folder)
        document["data"] = progress.document()
        if not as_json:
            print_data(page, folder.name, progress)
    if with_ledger:
        ledger = read_ledger(folder)
        document["ledger"] = ledger.document()
        code = 0 if ledger.is_whole else 1
        if not as_json:
            print_ledger(page, folder.name, ledger)
    return document, code


def print_ledger(page: Page, run: str, ledger: Ledger) -> None:
    """Print its epochs, those that depart in any case, and the verdict."""
    word, style = ("whole", "green") if ledger.is_whole else ("broken", "red")
    page.title(Text.assemble((run, "bold"), "  ledger ", (word, style)))
    if ledger.epochs:
        earlier = [entry for entry in ledger.epochs[:-EPOCHS_SHOWN] if entry.status is EpochStatus.BROKEN]
        shown = [*earlier, *ledger.epochs[-EPOCHS_SHOWN:]]
        page.table(_ledger_table(shown))
        left_out = len(ledger.epochs) - len(shown)
        if left_out:
            page.line(f"{left_out:,} earlier epochs, none of them broken; --json has all")
    if ledger.told_again:
        again = "1 step was" if ledger.told_again == 1 else f"{ledger.told_again:,} steps were"
        page.line(f"{again} repeated after resuming from a checkpoint; each counts once.")
    page.line(ledger.verdict)
    for place in ledger.bad_places[:LISTED]:
        page.line(f"  {place.in_words}")
    if len(ledger.bad_places) > LISTED:
        page.line("  and more")


def _ledger_table(entries: list[EpochEntry]) -> Table:
    skips, has_bad = any(entry.skipped_steps for entry in entries), any(entry.bad for entry in entries)
    whole = ("epoch", "steps", "samples", "status")
    more = [*(["skipped steps"] if skips else []), *(["bad samples"] if has_bad else [])]
    table = headed_table([*whole, "dropped", *more], whole)
    for entry in entries:
        table.add_row(
            f"{entry.epoch:,}",
            f"{entry.first_step:,}-{entry.last_step:,}",
            f"{entry.samples:,}",
            Text(entry.status.value, style=_STYLES[entry.status]),
            _listed(tuple((sample, sample) for sample in entry.dropped)),
            *([_listed(tuple((step, step) for step in entry.skipped_steps))] if skips else []),
            *([_listed(entry.bad)] if has_bad else []),
        )
    return table


def _listed(ranges: Ranges) -> str:
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:LISTED]) or NONE
    more = count_in(ranges[LISTED:])
    return f"{listed} and {more:,} more" if more else listed


def print_data(page: Page, run: str, progress: DataProgress) -> None:
    """Print what each lane reads, and how much of all is done."""
    sharding = progress.sharding
    page.title(Text.assemble((run, "bold"), f"  data after step {sharding.step:,}, in epoch {sharding.epoch:,}"))
    headings = ("lane", "worker", "shard", "block", "blocks done", "samples done")
    table = headed_table(headings, [heading for heading in headings if heading != "shard"])
    for lane in sharding.lanes:
        more = f" and {lane.open_blocks - 1:,} more" if lane.open_blocks > 1 else ""
        table.add_row(
            str(lane.lane),
            NONE if lane.worker is None else str(lane.worker),
            Text(progress.shard_of(lane) or NONE),
            NONE if lane.block is None else f"{lane.block:,}" + more,
            f"{lane.blocks_done:,} of {lane.blocks_done + lane.blocks_left:,}",
            f"{lane.samples_done:,} of {lane.samples_done + lane.samples_left:,}",
        )
    page.table(table)
    page.row("samples", f"{sharding.samples_done:,} read in this epoch, {sharding.samples_left:,} left")
    page.row("shards", _standing(sharding.shards))
    page.row("blocks", _standing(sharding.blocks))
    page.whole("index", shown_place(progress.data.index or ""))


def _standing(standing: ReadCounts) -> str:
    left_out = f", {standing.left_out:,} left out of this epoch" if standing.left_out else ""
    parts = f"{standing.done:,} done, {standing.in_progress:,} in progress, {standing.untouched:,} untouched"
    return f"{parts}{left_out}; {standing.total:,} in all"

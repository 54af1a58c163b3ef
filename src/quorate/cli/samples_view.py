"""Which samples a run has used, epoch by epoch, and how far it is in its shards."""

from rich.table import Table
from rich.text import Text

from quorate.cli.layout import NONE, Page, headed_table
from quorate.data.indices import Ranges, count_in
from quorate.data.sharding import LaneReading, ReadCounts
from quorate.history.ledger import EpochEntry, EpochStatus, Ledger
from quorate.history.streaming import DataProgress, shown_place

EPOCHS_SHOWN = 20
LISTED = 8
_STYLES = {EpochStatus.WHOLE: "green", EpochStatus.INCOMPLETE: "yellow", EpochStatus.BROKEN: "red"}


def print_ledger(page: Page, run: str, ledger: Ledger) -> None:
    """Print its epochs, those that depart in any case, and the verdict."""
    word, style = ("whole", "green") if ledger.is_whole else ("broken", "red")
    page.title(Text.assemble((run, "bold"), "  ledger ", (word, style)))
    if ledger.epochs:
        shown = _shown(ledger)
        page.table(_ledger_table(shown))
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


def print_data(page: Page, run: str, progress: DataProgress) -> None:
    """Print what each lane reads, and how much of all is done."""
    sharding = progress.sharding
    page.title(Text.assemble((run, "bold"), f"  data after step {sharding.step:,}, in epoch {sharding.epoch:,}"))
    page.table(_data_table(progress))
    page.row("samples", f"{sharding.samples_done:,} read in this epoch, {sharding.samples_left:,} left")
    page.row("shards", _standing(sharding.shards))
    page.row("blocks", _standing(sharding.blocks))
    page.whole("index", shown_place(progress.data.index or ""))


def _data_table(progress: DataProgress) -> Table:
    headings = ("lane", "worker", "shard", "block", "blocks done", "samples done")
    table = headed_table(headings, [heading for heading in headings if heading != "shard"])
    for lane in progress.sharding.lanes:
        table.add_row(
            str(lane.lane),
            NONE if lane.worker is None else str(lane.worker),
            Text(progress.shard_of(lane) or NONE),
            _block(lane),
            f"{lane.blocks_done:,} of {lane.blocks_done + lane.blocks_left:,}",
            f"{lane.samples_done:,} of {lane.samples_done + lane.samples_left:,}",
        )
    return table


def _block(lane: LaneReading) -> str:
    if lane.block is None:
        return NONE
    return f"{lane.block:,}" + (f" and {lane.open_blocks - 1:,} more" if lane.open_blocks > 1 else "")


def _standing(standing: ReadCounts) -> str:
    left_out = f", {standing.left_out:,} left out of this epoch" if standing.left_out else ""
    parts = f"{standing.done:,} done, {standing.in_progress:,} in progress, {standing.untouched:,} untouched"
    return f"{parts}{left_out}; {standing.total:,} in all"

"""Where a run stands in its shards, as a page for people and as a document for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quorate.cli.page import Page
from quorate.cli.shards_value import shown_file
from quorate.data.sharding import LaneReading, ReadCounts
from quorate.history.streaming import DataProgress

NONE = "-"


def data_document(progress: DataProgress) -> dict[str, Any]:
    """All of it."""
    sharding, streaming = progress.sharding, progress.streaming
    return {
        "index": shown_file(streaming.index),
        "index_digest": streaming.digest,
        "window": streaming.window,
        "step": sharding.step,
        "epoch": sharding.epoch,
        "samples_done": sharding.samples_done,
        "samples_left": sharding.samples_left,
        "shards": asdict(sharding.shards),
        "blocks": asdict(sharding.blocks),
        "lanes": [asdict(lane) | {"shard": _name(progress, lane)} for lane in sharding.lanes],
    }


def print_data(page: Page, run: str, progress: DataProgress) -> None:
    """Print what each lane reads, and how much of all is done."""
    sharding = progress.sharding
    page.title(Text.assemble((run, "bold"), f"  data after step {sharding.step:,}, in epoch {sharding.epoch:,}"))
    page.table(_table(progress))
    page.row("samples", f"{sharding.samples_done:,} read in this epoch, {sharding.samples_left:,} left")
    page.row("shards", _standing(sharding.shards))
    page.row("blocks", _standing(sharding.blocks))
    page.whole("index", shown_file(progress.streaming.index))


def _table(progress: DataProgress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("lane", "worker"):
        table.add_column(heading, no_wrap=True)
    table.add_column("shard", overflow="fold")
    for heading in ("block", "blocks done", "samples done"):
        table.add_column(heading, no_wrap=True)
    for lane in progress.sharding.lanes:
        table.add_row(
            str(lane.lane),
            NONE if lane.worker is None else str(lane.worker),
            Text(_name(progress, lane) or NONE),
            _block(lane),
            f"{lane.blocks_done:,} of {lane.blocks_done + lane.blocks_left:,}",
            f"{lane.samples_done:,} of {lane.samples_done + lane.samples_left:,}",
        )
    return table


def _name(progress: DataProgress, lane: LaneReading) -> str | None:
    return None if lane.shard is None else progress.names[lane.shard]


def _block(lane: LaneReading) -> str:
    if lane.block is None:
        return NONE
    return f"{lane.block:,}" + (f" and {lane.open_blocks - 1:,} more" if lane.open_blocks > 1 else "")


def _standing(standing: ReadCounts) -> str:
    left_out = f", {standing.left_out:,} left out of this epoch" if standing.left_out else ""
    parts = f"{standing.done:,} done, {standing.in_progress:,} in progress, {standing.untouched:,} untouched"
    return f"{parts}{left_out}; {standing.total:,} in all"

"""Data in shards, for people."""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rich.text import Text

from quorate.api.data import LARGE_BLOCK, Indexed, Spread, Stats, Verified
from quorate.api.preview import WHOLE, Previewed, short_fields
from quorate.cli.layout import NONE, Page, headed_table
from quorate.data.shards.index import ShardIndex
from quorate.history.streaming import shown_place
from quorate.observe.quantities import duration, size

MOST_FLAWS = 50
_EVERY = 0.2


class Counter:
    """A line on the terminal that counts shards while they are read, and is gone afterwards."""

    def __init__(self, word: str, as_json: bool) -> None:
        self._word = word
        self._is_shown = sys.stderr.isatty() and not as_json
        self._last = monotonic()
        self._width = 0

    def show(self, done: int, total: int) -> None:
        """So many are done, of so many."""
        if self._is_shown and monotonic() - self._last >= _EVERY:
            self._last = monotonic()
            self._write(f"{self._word} {done:,} of {total:,} shards")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text.ljust(self._width)}")
        sys.stderr.flush()
        self._width = len(text)


def print_indexed(page: Page, done: Indexed) -> None:
    """What was indexed, and where the index is."""
    index = done.index
    page.line(f"{_counted(index)}, {size(int(index.sizes.sum()))}, in {duration(done.seconds)}.")
    page.whole("index", shown_place(done.file))
    page.whole("digest", index.digest)
    largest = 0 if index.kind == "hdf5" else int(index.length.max())
    if largest > LARGE_BLOCK:
        page.line(
            f"The largest block has {size(largest)}, and a block is read at once: shards with smaller "
            f"{'row groups' if index.kind == 'parquet' else 'records'} need less memory."
        )


def print_verified(page: Page, done: Verified) -> None:
    """Whether all is as it was indexed, or what is not."""
    if not done.flaws:
        page.line(f"{_counted(done.index)}: all are as they were indexed.")
        return
    for flaw in done.flaws[:MOST_FLAWS]:
        place = f", {flaw.place}" if flaw.place else ""
        page.line(f"{flaw.file}{place}: {flaw.problem}")
    if len(done.flaws) > MOST_FLAWS:
        page.line(f"… and {len(done.flaws) - MOST_FLAWS:,} more, which --json lists.")
    if done.damaged_shards:
        page.line(
            f"{done.damaged_shards:,} of {len(done.index.shards):,} shards are not as they were indexed; "
            f"{done.damaged_records:,} of {len(done.index):,} records cannot be read."
        )
    else:
        page.line(f"{_counted(done.index)}: all are as they were indexed.")
    if done.new_shards:
        page.line(
            f"{done.new_shards:,} new, not in the index: `quorate data index PATH --force` lists what there is now."
        )


def print_stats(page: Page, found: Stats) -> None:
    """Counts, sizes and the schema."""
    index = found.index
    page.title(Text(_counted(index), style="bold"))
    page.whole("place", shown_place(index.place))
    page.row("size", size(found.bytes))
    page.row("shards", f"{_sizes(found.shard_bytes)}; {_numbers(found.shard_records)} records")
    in_bytes = "" if found.block_bytes is None else f"{_sizes(found.block_bytes)}; "
    page.row("blocks", f"{in_bytes}{_numbers(found.block_records)} records")
    page.whole("digest", index.digest)
    if index.schema:
        page.section("fields")
        page.columns([(name or WHOLE, kind) for name, kind in index.schema.items()])


def print_preview(page: Page, index: ShardIndex, found: Sequence[Previewed], sheet: Path | None, pictures: int) -> None:
    """Some records as a table, and below it what is wrong with those that are bad."""
    rows = [{} if each.bad else short_fields(each.record) for each in found]
    names = list(dict.fromkeys(name for row in rows for name in row)) or [WHOLE]
    table = headed_table(("sample", "file", "row", *names))
    for each, row in zip(found, rows, strict=True):
        cells = [Text("bad", style="red")] if each.bad else [Text(row.get(name, NONE)) for name in names]
        table.add_row(Text(str(each.sample)), Text(each.file), Text(str(each.row)), *cells)
    page.table(table)
    for why, group in groupby(found, key=lambda each: each.bad):
        if why:
            alike = [each.sample for each in group]
            which = f"sample {alike[0]}" if len(alike) == 1 else f"samples {alike[0]} to {alike[-1]}"
            page.line(f"{which}: {why}")
    bad = sum(bool(each.bad) for each in found)
    page.line(f"{len(found):,} of {len(index):,} records{f', {bad:,} of them bad' if bad else ''}.")
    if sheet is not None:
        page.line(f"{sheet}: {pictures} pictures.")


def _counted(index: ShardIndex) -> str:
    shards, blocks = len(index.shards), index.blocks
    return (
        f"{shards:,} {index.kind} shard{'s' * (shards != 1)} with {len(index):,} record{'s' * (len(index) != 1)} in "
        f"{blocks:,} block{'s' * (blocks != 1)}"
    )


def _sizes(spread: Spread) -> str:
    if spread.least == spread.most:
        return f"{size(spread.most)} each"
    return f"{size(spread.least)} to {size(spread.most)}, half of them up to {size(spread.median)}"


def _numbers(spread: Spread) -> str:
    if spread.least == spread.most:
        return f"{spread.most:,}"
    return f"{spread.least:,} to {spread.most:,}"

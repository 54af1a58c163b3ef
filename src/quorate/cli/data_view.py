"""What is done with data in shards, and how it is shown."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rich.progress import Progress, TextColumn
from rich.text import Text

from quorate.api.data import LARGE_BLOCK, Spread, data_stats, index_data, verify_data
from quorate.api.documents import index_document, preview_document, stats_document, verified_data_document
from quorate.api.preview import (
    WHOLE,
    Previewed,
    pictures_among,
    preview_data,
    refuse_no_picture_file,
    short_fields,
    write_contact_sheet,
)
from quorate.cli.layout import Page, headed_table
from quorate.cli.output import NONE, print_document
from quorate.core.errors import RequestError
from quorate.history.streaming import shown_place
from quorate.observe.quantities import duration, plural, size
from quorate.observe.screen import Screen
from quorate.shards.index import ShardIndex

MOST_FLAWS = 50


@contextmanager
def counting(word: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """A line on the terminal that counts shards while they are read, and is gone afterwards."""
    screen = Screen(sys.stderr)
    line = TextColumn(f"{word} {{task.completed:,}} of {{task.total:,}} shards", style="none")
    is_hidden = as_json or not screen.is_terminal
    with Progress(line, console=screen, transient=True, disable=is_hidden, redirect_stdout=False) as progress:
        task = progress.add_task(word, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def show_index(path: str, output: str | None, force: bool, as_json: bool) -> None:
    """Index shards, and print what there is and where the index is."""
    with counting("indexed", as_json) as progress:
        done = index_data(path, output, force=force, progress=progress)
    if as_json:
        print_document(index_document(done))
        return
    page, index = Page(), done.index
    page.line(f"{_counted(index)}, {size(int(index.sizes.sum()))}, in {duration(done.seconds)}.")
    page.whole("index", shown_place(done.file))
    page.whole("digest", index.digest)
    largest = 0 if index.kind == "hdf5" else int(index.length.max())
    if largest > LARGE_BLOCK:
        page.line(
            f"The largest block has {size(largest)}, and a block is read at once: shards with smaller "
            f"{'row groups' if index.kind == 'parquet' else 'records'} need less memory."
        )


def show_verified(path: str, as_json: bool) -> bool:
    """Compare shards with their index and print what is not as it was; whether all is."""
    with counting("verified", as_json) as progress:
        done = verify_data(path, progress)
    if as_json:
        print_document(verified_data_document(done))
        return not done.flaws
    page = Page()
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
    return not done.flaws


def show_stats(path: str, as_json: bool) -> None:
    """Print counts, sizes and the schema."""
    found = data_stats(path)
    if as_json:
        print_document(stats_document(found))
        return
    page, index = Page(), found.index
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


def show_preview(path: str, records: int, first: int, sheet: Path | None, as_json: bool) -> None:
    """Print some records, and write their pictures into a file if one is given."""
    if sheet is not None:
        refuse_no_picture_file(sheet)
    index, found = preview_data(path, records, first)
    pictures = pictures_among([each.record for each in found]) if sheet is not None else []
    if sheet is not None:
        if not pictures:
            raise RequestError(
                f"none of these {len(found)} records has a picture (png, jpeg, gif, bmp, webp, or an array of the "
                "shape of one). --records N looks at more of them, --from N at others."
            )
        write_contact_sheet(sheet, pictures)
    if as_json:
        print_document(preview_document(index, found, sheet, len(pictures)))
        return
    page = Page()
    _print_records(page, found)
    bad = sum(bool(each.bad) for each in found)
    page.line(f"{len(found):,} of {len(index):,} records{f', {bad:,} of them bad' if bad else ''}.")
    if sheet is not None:
        page.line(f"{sheet}: {len(pictures)} pictures.")


def _print_records(page: Page, found: Sequence[Previewed]) -> None:
    """A table, and below it what is wrong with those that are bad."""
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


def _counted(index: ShardIndex) -> str:
    shards = plural(len(index.shards), f"{index.kind} shard")
    return f"{shards} with {plural(len(index), 'record')} in {plural(index.blocks, 'block')}"


def _sizes(spread: Spread) -> str:
    if spread.min == spread.max:
        return f"{size(spread.max)} each"
    return f"{size(spread.min)} to {size(spread.max)}, half of them up to {size(spread.median)}"


def _numbers(spread: Spread) -> str:
    if spread.min == spread.max:
        return f"{spread.max:,}"
    return f"{spread.min:,} to {spread.max:,}"

"""`quorate data`: one verb for each thing that can be done with data in shards."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli.options import Json, group_of_verbs
from quorate.cli.output import print_document
from quorate.observe.quantities import duration, plural, size

if TYPE_CHECKING:  # torch, which a help text does without
    from quorate.api.data import Spread
    from quorate.shards.index import ShardIndex

MOST_FLAWS = 50

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder of the shards, or a URL such as s3://bucket/prefix.")
]
IndexedPlace = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder or URL of the shards, or the file of their index.")
]

app = group_of_verbs("data")


@app.callback()
def data() -> None:
    """Index, verify and count data in shards.

    \b
    Examples:
      quorate data index /data/photos
      quorate data verify /data/photos
      quorate data stats /data/photos
    """


@app.command()
def index(
    path: Place,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the index to this file instead of next to the shards.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing index, or index a folder whose subfolders have indexes of their own."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the index of a folder of shards, with a digest of every block.

    Training needs this index to read the shards. They may be tar (as in WebDataset), parquet, jsonl, txt, hdf5 or
    tfrecord files. The index is the file index.quorate next to them. The same shards give the same index.

    \b
    Examples:
      quorate data index /data/photos
      quorate data index s3://bucket/photos --force
    """
    from quorate.api.data import LARGE_BLOCK, index_data
    from quorate.cli.layout import Page
    from quorate.history.streaming import shown_place

    with counting("indexed", as_json) as progress:
        done = index_data(path, output, force=force, progress=progress)
    if as_json:
        print_document(done.document())
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


@app.command()
def verify(path: IndexedPlace, as_json: Json = False) -> None:
    """Read all shards in full and compare them with their index.

    Changed blocks are listed with their file and position, and shards that are missing, new or of another size. The
    exit code is 1 if there is any difference.

    \b
    Examples:
      quorate data verify /data/photos
      quorate data verify s3://bucket/photos --json
    """
    from quorate.api.data import verify_data
    from quorate.cli.layout import Page

    with counting("verified", as_json) as progress:
        done = verify_data(path, progress)
    if as_json:
        print_document(done.document())
        raise typer.Exit(1 if done.flaws else 0)
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
    raise typer.Exit(1 if done.flaws else 0)


@app.command()
def stats(path: IndexedPlace, as_json: Json = False) -> None:
    """Count shards, sizes and records, and show the schema.

    Only the index is read, no shard.

    \b
    Examples:
      quorate data stats /data/photos
      quorate data stats /data/photos --json
    """
    from rich.text import Text

    from quorate.api.data import data_stats
    from quorate.cli.layout import Page
    from quorate.history.streaming import shown_place

    found = data_stats(path)
    if as_json:
        print_document(found.document())
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
        page.columns([(name or "record", kind) for name, kind in index.schema.items()])


@contextmanager
def counting(word: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """A line on the terminal that counts shards while they are read, and is gone afterwards."""
    from rich.progress import Progress, TextColumn

    from quorate.observe.screen import Screen

    screen = Screen(sys.stderr)
    line = TextColumn(f"{word} {{task.completed:,}} of {{task.total:,}} shards", style="none")
    is_hidden = as_json or not screen.is_terminal
    with Progress(line, console=screen, transient=True, disable=is_hidden, redirect_stdout=False) as progress:
        task = progress.add_task(word, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def _counted(index: "ShardIndex") -> str:
    shards = plural(len(index.shards), f"{index.kind} shard")
    return f"{shards} with {plural(len(index), 'record')} in {plural(index.blocks, 'block')}"


def _sizes(spread: "Spread") -> str:
    if spread.min == spread.max:
        return f"{size(spread.max)} each"
    return f"{size(spread.min)} to {size(spread.max)}, half of them up to {size(spread.median)}"


def _numbers(spread: "Spread") -> str:
    if spread.min == spread.max:
        return f"{spread.max:,}"
    return f"{spread.min:,} to {spread.max:,}"

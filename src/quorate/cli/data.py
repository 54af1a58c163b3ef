"""`quorate data`: one verb for each thing that can be done with data in shards."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorate.cli.options import Json, group_of_verbs, to_file
from quorate.cli.output import print_document
from quorate.core.addresses import is_url
from quorate.observe.quantities import duration, plural, size

if TYPE_CHECKING:  # torch, which a help text does without
    from quorate.shards.index import ShardIndex

MOST_FLAWS = 50
LARGE_BLOCK = 128_000_000

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
    output: Annotated[str | None, to_file("Write the index to this file instead of next to the shards.")] = None,
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
    from quorate.cli.layout import Page
    from quorate.history.streaming import shown_place
    from quorate.shards.indexing import index_data

    for place in (path, output or ""):
        if is_url(place):
            from quorate.stores.objects import refuse_unknown_store

            refuse_unknown_store(place)
    began = time.monotonic()
    with counting("indexed", as_json) as progress:
        index, file = index_data(path, output, force=force, progress=progress)
    seconds, total = time.monotonic() - began, int(index.sizes.sum())
    if as_json:
        about = {"index": shown_place(file), "bytes": total, "digest": index.digest, "seconds": round(seconds, 3)}
        print_document(_head(index) | about)
        return
    page = Page()
    page.line(f"{_counted(index)}, {size(total)}, in {duration(seconds)}.")
    page.whole("index", shown_place(file))
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
    from quorate.cli.layout import Page
    from quorate.shards.index import load_index
    from quorate.shards.indexing import verify_shards

    with counting("verified", as_json) as progress:
        index = load_index(path)
        flaws = verify_shards(index, progress)
    damaged = len({flaw.file for flaw in flaws if not flaw.is_new})  # of those that were indexed
    lost, new = sum(flaw.records for flaw in flaws), sum(flaw.is_new for flaw in flaws)
    code = typer.Exit(1 if flaws else 0)
    if as_json:
        counts = {"damaged_shards": damaged, "damaged_records": lost, "new_shards": new}
        listed = [asdict(flaw) | {"unit": None if flaw.start is None else flaw.unit} for flaw in flaws]
        for each in listed:
            del each["is_new"]
        print_document(_head(index) | counts | {"flaws": listed})
        raise code
    page = Page()
    for flaw in flaws[:MOST_FLAWS]:
        place = f", {flaw.place}" if flaw.place else ""
        page.line(f"{flaw.file}{place}: {flaw.problem}")
    if len(flaws) > MOST_FLAWS:
        page.line(f"… and {len(flaws) - MOST_FLAWS:,} more, which --json lists.")
    if damaged:
        page.line(
            f"{damaged:,} of {len(index.shards):,} shards are not as they were indexed; "
            f"{lost:,} of {len(index):,} records cannot be read."
        )
    else:
        page.line(f"{_counted(index)}: all are as they were indexed.")
    if new:
        page.line(f"{new:,} new, not in the index: `quorate data index PATH --force` lists what there is now.")
    raise code


@app.command()
def stats(path: IndexedPlace, as_json: Json = False) -> None:
    """Count shards, sizes and records, and show the schema.

    Only the index is read, no shard.

    \b
    Examples:
      quorate data stats /data/photos
      quorate data stats /data/photos --json
    """
    import numpy
    from rich.text import Text

    from quorate.cli.layout import Page
    from quorate.history.streaming import shown_place
    from quorate.shards.index import load_index

    index = load_index(path)
    total = int(index.sizes.sum())
    shard_bytes, shard_records = _spread(index.sizes), _spread(numpy.diff(index.first[index.first_block]))
    block_bytes, block_records = None if index.kind == "hdf5" else _spread(index.length), _spread(index.records)
    if as_json:
        document = _head(index) | {"bytes": total, "shard_bytes": shard_bytes, "shard_records": shard_records}
        document |= {"block_bytes": block_bytes, "block_records": block_records}
        print_document(document | {"schema": dict(index.schema), "digest": index.digest})
        return
    page = Page()
    page.title(Text(_counted(index), style="bold"))
    page.whole("place", shown_place(index.place))
    page.row("size", size(total))
    page.row("shards", f"{_sizes(shard_bytes)}; {_numbers(shard_records)} records")
    in_bytes = "" if block_bytes is None else f"{_sizes(block_bytes)}; "
    page.row("blocks", f"{in_bytes}{_numbers(block_records)} records")
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


def _head(index: "ShardIndex") -> dict[str, Any]:
    """What every document about an index begins with."""
    from quorate.history.streaming import shown_place

    return {
        "place": shown_place(index.place),
        "kind": index.kind,
        "shards": len(index.shards),
        "blocks": index.blocks,
        "records": len(index),
    }


def _spread(numbers: Any) -> dict[str, int]:
    """The least, the middle and the most of some numbers."""
    ordered = numbers.copy()
    ordered.sort()
    return {"min": int(ordered[0]), "median": int(ordered[len(ordered) // 2]), "max": int(ordered[-1])}


def _sizes(spread: dict[str, int]) -> str:
    if spread["min"] == spread["max"]:
        return f"{size(spread['max'])} each"
    return f"{size(spread['min'])} to {size(spread['max'])}, half of them up to {size(spread['median'])}"


def _numbers(spread: dict[str, int]) -> str:
    least, most = spread["min"], spread["max"]
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"

"""`quorate data`: one verb for each thing that can be done with data in shards."""

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import Json, formerly, group_of_verbs

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder of the shards, or a URL such as s3://bucket/prefix.")
]
IndexedPlace = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder or URL of the shards, or the file of their index.")
]

app = group_of_verbs("data")


@app.callback()
def data() -> None:
    """Index, verify, count and preview data in shards.

    \b
    Examples:
      quorate data index /data/photos
      quorate data verify /data/photos
      quorate data preview /data/photos -o photos.png
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
    from quorate.cli.data_view import show_index

    show_index(path, output, force, as_json)


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
    from quorate.cli.data_view import show_verified

    raise typer.Exit(0 if show_verified(path, as_json) else 1)


@app.command()
def stats(path: IndexedPlace, as_json: Json = False) -> None:
    """Count shards, sizes and records, and show the schema.

    Only the index is read, no shard.

    \b
    Examples:
      quorate data stats /data/photos
      quorate data stats /data/photos --json
    """
    from quorate.cli.data_view import show_stats

    show_stats(path, as_json)


@app.command(context_settings=formerly("sheet"))
def preview(
    path: IndexedPlace,
    records: Annotated[int, typer.Option(metavar="N", min=1, help="How many records to show.")] = 10,
    first: Annotated[int, typer.Option("--from", metavar="N", min=0, help="The number of the first record.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the pictures of the records into one file, NAME.png.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show some records and where they are stored, or write their pictures as a contact sheet.

    Records that cannot be read are marked as bad, with the reason.

    \b
    Examples:
      quorate data preview /data/photos
      quorate data preview /data/photos --from 31415 --records 1
      quorate data preview /data/photos --records 64 -o photos.png
    """
    from quorate.cli.data_view import show_preview

    show_preview(path, records, first, output, as_json)

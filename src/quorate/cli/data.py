"""`quorate data`: one verb for each thing that can be done with data in shards."""

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import Json, group_of_verbs
from quorate.cli.output import print_document

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder of the shards, or a URL such as s3://bucket/prefix.")
]
IndexedPlace = Annotated[
    str, typer.Argument(metavar="PATH", help="The folder or URL of the shards, or the file of their index.")
]

app = group_of_verbs("data")


@app.callback()
def data() -> None:
    """Index, verify, count and look at data in shards.

    \b
    Examples:
      quorate data index /data/photos
      quorate data verify /data/photos
      quorate data preview /data/photos --sheet photos.png
    """


@app.command()
def index(
    path: Place,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the index there, and not beside the shards.", show_default=False),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the index that is there, or make one of folders that have their own."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the shards in a folder with a digest of every block.

    Training reads the shards by this index: tar (as WebDataset has it), parquet, jsonl, txt and hdf5. It is the file
    index.quorate beside them. The same shards give the same index.

    \b
    Examples:
      quorate data index /data/photos
      quorate data index s3://bucket/photos --force
    """
    from quorate.api.data import index_data
    from quorate.api.documents import index_document
    from quorate.cli.data_view import Counter, print_indexed
    from quorate.cli.layout import Page

    with Counter("indexed", as_json) as counter:
        done = index_data(path, output, force=force, progress=counter.show)
    if as_json:
        print_document(index_document(done))
    else:
        print_indexed(Page.on_stdout(), done)


@app.command()
def verify(path: IndexedPlace, as_json: Json = False) -> None:
    """Read all shards through and compare them with their index.

    Each block that has changed is named by its file and place, with shards that are missing, new or of another size.
    The exit code is 1 if there is any.

    \b
    Examples:
      quorate data verify /data/photos
      quorate data verify s3://bucket/photos --json
    """
    from quorate.api.data import verify_data
    from quorate.api.documents import verified_data_document
    from quorate.cli.data_view import Counter, print_verified
    from quorate.cli.layout import Page

    with Counter("verified", as_json) as counter:
        done = verify_data(path, counter.show)
    if as_json:
        print_document(verified_data_document(done))
    else:
        print_verified(Page.on_stdout(), done)
    raise typer.Exit(1 if done.flaws else 0)


@app.command()
def stats(path: IndexedPlace, as_json: Json = False) -> None:
    """Count shards, sizes and records, and show the schema.

    By the index alone: no shard is read.

    \b
    Examples:
      quorate data stats /data/photos
      quorate data stats /data/photos --json
    """
    from quorate.api.data import data_stats
    from quorate.api.documents import stats_document
    from quorate.cli.data_view import print_stats
    from quorate.cli.layout import Page

    found = data_stats(path)
    if as_json:
        print_document(stats_document(found))
    else:
        print_stats(Page.on_stdout(), found)


@app.command()
def preview(
    path: IndexedPlace,
    records: Annotated[int, typer.Option(metavar="N", min=1, help="How many records.")] = 10,
    first: Annotated[int, typer.Option("--from", metavar="N", min=0, help="The number of the first one.")] = 0,
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write their pictures into one file, NAME.png.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show some records with their places, or write their pictures as a contact sheet.

    Those that cannot be read are marked as bad, with the reason.

    \b
    Examples:
      quorate data preview /data/photos
      quorate data preview /data/photos --from 31415 --records 1
      quorate data preview /data/photos --records 64 --sheet photos.png
    """
    from quorate.api.documents import preview_document
    from quorate.api.preview import preview_data, refuse_no_picture_file
    from quorate.cli.data_view import print_preview
    from quorate.cli.layout import Page

    if sheet is not None:
        refuse_no_picture_file(sheet)
    index, found = preview_data(path, records, first)
    pictures = _written_sheet(sheet, [each.record for each in found]) if sheet is not None else 0
    if as_json:
        print_document(preview_document(index, found, sheet, pictures))
    else:
        print_preview(Page.on_stdout(), index, found, sheet, pictures)


def _written_sheet(file: Path, records: list[object]) -> int:
    from quorate.api.preview import pictures_among, write_contact_sheet
    from quorate.core.errors import RequestError

    pictures = pictures_among(records)
    if not pictures:
        raise RequestError(
            f"none of these {len(records)} records has a picture (png, jpeg, gif, bmp, webp, or an array of the shape "
            "of one). --records N looks at more of them, --from N at others."
        )
    write_contact_sheet(file, pictures)
    return len(pictures)

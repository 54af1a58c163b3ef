"""Data in shards as documents for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorate.api.data import Indexed, Previewed, Spread, Stats, Verified
from quorate.cli.shards_value import fields_of, shown_file
from quorate.data.shards.index import ShardIndex


def index_document(done: Indexed) -> dict[str, Any]:
    """An index that was made."""
    return {
        **_head(done.index),
        "index": shown_file(done.file),
        "bytes": int(done.index.sizes.sum()),
        "digest": done.index.digest,
        "seconds": round(done.seconds, 3),
    }


def verified_document(done: Verified) -> dict[str, Any]:
    """All that is not as it was indexed."""
    return {
        **_head(done.index),
        "damaged_shards": done.damaged_shards,
        "damaged_records": done.damaged_records,
        "new_shards": done.new_shards,
        "flaws": [
            {
                "file": flaw.file,
                "unit": flaw.unit if flaw.start is not None else None,
                "start": flaw.start,
                "length": flaw.length,
                "records": flaw.records,
                "problem": flaw.problem,
            }
            for flaw in done.flaws
        ],
    }


def stats_document(found: Stats) -> dict[str, Any]:
    """What an index says of its shards."""
    return {
        **_head(found.index),
        "bytes": found.bytes,
        "shard_bytes": _spread(found.shard_bytes),
        "shard_records": _spread(found.shard_records),
        "block_bytes": _spread(found.block_bytes),
        "block_records": _spread(found.block_records),
        "schema": dict(found.index.schema),
        "digest": found.index.digest,
    }


def preview_document(
    index: ShardIndex, found: Sequence[Previewed], sheet: Path | None, pictures: int
) -> dict[str, Any]:
    """Some records, each field as a short text."""
    return {
        **_head(index),
        "preview": [
            {
                "sample": each.sample,
                "file": each.file,
                "row": each.row,
                "fields": {} if each.bad else fields_of(each.record),
                "bad": each.bad or None,
            }
            for each in found
        ],
        "sheet": None if sheet is None else str(sheet.absolute()),
        "pictures": pictures,
    }


def _head(index: ShardIndex) -> dict[str, Any]:
    return {
        "place": shown_file(index.place),
        "kind": index.kind,
        "shards": len(index.shards),
        "blocks": index.blocks,
        "records": len(index),
    }


def _spread(spread: Spread | None) -> dict[str, int] | None:
    return None if spread is None else asdict(spread)

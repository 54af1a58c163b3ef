"""Index files of shards that need not exist: only how many records their blocks have matters."""

from pathlib import Path

import numpy

from quorate.shards.index import DIGEST, NAME, ShardIndex, save_index


def write_index(folder: Path, shards: list[list[int]]) -> ShardIndex:
    """The index of shards whose blocks have so many records, in a folder."""
    records = numpy.array([count for blocks in shards for count in blocks], dtype=numpy.int64)
    sizes = numpy.array([sum(blocks) for blocks in shards], dtype=numpy.int64)
    starts = [sum(blocks[:place]) for blocks in shards for place in range(len(blocks))]
    index = ShardIndex(
        kind="lines",
        schema={},
        shards=tuple(f"part-{number:05d}.jsonl" for number in range(len(shards))),
        sizes=sizes,
        tails=sizes,
        tail_digests=numpy.zeros((len(shards), DIGEST), dtype=numpy.uint8),
        shard_of_block=numpy.repeat(numpy.arange(len(shards)), [len(blocks) for blocks in shards]),
        start=numpy.array(starts, dtype=numpy.int64),
        length=records,
        records=records,
        digests=numpy.zeros((len(records), DIGEST), dtype=numpy.uint8),
    )
    save_index(index, folder / NAME)
    return index

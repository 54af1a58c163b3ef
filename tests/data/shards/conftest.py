"""Small blocks for small files. Nothing of shards is imported before a test asks for it: they are an option."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Blocks of a few records, so that small files have several."""
    from data.shards.shard_files import SMALL_BLOCK, blocks_of

    with blocks_of(SMALL_BLOCK):
        yield

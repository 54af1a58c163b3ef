"""Blocks of a store are read by several threads at once, and no message about them shows what might be a secret."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.shards.shard_files import write_shards
from quorate.data.bad_sample import Unreachable
from quorate.shards import files
from quorate.shards.blocks import ShardBlocks
from quorate.shards.index import ShardIndex
from quorate.shards.indexing import build_index
from quorate.storage.objects import ObjectMissing

pytestmark = pytest.mark.usefixtures("small_blocks")
THREADS = 4


class FolderStore:
    """A store whose library has one connection; it tells when two threads use that at once."""

    folder: Path
    is_shared = False
    opened = 0
    collisions = 0
    together: threading.Barrier

    def __init__(self, url: str) -> None:
        self.url = url
        self._busy = threading.Lock()
        type(self).opened += 1

    @property
    def serves_threads(self) -> bool:
        return self.is_shared

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if not (self.folder / key).exists():
            raise ObjectMissing(f"there is no object {key}.")
        is_alone = self._busy.acquire(blocking=False)
        type(self).collisions += not is_alone
        try:
            self.together.wait(60)
            return (self.folder / key).read_bytes()[start:][:length]
        finally:
            if is_alone:
                self._busy.release()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardIndex:
    write_shards("text", tmp_path)
    monkeypatch.setattr(FolderStore, "folder", tmp_path, raising=False)
    monkeypatch.setattr(FolderStore, "together", threading.Barrier(1), raising=False)
    monkeypatch.setattr(FolderStore, "opened", 0)
    monkeypatch.setattr(FolderStore, "collisions", 0)
    monkeypatch.setattr(files, "open_store", FolderStore)
    return replace(build_index(str(tmp_path)), place="odd://someone@place")


@pytest.mark.parametrize("shared", [False, True])
def test_threads_share_a_store_only_where_its_library_allows_it(
    shared: bool, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderStore, "is_shared", shared)
    blocks: Any = ShardBlocks(index)
    expected = len(blocks.read(0))  # the first speaks alone
    monkeypatch.setattr(FolderStore, "together", threading.Barrier(THREADS))
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda _: len(blocks.read(0)), range(THREADS))) == [expected] * THREADS
    blocks.close()
    assert (FolderStore.opened == 1) == shared
    assert (FolderStore.collisions > 0) == shared


def test_a_message_shows_no_user_of_the_store(index: ShardIndex) -> None:
    (FolderStore.folder / index.shards[0]).unlink()
    with pytest.raises(Unreachable, match=r"odd://…@place/shard-000\.txt cannot be read") as raised:
        ShardBlocks(index).read(0)
    assert "someone" not in raised.value.message

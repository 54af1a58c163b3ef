"""A dataset that Quorate itself reads, block after block, as `quorate.Shards` does: what a feed needs of one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from quorate.data.bad_sample import BadSample
from quorate.data.indices import Indices

LIMIT = 160_000_000
"""Bytes of blocks that a process keeps, unless what it reads at the same time is more."""


SKIP = "`on_bad_sample: skip` leaves such samples out."
COLLATE = "or write collate(self, samples), which may pad or convert them."


class BlockSet(ABC):
    """Its samples are the records of block 0, then those of block 1, and so on. Whole blocks are read ahead by threads.

    `limit` is how many bytes of blocks a process may keep, `blocks` how many records each has, and `fingerprint` a
    digest of every byte. Samples that `decode` has made may be cached under `cache_key`.
    """

    limit: int
    blocks: Indices
    fingerprint: str
    has_decode: bool
    cache_key: str | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    @property
    @abstractmethod
    def notes(self) -> Sequence[str]:
        """What to tell of its cache."""

    @property
    @abstractmethod
    def is_columns(self) -> bool:
        """Whether batches come from columns at once, and no code of the task runs for them."""

    @property
    @abstractmethod
    def in_words(self) -> str:
        """Of what it is made: "in 4 parquet files"."""

    @abstractmethod
    def batch(self, indices: Sequence[int] | Indices) -> Any:
        """What collating these samples would give, made of whole columns."""

    @abstractmethod
    def blocks_of(self, indices: Sequence[int] | Indices) -> list[int]:
        """The blocks that these samples are in, each once."""

    @abstractmethod
    def block_bytes(self, block: int) -> int:
        """What a block takes in memory."""

    @abstractmethod
    def prefetch(self, blocks: Sequence[int]) -> None:
        """Read these ahead, in this order."""

    # --- a cache of its samples

    @abstractmethod
    def keeping(self) -> AbstractContextManager[Any]:
        """Around the reading of a batch: what is made in it may be cached, if `settle` says so."""

    @abstractmethod
    def settle(self, drew: bool) -> None:
        """Cache what was made, unless random numbers were drawn for it."""

    @abstractmethod
    def uncached(self) -> AbstractContextManager[Any]:
        """Meanwhile nothing is taken from the cache, which may be of an earlier `decode`."""

    # --- what is wrong, in words

    @abstractmethod
    def name_of(self, index: int) -> str:
        """A sample by its file."""

    @abstractmethod
    def hint_of(self, error: BadSample) -> str:
        """What to do about a bad sample."""

    @abstractmethod
    def others_of(self, index: int, error: BadSample) -> str:
        """What else is bad where a whole block is."""

    @property
    @abstractmethod
    def unreadable_hint(self) -> str:
        """What to do where its columns cannot be read."""

    @property
    @abstractmethod
    def alike_hint(self) -> str:
        """What to do where samples cannot be collated."""

"""What encrypts the parts of a checkpoint, as those who write and read them see it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from quorate.core.digests import Buffer


class Seal(ABC):
    """Seals and opens contents with one key, which has an id."""

    key_id: str

    @property
    @abstractmethod
    def label(self) -> dict[str, str]:
        """What a manifest says of it."""

    @abstractmethod
    def tag(self, content: bytes) -> str:
        """What vouches for a content that stays readable: without the key nobody makes the right one."""

    @abstractmethod
    def seal(self, chunks: Iterable[Buffer], context: bytes = b"") -> Iterator[bytes]:
        """The sealed bytes of a content that comes in pieces; it opens only with the same context, which it lacks."""

    @abstractmethod
    def open(self, content: Buffer, context: bytes = b"") -> memoryview:
        """What was sealed; raises `CheckpointError` for anything but exactly that."""

    @abstractmethod
    def open_from(self, fill: Callable[[memoryview], None], size: int, context: bytes = b"") -> memoryview:
        """The same of so many bytes as they stream: `fill` fills a buffer with the next of them."""

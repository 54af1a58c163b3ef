"""An object store, such as ``s3://bucket/prefix``, as those who keep something there see it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from quorate.core.addresses import has_secret, shown
from quorate.core.errors import JobError, RequestError

SLOWEST = 100_000
"""Bytes a second that are waited for at least, of what is moved."""


class StoreError(JobError):
    """A place for copies that cannot be used now. `lasts`: nothing but a person will mend it."""

    def __init__(self, message: str, lasts: bool = False) -> None:
        self.lasts = lasts
        super().__init__(message)


class ObjectMissing(StoreError):  # noqa: N818 (a happening, not a mistake)
    """The store answers, and does not have it."""


@dataclass(frozen=True)
class Stored:
    """An object as the store lists it; `modified` is a time by the store's clock, None if it does not tell. `tag` is
    another for another content (S3's ETag), and empty if the store has none."""

    bytes: int
    modified: float | None
    tag: str = ""


class ObjectStore(ABC):
    """Puts, reads, lists and removes objects by their keys under a URL. An object appears whole or not at all.

    Every failure is a `StoreError`. One thread at a time; once it has answered, several may read at once.
    """

    url: str

    def __str__(self) -> str:
        return shown(self.url)

    @property
    @abstractmethod
    def serves_threads(self) -> bool:
        """Whether several threads may use it at once."""

    @abstractmethod
    def below(self, prefix: str) -> "ObjectStore":
        """The part of it under a prefix."""

    @abstractmethod
    def put_file(self, key: str, file: Path) -> None:
        """Store a file's content. An OSError is trouble with the file itself."""

    @abstractmethod
    def put(self, key: str, content: bytes) -> None: ...

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Store an object that is not there yet: of several who try, one alone does, and the others hear False."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What is directly under the URL: objects, and what stands before the first / of others."""

    @abstractmethod
    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The content of a small object, or a range of any: fewer bytes than asked for where the object ends."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def fetch(self, key: str, file: Path, bytes: int) -> None:
        """Write an object's content, of about so many bytes, to a file."""

    @abstractmethod
    def list(self) -> dict[str, Stored]:
        """All that is under the URL, by key."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """One that is not there is as good as removed."""


def refuse_secret(url: str) -> None:
    """Refuse a URL with a secret in it: it is written into indexes, run folders and logs."""
    if has_secret(url):
        raise RequestError(
            f"{url.partition('://')[0]}://…: this address has a password or a query in it, and it would be written "
            "down where others may read it. Leave that out: credentials come from where the store's own library looks "
            "for them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or its settings file."
        )


def open_store(url: str) -> ObjectStore:
    """The store at a URL, which is not asked yet. A URL with a secret in it is refused."""
    store = import_module("quorate.stores.objects").FsspecStore(url)
    assert isinstance(store, ObjectStore)
    return store

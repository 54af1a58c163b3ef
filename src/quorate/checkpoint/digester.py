"""The digests that a part of a checkpoint may have: xxh3-128 finds damage, sha-256 also finds what somebody made up."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import xxhash

from quorate.core.digests import Buffer
from quorate.core.errors import CheckpointError


class Digester(Protocol):
    """A digest that grows with what is read or written. Both kinds let other threads run during a large update."""

    def update(self, data: Buffer, /) -> None:
        """Take further bytes in."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""


XXH3 = "xxh3-128"
SHA = "sha-256"
_MAKERS: dict[str, Callable[[], Digester]] = {XXH3: xxhash.xxh3_128, SHA: hashlib.sha256}
DIGESTS = tuple(_MAKERS)


def new_digester(name: str) -> Digester:
    """A digester that has seen nothing yet."""
    try:
        return _MAKERS[name]()
    except KeyError:
        known = " and ".join(DIGESTS)
        raise CheckpointError(f"the digest {name!r} is unknown: this version of Quorate knows {known}") from None


def labelled(name: str, digester: Digester) -> str:
    """A digest as a manifest holds it, such as `sha-256:9f86…`."""
    return f"{name}:{digester.hexdigest()}"

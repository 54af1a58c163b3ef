"""What is hashed: digests of named bytes (sha-256 for what a person compares, xxh3 for what a machine checks), and the
seeds of random streams."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class NamedBytes:
    """A tensor's content as any process can describe it without torch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Buffer

    @property
    def label(self) -> bytes:
        """Name, type and shape: equal bytes of another shape are another tensor."""
        return f"{self.name}|{self.dtype}|{self.shape}\n".encode()


def weights_digest(tensors: Mapping[str, str]) -> str:
    """Sha-256 over the names and digests of tensors, in name order: the digest that a run prints.

    Over digests, which several threads and workers can make at once, and much faster than a sha-256 of everything.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}|{tensors[name]}\n".encode())
    return digest.hexdigest()


def tensor_digest(tensor: NamedBytes) -> str:
    """Xxh3-128 of one tensor, its name, type and shape."""
    digest = xxhash.xxh3_128(tensor.label)
    digest.update(tensor.content)
    return digest.hexdigest()


def content_digest(content: Buffer) -> str:
    """Xxh3-128 of bytes, for files and buffers."""
    return xxhash.xxh3_128_hexdigest(content)


def outvoted(told: Mapping[int, str]) -> tuple[list[int], tuple[int, ...]] | None:
    """Of workers and their digests, those who differ from most; and those who are wrong, if more than half agree.

    None where all are equal.
    """
    if len(set(told.values())) <= 1:
        return None
    usual, count = Counter(told.values()).most_common(1)[0]
    odd = [worker for worker, digest in told.items() if digest != usual]
    return odd, tuple(odd) if count > len(told) / 2 else ()


def first_difference(left: dict[str, str], right: dict[str, str]) -> str | None:
    """The first name, in order, at which two sets of digests differ."""
    return next((name for name in sorted({*left, *right}) if left.get(name) != right.get(name)), None)


def derive_seed(seed: int, *labels: int | str) -> int:
    """A 63-bit seed for the stream that `labels` name, such as ``("lane", step, lane)``.

    Hashed, not added: (seed 1, step 2) and (seed 2, step 1) must not meet.
    """
    text = "/".join([f"{type(label).__name__}:{label}" for label in (seed, *labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

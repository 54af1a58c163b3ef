"""One digest of every byte that a job's datasets hold: two jobs with an equal one read equal data.

There are limits on how much is read for it, in bytes and samples and never in time: whether a dataset has a digest must
not depend on how fast a machine is.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quorate.core.user_code import building_code
from quorate.data.datasets import columns_of, is_stream
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples

IN_MEMORY_BYTES = 1 << 30
"""Of tensors, arrays and lists that are in memory already."""
IN_MEMORY_SAMPLES = 200_000
"""Of lists, whose samples are looked at one by one."""
READ_BYTES, READ_SAMPLES = 64 << 20, 1_024
"""Of any other dataset, whose `[]` may take its time."""


@dataclasses.dataclass(frozen=True)
class DataDigest:
    """The digest, empty where there is none; how it was taken, or why it was not; and how many seconds that took.

    It begins with what it is of: `sha-256` of samples as they are decoded, `index` of shards, `task` as the task says.
    """

    digest: str
    words: str
    seconds: float = 0.0


class _Unproven(Exception):  # noqa: N818 (a finding)
    """Why there is no digest of all bytes."""


def digest_of_all(samples: Samples, declared: Callable[[], Any] | None = None) -> DataDigest:
    """The digest of all samples of all sets; `declared` is the task's own `data_digest()`, if it has one."""
    began = time.perf_counter()
    digest, words = _digest_of_all(samples, declared)
    return DataDigest(digest, words, time.perf_counter() - began)


def _digest_of_all(samples: Samples, declared: Callable[[], Any] | None) -> tuple[str, str]:
    if declared is not None:
        with building_code("data_digest()"):
            digest = declared()
        if digest is not None:
            return f"task:{digest}", "proven: by data_digest() of the task"
    total, count = hashlib.sha256(), 0
    try:
        for source, dataset in samples.datasets.items():
            content = _Content(source, samples)
            content.add_dataset(dataset)
            total.update(f"{source.value} {len(dataset)} {content.hash.hexdigest()}\n".encode())
            count += content.bytes
    except _Unproven as why:
        return "", f"unproven: the {source.value} set {why}. data_digest() of the task may return a digest of the data"
    if samples.shards:
        return f"index:{total.hexdigest()}", "proven: by the index of the shards (xxh3-128 of every byte)"
    return f"sha-256:{total.hexdigest()}", f"proven: sha-256 of all {count:,} bytes"


def _is_in_memory(dataset: Any) -> bool:
    """Whether `[]` gives what the dataset holds and nothing else; a class of one's own may do anything."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_in_memory, dataset.datasets))
    return type(dataset) in (list, tuple, TensorDataset, torch.Tensor, numpy.ndarray)


class _Content:
    """Takes up what a set holds so that no two come to the same bytes: each value has its kind and length before it."""

    def __init__(self, source: Source, samples: Samples) -> None:
        self.hash = hashlib.sha256()
        self.bytes = 0
        self._source = source
        self._samples = dataclasses.replace(samples, collate=list, copies=False, drawing=set())
        self._most_bytes, self._most_samples = IN_MEMORY_BYTES, IN_MEMORY_SAMPLES

    def add_dataset(self, dataset: Any) -> None:
        shards = self._samples.shards.get(self._source)
        if shards is not None:
            self._begin(f"shards {shards.fingerprint}", 0)
        elif is_stream(dataset):
            raise _Unproven("is a stream, which is read once")
        elif not _is_in_memory(dataset):
            self._most_bytes, self._most_samples = READ_BYTES, READ_SAMPLES
            self._add_samples(self._read, len(dataset))
        elif (columns := columns_of(dataset)) is not None:
            self._add_all("columns", [t if columns.rows is None else t[columns.rows] for t in columns.tensors])
        elif isinstance(dataset, torch.Tensor | numpy.ndarray):
            self.add(dataset)
        elif type(dataset) is ConcatDataset:
            for part in dataset.datasets:
                self.add_dataset(part)
        else:
            self._add_samples(dataset.__getitem__, len(dataset))

    def _add_samples(self, read: Callable[[int], Any], count: int) -> None:
        if count > self._most_samples:
            raise _Unproven(f"has more than {self._most_samples:,} samples, and so many are not read for a digest")
        self._begin(f"samples {count}", 0)
        for index in range(count):
            self.add(read(index))

    def _read(self, index: int) -> Any:  # before it is collated, seeded as for a fingerprint
        answer = self._samples[Request(self._source, 0, (index,))]
        if not isinstance(answer, Batch) or answer.is_empty:
            raise _Unproven(f"cannot be read: sample {index}")
        if self._source in self._samples.drawing:
            raise _Unproven("draws random numbers for its samples, which do not show all that it holds")
        return answer.content

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise _Unproven(f"has tensors of a layout that has no plain bytes ({value.layout})")
            self._begin(f"tensor {value.dtype} {tuple(value.shape)}", value.nbytes)
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            self.hash.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
            self._begin(f"array {value.dtype.descr} {value.shape}", value.nbytes)
            self.hash.update(value.tobytes())
        elif isinstance(value, str | bytes | bytearray):
            content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            self._begin("text" if isinstance(value, str) else "bytes", len(content))
            self.hash.update(content)
        elif value is None or isinstance(value, bool | int | float | complex):
            self._begin(f"{type(value).__name__} {value!r}", 8)
        elif isinstance(value, Mapping):
            self._add_all("mapping", list(value.items()))
        elif isinstance(value, list | tuple):
            self._add_all("list", value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            self._add_all(type(value).__qualname__, [(name, getattr(value, name)) for name in names])
        else:
            raise _Unproven(f"has {type(value).__qualname__} in its samples, whose bytes are not known")

    def _add_all(self, label: str, values: Sequence[Any]) -> None:
        self._begin(f"{label} of {len(values)}", 0)
        for each in values:
            self.add(each)

    def _begin(self, label: str, size: int) -> None:
        self.bytes += size
        if self.bytes > self._most_bytes:
            raise _Unproven(f"has more than {self._most_bytes >> 20:,} MiB, and so much is not read for a digest")
        self.hash.update(f"{len(label)} {label} {size}\n".encode())

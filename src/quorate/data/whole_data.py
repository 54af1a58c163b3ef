"""One digest of every byte that a job's datasets hold, where that can be had: two jobs with an equal one read equal data.

A fingerprint looks at the first and the last sample. This reads all of them, so there are limits on how much is read,
in bytes and samples and never in time: whether a dataset has a digest must not depend on how fast a machine is.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quorate.core.digests import Buffer
from quorate.core.errors import TaskError
from quorate.core.user_code import building_code, given
from quorate.data.datasets import columns_of, is_stream
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples

IN_MEMORY_BYTES = 2 << 30
"""Of tensors, arrays and lists that are in memory already."""
IN_MEMORY_SAMPLES = 200_000
"""Of lists, whose samples are looked at one by one."""
READ_BYTES, READ_SAMPLES = 64 << 20, 1_024
"""Of any other dataset, whose `[]` may take its time."""
_ROWS = 65_536
_REMEDY = "data_digest() of the task may return a digest of what they hold"


@dataclasses.dataclass(frozen=True)
class DataDigest:
    """The digest, empty where there is none; how it was taken, or why it was not; and how many seconds that took."""

    digest: str
    words: str
    seconds: float = 0.0

    @property
    def in_words(self) -> str:
        """For a person, beginning with whether the data are known to the last byte."""
        return f"{'proven' if self.digest else 'unproven'}: {self.words}"


class _Unproven(Exception):  # noqa: N818 (a finding)
    """Why there is no digest of all bytes."""


def digest_of_all(samples: Samples, declared: Callable[[], Any] | None = None) -> DataDigest:
    """The digest of all samples of all sets; `declared` is the task's own `data_digest()`, if it has one."""
    began = time.perf_counter()
    if declared is not None:
        with building_code("data_digest()"):
            digest = declared()
        if digest is not None:
            if not isinstance(digest, str) or not digest:
                raise TaskError(f"data_digest() returned {given(digest)}; return a digest as text, or None.")
            return DataDigest(f"task:{digest}", "data_digest() of the task", time.perf_counter() - began)
    total = hashlib.sha256()
    told = []
    for source, dataset in samples.datasets.items():
        try:
            digest, how = _digest_of(samples, source, dataset)
        except _Unproven as why:
            words = f"the {source.value} set {why}; {_REMEDY}"
            return DataDigest("", words, time.perf_counter() - began)
        total.update(f"{source.value} {len(dataset)} {digest}\n".encode())
        told.append(f"{source.value} set: {how}")
    return DataDigest(f"sha-256:{total.hexdigest()}", "; ".join(told), time.perf_counter() - began)


def _digest_of(samples: Samples, source: Source, dataset: Any) -> tuple[str, str]:
    shards = samples.shards.get(source)
    if shards is not None:
        return shards.fingerprint, "the index of its shards, which has a digest (xxh3-128) of every byte"
    if is_stream(dataset):
        raise _Unproven("is a stream, which is read once")
    if _is_in_memory(dataset):
        content = _Content(IN_MEMORY_BYTES, IN_MEMORY_SAMPLES)
        content.add_dataset(dataset)
    else:
        content = _Content(READ_BYTES, READ_SAMPLES)
        content.add_read(samples, source, dataset)
    return content.hash.hexdigest(), f"sha-256 of all {content.bytes:,} bytes"


def _is_in_memory(dataset: Any) -> bool:
    """Whether `[]` gives what the dataset holds and nothing else; a class of one's own may do anything."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_in_memory, dataset.datasets))
    return type(dataset) in (list, tuple, TensorDataset, torch.Tensor, numpy.ndarray)


class _Content:
    """Takes up values so that no two of them come to the same bytes: each has its kind and its length before it."""

    def __init__(self, most_bytes: int, most_samples: int) -> None:
        self.hash = hashlib.sha256()
        self.bytes = 0
        self._most_bytes, self._most_samples, self._samples = most_bytes, most_samples, 0

    def add_dataset(self, dataset: Any) -> None:
        """One that is in memory."""
        columns = columns_of(dataset)
        if columns is not None:
            count = len(dataset)
            for tensor in columns.tensors:
                self._begin(f"column {tensor.dtype} {(count, *tensor.shape[1:])}", count * tensor[0].nbytes)
                for start in range(0, count, _ROWS):
                    rows = slice(start, start + _ROWS)
                    self.hash.update(_bytes(tensor[rows] if columns.rows is None else tensor[columns.rows[rows]]))
        elif isinstance(dataset, torch.Tensor | numpy.ndarray):
            self.add(dataset)
        elif type(dataset) is ConcatDataset:
            self._begin(f"parts {len(dataset.datasets)}", 0)
            for part in dataset.datasets:
                self.add_dataset(part)
        else:
            for index in range(self._counted(len(dataset))):
                self.add(dataset[index])

    def add_read(self, samples: Samples, source: Source, dataset: Any) -> None:
        """One that is read sample by sample, before they are collated, as for a fingerprint."""
        plain = dataclasses.replace(samples, collate=list, copies=False, drawing=set())
        for index in range(self._counted(len(dataset))):
            answer = plain[Request(source, 0, (index,))]
            if not isinstance(answer, Batch) or answer.is_empty:
                raise _Unproven(f"cannot be read: sample {index}")
            if source in plain.drawing:
                raise _Unproven("draws random numbers for its samples, which do not show all that it holds")
            self.add(answer.content)

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise _Unproven(f"has tensors of a layout that has no plain bytes ({value.layout})")
            self._begin(f"tensor {value.dtype} {tuple(value.shape)}", value.nbytes)
            self.hash.update(_bytes(value))
        elif isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
            self._begin(f"array {value.dtype.descr} {value.shape}", value.nbytes)
            self.hash.update(value.tobytes())
        elif isinstance(value, numpy.ndarray):
            self._add_all(f"objects {value.shape}", value.ravel().tolist())
        elif isinstance(value, str | bytes | bytearray):
            content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            self._begin("text" if isinstance(value, str) else "bytes", len(content))
            self.hash.update(content)
        elif value is None or isinstance(value, bool | int | float | complex):
            self._begin(f"{type(value).__name__} {value!r}", 8)
        elif isinstance(value, Mapping):
            self._add_all("mapping", [each for pair in value.items() for each in pair])
        elif isinstance(value, list | tuple):
            self._add_all("list", value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            self._add_all(type(value).__qualname__, [each for pair in fields.items() for each in pair])
        else:
            raise _Unproven(f"has {type(value).__qualname__} in its samples, whose bytes are not known")

    def _add_all(self, label: str, values: Any) -> None:
        self._begin(f"{label} of {len(values)}", 0)
        for each in values:
            self.add(each)

    def _begin(self, label: str, size: int) -> None:
        self.bytes += size
        if self.bytes > self._most_bytes:
            raise _Unproven(f"has more than {self._most_bytes >> 20:,} MiB, and so much is not read for a digest")
        self.hash.update(f"{len(label)} {label} {size}\n".encode())

    def _counted(self, samples: int) -> int:
        self._samples += samples
        if self._samples > self._most_samples:
            raise _Unproven(f"has more than {self._most_samples:,} samples, and so many are not read for a digest")
        return samples


def _bytes(tensor: torch.Tensor) -> Buffer:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data

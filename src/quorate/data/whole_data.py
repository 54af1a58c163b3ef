"""One digest of every byte that a job's datasets hold: two jobs with an equal one read equal data.

There are limits on how much is read for it, in bytes and samples and never in time: whether a dataset has a digest must
not depend on how fast a machine is.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quorate.core.errors import QuorateError, TaskError
from quorate.core.user_code import building_code, describe, given
from quorate.data.collate import collate
from quorate.data.datasets import columns_of, is_stream
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples

IN_MEMORY_BYTES = 1 << 30
"""Of tensors, arrays and lists that are in memory already."""
IN_MEMORY_SAMPLES = 200_000
"""Of lists, whose samples are looked at one by one."""
PIECE = 1 << 20
"""Bytes that are copied at a time."""
READ_BYTES, READ_SAMPLES = 64 << 20, 1_024
"""Of any other dataset, whose `[]` may take its time."""


@dataclasses.dataclass(frozen=True)
class DataDigest:
    """A digest of every byte, empty where there is none; how it was taken, or why it was not; and how many seconds that
    took.

    It begins with what it is of: `sha-256` of samples as they are decoded, `index` of shards, `task` as the task says.
    """

    digest: str
    words: str
    seconds: float = 0.0


class Unproven(Exception):  # noqa: N818 (a finding)
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
        if type(digest) not in (str, int, bytes, type(None)) or digest in ("", b""):
            raise TaskError(
                f"data_digest() returned {given(digest)}. Return a text that is not empty, a whole number or bytes; "
                "None where there is no digest."
            )
        if digest is not None:
            return f"task:{digest}", "proven: by data_digest() of the task"
    total, count = hashlib.sha256(), 0
    try:
        for source, dataset in samples.datasets.items():
            content = _Set(source, samples)
            content.add_dataset(dataset)
            total.update(f"{source.value} {len(dataset)} {content.hash.hexdigest()}\n".encode())
            count += content.bytes
    except QuorateError:
        raise
    except Exception as error:  # whatever code of a dataset, a list of one's own or an array raises
        why = error if isinstance(error, Unproven) else f"cannot be read for a digest: {describe(error)}"
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


class Content:
    """Takes up values so that no two come to the same bytes: each has its type and length before it. Only types whose
    bytes say all are taken: one that is made from them may hold more."""

    def __init__(self, most_bytes: int = IN_MEMORY_BYTES) -> None:
        self.hash = hashlib.sha256()
        self.bytes = 0
        self._most_bytes = most_bytes

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind is torch.Tensor and not vars(value):
            self._add_tensor(value)
        elif (kind in (numpy.ndarray, numpy.memmap) or kind in _SCALARS) and not value.dtype.hasobject:
            strides = "" if kind in _SCALARS or value.flags.c_contiguous else f" {value.strides}"
            self._begin(f"{kind.__name__} {value.dtype.descr} {value.shape}{strides}", value.nbytes)
            self.hash.update(value.tobytes())
        elif kind in (str, bytes, bytearray):
            content = value.encode("utf-8", "surrogatepass") if kind is str else value
            self._begin(kind.__name__, len(content))
            self.hash.update(content)
        elif kind in (type(None), bool, int, float, complex):
            self._begin(f"{kind.__name__} {value!r}", 8)
        elif kind is dict:
            self._add_all("dict", list(value.items()))
        elif kind in (list, tuple) or _is_named_tuple(kind):
            self._add_all(name_of(kind), value)
        elif dataclasses.is_dataclass(kind) and _is_whole(value):
            self._add_all(name_of(kind), [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)])
        else:
            self._add_other(value)

    def _add_other(self, value: Any) -> None:
        raise Unproven(f"has {type(value).__qualname__} in its samples, whose bytes are not known")

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise Unproven(f"has tensors of a layout that has no plain bytes ({tensor.layout})")
        strides = "" if tensor.is_contiguous() else f" {tensor.stride()}"
        marks = f"{tensor.device.type} {tensor.requires_grad} {tensor.is_conj()} {tensor.is_neg()}"
        self._begin(f"tensor {tensor.dtype} {tuple(tensor.shape)}{strides} {marks}", tensor.nbytes)
        self._add_bytes(tensor)

    def _add_bytes(self, tensor: torch.Tensor) -> None:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self.hash.update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)

    def _add_all(self, label: str, values: Sequence[Any]) -> None:
        self._begin(f"{label} of {len(values)}", 0)
        for each in values:
            self.add(each)

    def _begin(self, label: str, size: int) -> None:
        self.bytes += size
        if self.bytes > self._most_bytes:
            raise Unproven(f"has more than {self._most_bytes >> 20:,} MiB, and so much is not read for a digest")
        self.hash.update(f"{len(label)} {label} {size}\n".encode())


_SCALARS = frozenset({numpy.bool_, *(numpy.dtype(code).type for code in numpy.typecodes["All"])})


def name_of(kind: type) -> str:
    """By which a class is known, wherever its file lies."""
    return kind.__qualname__


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and kind.__dictoffset__ == 0


def _is_whole(value: Any) -> bool:
    """Whether the fields of a record are all that it holds."""
    kind, names = type(value), {each.name for each in dataclasses.fields(value)}
    slots = {name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())}
    is_plain = all(base is object or dataclasses.is_dataclass(base) for base in kind.__mro__)
    return is_plain and {*getattr(value, "__dict__", {}), *slots} - {"__weakref__", "__dict__"} <= names


class _Set(Content):
    """The content of a set."""

    def __init__(self, source: Source, samples: Samples) -> None:
        super().__init__()
        self._source = source
        # collate() of the task may read more than it is given: of such samples the digest is of what it returns.
        self._is_collated = samples.collate is not collate
        made = samples.collate if self._is_collated else list
        self._samples = dataclasses.replace(samples, collate=made, copies=False, drawing=set())
        self._most_bytes, self._most_samples = IN_MEMORY_BYTES, IN_MEMORY_SAMPLES

    def add_dataset(self, dataset: Any) -> None:
        shards = self._samples.shards.get(self._source)
        if shards is not None:
            self._begin(f"shards {shards.fingerprint}", 0)
        elif is_stream(dataset):
            raise Unproven("is a stream, which is read once")
        elif self._is_collated or not _is_in_memory(dataset):
            self._most_bytes, self._most_samples = READ_BYTES, READ_SAMPLES
            self._add_samples(self._read, len(dataset))
        elif (columns := columns_of(dataset)) is not None:
            self._begin(f"columns of {len(columns.tensors)}", 0)
            for tensor in columns.tensors:
                self.add(tensor) if columns.rows is None else self._add_rows(tensor, columns.rows)
        elif isinstance(dataset, torch.Tensor | numpy.ndarray):
            self.add(dataset)
        elif type(dataset) is ConcatDataset:
            for part in dataset.datasets:
                self.add_dataset(part)
        else:
            self._add_samples(dataset.__getitem__, len(dataset))

    def _add_samples(self, read: Callable[[int], Any], count: int) -> None:
        if count > self._most_samples:
            raise Unproven(f"has more than {self._most_samples:,} samples, and so many are not read for a digest")
        self._begin(f"samples {count}", 0)
        for index in range(count):
            self.add(read(index))

    def _read(self, index: int) -> Any:  # seeded as for a fingerprint
        answer = self._samples[Request(self._source, 0, (index,))]
        if not isinstance(answer, Batch) or answer.is_empty:
            raise Unproven(f"cannot be read: sample {index}")
        if self._source in self._samples.drawing:
            raise Unproven("draws random numbers for its samples, which do not show all that it holds")
        return answer.content

    def _add_rows(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """A part of a tensor, which is not copied as a whole."""
        row = tensor[0].nbytes
        self._begin(f"rows {tensor.dtype} {(len(rows), *tensor.shape[1:])}", row * len(rows))
        some = max(1, PIECE // max(1, row))
        for first in range(0, len(rows), some):
            self._add_bytes(tensor[rows[first : first + some]])

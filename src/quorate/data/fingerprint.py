"""A digest of what a dataset holds, to find two workers that read different data."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import xxhash

from quorate.core.child import ask_child
from quorate.core.errors import JobError, TaskError
from quorate.data.reading import Request, Source
from quorate.data.samples import Fetched, FetchTrouble, Samples

_TROUBLE = "!"


def fingerprint_in_child(samples: Samples) -> str:
    """The fingerprint, taken in a process of its own.

    Reading a sample may open the dataset's files, and loader processes that are forked afterwards would share one file
    offset: each would read what the others skip, without an error.
    """
    answer = ask_child(lambda: _told(samples))
    if answer.text.startswith(_TROUBLE):
        raise TaskError(answer.text.removeprefix(_TROUBLE))
    if not answer.text:
        raise JobError(f"The process that read the first and last samples of the datasets {answer.ending}.")
    return answer.text


def _told(samples: Samples) -> str:
    torch.set_num_threads(1)
    try:
        return fingerprint(samples)
    except TaskError as error:
        return f"{_TROUBLE}{error}"


def fingerprint(samples: Samples) -> str:
    """Lengths and the first and last sample of each dataset: cheap, and it catches another version of the data.

    Of shards it is the digest of their index.
    """
    digest = xxhash.xxh3_128()
    for source, dataset in samples.datasets.items():
        length = len(dataset)
        digest.update(f"{source.value}:{length}".encode())
        if source in samples.shards:
            digest.update(samples.shards[source].fingerprint.encode())
        for index in _looked_at(samples, source, length):
            once, again = (_content(samples[Request(source, 0, (index,))]) for _ in range(2))
            if once != again:
                raise TaskError(
                    f"Sample {index} of the {source.value} set is another one each time it is read, so it depends on "
                    "who reads what. Draw from the global generators, which are seeded for each sample, and do not "
                    "change what the dataset holds."
                )
            digest.update(once)
    return digest.hexdigest()


def _looked_at(samples: Samples, source: Source, length: int) -> tuple[int, ...]:
    """Of shards the index has a digest of every byte; only what the task makes of them is looked at."""
    shards = samples.shards.get(source)
    if shards is None:
        return 0, length - 1
    return (0,) if shards.has_decode else ()


def _content(answer: Fetched | FetchTrouble) -> bytes:
    return b"".join(_parts(answer.batch if isinstance(answer, Fetched) else answer.message))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, numpy.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        # An array of objects holds addresses, which no two workers share.
        yield from _parts(value.tolist()) if value.dtype.hasobject else (value.tobytes(),)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key).encode()
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _parts(getattr(value, item.name))
    elif isinstance(value, str | bytes | int | float | bool | None):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()

"""Digests of what the datasets hold, to find two workers, or two parts of a run, that read different data."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import xxhash

from quorate.core.errors import HelperLost, JobError, QuorateError, RequestError, TaskError
from quorate.core.processes import ask_child
from quorate.core.user_code import is_attached
from quorate.data.collate import collate
from quorate.data.datasets import is_stream
from quorate.data.indices import Blocked
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, batch_of
from quorate.data.streams import preserved_generators

# What samples are decoded by: in another version it may give other numbers. By module, and by the name people know.
_DECODERS = {
    "PIL": "Pillow",
    "av": "PyAV",
    "cv2": "OpenCV",
    "h5py": "h5py",
    "imageio": "imageio",
    "librosa": "librosa",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "scipy": "SciPy",
    "skimage": "scikit-image",
    "soundfile": "soundfile",
    "tokenizers": "tokenizers",
    "torchaudio": "torchaudio",
    "torchvision": "torchvision",
}


LAYOUT, SAMPLES, LIBRARY = "dataset layout", "dataset", "library"


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What the datasets are.

    `layout`: how many samples each has, how those of shards lie in blocks and in which windows they are shuffled; the
    index of shards has a digest of every byte. `samples`: what the first and the last sample of each are. Where one
    of them cannot be read it says which, and compares with nothing but the same. `libraries`: the versions of those
    that decode samples, as far as they are loaded once these are read. `words`: the layout for people.
    """

    layout: str
    samples: str
    libraries: dict[str, str] = dataclasses.field(default_factory=dict)
    words: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """By which the data of two workers, and of two parts of a run, are compared."""
        libraries = {f"{LIBRARY} {name}": version for name, version in self.libraries.items()}
        words = f" ({self.words})" if self.words else ""
        return {LAYOUT: f"{self.layout}{words}", SAMPLES: self.samples, **libraries}


def fingerprint_in_child(samples: Samples) -> Fingerprint:
    """The fingerprint, taken in a process of its own.

    Reading a sample may open the dataset's files, and loader processes that are forked afterwards would share one file
    offset: each would read what the others skip, without an error. Where somebody steps through the dataset there are
    no loaders, and it is taken here.
    """
    if is_attached():
        with preserved_generators():
            return fingerprint(samples)
    told, ending = asked_of_child(lambda: dataclasses.asdict(fingerprint(samples)))
    if told is None:
        raise HelperLost(f"the process that read the first and last samples of the datasets {ending}.")
    return Fingerprint(**told)


def asked_of_child(question: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """What a forked process answers by reading data, and how it ended; None where that was without an answer. Errors
    that a person is to be told are raised here."""

    def answer() -> str:
        torch.set_num_threads(1)
        try:
            return json.dumps({"answer": question()})
        except QuorateError as error:
            return json.dumps({"refusal" if isinstance(error, RequestError) else "trouble": error.message})

    child = ask_child(answer)
    told = json.loads(child.text) if child.text else {}
    if "refusal" in told:
        raise TaskError(told["refusal"])
    if "trouble" in told:
        raise JobError(told["trouble"])
    return told.get("answer"), child.ending


def fingerprint(samples: Samples) -> Fingerprint:
    """Lengths and the first and last sample of each dataset: cheap, and it catches another version of the data.

    Of shards it is the digest of their index. Data that cannot be reached are no content: that is raised.
    """
    layout, content = xxhash.xxh3_128(), xxhash.xxh3_128()
    unread: list[str] = []
    for source, dataset in samples.datasets.items():
        length = len(dataset)
        for digest in (layout, content):
            digest.update(f"{source.value}:{length}".encode())
        for part in _arrangement(samples, source, length):
            layout.update(part)
        shards = samples.shards.get(source)
        # Of shards the index has a digest of every byte; only what the task makes of them is looked at.
        looked_at = (0, length - 1) if shards is None else (0,) if shards.has_decode else ()
        if is_stream(dataset):  # its last sample is behind all others
            looked_at = (0,)
        for index in looked_at:
            request = Request(source, 0, (index,))
            answer = _read_anew(samples, request)
            if _content(answer) != _content(_read_anew(samples, request)):
                raise TaskError(_why_not_the_same(samples, request))
            key = None if shards is None else shards.cache_key
            if key is not None and _content(answer) != _content(samples[request]):
                raise TaskError(
                    f"Sample {index} of the {source.value} set is another one in the cache than decode makes now. "
                    f"cache_key= ({key!r}) says what decode makes: give another one whenever decode, or anything that "
                    "it depends on, has changed."
                )
            if isinstance(answer, FetchFailure) or answer.bad:
                unread.append(f"sample {index} of the {source.value} set")
            content.update(_content(answer))
    without = f" ({' and '.join(unread)} cannot be read)" if unread else ""
    words = "; ".join(_in_words(samples, source) for source in samples.datasets)
    return Fingerprint(layout.hexdigest(), f"{content.hexdigest()}{without}", _libraries(), words)


def _read_anew(samples: Samples, request: Request) -> Batch | FetchFailure:
    shards = samples.shards.get(request.source)
    with contextlib.nullcontext() if shards is None else shards.uncached():
        return samples[request]


def _why_not_the_same(samples: Samples, request: Request) -> str:
    """Of a sample that is another one when it is read again: whether the dataset or collate() is to blame."""
    sample = f"{request.indices[0]} of the {request.source.value} set"
    remedy = "so it depends on who reads what. Draw from the global generators, which are seeded for each sample, and"
    uncollated = dataclasses.replace(samples, collate=list)
    if samples.collate is not collate and _content(_read_anew(uncollated, request)) == _content(
        _read_anew(uncollated, request)
    ):
        return f"collate() makes another batch of sample {sample} each time, {remedy} keep nothing between two calls."
    return f"Sample {sample} is another one each time it is read, {remedy} do not change what the dataset holds."


def _in_words(samples: Samples, source: Source) -> str:
    """How many there are and how they are read; not where they lie, which may be another place on each machine."""
    dataset, shards = samples.datasets[source], samples.shards.get(source)
    if is_stream(dataset):
        return f"{source.value} set: {dataset.in_words}"
    told = [f"{source.value} set: {len(dataset):,} samples"]
    if shards is not None:
        told[0] += f" {shards.in_words}"
    if source is Source.TRAINING and isinstance(dataset, Blocked):
        told.append(f"window {dataset.window}")
    return ", ".join(told)


def _libraries() -> dict[str, str]:
    # By what is loaded, which knows its version whatever package it came in: that of OpenCV has four names.
    loaded = {name: getattr(sys.modules.get(module), "__version__", None) for module, name in _DECODERS.items()}
    return {name: str(version) for name, version in loaded.items() if version is not None}


def _arrangement(samples: Samples, source: Source, length: int) -> Iterator[bytes]:
    """What decides, besides the job, which sample is read when; and, of shards, what all of them are."""
    dataset = samples.datasets[source]
    if is_stream(dataset):
        yield b"stream"
    if source in samples.shards:
        yield samples.shards[source].fingerprint.encode()
    if source is Source.TRAINING and isinstance(dataset, Blocked):
        # Blocks that are none are for whoever orders by them to refuse: a task may have an order of its own.
        from quorate.data.block_sampler import records_of

        with contextlib.suppress(TaskError):
            records = records_of(dataset, length)
            yield f"window {dataset.window}".encode()
            yield records.tobytes()


def _content(answer: Batch | FetchFailure) -> bytes:
    if isinstance(answer, FetchFailure) and answer.kind == "access":
        batch_of(answer)
    return b"".join(_parts(answer.content if isinstance(answer, Batch) else answer.message))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        plain = value.detach().contiguous()
        # Not reshape(): a single element keeps the stride of the row that it is from.
        yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
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

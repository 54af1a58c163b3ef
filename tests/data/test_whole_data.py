"""A digest of every byte of the datasets: of which there is one, and that no two datasets share one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import quorate
from quorate.core.errors import TaskError
from quorate.data import whole_data
from quorate.data.collate import collate
from quorate.data.sampler import Source
from quorate.data.samples import Samples
from quorate.data.whole_data import DataDigest, digest_of_all


class Own:
    """A dataset of one's own, of what is given for its samples."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class Noisy(Own):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1)


class Opaque:
    pass


@dataclass
class Point:
    x: float
    y: float


class Marked(Point):
    pass


def of(training: Any, validation: Any = None, declared: Callable[[], Any] | None = None) -> DataDigest:
    datasets = {Source.TRAINING: training} | ({Source.VALIDATION: validation} if validation is not None else {})
    return digest_of_all(Samples(datasets, collate, 1), declared)


NUMBERS = torch.arange(12.0).reshape(6, 2)
MAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda tensor: tensor,
    "an array": lambda tensor: tensor.numpy().copy(),
    "a list": list,
    "tensors": TensorDataset,
    "half precision": lambda tensor: TensorDataset(tensor.bfloat16()),
    "a part": lambda tensor: Subset(TensorDataset(tensor), range(1, 5)),
    "a part of a list": lambda tensor: Subset(list(tensor), [4, 3, 2]),  # type: ignore[arg-type]
    "parts": lambda tensor: ConcatDataset([TensorDataset(tensor[:2]), TensorDataset(tensor[2:])]),
    "one's own": lambda tensor: Own([{"row": row, "name": "a"} for row in tensor]),
    "records": lambda tensor: Own([Point(*map(float, row)) for row in tensor]),
    "array samples": lambda tensor: Own([(numpy.float32(row[0]), row.numpy()) for row in tensor]),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_every_sample_counts_also_those_in_the_middle(make: Callable[[torch.Tensor], Any]) -> None:
    changed = NUMBERS.clone()
    changed[3, 1] = 99.0
    digest = of(make(NUMBERS)).digest
    assert digest and digest == of(make(NUMBERS.clone())).digest
    assert of(make(changed)).digest not in ("", digest)


def test_what_a_part_leaves_out_does_not_count() -> None:
    changed = NUMBERS.clone()
    changed[0, 0] = 99.0
    assert of(MAKES["a part"](NUMBERS)).digest == of(MAKES["a part"](changed)).digest


ALIKE: list[list[Any]] = [
    [1, 2],
    [12],
    ["1", "2"],
    ["12"],
    [b"12"],
    [[1, 2]],
    [[1], [2]],
    [(1, [2])],
    [1.0, 2.0],
    [True, 2],
    [{"a": 1}, 2],
    [{"a": [1, 2]}],
    [numpy.int64(1), 2],
    [torch.tensor(1), 2],
    [torch.tensor([1]), 2],
    [torch.tensor([1], dtype=torch.int32), 2],
    [None],
    ["None"],
    [Point(1, 2)],
    [Marked(1, 2)],
    [[1, 2], bytearray(b"12")],
    [[1, 2], b"12"],
    [(1, 2), b"12"],
    [{"x": 1, "y": 2}],
    [0.0],
    [-0.0],
]


def test_no_two_of_these_have_the_same_digest() -> None:
    digests = [of(each).digest for each in ALIKE]
    assert "" not in digests and len(set(digests)) == len(ALIKE)
    assert of([1], [2]).digest != of([2], [1]).digest != of([1, 2]).digest


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Own([1, Opaque()]), "has Opaque in its samples"),
        (Noisy([0, 1]), "draws random numbers"),
        (Own([torch.zeros(2).to_sparse()]), "layout"),
        (quorate.Stream(lambda epoch, shard, shards: iter(()), samples=4), "is a stream"),
    ],
)
def test_without_a_digest_the_reason_and_the_remedy_are_told(dataset: Any, why: str) -> None:
    found = of([1], dataset)
    assert not found.digest
    assert found.words.startswith("unproven: the validation set ") and why in found.words
    assert "data_digest() of the task" in found.words


@pytest.mark.parametrize(("limit", "value"), [("READ_SAMPLES", 3), ("READ_BYTES", 16), ("IN_MEMORY_BYTES", 16)])
def test_how_much_is_read_is_limited_by_what_there_is(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(whole_data, limit, value)
    given = TensorDataset(NUMBERS) if limit == "IN_MEMORY_BYTES" else Own(list(NUMBERS))
    assert "not read for a digest" in of(given).words
    assert of([1]).digest


def test_what_the_task_says_counts_for_what_it_says_it_of() -> None:
    stream = quorate.Stream(lambda epoch, shard, shards: iter(()), samples=4)
    assert of(stream, declared=lambda: "v1").digest == "task:v1"
    assert of([1], declared=lambda: None).digest == of([1]).digest


class Text(str):
    pass


def noted(value: Any) -> Any:
    """With something that its type does not show."""
    value.note = 1
    return value


@pytest.mark.parametrize(
    "value",
    [
        Text("a"),
        noted(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(2)),
        noted(Point(1, 2)),
        numpy.ma.masked_array([1, 2], mask=[True, False]),
        numpy.zeros(2).view(numpy.recarray),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_hold_more_than_its_bytes_is_not_proven(value: Any) -> None:
    assert of([value]).words.startswith("unproven")


def test_how_an_image_lies_in_memory_counts() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert of([image]).digest != of([image.contiguous(memory_format=torch.channels_last)]).digest
    assert of([image.numpy()]).digest != of([numpy.asfortranarray(image.numpy())]).digest


def test_a_part_that_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_data, "IN_MEMORY_BYTES", 16)
    monkeypatch.setattr(whole_data.Content, "_add_bytes", lambda *_: pytest.fail("was copied"))
    assert "not read for a digest" in of(Subset(TensorDataset(NUMBERS), range(1, 5))).words


def test_a_dataset_that_fails_ends_no_job_for_want_of_a_digest() -> None:
    beyond: Any = Subset(TensorDataset(NUMBERS), [0, 7])
    assert "cannot be read for a digest: IndexError" in of(beyond).words


@pytest.mark.parametrize("given", ["", b"", True, 1.5, Opaque()])
def test_what_the_task_says_has_to_be_a_digest(given: Any) -> None:
    with pytest.raises(TaskError, match=r"data_digest\(\) returned"):
        of([1], declared=lambda: given)


def test_what_a_collate_of_ones_own_reads_counts(tmp_path: Path) -> None:
    file = tmp_path / "offset"

    def reading(samples: Sequence[Any]) -> Any:
        return torch.tensor(samples) + int(file.read_text())

    found = []
    for offset in ("1", "2"):
        file.write_text(offset)
        found.append(digest_of_all(Samples({Source.TRAINING: [1, 2, 3]}, reading, 5)))
    assert [each.words.partition(":")[0] for each in found] == ["proven", "proven"]
    assert found[0].digest != found[1].digest
    many = list(range(whole_data.READ_SAMPLES + 1))
    assert digest_of_all(Samples({Source.TRAINING: many}, reading, 5)).digest == ""


def test_a_column_of_one_row_has_a_digest() -> None:
    assert of([torch.tensor([[1, 2]])[:, 1]]).digest != of([torch.tensor([[1, 3]])[:, 1]]).digest

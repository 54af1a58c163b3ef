from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from quorate.data.collate import collate
from quorate.data.fingerprint import fingerprint
from quorate.data.reading import Source
from quorate.data.samples import Samples


@dataclass
class Point:
    inputs: torch.Tensor
    label: int


class Opaque:
    """Something that has no bytes of its own."""


def first(samples: Any) -> Any:
    return samples[0]


def of(training: Any, validation: Any = None, *, collate_with: Any = collate, seed: int = 1) -> str:
    datasets = {Source.TRAINING: training} | ({Source.VALIDATION: validation} if validation is not None else {})
    return fingerprint(Samples(datasets, collate_with, seed))


def build(kind: str, value: float) -> list[Any]:
    vector = torch.tensor([1.0, value])
    sample: Any = {
        "tensor": vector,
        "bfloat16": vector.bfloat16(),
        "numpy": vector.numpy(),
        "tuple": (vector, 1),
        "dict": {"a": {"b": vector}, "name": "x"},
        "dataclass": Point(vector, 3),
        "number": value,
        "text": str(value),
    }[kind]
    return [sample, sample]


KINDS = ["tensor", "bfloat16", "numpy", "tuple", "dict", "dataclass", "number", "text"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_data_have_equal_fingerprints_and_different_data_do_not(kind: str) -> None:
    assert of(build(kind, 2.0)) == of(build(kind, 2.0))
    assert of(build(kind, 2.0)) != of(build(kind, 3.0))


def test_the_last_sample_the_length_and_the_validation_set_count() -> None:
    usual = of([1, 2, 3])
    assert usual != of([1, 2, 4])
    assert usual != of([1, 3])
    assert usual != of([1, 2, 3], [1])
    assert of([1, 2, 3], [1]) != of([1, 2, 3], [2])


def test_keys_shapes_and_types_count() -> None:
    assert of([{"a": 1}]) != of([{"b": 1}])
    assert of([torch.zeros(2, 3)]) != of([torch.zeros(3, 2)])
    assert of([torch.zeros(2, dtype=torch.int32)]) != of([torch.zeros(2)])


def test_a_random_transform_has_one_fingerprint() -> None:
    """Samples are drawn from their own streams, so two workers agree on a noisy one."""

    class Noisy:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(2) + float(numpy.random.rand())

    assert of(Noisy()) == of(Noisy())
    assert of(Noisy(), seed=1) != of(Noisy(), seed=2)


def test_objects_without_bytes_do_not_make_it_differ_by_address() -> None:
    assert of([Opaque()], collate_with=first) == of([Opaque()], collate_with=first)
    boxes = [numpy.array([{"a": 1}, "b"], dtype=object), numpy.array([{"a": 1}, "b"], dtype=object)]
    assert of(boxes[:1], collate_with=first) == of(boxes[1:], collate_with=first)
    assert of([None], collate_with=first) != of([0], collate_with=first)


def test_a_sample_that_cannot_be_read_leaves_the_trouble_to_the_step_that_needs_it() -> None:
    class Broken:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            raise KeyError("gone")

    assert of(Broken()) == of(Broken()) != of([1, 1])

import os
import signal
import sys
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from quorate.core.errors import HelperLost, JobError, TaskError
from quorate.data.bad_sample import BadSample, Unreachable
from quorate.data.collate import collate
from quorate.data.fingerprint import Fingerprint, fingerprint, fingerprint_in_child
from quorate.data.sampler import Source
from quorate.data.samples import Samples


@dataclass
class Point:
    inputs: torch.Tensor
    label: int


class Opaque:
    """Something that has no bytes of its own."""


def first(samples: Any) -> Any:
    return samples[0]


def samples_of(
    training: Any, validation: Any = None, *, collate_with: Any = collate, seed: int = 1, skips: bool = False
) -> Samples:
    datasets = {Source.TRAINING: training} | ({Source.VALIDATION: validation} if validation is not None else {})
    return Samples(datasets, collate_with, seed, skips=skips)


def of(training: Any, validation: Any = None, **options: Any) -> Fingerprint:
    return fingerprint(samples_of(training, validation, **options))


def build(kind: str, value: float) -> list[Any]:
    vector = torch.tensor([1.0, value])
    sample: Any = {
        "tensor": vector,
        "bfloat16": vector.bfloat16(),
        "a column": torch.tensor([[0.0, value]])[:, 1],
        "numpy": vector.numpy(),
        "tuple": (vector, 1),
        "dict": {"a": {"b": vector}, "name": "x"},
        "dataclass": Point(vector, 3),
        "number": value,
        "text": str(value),
    }[kind]
    return [sample, sample]


KINDS = ["tensor", "bfloat16", "a column", "numpy", "tuple", "dict", "dataclass", "number", "text"]


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
    assert of(Broken()).layout == of([1, 1]).layout
    assert of(Broken()).samples.endswith(
        " (sample 0 of the training set and sample 1 of the training set cannot be read)"
    )


def test_a_bad_sample_that_is_skipped_is_told_as_well() -> None:
    class Bad(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise BadSample("shard-000.tar, byte 0: damaged")

    found = of(Bad([1, 2]), skips=True)
    assert "sample 0 of the training set and sample 1" in found.samples


def test_data_that_cannot_be_reached_have_no_fingerprint() -> None:
    """Two workers of which one reaches a store and the other does not, hold the same data."""

    class Away(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise Unreachable("s3://bucket/shard-000.tar cannot be read (tried 6 times in 3.1 s): no answer.")

    for take in (fingerprint, fingerprint_in_child):
        with pytest.raises(JobError, match=r"sample 0 of the training set cannot be read: s3://.*no answer") as told:
            take(samples_of(Away([1, 2])))
        assert told.value.exit_code == 1


class InBlocks(list[int]):
    def __init__(self, blocks: Any, window: int = 4) -> None:
        super().__init__(range(6))
        self.blocks, self.window = blocks, window


def test_blocks_and_windows_count_where_they_decide_the_order() -> None:
    usual = of(InBlocks([2, 4]))
    assert usual == of(InBlocks(numpy.array([2, 4], dtype=numpy.int32)))
    others = [of(InBlocks([4, 2])), of(InBlocks([2, 4], window=5)), of(InBlocks([2, 4, 0])), of(list(range(6)))]
    assert len({usual.layout, *(each.layout for each in others)}) == 5
    assert {usual.samples} == {each.samples for each in others}
    assert of([1], InBlocks([2, 4])) == of([1], InBlocks([4, 2])), "an evaluation reads in order"


def test_blocks_that_are_none_are_left_to_whoever_orders_by_them() -> None:
    assert of(InBlocks("towers")).layout == of(list(range(6))).layout


def test_in_a_process_of_its_own_it_is_the_same_and_refuses_the_same() -> None:
    samples = samples_of(InBlocks([2, 4]))
    assert fingerprint_in_child(samples) == fingerprint(samples)

    class Counting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            self.append(len(self))
            return len(self)

    with pytest.raises(TaskError, match="Sample 0 of the training set is another one each time it is read"):
        fingerprint_in_child(samples_of(Counting([1])))


def test_a_collate_that_keeps_a_state_is_not_blamed_on_the_dataset() -> None:
    calls: list[int] = []

    def counting(samples: Any) -> Any:
        calls.append(0)
        return [*samples, len(calls)]

    with pytest.raises(TaskError, match=r"collate\(\) makes another batch of sample 0 of the training set each time"):
        of([1, 2], collate_with=counting)


class Pictures:
    """Decoded by a library that is loaded when the first of them is read, and so not by whoever builds the dataset."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        return torch.tensor(Image.new("L", (1, 1), index).getpixel((0, 0)))


def test_the_libraries_that_decode_samples_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "PIL", raising=False)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(__version__="4.9"))
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace())
    libraries = fingerprint_in_child(samples_of(Pictures())).libraries
    assert libraries["Pillow"] == version("pillow")
    assert libraries["OpenCV"] == "4.9"
    assert "h5py" not in libraries, "a module that does not say which it is"


def test_a_process_that_is_killed_while_it_takes_the_fingerprint_is_a_helper_that_is_lost() -> None:
    class Fatal:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return index

    with pytest.raises(HelperLost, match=r"the process that read the first .* was killed by SIGKILL\.$"):
        fingerprint_in_child(Samples({Source.TRAINING: Fatal()}, collate, 5))

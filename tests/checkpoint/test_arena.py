import threading

import pytest
import torch

from quorate.checkpoint import tensor_file as arena_module
from quorate.checkpoint.tensor_file import DTYPES, SPARE, Arena, TensorFile, tensors_in
from quorate.replica.device import same_bits


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    bits = {
        str(dtype): torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5 * dtype.itemsize), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        for dtype in DTYPES
    }
    return bits | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "not contiguous": torch.arange(24.0).reshape(4, 6).t()[1:, ::2],
        "negative zero and nan": torch.tensor([-0.0, float("nan")]),
    }


def content_of(file: TensorFile) -> bytes:
    return b"".join(file.chunks())


def test_what_is_staged_is_the_file_to_the_last_byte_and_its_tensors() -> None:
    file = TensorFile(tensors())
    staged = Arena().stage(file)
    assert staged is not None
    content, copies = staged
    assert bytes(content) == content_of(file)
    assert copies.keys() == file.tensors.keys()
    assert [name for name, copy in copies.items() if not same_bits(copy, file.tensors[name])] == []
    read = tensors_in(memoryview(bytearray(content)))
    assert [name for name, tensor in read.items() if not same_bits(tensor, file.tensors[name])] == []


def test_a_copy_does_not_follow_its_tensor() -> None:
    tensor = torch.zeros(1000)
    staged = Arena().stage(TensorFile({"a": tensor}))
    assert staged is not None
    tensor.fill_(1.0)
    assert not staged[1]["a"].any()


def test_its_memory_is_taken_once_and_serves_smaller_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    large, small = TensorFile({"a": torch.ones(1000)}), TensorFile({"a": torch.zeros(10)})
    first = arena.stage(large)
    monkeypatch.setattr(arena_module, "free_memory", lambda: 0)
    assert first is not None
    second, third = arena.stage(small), arena.stage(large)
    assert second is not None
    assert third is not None
    assert bytes(third[0]) == content_of(large)
    assert third[1]["a"].untyped_storage().data_ptr() == first[1]["a"].untyped_storage().data_ptr()
    assert len(second[0]) == small.size


def test_memory_that_others_need_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    file = TensorFile({"a": torch.ones(1000)})
    monkeypatch.setattr(arena_module, "free_memory", lambda: file.size + SPARE - 1)
    assert arena.stage(file) is None
    assert arena.reserve(file.size) is None
    monkeypatch.setattr(arena_module, "free_memory", lambda: file.size + SPARE)
    assert arena.reserve(file.size) is not None
    assert arena.stage(file) is not None


def test_more_memory_that_is_taken_in_the_background_does_not_disturb_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken when fewer workers are left, so that parts are larger, and a save may be under way."""
    arena = Arena()
    file = TensorFile({"a": torch.arange(1000.0)})
    reserve, taken = arena.reserve, threading.Event()
    assert reserve(file.size) is not None

    def take_more(size: int) -> torch.Tensor | None:
        memory = reserve(size)
        # There is none: what it had is let go of all the same.
        monkeypatch.setattr(arena_module, "free_memory", lambda: 0)
        thread = threading.Thread(target=reserve, args=(10 * size,))
        thread.start()
        thread.join(60)
        taken.set()
        return memory

    monkeypatch.setattr(arena, "reserve", take_more)
    staged = arena.stage(file)
    assert taken.is_set()
    assert staged is not None
    assert bytes(staged[0]) == content_of(file)

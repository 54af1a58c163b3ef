"""What a loader sends arrives as it was: every bit, where it lies, and what shares memory with what."""

import os
import socket
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.data.batch_message import LEAST_SHARED, pack, receive, send, unpack


def sent(content: Any) -> Any:
    """Through a socket; more than that takes is sent by a process of its own."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            send(theirs, pack(content))
            os._exit(0)
        ours.setblocking(True)
        try:
            return unpack(receive(ours, lambda: None))
        finally:
            os.waitpid(child, 0)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


PLAIN = [
    torch.arange(6).reshape(2, 3).t(),
    torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.ones(1).expand(4, 3),
    torch.rand(8)[2:6:2],
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
]
OTHER = [
    torch.tensor([1 + 2j]).conj(),
    torch.eye(3).to_sparse(),
    torch.nn.Parameter(torch.rand(3)),
    torch.rand(3).requires_grad_(),
]


@pytest.mark.parametrize("tensor", PLAIN)
def test_a_tensor_keeps_its_bits_and_its_layout(tensor: torch.Tensor) -> None:
    (got,) = sent((tensor,))
    assert (got.dtype, got.size(), got.stride()) == (tensor.dtype, tensor.size(), tensor.stride())
    assert bits(got) == bits(tensor)


@pytest.mark.parametrize("tensor", OTHER)
def test_other_kinds_of_tensors_travel_as_torch_sends_them(tensor: torch.Tensor) -> None:
    got = sent(tensor)
    assert (type(got), got.layout, got.requires_grad) == (type(tensor), tensor.layout, tensor.requires_grad)
    assert torch.equal(got.to_dense(), tensor.to_dense())


@settings(max_examples=20)
@given(st.integers(0, 3 * LEAST_SHARED // 4), st.integers(0, 3 * LEAST_SHARED // 4))
def test_memory_of_any_size_arrives_within_the_pickle_beside_it_or_shared(first: int, second: int) -> None:
    before = descriptors()
    content: dict[str, Any] = {
        "torch": torch.arange(first) % 251,
        "numpy": numpy.arange(second, dtype=numpy.uint8),
        "rest": [first],
    }
    got = sent(content)
    assert torch.equal(got["torch"], content["torch"])
    assert numpy.array_equal(got["numpy"], content["numpy"])
    assert got["torch"].data_ptr() % 64 == 0
    got["torch"] += 1
    got["numpy"][:] = 0  # both may be written to, as where they were made
    assert got["rest"] == [first]
    assert descriptors() == before, "none is kept, or memory would be"


@pytest.mark.parametrize("size", [10, 100_000])
def test_tensors_that_share_memory_still_do(size: int) -> None:
    whole = torch.zeros(size)
    first, again, part = sent((whole, whole, whole[3:5]))
    assert again is first
    part += 1
    assert first[2:6].tolist() == [0, 1, 1, 0]


def memory_of(content: Any) -> int:
    message = pack(content)
    return len(message.content) + sum(piece.memory.nbytes for piece in message.beside)


class Own:
    """A batch of a class of one's own, which nothing looks into."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


def test_a_view_does_not_bring_along_what_it_was_cut_from() -> None:
    whole = torch.arange(2**20, dtype=torch.float32)
    for view in (whole[:4], whole[-4:], whole[1000:2000:3], whole.view(1024, 1024)[7:9, 5:]):
        assert memory_of([view]) < 20_000
        (got,) = sent([Own(view)])
        assert bits(got.rows) == bits(view)
        assert (got.rows.size(), got.rows.stride()) == (view.size(), view.stride())
        assert got.rows.data_ptr() % 64 == view.data_ptr() % 64, "which instructions a kernel uses may depend on it"


def test_views_share_as_much_of_their_memory_as_they_use() -> None:
    whole = torch.zeros(2**20)
    parts = whole[1000:1010], whole[5:5], whole[1005:3000], whole[1002]
    assert memory_of(parts) < 10_000
    first, empty, second, number = sent(parts)
    second += 1
    number += 2
    assert first.tolist() == [0, 0, 2, 0, 0, 1, 1, 1, 1, 1]
    assert empty.shape == (0,)
    assert sent(torch.zeros(2**20)[7:7]).shape == (0,)


def test_a_storage_is_sent_whole_and_is_that_of_its_tensors() -> None:
    whole = torch.zeros(5_000)
    part, storage = sent((whole[4_000:], whole.untyped_storage()))
    assert storage.nbytes() == 20_000
    assert part.untyped_storage().data_ptr() == storage.data_ptr()
    part.fill_(1)
    assert torch.empty(0).set_(storage).sum() == 1_000


def test_memory_that_cannot_be_mapped_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("unable to mmap 400000 bytes from file")

    monkeypatch.setattr(torch, "from_file", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="bytes of shared memory could not be mapped"):
        sent(torch.rand(100_000))
    assert descriptors() == before


def test_a_tensor_with_a_graph_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loses its graph on the way; detach\(\) it"):
        pack(torch.ones(2, requires_grad=True) * 2)


def test_without_memory_to_share_it_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = descriptors()
    content = torch.rand(100_000)
    assert torch.equal(sent(content), content)
    assert descriptors() == before

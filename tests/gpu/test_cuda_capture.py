"""How graphs share a pool of memory, against the rules of torch's allocator: there need be no GPU for it."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorate.cuda.device import CudaCapture


class Allocator:
    """The pools that exist, each with the number of graphs that use it. What still lies in one keeps it in existence
    when all its graphs are gone, and it may not be used again then."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.underway: list[int] = []
        self.made = 0
        self.breaks = False

    def handle(self) -> int:
        self.made += 1
        return self.made

    def begin(self, pool: int) -> None:
        if self.uses.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.underway.append(pool)

    def end(self, _: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, _: int, pool: int) -> None:
        self.uses[pool] -= 1


class Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()

    @contextmanager
    def graph(made: Graph, pool: int, **_: Any) -> Iterator[None]:
        allocator.begin(pool)
        try:
            yield
        finally:
            if allocator.breaks:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            allocator.end(0, pool)
            weakref.finalize(made, allocator.release, 0, pool)

    generator = SimpleNamespace(
        get_state=lambda: 0, set_state=lambda _: None, clone_state=lambda: 0, graphsafe_set_state=lambda _: None
    )
    for name, value in {
        "Stream": lambda _: object(),
        "current_stream": lambda _: object(),
        "set_stream": lambda _: None,
        "graph_pool_handle": allocator.handle,
        "CUDAGraph": Graph,
        "graph": graph,
        "default_generators": (generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    return allocator


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("of the user")


def test_graphs_share_a_pool_and_whoever_comes_after_all_of_them_has_another(allocator: Allocator) -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    graphs = [capture.record(nothing), capture.record(nothing)]
    assert allocator.made == 1
    graphs.clear()
    assert allocator.uses == {1: 0}
    kept = capture.record(nothing)
    assert allocator.made == 2
    del kept


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_that_fails_gives_up_its_memory(allocator: Allocator, breaks: bool) -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    allocator.breaks = breaks
    with pytest.raises((ValueError, RuntimeError)):
        capture.record(fail)
    assert allocator.underway == []
    assert allocator.uses == {1: 0}

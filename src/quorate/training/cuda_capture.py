"""CUDA graphs: a lane's kernels, recorded on a stream of their own and launched at once."""

import contextlib
import pickle
import random
import warnings
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet

import numpy
import torch

_SYNCHRONISING = "synchronizing CUDA operation"


class CudaCapture:
    """Captures on one side stream, on which everything that will be captured is warmed up: autograd remembers the
    stream that a parameter's gradient was first accumulated on, and workspaces of cuBLAS belong to one stream.

    All graphs share a pool of memory, since they are replayed one after another on one stream, and nothing that one of
    them leaves there is read after the next but what somebody holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, work: Callable[[], None]) -> str | None:
        side, current = self._side(), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as met, torch.cuda.stream(side):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
                current.wait_stream(side)
        others = [one for one in met if _SYNCHRONISING not in str(one.message)]
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if len(others) == len(met):
            return None
        return "loss() or its backward pass waits for the GPU, as .item(), `if` on a tensor and indexing by a mask do"

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side, current = self._side(), torch.cuda.current_stream(self._device)
        if not self._graphs:
            # The allocator refuses a pool whose graphs are all gone, as long as something still lies in it.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        stream = generator.get_state()
        try:
            # In other threads pages may be pinned meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._recover(graph, current)
            raise
        finally:
            generator.set_state(stream)
        self._graphs.add(graph)
        return graph

    def host_streams(self) -> Hashable:
        of_torch = torch.default_generator.get_state().numpy().tobytes()
        return random.getstate(), pickle.dumps(numpy.random.get_state()), of_torch

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream

    def _recover(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """A capture that was broken off by an error leaves its stream the current one, its pool open, and the generator
        in the middle of it. Graphs from before cannot be used after this: they have another generator's state."""
        torch.cuda.set_stream(stream)
        self._graphs.clear()
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            # It had not been ended, so torch may still refer to the graph, and nobody else gives up its memory.
            self._failed.append(graph)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        generator = torch.cuda.default_generators[self._device.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())

"""What a worker of `strategy: fsdp` needs: its part of the state, what is gathered, and what is cut across."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quorate.core.errors import TaskError
from quorate.core.generation import MeshShape
from quorate.data.streams import preserved_generators
from quorate.observe.quantities import size
from quorate.replica.device import local
from quorate.replica.footprint import Footprint, Part, Spread, Traffic, make_fake, shapes_of
from quorate.replica.replica import build_model
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.gang_world import TENSOR
from quorate.strategies.gangs.option import FsdpSpec
from quorate.strategies.gangs.sharded_model import parallelize, units_of
from quorate.task.task import Task

_MOST_SHARDS = 1024


class ShardedPlan:
    """Of one job; `trace` finds a footprint of the model after it was cut."""

    def __init__(self, task: Task, spec: JobSpec, shape: MeshShape) -> None:
        assert isinstance(spec.strategy, FsdpSpec)
        self._task, self._spec, self._strategy, self._shape = task, spec, spec.strategy, shape
        with preserved_generators(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            model = build_model(task, spec.seed)
            make_fake(model, fakes)
            self._units = units_of(model, spec.strategy)
            self._tensors = shapes_of(model.named_parameters())
            self._trained = shapes_of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._largest = self._outside = 0
        self._measure(model)

    @property
    def spread(self) -> Spread:
        units = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1) for name in self._units)
        return Spread(self._shape, tuple(units.items()))

    def traced(self, trace: Callable[[Callable[[torch.nn.Module], None] | None], Footprint]) -> Footprint:
        """The footprint of a worker of the tensor dimension."""
        if self._shape.tensor == 1:
            return trace(None)
        with imagined_mesh(self._shape.tensor) as mesh:

            def cut(model: torch.nn.Module) -> None:
                parallelize(self._task, model, mesh)
                self._measure(model)

            return trace(cut)

    def whole(self, found: Footprint) -> Footprint:
        """With the parameters of all workers together."""
        return replace(found, tensors=self._tensors, trained=self._trained)

    def parts(self, found: Footprint, precision: str, shards: int | None = None) -> Iterator[Part]:
        """The memory of a worker, as the mesh is or with another number of shards."""
        strategy, shard = self._strategy, shards or self._shape.shard
        share, away = (f"1/{shard} of {{}}", " in the host's memory") if shard > 1 else ("", "in the host's memory")

        def part(name: str, whole: int) -> Part:
            note = share.format(size(whole)) + (away if strategy.offload else "")
            return Part(name, 0 if strategy.offload else -(-whole // shard), note)

        yield part("weights", found.weights)
        if found.buffers:
            yield Part("buffers", found.buffers)
        yield part("gradients", found.gradients)
        yield part("optimizer", found.optimizer)
        if self._spec.average is not None:
            yield part("averages", found.weights)
        yield Part("gathered", self._gathered(found), self._gathered_note())
        if found.weight_copies and strategy.gather != "bf16":
            yield Part("weight copies", found.weight_copies, f"in {precision}")
        yield Part("activations", found.kept, "kept for the backward pass", grows=True)
        if found.working:
            yield Part("working", found.working, "at the worst moment of a step", grows=True)
        yield Part("batch", found.batch, grows=True)

    def traffic(self, found: Footprint) -> tuple[Traffic, ...]:
        """Of a step: every lane's micro-batches gather the weights and sum gradients."""
        strategy, shape = self._strategy, self._shape
        passes = self._spec.lanes // shape.groups * self._spec.accumulate
        weights = found.weights // (2 if strategy.gather == "bf16" else 1)
        gradients = found.gradients // (2 if strategy.reduce == "bf16" else 1)
        each = _mesh_traffic(shape, weights, gradients, gathers=2 if strategy.reshard else 1)
        sent = passes * (each + _tensor_traffic(found.exchanged, shape.tensor))
        return (Traffic(sent, sent),) * shape.size

    def advice(self, found: Footprint, precision: str, room: int) -> Iterator[str]:
        """What in the strategy would make it need less."""
        now, shape, strategy = self._need(found, precision), self._shape, self._strategy
        shards = shape.shard
        while shards < _MOST_SHARDS:
            shards *= 2
            if (need := self._need(found, precision, shards)) <= room:
                workers = shards * shape.replicate * shape.tensor
                yield f"strategy.shard: {shards} ({workers} workers) needs {size(need)} for each, which fits."
                break
        if not strategy.reshard:
            yield "strategy.reshard: true keeps one unit's weights at a time; they are gathered twice."
        if strategy.gather is None and precision == "bf16":
            less = size(self._gathered(found) // 2 + found.weight_copies)
            yield f"strategy.gather: bf16 saves {less}: weights travel, and are multiplied, in 16 bits."
        if not strategy.offload:
            state = sum(part.bytes for part in self.parts(found, precision) if part.name in _STATE)
            verdict = "fits" if now - state <= room else "is not enough alone"
            yield f"strategy.offload: true keeps {size(state)} in the host's memory, which {verdict}; it is slower."

    def _need(self, found: Footprint, precision: str, shards: int | None = None) -> int:
        return sum(part.bytes for part in self.parts(found, precision, shards))

    def _gathered(self, found: Footprint) -> int:
        """The unit that is computed and the next one, what lies outside of units, and the gradient of one of them."""
        is_half = self._strategy.gather == "bf16"
        at_once = min(found.weights, 2 * self._largest + self._outside) if self._strategy.reshard else found.weights
        return (at_once + max(self._largest, self._outside)) // (2 if is_half else 1)

    def _gathered_note(self) -> str:
        if not self._strategy.reshard:
            return "all weights, until the backward pass has used them"
        if not self._units:
            return "the whole model: it repeats no blocks"
        return "two units and what is outside of them, and a gradient"

    def _measure(self, model: torch.nn.Module) -> None:
        total = sum(local(parameter).nbytes for parameter in model.parameters())
        sizes = [
            sum(local(parameter).nbytes for parameter in model.get_submodule(name).parameters()) for name in self._units
        ]
        self._largest, self._outside = max(sizes, default=0), total - sum(sizes)


_STATE = ("weights", "gradients", "optimizer", "averages")


@contextmanager
def imagined_mesh(tensor: int) -> Iterator[DeviceMesh]:
    """A mesh on which this is the first worker and the others are not there, for tensors without content: what is to
    come from them has the right shape."""
    if dist.is_initialized():
        raise TaskError("torch.distributed is in use in this process: how a model is cut cannot be tried in it.")
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=tensor)
    try:
        yield init_device_mesh("cpu", (tensor,), mesh_dim_names=(TENSOR,))
    finally:
        dist.destroy_process_group()


def _mesh_traffic(shape: MeshShape, weights: int, gradients: int, gathers: int = 2) -> int:
    """What a worker of a mesh sends in a forward and a backward pass: its shard of the weights, each time that they are
    gathered, of the gradients all but its shard, and that shard's to the replicas. Bytes are those of all shards."""
    sent = (gathers * weights + gradients) * (shape.shard - 1) // shape.shard
    return sent + 2 * gradients * (shape.replicate - 1) // (shape.replicate * shape.shard)


def _tensor_traffic(exchanged: Mapping[str, int], tensor: int) -> int:
    """What a worker sends in collectives of the tensor dimension, to which it gives so many bytes."""
    share = (tensor - 1) / tensor
    factors = {
        "all_reduce": 2 * share,
        "all_gather_into_tensor": tensor - 1,
        "reduce_scatter_tensor": share,
        "all_to_all_single": share,
    }
    return round(sum(factors.get(name, 0) * size for name, size in exchanged.items()))

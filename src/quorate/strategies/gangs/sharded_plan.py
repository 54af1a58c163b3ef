"""What a worker of `strategy: fsdp` needs: its part of the state, what is gathered, and what is cut across."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quorate.core.errors import TaskError
from quorate.core.mesh import MeshShape
from quorate.data.streams import preserved_generators
from quorate.lanes.traffic import Traffic, mesh_traffic, tensor_traffic
from quorate.observe.quantities import plural, size
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.option import FsdpSpec
from quorate.strategies.gangs.shard_units import units_of
from quorate.strategies.gangs.tensor_parallel import imagined_mesh, parallelize
from quorate.strategies.gangs.tensor_plan import TensorPlan, pattern_of, plan_task
from quorate.training.footprint import Footprint, make_fake, shapes_of
from quorate.training.replica import build_model
from quorate.training.sharded_tensors import local
from quorate.training.task import Task

_MOST_SHARDS = 1024


@dataclass(frozen=True)
class Part:
    """A part of a worker's memory."""

    name: str
    bytes: int
    note: str = ""
    grows: bool = False
    """Whether it grows with the samples of a micro-batch."""


@dataclass(frozen=True)
class Spread:
    """How a model is spread: units are patterns of the modules that are gathered at a time, and how many there are;
    cuts are patterns of those that are cut across, and how."""

    shape: MeshShape
    units: tuple[tuple[str, int], ...]
    cuts: tuple[tuple[str, str], ...]


class ShardedPlan:
    """Of one job; `trace` finds a footprint of the model after it was cut."""

    def __init__(self, task: Task, spec: JobSpec, shape: MeshShape, batch: Any) -> None:
        assert isinstance(spec.strategy, FsdpSpec)
        self._spec, self._strategy, self._shape = spec, spec.strategy, shape
        with preserved_generators(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            model = build_model(task, spec.seed)
            make_fake(model, fakes)
            self._units = units_of(model, spec.strategy)
            self._tensors = shapes_of(model.named_parameters())
            self._trained = shapes_of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._tensor_plan = TensorPlan(1)
        if shape.tensor > 1:
            self._tensor_plan = plan_task(task, spec.strategy, spec.seed, batch, model)
        self._largest = self._outside = 0
        self._measure(model)

    @property
    def spread(self) -> Spread:
        units = Counter(map(pattern_of, self._units))
        return Spread(self._shape, tuple(units.items()), self._tensor_plan.rows())

    @property
    def notes(self) -> tuple[str, ...]:
        return self._tensor_plan.notes

    def traced(self, trace: Callable[[Callable[[torch.nn.Module], None] | None], Footprint]) -> Footprint:
        """The footprint of a worker of the tensor dimension. A plan that does not work is an error here."""
        if not self._tensor_plan.cuts:
            return trace(None)
        try:
            with imagined_mesh(self._shape.tensor) as mesh:

                def cut(model: torch.nn.Module) -> None:
                    parallelize(model, mesh, self._tensor_plan)
                    self._measure(model)

                return trace(cut)
        except Exception as error:
            whole = trace(None)
            if whole.notes:  # it cannot be traced at all
                return replace(whole, notes=(*whole.notes, "it is counted as if no tensor were cut across"))
            cause = error.__cause__ or error
            raise TaskError(
                "strategy.plan: a model that is cut so does not run: "
                f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]} "
                "Give the modules around it as replicate."
            ) from error

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
        each = mesh_traffic(shape, weights, gradients, gathers=2 if strategy.reshard else 1)
        sent = passes * (each + tensor_traffic(found.exchanged, shape.tensor))
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


def spread_lines(spread: Spread) -> Iterator[tuple[str, str]]:
    """Mesh and units, for people."""
    shape = spread.shape
    yield (
        "mesh",
        f"{plural(shape.replicate, 'replica')} × {plural(shape.shard, 'shard')} × {shape.tensor} across: "
        f"{plural(shape.size, 'worker')}, of which {shape.groups} read data of their own",
    )
    units = ", ".join(f"{pattern} ({count})" for pattern, count in spread.units)
    yield "units", f"{units}, then the rest" if units else "the whole model at once"

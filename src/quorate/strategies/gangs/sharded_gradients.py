"""The gradients of a sharded gang: FSDP2 sums them while the backward pass runs, and each worker has its part."""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from quorate.strategies.gangs.gang_gradients import GangGradients
from quorate.strategies.gangs.gang_world import SHARD, TENSOR, GangWorld
from quorate.strategies.gangs.sharded_passes import Passes
from quorate.training.device import Device
from quorate.training.sharded_tensors import local


class ShardedGradients(GangGradients):
    """Lanes are accumulated like micro-batches; norms are those of all parts together."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], hosted: range, world: GangWorld, passes: Passes
    ) -> None:
        super().__init__(parameters, hosted, None, overlaps=False)
        self._world = world
        self._passes = passes

    def begin(self, lane: int) -> None:
        super().begin(lane)
        if lane == self._hosted.start:
            self._passes.begin()

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor,
        inputs: list[torch.Tensor] | None = None,
        *,
        retain: bool = False,
        is_last: bool = False,
    ) -> None:
        super().backward(loss, weight, inputs, retain=retain, is_last=is_last)
        self._passes.end_backward()

    def finish(self) -> int:
        """Not of those that have zeros from FSDP2, which an optimizer would take for gradients."""
        bits = super().finish()
        used = (1 << index for index, parameter in enumerate(self.parameters) if self._passes.has_used(parameter))
        return bits & sum(used)

    def total_norm(self, device: Device) -> float:
        return device.numbers([self.norm()])()[0]

    def norm(self) -> torch.Tensor:
        return self.clipped_norm(self.parameters, None)

    def clipped_norm(self, parameters: Sequence[torch.Tensor], clip: float | None) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        held = [local(gradient) for gradient in gradients]
        wide = reduce(torch.promote_types, (part.dtype for part in held), torch.float32)
        # What several workers hold alike counts once.
        squares = [
            torch.linalg.vector_norm(part, dtype=wide).square() / self._copies(gradient)
            for part, gradient in zip(held, gradients, strict=True)
        ]
        # Where the group works: gradients may have gone to the host (`offload`), where NCCL does not look.
        total = (torch.stack(squares).sum() if squares else torch.zeros(())).to(self._world.device)
        dist.all_reduce(total, group=self._world.parts)
        # Before anything is made of them: all gradients were summed before this was.
        self._world.complete()
        norm = total.sqrt()
        if clip is not None and held:
            # As torch.nn.utils.clip_grad_norm_ has it.
            factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            for part in held:
                part.mul_(factor.to(part))
        return norm

    def _copies(self, gradient: torch.Tensor) -> int:
        """By how many of those who hold different parts of the state this is held alike."""
        sizes = {SHARD: self._world.shape.shard, TENSOR: self._world.shape.tensor}
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, gradient.placements, strict=True):
                if not isinstance(placement, Replicate):
                    sizes.pop(name, None)
        copies = 1
        for size in sizes.values():
            copies *= size
        return copies

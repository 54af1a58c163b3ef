"""Tasks whose memory runs out, always where a micro-batch is too large."""

import weakref
from typing import Any

import torch
from torch import nn

from bits import bit_tasks as tasks

MADE: list["weakref.ref[torch.Tensor]"] = []


class Scarce(tasks.BatchNormAndDropout):
    """From a step on there is only room for so many samples at a time; in the backward pass if it says so."""

    room: int = 4
    since: float = 0.0
    in_backward: bool = False

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("steps", torch.zeros(()))
        return model

    buffer_rules = {"steps": "lane 0"}  # noqa: RUF012

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        if model.training:
            steps = model.get_buffer("steps")
            steps += inputs.shape[0] / 24  # a buffer that counts samples knows how far the job is
            if steps > self.since and len(inputs) > self.room:
                if not self.in_backward:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(inputs)} GiB.")
                inputs = Exhausting.apply(inputs.requires_grad_())  # type: ignore[no-untyped-call]
        return super().loss(model, (inputs, targets))


class Exhausting(torch.autograd.Function):
    """Lets the forward pass through, and runs out in the middle of the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(gradient)} GiB.")


class Held(Scarce):
    """What a failed try has made is gone when the step is done again: its memory is what the next try needs."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        held = [ref for ref in MADE if ref() is not None]
        if held:
            raise AssertionError(f"{len(held)} tensors of an earlier try are still there")
        activations = torch.zeros(len(batch[0]))
        if len(batch[0]) > self.room:
            MADE.append(weakref.ref(activations))
        return super().loss(model, batch) + activations.sum()

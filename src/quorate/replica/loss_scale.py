"""The dynamic loss scale of `precision: fp16`: small gradients would vanish in float16, so the loss is multiplied.

Each lane's backward pass begins with the scale, lanes are summed scaled, and the sum is divided by it again before
anything looks at it. Where that sum is not finite the step has overflowed: the optimizers leave it out, in every worker
alike, since all have the same sum, and the scale is halved. After so many steps in a row without, it is doubled.

All else of such a step happens, as in a loop with torch's GradScaler: batch norms have seen the samples, schedules and
averages move on. With one lane and one optimizer the bits are those of that loop; of several it leaves out those alone
whose own gradients overflow, and here all are left out. Scale and counter are tensors on the device, so that nobody has
to wait for it: what decides is decided there, and read when it is read.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from quorate.core.errors import LossError, UnsupportedModelError
from quorate.replica.device import Device
from quorate.spec.job import LossScaleSpec

GROWTH, BACKOFF = 2.0, 0.5
LEAST = 1.0
"""Below it gradients would be made smaller than they are: whatever overflows then, it is not for the scale."""


class Scaling(NamedTuple):
    """What a step has made of the scale, if there is one: what it is after it, and whether the step has overflowed."""

    scale: float | None = None
    overflowed: bool = False


class LossScale:
    """Part of the replica's state. A power of two, always: dividing by it changes no bit."""

    def __init__(self, spec: LossScaleSpec, device: Device) -> None:
        self._device = device
        self._growth_interval = spec.growth_interval
        # They stay where they are: captured graphs read them there.
        self._scale = device.zeros(1, torch.float32).fill_(spec.initial).squeeze()
        self._good_steps = device.zeros(1, torch.int32).squeeze()
        self._found = device.zeros(1, torch.float32).squeeze()
        self._initial = {name: value.clone() for name, value in self.state().items()}

    def times(self, weight: torch.Tensor) -> torch.Tensor:
        """What a backward pass begins with instead of a weight that is of its loss's type."""
        return (weight * self._scale).to(weight.dtype)

    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the summed gradients, and look whether they are finite.

        Torch does not count this as a write (`_version`), so they must lie where that is not asked: `Gradients.install`
        is told that they will be written to.
        """
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        self._found.zero_()
        inverse = self._scale.reciprocal()
        for gradients in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, inverse)

    def move(self, void: torch.Tensor | None = None) -> None:
        """Halve or double it, as the gradients say that were unscaled last; a step that is `void` says nothing."""
        before = self._scale.clone(), self._good_steps.clone()
        torch._amp_update_scale_(self._scale, self._good_steps, self._found, GROWTH, BACKOFF, self._growth_interval)
        if void is not None:
            for value, old in zip((self._scale, self._good_steps), before, strict=True):
                value.copy_(torch.where(void, old, value))

    @property
    def value(self) -> float:
        """What it is now; waits for the device."""
        return float(self._device.numbers([self._scale])()[0])

    @property
    def found_overflow(self) -> torch.Tensor:
        """Whether the gradients that were unscaled last are not finite, still on the device."""
        return self._found.bool()

    @property
    def scalars(self) -> list[torch.Tensor]:
        """What is to be read for `judged`, after the scale has moved."""
        return [self._scale, self._found]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its state, by names for people."""
        return {"loss scale": self._scale, "steps since the loss scale has moved": self._good_steps}

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on with a saved one; where there is none, from the beginning, whatever this process has done before."""
        for name, value in self.state().items():
            value.copy_(saved.get(name, self._initial[name]))

    def set(self, value: float) -> None:
        """Another one, a power of two, for steps that are only tried."""
        self._scale.fill_(value)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Whatever becomes of it in a block, it is as before afterwards."""
        kept = {name: value.clone() for name, value in self.state().items()}
        try:
            yield
        finally:
            self.load(kept)


def judged(step: int, scale: float, found: float) -> Scaling:
    """What was read of a step, unless it ends the job."""
    if scale < LEAST:
        raise LossError(
            f"The gradients of step {step} overflow float16 even with a loss scale of {LEAST:.0f}. No weight was "
            "changed by this step. Often the loss is a sum instead of a mean, or the learning rate is too high (try a "
            "lower one, a warm-up, or clip_norm); in `precision: bf16` and `fp32` there is room for larger ones."
        )
    return Scaling(scale, bool(found))


def check_master_weights(trained: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuse parameters whose updates would vanish, or whose gradients torch cannot scale."""
    for name, parameter in trained:
        kind = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_complex():
            raise UnsupportedModelError(
                f"Parameter '{name}' is {kind}, and the gradients of complex numbers are not scaled. Use `precision: "
                "bf16` or `fp32`."
            )
        if parameter.itemsize < torch.float32.itemsize:
            raise UnsupportedModelError(
                f"Parameter '{name}' is {kind}. With `precision: fp16` the model computes in float16, and parameters "
                "that are trained stay float32, or small updates would be lost: leave out half() or bfloat16() in "
                "model()."
            )

"""Gradients that should be equal: every so many steps workers compare what they are about to give to the optimizer.

Replicas are compared all the time, but whoever adds something else is found only by what it has made of its weights.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quorate.core.worker_status import OTHERS
from quorate.training.activity import Activity
from quorate.training.device import Device, digests
from quorate.training.divergence import Voucher, compare_replicas

GRADIENTS_INDEX = 7
"""Tells the digests of gradients from what else is gathered in a step."""


class GradientCheck:
    """Compares the gradients of one worker with those of the others, before they change any weight."""

    def __init__(
        self,
        every: int,
        worker: int,
        trainable: Sequence[tuple[str, torch.nn.Parameter]],
        device: Device,
        gather: Callable[[int, int, bytes], Sequence[bytes]],
        activity: Activity,
    ) -> None:
        self._every = every
        self._worker = worker
        self._trainable = trainable
        self._device = device
        self._gather = gather
        self._activity = activity

    def __call__(self, step: int) -> None:
        """Raise if a worker has another sum than the others. All call it together, with the sums in `.grad`."""
        if step % self._every:
            return
        held = ((name, parameter.grad) for name, parameter in self._trainable)
        own = Voucher(self._worker, digests(((name, each) for name, each in held if each is not None), self._device))
        with self._activity.waiting(OTHERS):
            compare_replicas(step, own, partial(self._gather, step, GRADIENTS_INDEX), "gradients")

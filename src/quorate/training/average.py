"""An exponential moving average of the parameters (`average` in the job file): part of the state, like they are.

It begins with the initial weights, and after each step moves by (1 − decay) towards the parameters: what
`copy.deepcopy(model)` before the first step and a `lerp_` after each one give. A step that is void does not move it.
Buffers are not averaged; the averaged model has those of the trained one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

_SUFFIX = " (averaged)"
"""What follows a parameter's name; no attribute has such a name."""


class Average:
    """The averages of a model's parameters."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], decay: float) -> None:
        self._parameters = {f"{name}{_SUFFIX}": parameter for name, parameter in parameters}
        self._values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._move = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        # Several tensors are moved at once, all of one type.
        self._by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, value in self._values.items():
            averages, trained = self._by_type.setdefault(value.dtype, ([], []))
            averages.append(value)
            trained.append(self._parameters[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values, as they stand in a checkpoint."""
        return iter(self._values.items())

    def update(self) -> None:
        """A step has changed the parameters."""
        for averages, trained in self._by_type.values():
            self._move(averages, trained, 0)

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Take up saved averages; where there are none, begin with the parameters as they are."""
        with torch.no_grad():
            for name, value in self._values.items():
                value.copy_(saved.get(name, self._parameters[name]))

    def take_over(self) -> None:
        """Make the averages the parameters, for good."""
        with torch.no_grad():
            for name, value in self._values.items():
                self._parameters[name].copy_(value)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages for its parameters, and its own again afterwards, to the bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # One after another: a second copy of all parameters may be more than there is memory for.
        with torch.no_grad():
            for name, value in self._values.items():
                parameter = self._parameters[name]
                kept = parameter.clone()
                parameter.copy_(value)
                value.copy_(kept)


def split_averages(saved: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a checkpoint: those of the model, and the averages, if it has any."""
    averages = {name: tensor for name, tensor in saved.items() if name.endswith(_SUFFIX)}
    return {name: tensor for name, tensor in saved.items() if name not in averages}, averages

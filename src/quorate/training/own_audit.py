"""A batch that a loop of one's own is given twice, to find out what it carries from one batch to the next."""

from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.training.task import loss_in

AUDITED = 2
"""So many steps of a generation have a batch computed twice."""


class Audit:
    """The loss of a batch and its gradients, to be compared with those of the same batch, given again."""

    def __init__(
        self,
        name: str,
        loss: Any,
        parameters: Sequence[torch.Tensor],
        before: Mapping[str, Any],
        now: Callable[[], dict[str, Any]],
    ) -> None:
        self._name, self._before, self._now = name, before, now
        self._trained = [each for each in parameters if each.requires_grad]
        self.found = numbers_of(loss, self._trained)

    def compare(self, loss: Any) -> None:
        """Refuse a loss that is another one, or has another gradient."""
        if same_numbers(self.found, numbers_of(loss, self._trained)):
            return
        now = self._now()
        changed = [name for name, marks in self._before.items() if now.get(name) != marks]
        named = f" These have changed meanwhile: {', '.join(sorted(changed)[:8])}." if changed else ""
        raise UnsupportedModelError(
            f"{self._name}() was given one batch twice, and the second time its loss or gradient was another one: "
            "something is carried from a batch to the next, which may be another lane's, so that the result depends on "
            f"the number of workers.{named} Keep it in run.state or in a buffer of the model, and change it where "
            "run.step() has given a result."
        )


def numbers_of(loss: Any, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A loss, or several, and their gradients."""
    losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    numbers = [each[0] if isinstance(each, tuple) and each else loss_in(each) for each in losses]
    numbers = [each for each in numbers if isinstance(each, torch.Tensor)]  # others are refused where they are read
    found = [each.detach().clone() for each in numbers]
    for each in (each for each in numbers if each.requires_grad):
        with suppress(RuntimeError):  # such as of a graph that is used up, which the lane itself finds
            gradients = torch.autograd.grad(each.sum(), trained, retain_graph=True, allow_unused=True)
            pairs = zip(trained, gradients, strict=True)
            found += [torch.zeros_like(p) if one is None else one.detach().to_dense() for p, one in pairs]
    return found


def same_numbers(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all are equal to the last bit, but for −0.0, and a NaN equals itself."""
    if [(one.shape, one.dtype) for one in ones] != [(other.shape, other.dtype) for other in others]:
        return False
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(ones, others, strict=True))


def marked_locals(frame: FrameType | None) -> dict[str, Any]:
    """The variables of `main`, and of functions that it has called, with marks by which a change is seen."""
    found: dict[str, Any] = {}
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("quorate."):
            found |= {name: (id(value), _marks(value)) for name, value in frame.f_locals.items()}
        frame = frame.f_back
    return found


def _marks(value: Any) -> Any:
    """By which a value that is the same object is seen to have changed."""
    return value._version if isinstance(value, torch.Tensor) else len(value) if isinstance(value, Sized) else None

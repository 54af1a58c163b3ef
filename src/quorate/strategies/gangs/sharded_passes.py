"""What the passes of a step use of a sharded model.

FSDP2 gathers and sums by units, whoever's they are: it neither sees that workers run different ones, nor tells a
gradient that nobody has from one that is zero. One process does, so it is noted here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from quorate.strategies.gangs.unit_order import UnitOrder


class Passes:
    """Looks on while a model computes: which units it runs, in which order, and which parameters get gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.order = UnitOrder()
        self._used: set[torch.nn.Parameter] = set()
        self._run: set[Any] = set()
        for name, unit in model.named_modules():
            for group in param_groups(unit) if isinstance(unit, FSDPModule) else ():
                called = f"'{name}'" if name else "the model itself"
                group.pre_forward = partial(self._forward, group, f"the forward pass of {called}", group.pre_forward)
                group.pre_backward = partial(
                    self._backward, group, f"the backward pass of {called}", group.pre_backward
                )
                group.post_backward = partial(
                    self._leave, group, f"the sum of the gradients of {called}", group.post_backward
                )

    def begin(self) -> None:
        """A step begins: no parameter has a gradient."""
        self._used.clear()
        self._run.clear()

    def end_backward(self) -> None:
        """What runs now is of another backward pass."""
        self._run.clear()

    def has_used(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it got a gradient from what this worker computed of the step."""
        return parameter in self._used

    def _forward(self, group: Any, what: str, pre_forward: Callable[..., Any], *arguments: Any) -> Any:
        self.order.enter(what)
        self._run.add(group)
        return pre_forward(*arguments)

    def _backward(self, group: Any, what: str, pre_backward: Callable[..., None], *arguments: Any) -> None:
        if group._training_state != TrainingState.PRE_BACKWARD:  # else it was entered by another of its outputs
            self.order.enter(what)
        pre_backward(*arguments)

    def _leave(self, group: Any, what: str, post_backward: Callable[..., None], *arguments: Any) -> None:
        self.order.enter(what)
        for held in group.fsdp_params:
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is None or not gathered.requires_grad:
                continue
            if gathered.grad is not None or held.unsharded_accumulated_grad is not None:
                self._used.add(held.sharded_param)
            elif group in self._run:
                # Another worker may have a gradient of it, and all must sum the same.
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*arguments)


def param_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's own account of a unit's parameters; torch has had one for each, or several."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]

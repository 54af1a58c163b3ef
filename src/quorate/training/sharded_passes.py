"""What the passes of a step use of a sharded model.

FSDP2 gathers and sums by units, whoever's they are: it neither sees that workers run different ones, nor tells a
gradient that nobody has from one that is zero. One process does, so it is noted here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.distributed.fsdp import FSDPModule


class Passes:
    """Looks on while a model computes: which units it runs, in which order, and which parameters get gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.order = 0
        """Equal for those who have run the same units in the same order since it was last set to 0."""
        self._used: set[torch.nn.Parameter] = set()
        units = (module for module in model.modules() if isinstance(module, FSDPModule))
        for number, group in enumerate(group for unit in units for group in param_groups(unit)):
            group.pre_forward = partial(self._enter, number, group.pre_forward)
            group.post_backward = partial(self._leave, group, group.post_backward)

    def begin(self) -> None:
        """A step begins: no parameter has a gradient."""
        self._used.clear()

    def has_used(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it got a gradient from what this worker computed of the step."""
        return parameter in self._used

    def _enter(self, number: int, pre_forward: Callable[..., Any], *arguments: Any) -> Any:
        self.order = crc32(number.to_bytes(4, "little"), self.order)
        return pre_forward(*arguments)

    def _leave(self, group: Any, post_backward: Callable[..., None], *arguments: Any) -> None:
        for held in group.fsdp_params:
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is None or not gathered.requires_grad:
                continue
            if gathered.grad is not None or held.unsharded_accumulated_grad is not None:
                self._used.add(held.sharded_param)
            else:
                # Another worker may have a gradient of it, and all must sum the same.
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*arguments)


def param_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's own account of a unit's parameters; torch has had one for each, or several."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]

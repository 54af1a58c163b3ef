"""What the passes of a step use of a sharded model.

FSDP2 gathers and sums by units, whoever's they are: it neither sees that workers run different ones, nor tells a
gradient that nobody has from one that is zero. One process does, so it is noted here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from quorate.core.errors import GenerationOver, UnsupportedModelError
from quorate.core.generation import Member, names_of


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


ASKED_STEPS = 2
"""So many steps of a generation are asked about; where they are alike, those that follow are taken to be so too."""

DONE = "no other unit"

Gather = Callable[[bytes], tuple[bytes, ...]]
"""What each member of the generation tells, in their order."""


class UnitOrder:
    """Follows what this worker runs, and compares it with what the others do.

    Workers that run different units would gather weights of one block with those of another, wait for ever, or have
    their process aborted by Gloo, as the sizes do not fit. So they ask each other before each unit in the first steps
    of a generation. After that each knows what comes next, and need not ask: whoever finds that its own turn is another
    leaves the generation, and in the next all ask before every unit again.
    """

    def __init__(self) -> None:
        self.varies = False
        """Whether steps are not all alike: then workers ask each other always."""
        self._gather: Gather | None = None
        self._members: Sequence[Member] = ()
        self._step: int | None = None
        self._run: list[str] = []
        self._expected: list[str] | None = None
        self._asked = 0

    def follow(self, gather: Gather, members: Sequence[Member]) -> None:
        """From now on with these: some of them may be new here. All of them call it."""
        self._members, self._gather = members, gather if len(members) > 1 else None
        self._step, self._expected, self._asked = None, None, 0
        self._run.clear()
        if self._gather is not None:
            self.varies = b"1" in self._gather(b"1" if self.varies else b"0")

    def leave(self) -> None:
        """The generation is over: nobody can be asked."""
        self._gather = None

    def begin(self, step: int) -> None:
        """What runs now is of this step, until `end`."""
        self._step = step
        self._run.clear()

    def enter(self, what: str) -> None:
        """Before a unit is gathered or summed: return if all others are about to do the same."""
        if self._gather is None:
            return
        if self._is_known:
            place = len(self._run)
            if self._expected is None or self._expected[place : place + 1] != [what]:
                raise self._changed(what)
        else:
            self._compare(self._gather(what.encode()))
        if self._step is not None:
            self._run.append(what)

    def end(self) -> None:
        """Before workers exchange anything else: return if none of them has still to run a unit."""
        if self._gather is None:
            return
        if not self._is_known:
            self._compare(self._gather(DONE.encode()))
        elif self._run != self._expected:
            raise self._changed(DONE)
        if self._step is not None:
            self.varies = self.varies or self._expected not in (None, self._run)
            self._expected = list(self._run)
            self._asked += 1
        self._step = None

    @property
    def _is_known(self) -> bool:
        """Not in an evaluation, which has as many passes as there are samples."""
        return self._step is not None and not self.varies and self._asked >= ASKED_STEPS

    def _changed(self, what: str) -> GenerationOver:
        self.varies = True
        expected = [*(self._expected or ()), DONE][len(self._run)]
        return GenerationOver(
            f"in step {self._step}, {what} comes where {expected} has come in all steps before: whether it is so for "
            "all workers is seen when the step is done again"
        )

    def _compare(self, told: Sequence[bytes]) -> None:
        if len(set(told)) == 1:
            return
        by_word: dict[str, list[int]] = {}
        for member, word in zip(self._members, told, strict=True):
            by_word.setdefault(word.decode(), []).append(member.worker)
        found = "; ".join(f"{names_of(workers)}: {word}" for word, workers in by_word.items())
        where = "an evaluation" if self._step is None else f"step {self._step}"
        raise UnsupportedModelError(
            f"In {where} workers go through different parts of the model. What comes next for {found}. With strategy: "
            "fsdp all workers gather the weights of a part together, so which ones run, and in which order, must not "
            "depend on samples or random numbers (LayerDrop, early exits, experts chosen by an if). Run all of them "
            "and multiply by 0, gather them together (strategy.units), or use ddp."
        )

"""Which modules of a sharded model are gathered at a time."""

from collections.abc import Iterable, Sequence

import torch

from quorate.core.errors import TaskError
from quorate.strategies.gangs.option import FsdpSpec
from quorate.training.activation_checkpointing import find_repeated, matching_modules

KEY = "strategy.units"


def units_of(model: torch.nn.Module, spec: FsdpSpec) -> tuple[str, ...]:
    """The modules to call `fully_shard` on, before the model itself, which has the rest; none lies within another.

    `auto`: the blocks that the model repeats, without those that share a parameter with something else, which must be
    gathered with it.
    """
    if spec.units == "auto":
        return tuple(name for name in find_repeated(model) if _shared_with(model, name) is None)
    matching = {name for pattern in spec.units for name in matching_modules(model, pattern, KEY)}
    units = tuple(
        name for name, _ in model.named_modules() if name in matching and not _is_within(name, matching - {name})
    )
    for name in units:
        if (other := _shared_with(model, name)) is not None:
            raise TaskError(
                f"{KEY}: '{name}' shares a parameter with '{other}', which is outside of it. Both must be gathered "
                "together: name a module that holds both, or neither of them."
            )
    return units


def batch_norms(model: torch.nn.Module) -> tuple[str, ...]:
    """Modules that are gathered as they are: cuDNN takes the weights of a batch norm in the type of its statistics."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine
    )


def check_units(model: torch.nn.Module, units: Sequence[str]) -> None:
    """Refuse what FSDP2 cannot gather. `units` end with the model itself, which has what is in no other."""
    inside: set[torch.nn.Parameter] = set()
    for name in units:
        unit, called = model.get_submodule(name), f"'{name}'" if name else "the model"
        if type(unit).forward is torch.nn.Module.forward:
            raise TaskError(
                f"{called} is a {type(unit).__name__}, which has no forward() to gather its weights for "
                "(strategy: fsdp). Put it into a module that has one, and call that."
            )
        own = {parameter: label for label, parameter in unit.named_parameters() if parameter not in inside}
        inside |= own.keys()
        for label in (label for parameter, label in own.items() if parameter.requires_grad and not parameter.numel()):
            raise TaskError(
                f"'{label}' has no elements (its shape is {tuple(unit.get_parameter(label).shape)}), and FSDP2 sums no "
                "gradient of it (strategy: fsdp). Leave it out of the model, or set its requires_grad to False."
            )
        kinds = {parameter.dtype: label for parameter, label in own.items() if parameter.requires_grad}
        if len(kinds) > 1:
            (one, first), (other, second), *_ = kinds.items()
            raise TaskError(
                f"'{first}' is {one} and '{second}' is {other}, and both are gathered with {called} (strategy: fsdp). "
                f"Give them one type, or have modules with a type of their own be units: {KEY}."
            )


def _is_within(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _shared_with(model: torch.nn.Module, unit: str) -> str | None:
    """A module outside of the unit that has a parameter of the unit."""
    own = {id(parameter) for parameter in model.get_submodule(unit).parameters()}
    for name, module in model.named_modules(remove_duplicate=False):
        is_outside = name != unit and not _is_within(name, (unit,))
        if is_outside and any(id(parameter) in own for parameter in module.parameters(recurse=False)):
            return name or "the model itself"
    return None

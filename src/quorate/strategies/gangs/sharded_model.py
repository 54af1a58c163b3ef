"""A model of which this worker holds a part: FSDP2's shards, of modules that may be cut across besides."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from quorate.core.errors import GenerationOver, TaskError, UnsupportedModelError
from quorate.core.generation import Member, names_of
from quorate.core.user_code import building_code
from quorate.replica.activation_checkpointing import checkpoint_activations, find_repeated, matching_modules
from quorate.replica.device import local
from quorate.spec.job import JobSpec
from quorate.strategies.gangs.deferred_init import CannotDefer, deferred
from quorate.strategies.gangs.gang_world import TENSOR, GangWorld
from quorate.strategies.gangs.option import FsdpSpec
from quorate.strategies.gangs.sharded_layout import cut_by
from quorate.task.task import Task

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sharding_of(spec: JobSpec, worker: int, workers: int, place: torch.device) -> "ShardedModel":
    """What cuts the model, in the one world of this process."""
    shape = spec.strategy.mesh(workers)
    assert shape is not None
    return ShardedModel(spec, GangWorld(shape, worker, place), place)


class ShardedModel:
    """How the model of a job is spread over the workers of a mesh, of which this is one."""

    def __init__(self, spec: JobSpec, world: GangWorld, device: torch.device) -> None:
        assert isinstance(spec.strategy, FsdpSpec)
        self.world = world
        self._spec = spec
        self._strategy = spec.strategy
        self._device = device
        self.passes: Passes

    def build(self, task: Task, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """What `build` gives, cut, with the initial weights that one process would have. The whole of it is in nobody's
        memory, unless its code looks at the values of tensors. The generators must be seeded."""
        state = torch.get_rng_state()
        try:
            model = self._in_parts(task, build)
        except CannotDefer as error:
            # Perhaps only when it was replayed: then the model that was cut is of no use either.
            log.warning("every worker builds the whole model before it is cut: %s", error)
            torch.set_rng_state(state)
            model = self._cut(task, build().to(self._device))
        # FSDP2 completes itself when a model is first called. It shall not seem that the task has given it hooks then.
        assert isinstance(model, FSDPModule)
        model._get_fsdp_state()._lazy_init()
        self.passes = Passes(model)
        return model

    def _in_parts(self, task: Task, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        deferred_model = deferred(build)
        model = self._cut(task, deferred_model.model)
        model.to_empty(device=torch.device("cpu") if self._strategy.offload else self._device)
        if self._strategy.offload:
            _move_buffers(model, self._device)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())

        def keep(name: str, whole: torch.Tensor) -> None:
            local(tensors[name]).copy_(part_of(whole, tensors[name]))

        with torch.no_grad():
            deferred_model.materialize(keep)
        return model

    def _cut(self, task: Task, model: torch.nn.Module) -> torch.nn.Module:
        spec, strategy, world = self._spec, self._strategy, self.world
        if strategy.tensor > 1:
            parallelize(task, model, world.mesh[TENSOR])
        if spec.memory.checkpoint_activations:
            checkpoint_activations(model, spec.memory.checkpoint_activations)
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES.get(strategy.gather or ""),
            reduce_dtype=DTYPES.get(strategy.reduce or ""),
            # Elsewhere autocast sees to what operations get.
            cast_forward_inputs=spec.precision == "fp32" or (spec.precision == "auto" and self._device.type == "cpu"),
        )
        whole = policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            # loss() gets what the model gives in one process: not every torch has losses of two types.
            whole = replace(policy, output_dtype=next(model.parameters()).dtype)
        offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu") if strategy.offload else OffloadPolicy()
        units = (*units_of(model, strategy), "")
        check_units(model, units)
        norms = () if policy.param_dtype is None else batch_norms(model)
        in_full = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
        for name in dict.fromkeys((*norms, *units)):
            fully_shard(
                model.get_submodule(name),
                mesh=world.data_mesh,
                reshard_after_forward=strategy.reshard,
                mp_policy=in_full if name in norms else policy if name else whole,
                offload_policy=offload,
            )
        for module in shards_of(model):
            # Lanes have weighted their gradients: they are summed, and not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return model

    def settle(self, model: torch.nn.Module) -> None:
        """Have everybody hold a part again, and nothing more, wherever a pass was left: what was gathered or summed,
        and what was under way, is dropped. A group that is over is not waited for."""
        for module in shards_of(model):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            for group in param_groups(module):
                group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
                group._partial_reduce_output = group._reshard_after_forward_event = None
                group._post_forward_indices.clear()
                group._training_state = TrainingState.IDLE
                group._to_sharded()
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                        gathered.grad = None
        # What all of them share: torch 2.13 does the same by `_reset_iter_state`, which waits besides.
        root: Any = model._get_fsdp_state()  # type: ignore[operator]
        shared, context = root._comm_ctx, root._state_ctx
        shared.all_gather_state = None
        shared.post_forward_order.clear()
        if hasattr(shared, "reduce_scatter_states"):
            shared.reduce_scatter_states.clear()
            shared._last_post_reduce_events.clear()
        else:
            shared.reduce_scatter_state = None
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False


def parallelize(task: Task, model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Have the task cut its model across the tensor dimension. Modules that share a weight go on sharing it."""
    kind = type(task).__name__
    if type(task).parallelize is Task.parallelize:
        raise TaskError(f"strategy.tensor: {mesh.size()} needs {kind}.parallelize(), which says {_MISSING}")
    shared: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter, []).append(name)
    with building_code("parallelize()"):
        task.parallelize(model, mesh)
    for first, *others in shared.values():
        _share_again(model, first, others)
    if not any(map(cut_by, model.parameters())):
        raise TaskError(
            f"strategy.tensor: {mesh.size()}, and {kind}.parallelize() splits nothing of the model, so that all "
            f"{mesh.size()} workers would compute the same. It has to say {_MISSING}"
        )


_MISSING = """\
how modules are split, or leave tensor out. For example:
    def parallelize(self, model, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})"""


def _share_again(model: torch.nn.Module, first: str, others: Sequence[str]) -> None:
    weight = model.get_parameter(first)
    for name in others:
        now = model.get_parameter(name)
        if getattr(now, "placements", None) != getattr(weight, "placements", None):
            raise TaskError(
                f"'{first}' and '{name}' are one weight, and parallelize() splits it in two ways. Split both alike."
            )
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, weight)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """They are not cut, and so are nothing that would be brought to the device when it is needed."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # several modules may have the same
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(buffer, buffer.to(device))


def shards_of(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules that are gathered by themselves."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def part_of(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this worker holds of such a one."""
    if not isinstance(target, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


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


# --- what the passes of a step use of it
#
# FSDP2 gathers and sums by units, whoever's they are: it neither sees that workers run different ones, nor tells a
# gradient that nobody has from one that is zero. One process does, so it is noted here.


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

"""One worker's copy of everything that training changes: equal, bit for bit, in every worker."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from quorate.checkpoint.pieces import Piece
from quorate.core.digests import derive_seed, weights_digest
from quorate.core.errors import RunError, TaskError, UnsupportedModelError
from quorate.core.user_code import building_code, given, likely_slip
from quorate.data.streams import seed_generators
from quorate.lanes.buckets import MEAN
from quorate.replica.buffers import Buffers
from quorate.replica.device import CPU, Device, assign, digests, is_spread
from quorate.replica.loss_scale import LossScale, check_master_weights
from quorate.replica.optimizers import Optimizers
from quorate.replica.settings import digest_of_saved
from quorate.spec.job import JobSpec
from quorate.task.task import Task

AVERAGED = " (averaged)"
"""What follows the name of a parameter whose average it is; no attribute has such a name."""
_SHOWN = 5
VERSION, IS_TRAINED, MODE = attrgetter("_version"), attrgetter("requires_grad"), attrgetter("training")


class Sharding(Protocol):
    """Where each worker holds a part of the model: what builds this worker's."""

    def build(self, task: Task, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """The part of the model that `build` gives; the generators are seeded as for the whole of it."""
        ...

    def settle(self, model: torch.nn.Module) -> None:
        """Drop what a pass that was left has gathered."""
        ...


class Replica:
    """Model, buffers and optimizers of a task, built from the job's seed, on a device."""

    def __init__(self, task: Task, spec: JobSpec, device: Device = CPU, sharding: Sharding | None = None) -> None:
        self.spec = spec
        self.device = device
        self.sharding = sharding
        if sharding is not None:
            seed_generators(derive_seed(spec.seed, "build"))
            self.model = sharding.build(task, partial(build_model, task, spec.seed))
        else:
            model = build_model(task, spec.seed)
            if spec.memory.checkpoint_activations:
                from quorate.replica.activation_checkpointing import checkpoint_activations

                checkpoint_activations(model, spec.memory.checkpoint_activations)
            self.model = device.place(model)
        self.buffers = Buffers(self.model, task.buffer_rules, device)
        seed_generators(derive_seed(spec.seed, "optimizer"))
        self.optimizers = Optimizers(task, self.model, spec, device)
        self.parameters = tuple(self.model.named_parameters())
        self.average = None if spec.average is None else Average(self.parameters, spec.average.decay)
        self.trainable = tuple((name, p) for name, p in self.parameters if p.requires_grad)
        self.loss_scale: LossScale | None = None
        if spec.precision == "fp16":
            check_master_weights(self.trainable)
            self.loss_scale = LossScale(spec.loss_scale, device)
        # Told of the progress of a state that is about to be loaded.
        self.before_load: Callable[[Any], None] = lambda _: None
        self.trained = [parameter.requires_grad for _, parameter in self.parameters]
        self.modules = tuple(self.model.modules())
        self.modes = self._built_modes = list(map(MODE, self.modules))

    def what_runs(self, is_captured: bool = False) -> str:
        """What computes, and how, in words: NVIDIA H200, bf16, compiled, captured, deterministic, channels last, fused
        SGD. Whether lanes are captured is not known before the first steps."""
        spec, facts = self.spec, self.device.facts(self.spec.threads, self.spec.deterministic)
        groups = [(type(o).__name__, group) for o in self.optimizers.by_name.values() for group in o.param_groups]
        fused = dict.fromkeys(name for name, group in groups if group.get("fused"))
        lies_last = any(
            p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for _, p in self.parameters
        )
        words = {
            facts.get("gpu", self.device.name): True,
            facts["precision"]: True,
            "compiled": self.device.compiles,
            "captured": is_captured,
            "deterministic": spec.deterministic,
            "not deterministic": not spec.deterministic,
            "channels last": lies_last,
            f"fused {', '.join(fused)}": bool(fused),
            "activations computed again": bool(spec.memory.checkpoint_activations),
        }
        return ", ".join(word for word, holds in words.items() if holds)

    def notice_of_left_out(self) -> str | None:
        """What to say of parameters that have gradients, and that no optimizer updates."""
        updated = self.optimizers.places()
        names = [name for name, parameter in self.trainable if parameter not in updated]
        if not names:
            return None
        shown = ", ".join(names[:_SHOWN]) + (f" … ({len(names)} in all)" if len(names) > _SHOWN else "")
        return (
            f"optimizer() leaves out parameters that require gradients, so they stay as they are: {shown}. Give it all "
            "of model.parameters(), or freeze these by requires_grad_(False) in model()."
        )

    def begin_lane(self) -> None:
        """Make the model what it was before any lane of the step: what one lane leaves must not reach the next."""
        if self.buffers.exist:
            self.buffers.restore()
        for module, training in zip(self.modules, self.modes, strict=True):
            if module.training is not training:
                module.training = training

    def adopt(self) -> bool:
        """Take modes and buffers for the committed ones, which code between two steps has changed in every worker.
        Whether there are other modes."""
        if self.buffers.exist:
            self.buffers.adopt()
        now = list(map(MODE, self.modules))
        has_changed = now != self.modes
        if has_changed:
            self.modes = now
        return has_changed

    def changed_modes(self) -> dict[str, bool]:
        """The modes of modules that are not as they were built, by name."""
        if self.modes is self._built_modes:  # as almost always
            return {}
        named = zip(self.model.named_modules(), self.modes, self._built_modes, strict=True)
        return {name: now for (name, _), now, built in named if now is not built}

    def restore_modes(self, changed: Mapping[str, bool]) -> None:
        """The modes as they were built, but for these."""
        named = zip(self.model.named_modules(), self._built_modes, strict=True)
        self.modes = [changed.get(name, built) for (name, _), built in named]
        for module, training in zip(self.modules, self.modes, strict=True):
            module.training = training

    def begin_batch(self) -> None:
        """The same before an evaluation batch, for which every layer is in evaluation mode."""
        self.buffers.restore()
        for module in self.modules:
            if module.training:
                module.training = False

    def settle(self) -> None:
        """After an evaluation: what was gathered of a model whose parts are spread is given up. The weights may have
        been others than those that are trained."""
        if self.sharding is not None:
            self.sharding.settle(self.model)

    def versions(self) -> list[int]:
        """A number for each parameter that grows when it is written to."""
        return [parameter._version for _, parameter in self.parameters]

    def check_unchanged(self, before: list[int], where: str) -> None:
        """Refuse a parameter that user code has changed outside the optimizer: the next lane would start from it."""
        for (name, parameter), version in zip(self.parameters, before, strict=True):
            if parameter._version != version:
                raise changed_outside(name, where)

    def check_trainable(self) -> None:
        """Refuse a parameter that was frozen or thawed while training: the exchange was laid out without it."""
        for (name, parameter), trained in zip(self.parameters, self.trained, strict=True):
            if parameter.requires_grad is not trained:
                raise UnsupportedModelError(
                    f"requires_grad of '{name}' was changed to {parameter.requires_grad} while training. "
                    "Which parameters are trained is fixed when the job starts: set it where the model is built."
                )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.parameters
        yield from self.buffers.committed()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, and the averages of the parameters if the job keeps any."""
        yield from self.weights()
        if self.average is not None:
            yield from self.average.tensors()

    def common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that every worker holds whole, and alike."""
        return self.tensors() if self.sharding is None else iter(self.buffers.committed())

    def weights_digest(self) -> str:
        return weights_digest(digests(self.tensors(), self.device))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the state, optimizers included, by a name for people."""
        named = dict(self.tensors())
        for name, state in self.optimizers.state()["optimizers"].items():
            for index, values in state["state"].items():
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        named[f"optimizer {name} {index} {key}"] = value
        if self.loss_scale is not None:
            named |= self.loss_scale.tensors()
        return named

    def layout(self) -> str:
        """What must be equal before weights can be compared."""
        return "; ".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in self.weights())

    def state(self) -> dict[str, Any]:
        """For a checkpoint. Tied weights appear once, under their first name."""
        scaling = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        # What is spread is taken by its local part; to detach it here takes torch as long as all the rest of a save.
        tensors = {name: tensor if is_spread(tensor) else tensor.detach() for name, tensor in self.tensors()}
        kept = self.optimizers.state()
        return {"tensors": tensors, **kept, "settings": digest_of_saved(kept), **scaling}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state, in place, so that ties and optimizers keep their tensors. Of tensors that are spread
        over workers it has the pieces that this one holds."""
        tensors = state["tensors"]
        averages = {name: tensor for name, tensor in tensors.items() if name.endswith(AVERAGED)}
        saved = {name: tensor for name, tensor in tensors.items() if name not in averages}
        self._check_names(saved)
        for name, parameter in self.parameters:
            assign(parameter, saved.pop(name))
        self.buffers.commit(saved)
        from quorate.replica.optimizer_state import load_state  # a job that begins has none to load

        load_state(self.optimizers, state)
        if self.average is not None:
            self.average.load(averages)
        if self.loss_scale is not None:
            self.loss_scale.load(state.get("loss_scale", {}))

    def _check_names(self, saved: Mapping[str, torch.Tensor | Piece]) -> None:
        own = {name: tuple(tensor.shape) for name, tensor in self.weights()}
        theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        # A buffer's shape may change in training, except where it is averaged over lanes.
        free = {name for name, _ in self.buffers.committed() if self.buffers.rules.get(name) != MEAN} & theirs.keys()
        different = next((n for n in sorted({*own, *theirs} - free) if own.get(n) != theirs.get(n)), None)
        if different is not None:
            raise RunError(
                f"the checkpoint was saved by another model: '{different}' {_shape(theirs.get(different))} there, and "
                f"{_shape(own.get(different))} in the model that the task builds now. "
                "Restore the model, or train from the beginning."
            )


class Average:
    """An exponential moving average of the parameters (`average` in the job file): part of the state, like they are.

    It begins with the initial weights, and after each step moves by (1 − decay) towards the parameters: what
    `copy.deepcopy(model)` before the first step and a `lerp_` after each one give. A step that is void does not move
    it. Buffers are not averaged; the averaged model has those of the trained one.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], decay: float) -> None:
        self._parameters = {f"{name}{AVERAGED}": parameter for name, parameter in parameters}
        self._values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._move = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        # Several tensors are moved at once, all of one type.
        self._by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, value in self._values.items():
            averages, trained = self._by_type.setdefault(value.dtype, ([], []))
            averages.append(value)
            trained.append(self._parameters[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._values.items())

    def update(self) -> None:
        for averages, trained in self._by_type.values():
            self._move(averages, trained, 0)

    def load(self, saved: Mapping[str, torch.Tensor | Piece]) -> None:
        """Take up saved averages; where there are none, begin with the parameters as they are."""
        for name, value in self._values.items():
            assign(value, saved.get(name, self._parameters[name]))

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


def _shape(shape: tuple[int, ...] | None) -> str:
    return "does not exist" if shape is None else f"has shape {shape}"


def changed_outside(name: str, where: str) -> UnsupportedModelError:
    """The error for a parameter that changed where only the optimizer may change it."""
    return UnsupportedModelError(
        f"Parameter '{name}' was changed in {where}. Lanes share the parameters, so a change there would depend on "
        "which lanes a worker hosts. Change parameters in the optimizer's step() only; to compute with other weights, "
        "as sharpness-aware training does, use torch.func.functional_call, and keep a second set of weights in buffers."
    )


def build_model(task: Task, seed: int) -> torch.nn.Module:
    """The model with its initial weights, from the job's seed."""
    seed_generators(derive_seed(seed, "build"))
    with building_code("model()"):
        model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"model() returned {given(model)}; it must return a torch.nn.Module.{likely_slip(model)}")
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise TaskError(
            f"'{lazy}' is a lazy parameter, whose shape is known only after the first batch. "
            "Give its layer the number of inputs, or run one batch through the model in model()."
        )
    named = (*model.named_parameters(), *model.named_buffers())
    if (empty := next((name for name, tensor in named if tensor.is_meta), None)) is not None:
        raise TaskError(
            f"'{empty}' is on the meta device: it has a shape and no values. Build the model without "
            'torch.device("meta"), or give it values in model(), such as by load_state_dict(weights, assign=True).'
        )
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        why = f"none of its {count} parameters has requires_grad" if count else "it has no parameters at all"
        remedy = "Set requires_grad where something is to be trained" if count else "Keep layers as attributes of it"
        raise TaskError(f"model() returned a {type(model).__name__} with nothing to train: {why}. {remedy}.")
    with building_code("initial_weights()"):
        weights = task.initial_weights()
        if weights is not None:
            model.load_state_dict(weights)
    return model


def check_repeatable(task: Task, spec: JobSpec, replica: Replica) -> None:
    """Build the model a second time and compare: what differs was drawn from somewhere without a seed."""
    again = build_model(task, spec.seed)
    second = digests([*again.named_parameters(), *again.named_buffers()])
    for name, digest in digests(replica.weights(), replica.device).items():
        if second.get(name) != digest:
            raise TaskError(
                f"model() gives other weights each time it is called with the same seed, first in '{name}'. "
                "Draw initial weights from torch's, NumPy's or Python's global generator: Quorate seeds these."
            )

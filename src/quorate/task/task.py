"""What a user writes: model, data, loss, optimizer, evaluation; and how the job file's `params` become part of it."""

import contextlib
import copy
import difflib
import inspect
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeGuard, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch.utils.data import Dataset as TorchDataset

from quorate.core.digests import derive_seed
from quorate.core.errors import JobFileError, Problem, TaskError
from quorate.core.user_code import building_code, given
from quorate.data.collate import collate
from quorate.data.datasets import refuse_unpaired
from quorate.data.sampler import Sampler, steps_in
from quorate.data.streams import preserved_generators, seed_generators
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress

LOG = "_log"
"""Where a task keeps the numbers that it logs."""
LENGTH = "_length"
"""Where a task has the length of its job while it is asked for a schedule."""


class _OfJob:
    """A number of the job. No property: a task may have a parameter of this name, which goes over it."""

    def __init__(self, name: str) -> None:
        self._name = name
        # By any task of this process: who knows the length may train otherwise for another.
        self.was_asked = False

    def __get__(self, task: Any, kind: type | None = None) -> Any:
        if task is None:
            return self
        if LENGTH not in vars(task):
            raise TaskError(
                f"self.{self._name} is known in schedule() only; keep it there: length = self.{self._name}. Elsewhere, "
                "make it a parameter of the task, which `params` of the job sets."
            )
        self.was_asked = True
        spec, known = vars(task)[LENGTH]
        if self._name == "total_steps" and spec.steps:
            return spec.steps
        # The training set is asked for its length only where that is needed, and once: to make it may take long.
        known[:] = known or [_steps_per_epoch(task, spec)]
        return known[0] if self._name == "steps_per_epoch" else known[0] * (spec.epochs or 0)


class Task:
    """Base class of a task: what to train. Subclass it, and write four methods of ordinary PyTorch.

    ::

        class Digits(quorate.Task):
            learning_rate: float = 0.1            # filled from the job file's `params`, typed and checked

            def model(self):
                return nn.Linear(64, 10)

            def datasets(self):
                return training_set, validation_set       # anything with len() and []

            def loss(self, model, batch):
                images, labels = batch
                return F.cross_entropy(model(images), labels)

            def optimizer(self, model):
                return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    A worker computes several lanes in one process, so no state may pass from one call of loss() to the next: attributes
    that it assigns are reset after each lane. Keep state in buffers of the model, and let only the optimizer change
    parameters.
    """

    buffer_rules: ClassVar[Mapping[str, str]] = {}
    """For buffers that training changes differently in each lane: name (or pattern) → "mean" or "lane 0"."""

    callbacks: ClassVar[Sequence[str]] = ()
    """Callbacks of every job of this task, written as in the job file: ``callbacks = ["tell.py:Tell"]``, with a file
    next to that of the task. They are named because they run in the launcher."""

    total_steps = _OfJob("total_steps")
    steps_per_epoch = _OfJob("steps_per_epoch")

    def model(self) -> torch.nn.Module:
        """Return the model. Random weights come from torch's global generator, which is seeded."""
        raise NotImplementedError

    def datasets(self) -> Any:
        """Return the training set, (training set, validation set), or these and a test set for `quorate eval --test`:
        anything with len() and []."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss of a batch: a mean over the samples, (sum, count), or a dict by optimizer name. With one
        optimizer also a model's whole output: a dict or an object with a `loss`."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> Any:
        """Return an optimizer, or a dict of them by name."""
        raise NotImplementedError

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of a batch by name: a mean over its samples, (sum, count), or an object that has seen the
        batch and accumulates, such as those of torchmetrics (docs/how-to/metrics.md). By default the loss.

        It is tried on one batch before the first step, in a separate process, so that a mistake is found early.
        """
        loss = self.loss(model, batch)
        by_name = isinstance(loss, dict) and all(isinstance(each, tuple) or is_scalar(each) for each in loss.values())
        return loss if by_name else {"loss": loss_in(loss)}

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return what `quorate predict` writes down of a batch: a tensor or a list with a row for each sample, or a
        dict of them by name. The model is in evaluation mode."""
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ARG002
        """Return a torch learning-rate scheduler. It steps after every update, or after every epoch with
        `schedule: {per: epoch}` in the job; ReduceLROnPlateau steps after each evaluation. Here, `self.total_steps` and
        `self.steps_per_epoch` are the length of the job; where it is given in epochs, datasets() is called for them."""
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Turn samples into a batch. Samples may be nested dicts, tuples and dataclasses of tensors and numbers."""
        return collate(samples)

    def data_digest(self) -> str | None:
        """Return a digest of all that datasets() gives, for data that Quorate cannot read as a whole, such as a stream:
        another one whenever anything in them is another. None: it is taken of what is small (reproduce.md)."""
        return None

    def order(self, epoch: int, generator: torch.Generator) -> Sequence[int] | None:  # noqa: ARG002
        """Return the indices of the samples of an epoch in order; None: shuffle all samples."""
        return None

    def _begin_job(self, spec: JobSpec) -> None:
        """The job in which it trains is known."""

    def parallelize(self, model: torch.nn.Module, mesh: Any) -> None:
        """Split modules over the N workers of this DeviceMesh, in place, by torch's parallelize_module; for `strategy:
        {kind: fsdp, tensor: N}`. The model has no content yet."""
        raise NotImplementedError

    def initial_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return a state dict to start from; None: start with the weights of model()."""
        return None

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Log a number from within loss(). Each step reports its mean over the samples."""
        try:
            # A tensor is read at the end of the batch, with all others: reading may have to wait for a device.
            number: Any = value.detach().clone() if is_scalar(value) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"self.log({name!r}, ...) takes one number, and was given {given(value)}. MLflow takes pictures, "
                "tables and files, into the run of the job if that has `track: {mlflow: true}`:\n"
                "    import mlflow\n"
                '    mlflow.log_artifact(path)  # or log_figure(figure, "name.png"), log_image, log_table, log_text'
            ) from None
        self._logged().setdefault(name, []).append(number)

    def _logged(self) -> dict[str, list[Any]]:
        logged: dict[str, list[Any]] | None = getattr(self, LOG, None)
        if logged is None:  # not by setdefault: not every torch can compile a loss() that calls it
            logged = self.__dict__[LOG] = {}
        return logged


class HostedLoop(Task):
    """A task whose code runs from one step to the next, beside the loop of the worker (`own_loop`)."""

    @property
    @abstractmethod
    def clip_norm(self) -> float | None:
        """How gradients are clipped, if the loop says so."""

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Refuse keys of the job that do not go with a loop of one's own."""

    @abstractmethod
    def take_up(self, progress: Progress, sampler: Sampler) -> None:
        """Go on from what is loaded next."""

    @classmethod
    @abstractmethod
    def beside(cls, work: Callable[[], None]) -> None:
        """Do the work of the worker's process, in which this loop will run, too."""


def loss_in(output: Any) -> Any:
    """The loss in a model's whole output, as Hugging Face's models give it; anything else as it is."""
    if isinstance(output, torch.Tensor | tuple):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if found is None else found


def take_log(task: Task) -> dict[str, list[Any]]:
    """What was logged since the last call: by name, numbers, and tensors that are still on the device."""
    taken: dict[str, list[Any]] = task.__dict__.get(LOG) or {}
    if taken:
        # It stays among the attributes: by their number it is seen whether others were added.
        task.__dict__[LOG] = {}
    return taken


def configure(
    task_type: type[Task], params: dict[str, Any], source: str, seed: int, spec: JobSpec | None = None
) -> Task:
    """An instance of the task with its parameters set; every mistake is told at once. `spec` is the job, where there is
    one: a training loop of one's own may ask how long it is."""
    checked = _checked_params(task_type, params)
    if isinstance(checked, list):
        raise JobFileError(source, checked)
    seed_generators(derive_seed(seed, "task"))
    with building_code(f"{task_type.__name__}()"):
        task = task_type()
    for name in parameters_of(task_type):
        setattr(task, name, getattr(checked, name))
    if spec is not None:
        task._begin_job(spec)
    return task


def notice_of_misspelt(task_type: type[Task]) -> str | None:
    """What to say of names of a class that nobody calls, and that are almost those of a task's own methods."""
    known, own = set(dir(Task)), set(dir(task_type))
    free = [name for name in known if not name.startswith("_") and getattr(task_type, name) is getattr(Task, name)]
    pairs = []
    for name in sorted(own - known - parameters_of(task_type).keys()):
        near = [] if name.startswith("_") else difflib.get_close_matches(name, free, n=1, cutoff=0.75)
        pairs += [f"{name} (did you mean {meant}?)" for meant in near]
    if not pairs:
        return None
    return f"{task_type.__name__} has what no task has, and nobody uses it but the class itself: {', '.join(pairs)}"


def callbacks_of(task_type: type[Task]) -> list[str]:
    """The callbacks that it names."""
    named = task_type.callbacks
    if isinstance(named, str) or not all(isinstance(each, str) for each in named):
        raise TaskError(
            f"{task_type.__name__}.callbacks is {given(named)}. They run in the launcher, so name them: "
            'callbacks = ["tell.py:Tell"], by a file beside that of the task.'
        )
    return list(named)


def params_problems(task_type: type[Task], params: dict[str, Any]) -> list[Problem]:
    """What the task would refuse of its parameters."""
    checked = _checked_params(task_type, params)
    return checked if isinstance(checked, list) else []


def _checked_params(task_type: type[Task], params: dict[str, Any]) -> BaseModel | list[Problem]:
    fields = parameters_of(task_type)
    with warnings.catch_warnings():
        # A parameter may be called `schema` or `copy`, as methods of a pydantic model are: here nobody calls those.
        warnings.simplefilter("ignore", UserWarning)
        model = create_model(
            "params", __config__=ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True), **fields
        )
    try:
        # As JSON: a list may then be given for a tuple and a text for a path, but never a text for a number.
        checked: BaseModel = model.model_validate_json(json.dumps(params))
    except ValidationError as error:
        from quorate.spec.problems import describe_errors  # rarely

        return [_told_unannotated(task_type, one) for one in describe_errors(error, model, prefix="params")]
    return checked


def _told_unannotated(task_type: type[Task], problem: Problem) -> Problem:
    """Of an attribute that the class has without a type, how it becomes a parameter."""
    name = problem.path.removeprefix("params.")
    value = getattr(task_type, name, None)
    is_plain = name in dir(task_type) and not callable(value) and not isinstance(value, property)
    if not is_plain or name in dir(Task) or name in parameters_of(task_type):
        return problem
    line = f"{name}: {type(value).__name__} = {value!r}" if value is not None else f"{name}: float | None = None"
    text = f"{task_type.__name__}.{name} has no type, so it is no parameter"
    return replace(problem, text=text, hint=f"Write its type in the class: {line}")


def parameters_of(task_type: type[Task]) -> dict[str, Any]:
    """Name → (type, default) of every annotated attribute of the task."""
    try:
        hints = get_type_hints(task_type, include_extras=True)
    except NameError as error:
        raise JobFileError(
            task_type.__name__, [Problem("params", f"an annotation of the task is unknown: {error}")]
        ) from None
    ignored = {name for base in Task.__mro__ for name in inspect.get_annotations(base)}
    return {
        name: (hint, ... if isinstance(default := getattr(task_type, name, ...), _OfJob) else copy.deepcopy(default))
        for name, hint in hints.items()
        if name not in ignored and ClassVar not in (hint, get_origin(hint)) and not name.startswith("_")
    }


def overrides(task: Task, method: str) -> bool:
    """Whether a task has this method of its own, or a function in its place."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


@contextlib.contextmanager
def knowing_length(task: Task, spec: JobSpec) -> Iterator[None]:
    """In this block the task may ask for `self.total_steps` and `self.steps_per_epoch`."""
    vars(task)[LENGTH] = spec, []
    try:
        yield
    finally:
        del vars(task)[LENGTH]  # what a task keeps is looked at in every step


def _steps_per_epoch(task: Task, spec: JobSpec) -> int:
    if overrides(task, "order"):
        raise TaskError(
            "Where order() chooses the samples, schedule() cannot know how many steps an epoch has: give the job "
            "`steps` instead of `epochs`."
        )
    with preserved_generators():
        seed_generators(derive_seed(spec.seed, "datasets"))
        return steps_in(spec, len(sets_of(task.datasets())[0]))


def sets_of(given: Any) -> tuple[Any, ...]:
    """What datasets() has returned, the training set first. random_split gives a list; a list of anything but datasets
    is a dataset itself."""
    refuse_unpaired(given)
    of_sets = isinstance(given, list) and bool(given) and all(isinstance(d, TorchDataset) for d in given)
    return tuple(given) if isinstance(given, tuple) or of_sets else (given,)


def is_scalar(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor with one number, as a device brings them to the host."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()

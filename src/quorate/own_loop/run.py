"""What a training loop of one's own gets, `main(run)`: the side of `main`. That of Quorate's loop is `own_loop`."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from quorate.core.errors import TaskError, UnsupportedModelError
from quorate.core.user_code import given
from quorate.data.datasets import check_dataset, columns_of
from quorate.data.sampler import steps_in
from quorate.observe.events import StepCompleted
from quorate.spec.job import JobSpec

NOT_GIVEN = object()
STOP = object()
HOW_TO_END = (
    "`steps` and `epochs` of the job say when it ends, and `early_stop`, with which it ends once a metric of "
    "run.evaluate() gets no better: quorate.launch(main, early_stop={'metric': 'loss', 'patience': 5}, ...)."
)
_STATE = (
    "What run.state holds is saved with checkpoints: numbers, texts, lists, and dicts whose keys are texts. Write "
    "float(x) for a number of NumPy, and list(x) for a tuple."
)


class StepResult(NamedTuple):
    """What a step has come to, over all lanes. `loss` is None where the step was left out; of several optimizers it is
    the sum of their losses, and rates and norms (before clipping) are by their names."""

    step: int
    epoch: int
    loss: float | None
    learning_rates: dict[str, float]
    gradient_norms: dict[str, float]
    log: dict[str, float]

    @classmethod
    def of(cls, told: StepCompleted) -> "StepResult":
        """What is told of the step."""
        losses = told.losses
        if len(losses) == 1:
            (loss,) = losses.values()
        else:
            counted = [each for each in losses.values() if each is not None]
            loss = sum(counted) if counted else None
        assert told.step is not None and told.epoch is not None
        return cls(told.step, told.epoch, loss, told.learning_rates, told.gradient_norms, told.log or {})


class Place(Enum):
    """Where `main` waits for its next turn."""

    TOP = "before it has begun"
    PREPARE = "in run.prepare()"
    EPOCHS = "in run.epochs(), before the first epoch or after the last"
    BATCH = "where it asks for a batch"
    STEP = "in run.step(), until the gradient is complete"
    RETURNED = "nowhere: it has returned"


AT_BATCH, AT_STEP = Place.BATCH, Place.STEP
"""By names of their own: to look up a member of an enumeration takes time, and there are several turns a step."""

_MODES: dict[str, Callable[[], Any]] = {
    "torch.no_grad() or set_grad_enabled()": torch.is_grad_enabled,
    "torch.inference_mode()": torch.is_inference_mode_enabled,
    "torch.autocast()": torch._C._is_any_autocast_enabled,
    "torch.set_default_dtype()": torch.get_default_dtype,
    "torch.device() or set_default_device()": torch._C._len_torch_function_stack,
    "hooks of saved tensors": partial(torch._C._autograd._top_saved_tensors_default_hooks, True),
}
"""What holds for a thread, and so for both sides, by what changes it: `main` leaves all as its turn has found it."""


_LASTING = slice(3, 5)


def torch_modes() -> list[Any]:
    """What holds in this thread now."""
    return [mode() for mode in _MODES.values()]


class Turns:
    """What `main` and the loop know of each other; one of the two runs at a time."""

    to_loop: Callable[[], Any]  # what the loop gives, when it has had its turn
    seed: Callable[..., None]  # the generators, for what `main` does outside lanes at a time that all workers know

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.prepared: tuple[Any, Any, Any] | None = None
        self.data: Any = None
        self.batch_size: int | None = None
        self.collate: Callable[[Sequence[Any]], Any] | None = None
        self.validation: Any = None
        self.measure: Callable[[Any], Mapping[str, Any]] | None = None
        self.clip: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.leads = False
        self.is_entered = False  # by the loop: before that nobody knows at which step the job stands
        self.first_epoch = 0
        self.restored: str | None = None
        self.ends = False  # all steps are done: what comes after them is not, or is not saved yet
        self.is_over = False
        self.checked = ""  # run.state as JSON that comes back as it is
        self.agreed = ""  # run.state as all workers have it, since they last had a result
        self.modes = torch_modes()
        self.place = Place.TOP
        self.state: dict[str, Any] = {}
        self.epoch: int | None = None
        self.given: Any = None
        self.marks: Mapping[str, Any] | None = None  # of the dataset, when `main` got its turn between two steps
        self.is_read = True  # the epoch, or the job, to its end
        self.in_pass = False
        self.owes_step = False
        self.loss: Any = NOT_GIVEN

    def park(self, place: Place) -> Any:
        """Called by `main`: it is the loop's turn, until this returns what that gives."""
        if place is not AT_STEP:  # where that was done already
            self.check_modes("run.batches()" if place is AT_BATCH else "run.prepare() or run.epochs()")
        self.place = place
        given = self.to_loop()
        self.modes = torch_modes()  # the loop may have its own around a lane, such as the precision of the job
        return given

    def check_modes(self, called: str) -> None:
        """Refuse to go on inside a `with` block that would hold for the other side, or for some lanes only."""
        if (now := torch_modes()) != self.modes:
            changed = next(name for name, mode, was in zip(_MODES, now, self.modes, strict=True) if mode != was)
            raise TaskError(
                f"{called} was called inside {changed}, which would then hold for backward(), the optimizer and other "
                "lanes. Begin the `with` block after the batch, and leave it before run.step(loss)."
            )

    def check_data(self) -> None:
        """Refuse a dataset that `main` has changed between two steps."""
        if (before := self.marks) is None:
            return
        self.marks, now = None, _marks(self.given, is_whole=any(isinstance(each, bytes) for each in before.values()))
        if changed := [name for name in now if now[name] != before.get(name)]:
            raise TaskError(
                f"'{changed[0]}' of the dataset was changed between two steps. Samples are read ahead, also in other "
                "processes, which have the dataset as it was given to run.batches() first. Do in the loop, with a "
                "batch, what depends on the step or the epoch; keep labels that change in a buffer of the model."
            )

    def take_up_state(self) -> None:
        """What was set before the loop are initial values: those that the run has kept go over them."""
        if self.restored is not None:
            self.state.clear()
            self.state.update(json.loads(self.restored) if self.restored else {})
            self.restored = None

    @property
    def steps_per_epoch(self) -> int:
        """How many there are by the job and the data that `main` has named."""
        if self.data is None or self.spec is None:
            raise TaskError(
                "How many steps an epoch has depends on the data, which is not known yet. Call run.batches(dataset) "
                "first; that may be before run.prepare()."
            )
        return steps_in(self.spec, len(self.data))

    def kept_state(self) -> str:
        """What `main` keeps in run.state, as JSON; refused if it would come back as something else."""
        if not self.state:
            return ""
        try:
            text = json.dumps(self.state)
        except (TypeError, ValueError) as error:
            raise UnsupportedModelError(f"run.state cannot be saved: {error}. {_STATE}") from None
        if text != self.checked and repr(json.loads(text)) != repr(self.state):
            raise UnsupportedModelError(
                f"run.state would come back from a checkpoint as {json.loads(text)!r}. {_STATE}"
            )
        self.checked = text
        return text


class Batches:
    """The batches that lanes of this worker read, one after the other; iterated once an epoch."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __len__(self) -> int:
        """The steps of an epoch, on any number of workers; a step has a batch for each lane that a worker hosts."""
        return self._turns.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        turns = self._turns
        if turns.place is Place.TOP:
            raise TaskError("run.batches() was called before run.prepare(model, optimizer). Call that first.")
        if turns.in_pass:
            raise TaskError(
                "The loop over run.batches() was left before its end, by `break` or by another loop inside it: every "
                f"worker must come to the same steps. {HOW_TO_END}"
            )
        if turns.is_entered:
            turns.take_up_state()
        turns.in_pass, turns.is_read = True, False
        while True:
            if turns.owes_step:
                raise TaskError(
                    "run.step(loss) was not called for the last batch: every batch of run.batches() needs one call, "
                    "also where it is of no use (give a loss that is multiplied by zero). It takes the place of "
                    "loss.backward(), optimizer.step() and zero_grad()."
                )
            turns.check_data()
            batch = turns.park(AT_BATCH)
            if batch is STOP:
                turns.in_pass, turns.is_read, turns.marks = False, True, _marks(turns.given, is_whole=True)
                return
            turns.owes_step = True
            yield batch


class Run:
    """What `main` gets: prepares model and optimizer, gives batches, takes losses.

    ::

        def main(run, learning_rate: float = 0.1):
            model = nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
            model, optimizer = run.prepare(model, optimizer)
            for epoch in run.epochs():
                for images, labels in run.batches(training_set):
                    loss = F.cross_entropy(model(images), labels)
                    result = run.step(loss)

    A worker that joins later runs `main` from its top to the epoch that the others are in, with the initial weights,
    and then gets their model, optimizer, scheduler and `run.state`; nothing else of `main` is kept.
    """

    def __init__(self, turns: Turns, log: Callable[[str, Any], None]) -> None:
        self._turns = turns
        self._log = log

    @property
    def state(self) -> dict[str, Any]:
        """What else survives: set it where run.step() has given a result, or after an epoch. Whatever is set before
        the loop is its initial value."""
        return self._turns.state

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the newest evaluation; empty before the first."""
        return self._turns.metrics

    @property
    def epoch(self) -> int:
        """The one that `main` is in, from 0."""
        return self._turns.epoch or 0

    @property
    def steps_per_epoch(self) -> int:
        """Known once run.batches(dataset) was called, which may be before run.prepare()."""
        return self._turns.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The steps of the job: for a scheduler that needs their number."""
        spec = self._turns.spec
        return spec.steps if spec is not None and spec.steps else self.steps_per_epoch * ((spec and spec.epochs) or 0)

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that hosts lane 0, once training has begun: print and write files there.
        Before that, at the top of `main`, it is False in every worker, with a warning."""
        if not self._turns.is_entered:
            warnings.warn(
                "run.is_main is False in every worker before the first epoch or batch: who hosts lane 0 is not known "
                "yet. Print and open files inside the loop.",
                stacklevel=2,
            )
        return self._turns.leads

    def prepare(self, model: torch.nn.Module, optimizer: Any, scheduler: Any = None) -> tuple[Any, ...]:
        """Hand over what is trained; the same two or three come back, and are to be used from here on."""
        turns = self._turns
        if turns.place is not Place.TOP:
            raise TaskError("run.prepare() was called twice: a run trains one model. Several optimizers are a dict.")
        if not isinstance(model, torch.nn.Module):
            raise TaskError(
                f"run.prepare() was given {given(model)} as the model: write run.prepare(model, optimizer)."
            )
        turns.modes[_LASTING] = torch_modes()[_LASTING]  # such as may be set for good, at the top of `main`
        turns.prepared = model, optimizer, scheduler
        turns.park(Place.PREPARE)
        return turns.prepared[: 2 if scheduler is None else 3]

    def evaluate(self, dataset: Any, measure: Callable[[Any], Mapping[str, Any]]) -> None:
        """Say, before the first batch, how the job evaluates: `measure(batch)` gives metrics by name, each a mean over
        the samples, (sum, count), or an object that accumulates, as torchmetrics has them. When it does is the job's
        `evaluate.every`; run.metrics are what it has found."""
        turns = self._prepared("evaluate")
        if turns.place is not Place.PREPARE:
            raise TaskError(
                "run.evaluate(dataset, measure) belongs before the loop: it says how the job evaluates, and the job's "
                "`evaluate.every` says when. What it has found is in run.metrics."
            )
        if not callable(measure):
            raise TaskError(f"run.evaluate() was given {given(measure)}: it takes a dataset and a function of a batch.")
        turns.validation, turns.measure = check_dataset(dataset, "validation", "run.evaluate()"), measure

    def clip(self, norm: float) -> None:
        """Clip the norm of the summed gradient, in every step; stands before the loop."""
        turns = self._prepared("clip")
        if turns.place is not Place.PREPARE and norm != turns.clip:
            raise TaskError("run.clip(norm) belongs before the loop: it holds for every step.")
        if not isinstance(norm, int | float) or not norm > 0:
            raise TaskError(f"run.clip() was given {given(norm)}: it takes a number above 0.")
        turns.clip = float(norm)

    def epochs(self) -> Iterator[int]:
        """The epochs of the job that are still to be done, from 0."""
        turns = self._prepared("epochs")
        turns.park(Place.EPOCHS)  # until somebody knows where the job stands
        turns.take_up_state()
        epoch = turns.first_epoch
        while not turns.is_over:
            turns.epoch, turns.is_read = epoch, False
            if turns.ends:
                turns.park(Place.EPOCHS)
                continue
            turns.seed("epoch", epoch)  # whoever joins in its middle draws the same at its top
            yield epoch
            if not turns.is_read:
                raise TaskError(
                    f"Epoch {epoch} was left before its batches were read, by `break` or without a loop over "
                    f"run.batches(): every worker must come to the same steps. {HOW_TO_END}"
                )
            epoch += 1
        turns.epoch = None

    def batches(
        self, dataset: Any, batch_size: int | None = None, collate: Callable[[Sequence[Any]], Any] | None = None
    ) -> Batches:
        """What the lanes of this worker read, a lane at a time; inside `run.epochs()` those of an epoch, elsewhere all.

        The dataset has len() and [], and is shuffled by the job's seed. `batch_size` is the global batch of the job.
        """
        turns = self._turns
        if turns.data is None:
            turns.data = check_dataset(dataset, "training", "run.batches()")
            turns.batch_size, turns.collate = batch_size, collate
        if turns.given is None and len(dataset) == len(turns.data):  # by this way through `main`
            if dataset is not turns.data and _have_same_rows(dataset, turns.data) is False:
                raise TaskError(
                    "The dataset has other samples each time that it is made, so that each worker would have its own. "
                    "Draw what is random in it from a generator with a fixed seed."
                )
            turns.given = dataset
        if dataset is not turns.given and not _have_same_rows(dataset, turns.data):
            raise TaskError(
                f"run.batches() was given {len(turns.data):,} samples at first, and now another dataset of "
                f"{len(dataset):,}: a job trains on one. Build it once, before the loop; put several together by "
                "torch.utils.data.ConcatDataset."
            )
        if batch_size not in (None, turns.batch_size):
            raise TaskError(f"run.batches() was given batch_size={turns.batch_size} at first, and now {batch_size}.")
        if not _is_same_code(collate, turns.collate):
            raise TaskError("run.batches() was given another `collate` than at first. Let one function do both.")
        return Batches(turns)

    def step(self, loss: Any) -> StepResult | None:
        """Hand over the loss of a batch: a mean over its samples, or (sum, count). The last batch of a step gives what
        that has come to, once all lanes are summed and the optimizer has stepped; others give None."""
        turns = self._turns
        if not turns.owes_step:
            self._prepared("step")
            raise TaskError(
                "run.step(loss) is called once for each batch of run.batches(), inside that loop: here is no batch, or "
                "it has had its step."
            )
        if type(loss) is not torch.Tensor and not isinstance(loss, torch.Tensor | tuple | Mapping):
            raise TaskError(f"run.step() was given {given(loss)}: it takes the loss as a tensor, not its .item().")
        turns.check_modes("run.step()")
        turns.owes_step, turns.loss = False, loss
        result: StepResult | None = turns.park(AT_STEP)
        if result is not None:
            turns.marks = _marks(turns.given)
        return result

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Note a number of this batch; the step reports its mean over all samples."""
        if not self._turns.owes_step:
            raise TaskError("run.log(name, value) belongs between a batch and its run.step(loss): it is of that batch.")
        self._log(name, value)

    def _prepared(self, called: str) -> Turns:
        if self._turns.place is Place.TOP:
            raise TaskError(f"run.{called}() was called before run.prepare(model, optimizer). Call that first.")
        return self._turns


_MARKED, _ROWS = 2**20, 1000


def _marks(dataset: Any, *, is_whole: bool = False, depth: int = 2) -> dict[str, Any]:
    """The numbers and texts that a dataset has, and those in it; `is_whole`: its tensors and arrays, too."""
    found: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        elif is_whole and isinstance(value, numpy.ndarray) and value.nbytes:
            found[name] = value.reshape(-1)[:: max(1, value.nbytes // _MARKED)].tobytes()
        elif is_whole and (tensors := [one for one in _each(value) if isinstance(one, torch.Tensor)]):
            found[name] = repr([one._version for one in tensors]).encode()
        elif depth and not isinstance(value, torch.nn.Module | type):
            found |= {f"{name}.{k}": v for k, v in _marks(value, is_whole=is_whole, depth=depth - 1).items()}
    return found


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _have_same_rows(one: Any, other: Any) -> bool | None:
    """Whether two datasets in memory have the same samples, as far as a thousand of them tell; None of others."""
    columns = columns_of(one), columns_of(other)
    if len(one) != len(other) or columns[0] is None or columns[1] is None:
        return None
    rows = numpy.unique(numpy.linspace(0, len(one) - 1, _ROWS).astype(numpy.int64))
    first, second = columns[0].batch(rows), columns[1].batch(rows)
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _is_same_code(one: Any, other: Any) -> bool:
    """Whether two functions do the same: one that is made anew by `lambda` or `partial` is another object each time."""
    if one is other:
        return True
    return _code_of(one) == _code_of(other)


def _code_of(function: Any) -> list[Any]:
    plain = bool, int, float, str, tuple
    cells = [each.cell_contents for each in getattr(function, "__closure__", None) or ()]
    given = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    bound = [getattr(function, name, None) for name in ("func", "args", "keywords")]
    return [
        getattr(function, "__code__", function),
        *given,
        *bound,
        [each for each in cells if isinstance(each, plain)],
    ]

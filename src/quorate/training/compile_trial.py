"""Whether a compiled model computes what the model computes: tried on one micro-batch before the first step.

Compiled and not are two sets of bits, so all workers must do the same. Each worker tries for itself while it is being
built, before anybody waits for it, and what comes of it is among the facts that a worker must share with the others to
be let in. They run the same code on the same kind of machine and come to the same; whoever does not is refused like a
worker with another version of torch. The kernels that the trial has compiled are those of the first step.
"""

import base64
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quorate.core.errors import QuorateError
from quorate.core.processes import ask_child
from quorate.data.sampler import Request, Sampler, Source
from quorate.data.samples import Samples, batch_of
from quorate.training.gradients import LoneGradients
from quorate.training.lane import LaneRunner
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import Task

LOSS_TOLERANCE, NORM_TOLERANCE = 0.05, 0.1
"""How much of its value a loss, and the norm of its gradient, may differ by: bfloat16 has three digits."""
_NEAR_ZERO = 1e-3
_TIMES_BY_CHANCE = 4.0
"""A model with dropout differs by chance, too: by so many times what two random streams make of it."""
_READING_LIMIT = 120.0


class _Outcome(NamedTuple):
    losses: dict[str, float]
    norm: float


def first_micro_batch(samples: Samples, sampler: Sampler) -> tuple[int, Any] | None:
    """What lane 0 reads first, with its number of samples; None where it cannot be had.

    Read in a process of its own, as the fingerprint is: files that were opened here would be shared with loaders.
    """
    planned = sampler.micro_batches(1, 0)
    if not planned:
        return None

    def read() -> str:
        torch.set_num_threads(1)
        batch = batch_of(samples[Request(Source.TRAINING, sampler.epoch_of(1), planned[0], 0)])
        return base64.b64encode(pickle.dumps((len(batch.samples), batch.content))).decode()

    answer = ask_child(read, _READING_LIMIT)
    if not answer.text:
        return None
    read_samples, content = pickle.loads(base64.b64decode(answer.text))
    return (read_samples, content) if read_samples else None


def why_not_compiled(task: Task, replica: Replica, batch: tuple[int, Any]) -> str | None:
    """Why the compiled model is of no use; None if it is. The replica is as before."""
    trial = _Trial(task, replica, batch)
    try:
        with uncompiled(replica.model):
            plain = trial.run(1)
    except (Exception, SystemExit):
        return None  # not the compiler's doing: the first step meets it again, and says whose
    finally:
        trial.clear()
    try:
        compiled = trial.run(1)
        difference = _difference(plain, compiled)
        if difference is None:
            return None
        with uncompiled(replica.model):
            chance = _distances(plain, trial.run(2))
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        return first if isinstance(error, QuorateError) else f"{type(error).__name__}: {first}"
    finally:
        trial.clear()
    found = _distances(plain, compiled)
    if all(found[name] <= _TIMES_BY_CHANCE * chance[name] for name in found):
        return None
    return difference


@contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """The model as it was before it was compiled in place."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


class _Trial:
    """A lane whose outcome is used for nothing else."""

    def __init__(self, task: Task, replica: Replica, batch: tuple[int, Any]) -> None:
        self._replica, self._batch = replica, batch
        self._gradients = LoneGradients(replica.trainable)
        self._runner = LaneRunner(task, replica, self._gradients, StateWatch(task, replica), replica.spec.seed)

    def run(self, step: int) -> _Outcome:
        samples = self._batch[0]
        result = self._runner.run(step, 0, [self._batch], samples)
        self._runner.read([result])
        norm = self._gradients.total_norm(self._replica.device)
        return _Outcome({name: loss.mean for name, loss in result.losses.items()}, norm)

    def clear(self) -> None:
        self._runner.abandon(0)
        self._replica.begin_lane()


def _difference(plain: _Outcome, compiled: _Outcome) -> str | None:
    """In words, if it is more than rounding makes."""
    for name, loss in plain.losses.items():
        other = compiled.losses.get(name, math.nan)
        if math.isfinite(loss) and not _are_close(loss, other, LOSS_TOLERANCE):
            return f"its loss is {other:.6g}, and without compiling {loss:.6g}"
    if math.isfinite(plain.norm) and not _are_close(plain.norm, compiled.norm, NORM_TOLERANCE):
        return f"the norm of its gradient is {compiled.norm:.6g}, and without compiling {plain.norm:.6g}"
    return None


def _are_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), _NEAR_ZERO)


def _distances(one: _Outcome, other: _Outcome) -> Mapping[str, float]:
    losses = {f"loss {name}": abs(loss - other.losses.get(name, math.nan)) for name, loss in one.losses.items()}
    return {**losses, "norm": abs(one.norm - other.norm)}

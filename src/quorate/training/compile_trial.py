"""Whether a compiled model computes what the model computes: tried on one micro-batch before the first step.

Compiled and not are two sets of bits, so all workers must do the same. Each worker tries for itself while it is being
built, before anybody waits for it, and what comes of it is among the facts that a worker must share with the others to
be let in. They run the same code on the same kind of machine and come to the same; whoever does not is refused like a
worker with another version of torch. The kernels that the trial has compiled are those of the first step.
"""

import base64
import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quorate.core.errors import QuorateError
from quorate.core.processes import ask_child
from quorate.data.sampler import Request, Sampler, Source
from quorate.data.samples import Samples, batch_of
from quorate.training.batch_nest import StructureError, structure_of
from quorate.training.device import uncompiled
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


class FirstBatch(NamedTuple):
    """What lane 0 reads first. `varies`: its next micro-batch, of as many samples, has other shapes, as these two."""

    samples: int
    content: Any
    varies: str = ""


def first_micro_batch(samples: Samples, sampler: Sampler) -> FirstBatch | None:
    """What lane 0 reads first; None where it cannot be had.

    Read in a process of its own, as the fingerprint is: files that were opened here would be shared with loaders.
    """
    planned = [sampler.micro_batches(step, 0) for step in range(1, min(2, sampler.total_steps) + 1)]
    if not planned[0]:
        return None

    def read() -> str:
        torch.set_num_threads(1)
        batches = [
            batch_of(samples[Request(Source.TRAINING, sampler.epoch_of(step), parts[0], 0)])
            for step, parts in enumerate(planned, 1)
            if parts
        ]
        first, last = batches[0], batches[-1]
        shapes = [_shapes(each.content) for each in (first, last)]
        varies = f"{shapes[0]} and {shapes[1]}" if len(first.samples) == len(last.samples) else ""
        answer = FirstBatch(len(first.samples), first.content, varies if shapes[0] != shapes[1] else "")
        return base64.b64encode(pickle.dumps(tuple(answer))).decode()

    answer = ask_child(read, _READING_LIMIT)
    if not answer.text:
        return None
    batch = FirstBatch(*pickle.loads(base64.b64decode(answer.text)))
    return batch if batch.samples else None


def why_not_compiled(task: Task, replica: Replica, batch: FirstBatch) -> str | None:
    """Why the compiled model is of no use; None if it is. The replica is as before."""
    if batch.varies:
        return f"its batches have different shapes, {batch.varies}, and each would be compiled anew"
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


class _Trial:
    """A lane whose outcome is used for nothing else."""

    def __init__(self, task: Task, replica: Replica, batch: FirstBatch) -> None:
        self._replica, self._batch = replica, batch
        self._gradients = LoneGradients(replica.trainable)
        self._runner = LaneRunner(task, replica, self._gradients, StateWatch(task, replica), replica.spec.seed)

    def run(self, step: int) -> _Outcome:
        samples, content, _ = self._batch
        result = self._runner.run(step, 0, [(samples, content)], samples)
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


def _shapes(content: Any) -> str:
    try:
        tensors = structure_of(content)[1]
    except StructureError:
        return "unknown"
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _are_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), _NEAR_ZERO)


def _distances(one: _Outcome, other: _Outcome) -> Mapping[str, float]:
    losses = {f"loss {name}": abs(loss - other.losses.get(name, math.nan)) for name, loss in one.losses.items()}
    return {**losses, "norm": abs(one.norm - other.norm)}

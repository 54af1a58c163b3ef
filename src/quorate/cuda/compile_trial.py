"""Whether a compiled model computes what the model computes: tried on one micro-batch before the first step.

Compiled and not are two sets of bits, so all workers must do the same. Each worker tries for itself while it is being
built, before anybody waits for it, and what comes of it is among the facts that a worker must share with the others to
be let in. They run the same code on the same kind of machine and come to the same; whoever does not is refused like a
worker with another version of torch. The kernels that the trial has compiled are those of the first step.
"""

import base64
import logging
import math
import pickle
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch

from quorate.core.errors import QuorateError
from quorate.core.processes import ask_child
from quorate.cuda.device import graphs_looked_up, number_of_graphs
from quorate.data.collate import StructureError, structure_of
from quorate.data.sampler import Request, Sampler, Source
from quorate.data.samples import Samples, batch_of
from quorate.replica.device import Device
from quorate.replica.gradients import LoneGradients, parameters_by_rows
from quorate.replica.loss_scale import BACKOFF, LEAST
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import Task
from quorate.training.lane import LaneRunner

log = logging.getLogger(__name__)

TOLERANCE, NORM = 0.05, "the norm of its gradient"
"""How much of its value a loss may differ by, and the norm by twice as much: bfloat16 has three digits."""
_NEAR_ZERO = 1e-3
_TIMES_BY_CHANCE = 4.0
"""A model with dropout differs by chance, too: by so many times what two random streams make of it."""
_READING_LIMIT = 120.0

Outcome = dict[str, float]
"""What a trial has computed, by names for people."""


class FirstBatch(NamedTuple):
    """What lane 0 reads first. `varies`: its next micro-batch, of as many samples, has other shapes, as these two.
    `following` is that one, where it has the same: what else is in it may differ, as numbers of the host do."""

    samples: int
    content: Any
    varies: str = ""
    following: Any = None


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
        is_alike = len(first.samples) == len(last.samples)
        varies = f"{shapes[0]} and {shapes[1]}" if is_alike and shapes[0] != shapes[1] else ""
        following = last.content if is_alike and not varies else None
        answer = FirstBatch(len(first.samples), first.content, varies, following)
        return base64.b64encode(pickle.dumps(tuple(answer))).decode()

    answer = ask_child(read, _READING_LIMIT)
    if not answer.text:
        return None
    batch = FirstBatch(*pickle.loads(base64.b64decode(answer.text)))
    return batch if batch.samples else None


def why_not_compiled(task: Task, replica: Replica, batch: FirstBatch) -> str | None:
    """Why the compiled model is of no use; None if it is. The replica is as before."""
    if by_rows := parameters_by_rows(replica.model, replica.trainable):
        return f"'{replica.trainable[min(by_rows)][0]}' has sparse gradients (sparse=True)"
    if batch.varies:
        return f"its batches have different shapes, {batch.varies}, and each would be recompiled"
    began, before = perf_counter(), graphs_looked_up()
    with nullcontext() if replica.loss_scale is None else replica.loss_scale.put_back():
        why = _why_not(_Trial(task, replica, batch), replica.device)
    found, all_of_them = (now - then for now, then in zip(graphs_looked_up(), before, strict=True))
    seconds = perf_counter() - began
    log.info("compiling was tried in %.1f s: %d of %d graphs came from the cache", seconds, found, all_of_them)
    return why


def _why_not(trial: "_Trial", device: Device) -> str | None:
    try:
        plain = trial.run_without_overflow()
    except (Exception, SystemExit):
        return None  # not the compiler's doing: the first step meets it again, and says whose
    if device.compiles_loss:
        why = trial.why_not(plain, is_whole=True)
        if why is None:
            return None
        log.info("the model is compiled, but not the rest of loss(): %s", why)
        device.compiles_loss = False
    return trial.why_not(plain)


class _Trial:
    """A lane whose outcome is used for nothing else."""

    def __init__(self, task: Task, replica: Replica, batch: FirstBatch) -> None:
        self._replica, self._batch = replica, batch
        self._gradients = LoneGradients(replica.trainable)
        self._runner = LaneRunner(task, replica, self._gradients, StateWatch(task, replica), replica.spec.seed)

    def run(self, step: int, content: Any = None) -> Outcome:
        samples, content = self._batch.samples, self._batch.content if content is None else content
        try:
            result = self._runner.run(step, 0, [(samples, content)], samples)
            self._runner.read([result])
            losses = {f"its loss {name}".rstrip(): loss.mean for name, loss in result.losses.items()}
            return losses | {NORM: self._gradients.total_norm(self._replica.device)}
        finally:
            self._runner.abandon(0)
            self._replica.begin_lane()

    def run_as_written(self, step: int) -> Outcome:
        with self._replica.device.as_written(self._replica.model):
            return self.run(step)

    def run_without_overflow(self) -> Outcome:
        """As written, with a loss scale that the first steps would come to: of gradients that overflow, nothing can be
        compared."""
        plain, scale = self.run_as_written(1), self._replica.loss_scale
        while (
            scale is not None
            and scale.value > LEAST
            and [n for n, v in plain.items() if not math.isfinite(v)] == [NORM]
        ):
            scale.set(scale.value * BACKOFF)
            plain = self.run_as_written(1)
        return plain

    def why_not(self, plain: Outcome, *, is_whole: bool = False) -> str | None:
        """Why what is compiled is of no use: it fails, or computes something else; or, of the whole of loss(), decides
        by something that changes with every call or batch, and would be compiled with each."""
        try:
            compiled = self.run(1)
            far = [name for name, value in plain.items() if not _is_close(name, value, compiled.get(name, math.nan))]
            if far:
                other = self.run_as_written(2)
                chance = {
                    name: _TIMES_BY_CHANCE * abs(value - other.get(name, math.nan)) for name, value in plain.items()
                }
                if not all(abs(value - compiled.get(name, math.nan)) <= chance[name] for name, value in plain.items()):
                    return (
                        f"{far[0]} is {compiled.get(far[0], math.nan):.6g}, and without compiling {plain[far[0]]:.6g}"
                    )
            if is_whole:
                self.run(2)
                before = number_of_graphs()
                self.run(3, self._batch.following)
                if number_of_graphs() > before:
                    return "it would be recompiled in every step"
        except (Exception, SystemExit) as error:
            first = str(error).strip().partition("\n")[0]
            return first if isinstance(error, QuorateError) else f"{type(error).__name__}: {first}"
        return None


def _is_close(name: str, one: float, other: float) -> bool:
    tolerance = 2 * TOLERANCE if name == NORM else TOLERANCE
    return not math.isfinite(one) or abs(one - other) <= tolerance * max(abs(one), _NEAR_ZERO)


def _shapes(content: Any) -> str:
    try:
        tensors = structure_of(content)[1]
    except StructureError:
        return "unknown"
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)

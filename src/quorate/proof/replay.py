"""One step of a run once more, in this process, where a debugger stops in the code of the task."""

import contextlib
import functools
import inspect
import pdb
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from quorate.api.debug import run_here
from quorate.api.evaluate import scratch_folder
from quorate.api.run_part import Accept, Show
from quorate.coordinator.places import Outcome
from quorate.core.errors import RequestError, RunError, UserCodeError
from quorate.core.failure import JobFailed
from quorate.proof.again import Again, Trainer, nearest
from quorate.spec.job import RingSpec
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch

Tell = Callable[[int, Any], None]
"""Hears a lane, and what loss() gives for it."""


@dataclass(frozen=True)
class Debugger:
    """Runs a job in this process: with `stops` the debugger stops in the first line of loss(), of each lane; otherwise,
    if `post_mortem`, where an exception is raised."""

    tell: Tell
    stops: bool = False
    post_mortem: bool = False

    def run(self, launch: Launch, show: Show, accept: Accept, signals: Signals) -> Outcome:
        """A `Runner`. Synchronous servers come to the bits of the ring, which needs no other process."""
        launch = replace(launch, spec=launch.spec.model_copy(update={"strategy": RingSpec()}))
        return run_here(launch, show, accept, signals, around=self._around, on_error=self._on_error)

    @contextlib.contextmanager
    def _around(self, task_type: Any, lane_now: Callable[[], int | None]) -> Iterator[None]:
        own, static = vars(task_type).get("loss"), inspect.getattr_static(task_type, "loss")

        @functools.wraps(task_type.loss)
        def loss(task: Any, model: Any, batch: Any) -> Any:
            original = static.__get__(task, task_type)  # it may be a static method
            if (lane := lane_now()) is None:  # an evaluation
                return original(model, batch)
            found = pdb.runcall(original, model, batch) if self.stops else original(model, batch)
            self.tell(lane, found)
            return found

        task_type.loss = loss
        try:
            yield
        finally:
            if own is None:  # it is inherited
                del task_type.loss
            else:
                task_type.loss = own

    def _on_error(self, error: Exception) -> None:
        if self.post_mortem:
            raised = (error.__cause__ or error) if isinstance(error, UserCodeError) else error
            print(f"{type(raised).__name__}: {raised}", flush=True)
            pdb.post_mortem(raised.__traceback__)


def replay(trainer: Trainer, step: int, tell: Tell, *, debug: bool) -> Again:
    """Do one step of a run again, also the one in which it failed, and compare it with the record. With `debug` the
    debugger stops at the exception or, if there is none, in loss() of each lane."""
    if getattr(trainer.job.spec.strategy, "compress", None):
        raise RequestError("with strategy.compress a step is more than one process computes: it is not replayed.")
    with scratch_folder() as scratch:
        before = nearest(trainer.whole_checkpoints(), step - 1)
        if step - 1 > (0 if before is None else before.cursor.step):
            earlier = trainer.to_step(before, step - 1, scratch / "before")
            if earlier.difference is not None:
                return earlier
            before = trainer.folder_of(earlier.run).list()[-1]
        alone = replace(trainer, runner=Debugger(tell, post_mortem=debug).run)
        try:
            again = alone.to_step(before, step, scratch / "step", 1, ahead=1)
        except JobFailed as failed:
            raise JobFailed(failed.failure) from None  # the rest of it goes with the folder
        if debug:
            stopping = replace(trainer, runner=Debugger(lambda *_: None, stops=True).run)
            with contextlib.suppress(JobFailed, RunError):  # `q` at the prompt
                stopping.to_step(before, step, scratch / "debugged", 1, ahead=1)
        return again

"""A training loop that the user keeps: `main(run)` in the place of a task.

The loop of Quorate pulls: it asks a task for the loss of a batch. A loop of one's own pushes. So `main` runs as a
greenlet, in the same thread, and the two take turns: the loop hands over a batch where `main` asks for one, and `main`
hands back a loss in `run.step`. To the rest of Quorate it is a task like any other.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, ClassVar, get_type_hints

import torch
import xxhash
from greenlet import getcurrent, greenlet
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quorate.core.errors import JobError, RequestError, TaskError, UnsupportedModelError, WorkerUnfit
from quorate.core.user_code import RAISED, blame_user_code
from quorate.data.sampler import Sampler
from quorate.data.streams import preserved_generators, seed_generators
from quorate.own_loop.run import AT_BATCH, AT_STEP, HOW_TO_END, NOT_GIVEN, STOP, Place, Run, Turns
from quorate.own_loop.state import Kept, OwnState
from quorate.replica.device import digests
from quorate.replica.state_watch import StateWatch
from quorate.spec.job import JobSpec
from quorate.task.hints import hint_for
from quorate.task.imported_anew import imported_anew, swapped_modules, unheard
from quorate.task.progress import Progress
from quorate.task.task import LOG, HostedLoop

log = logging.getLogger(__name__)


class OwnLoop(HostedLoop):
    """A task whose parts come out of `main`, as far as that has come."""

    # Not among its attributes, which are held to what they were: these change all the time.
    __slots__ = (
        *("_greenlet", "_last_lane", "_sampler", "_seed", "_streams"),
        *("audit", "environment", "state", "told", "turns"),
    )
    _main: ClassVar[Callable[..., Any]]
    _params: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.turns = Turns()
        self._greenlet: greenlet | None = None
        self.state: OwnState | None = None
        self.audit: Callable[[Any], Any] | None = None  # computes the loss of the next batch, and sees what is kept
        self.told: set[str] = set()  # variables of which a rehearsal has found that nobody saves them
        self.environment = dict(os.environ)  # before `main` changes it
        # Of the job: whoever makes a task has seeded the generators for it.
        self._seed = torch.default_generator.initial_seed()
        self._streams: list[int] = []  # what `main` draws from, before and after run.prepare()
        self.turns.seed = self._begin_stream

    def _begin_job(self, spec: JobSpec) -> None:
        self.turns.spec = spec

    def model(self) -> torch.nn.Module:
        self._streams = [torch.default_generator.initial_seed()]
        self._reach_prepare()
        model: torch.nn.Module = self._prepared[0]
        return model

    def optimizer(self, model: torch.nn.Module) -> Any:  # noqa: ARG002
        return self._prepared[1]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        scheduler = self._prepared[2]
        if isinstance(scheduler, Mapping):
            names = {id(each): name for name, each in dict(self._prepared[1]).items()}
            return scheduler.get(names.get(id(optimizer)))
        return scheduler

    def datasets(self) -> Any:
        self._reach_prepare()
        turns = self.turns
        if turns.place is Place.PREPARE:
            self._streams = [*self._streams, torch.default_generator.initial_seed()]
            self._resume()
        if turns.place is Place.EPOCHS and turns.data is None:
            self._discover()
        if turns.data is None or turns.place is Place.RETURNED:
            raise TaskError(
                f"{self._name}() reads no batch. Write `for batch in run.batches(dataset):` and in it run.step(loss)."
            )
        return turns.data if turns.validation is None else (turns.data, turns.validation)

    def _discover(self) -> None:
        """Find the data, which `main` names within its first epoch. Which one that is here nobody knows yet, and what
        `main` has done cannot be undone: so another one goes ahead, of modules that are imported anew, and is given
        up."""
        turns, spec = self.turns, self.turns.spec
        modules, code = imported_anew(type(self)._main, 0 if spec is None else spec.seed)
        with unheard(), swapped_modules(modules, environment=self.environment):
            scout = self.another(code)
            seed_generators(self._streams[0])
            scout._reach_prepare()
            seed_generators(self._streams[-1])
            scout._resume()
            scout._resume()
            found = scout.turns
            turns.data, turns.batch_size, turns.collate = found.data, found.batch_size, found.collate
            scout.give_up()

    def build_on(self, other: "OwnLoop") -> None:
        """Come to the loop, with the data of another one."""
        turns, known = self.turns, other.turns
        turns.data, turns.batch_size, turns.collate = known.data, known.batch_size, known.collate
        seed_generators(other._streams[-1])
        self._resume()

    def another(self, code: Callable[..., Any] | None = None) -> "OwnLoop":
        """One that has yet to begin, and runs this code."""
        other = (type(self) if code in (None, type(self)._main) else own_loop_of(code))()
        vars(other).update({name: value for name, value in vars(self).items() if name != LOG})
        other._seed, other.turns.spec, other.environment = self._seed, self.turns.spec, self.environment
        return other

    def give_up(self) -> None:
        """Let `main` end where it waits."""
        if self._greenlet:
            self._greenlet.throw()

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:  # noqa: ARG002
        turns = self.turns
        if turns.place not in (AT_BATCH, AT_STEP) or not turns.is_entered:
            if turns.place is Place.RETURNED and turns.is_entered:
                raise self._returned_early()
            raise JobError(f"{self._name}() has a loop of its own, and this takes a quorate.Task.")
        audit, self.audit = self.audit, None
        return self.loss_of(batch) if audit is None else audit(batch)

    def loss_of(self, batch: Any) -> Any:
        """What `main` makes of a batch; it waits in run.step() then."""
        turns = self.turns
        if turns.place is AT_STEP:
            with preserved_generators():  # those of the lane
                self._resume(None)
        self._resume(batch)
        if turns.loss is NOT_GIVEN:
            raise self._returned_early()
        loss, turns.loss = turns.loss, NOT_GIVEN
        return loss

    @property
    def frame(self) -> FrameType | None:
        """Where `main` waits."""
        return None if self._greenlet is None else self._greenlet.gr_frame

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        measure = self.turns.measure
        return super().metrics(model, batch) if measure is None else measure(batch)

    @property
    def collate(self) -> Any:
        return self.turns.collate or super().collate

    @property
    def clip_norm(self) -> float | None:
        """What `main` has asked for by run.clip()."""
        return self.turns.clip

    def check(self, spec: JobSpec) -> None:
        """Refuse what cannot hold for a loop of one's own."""
        size, clip = self.turns.batch_size, self.turns.clip
        if size is not None and size != spec.batch_size:
            raise TaskError(
                f"batch_size: the job says {spec.batch_size}, and run.batches() says {size}. It is the global batch, "
                "of all lanes together; give it in the job only."
            )
        if clip is not None and spec.clip_norm not in (None, clip):
            raise TaskError(f"clip_norm: the job says {spec.clip_norm}, and run.clip() says {clip}. Give it once.")
        if spec.train_metrics_every is not None and self.turns.measure is None:
            raise TaskError(
                "train_metrics_every asks for metrics of training batches: say by run.evaluate(dataset, measure) how "
                "to measure one, or leave it out."
            )
        refused = {
            f"strategy: {spec.strategy.kind}": not spec.strategy.fixes_bits,
            "on_bad_sample: skip": spec.on_bad_sample == "skip",
            "on_out_of_memory: shrink": spec.on_out_of_memory == "shrink",
            "compile: true": spec.compile is True,
        }
        for what in (key for key, is_refused in refused.items() if is_refused):
            raise TaskError(
                f"{what} is not possible with a training loop of your own ({self._name}()). Strategies are ring and "
                "parameter-server with mode: synchronous. Leave it out, or write a quorate.Task."
            )

    # What the loop tells it.

    def take_up(self, progress: Progress, sampler: Sampler) -> None:
        """A state is about to be loaded: bring `main` to the epoch in which it was made, to where it asks for a batch.

        Before the load, so that a worker which joins has the initial weights on its way there, as others had, and so
        that what `main` does there changes nothing.
        """
        turns, kept = self.turns, Kept.of(progress, sampler)
        if not progress.cursor.step and not progress.kept:
            return
        self._leave_step()
        turns.restored, turns.metrics, turns.ends = kept.state, progress.metrics, kept.is_ahead
        if not turns.is_entered:
            self._reach_batch(kept.epoch)
        while turns.epoch is not None and kept.epoch is not None and turns.epoch < kept.epoch:
            self._resume(STOP)
        if turns.epoch is not None and turns.epoch != kept.epoch:
            raise WorkerUnfit(f"{self._name}() is in epoch {turns.epoch} already, and has to go back to {kept.epoch}.")

    def enter(self, progress: Progress, sampler: Sampler, hosted: range, watch: StateWatch) -> Progress:
        """A generation begins to train, from `progress` on.

        Only a job that had come to its end, and is made longer, has the beginning of an epoch still before it.
        """
        turns, kept = self.turns, Kept.of(progress, sampler)
        _refuse_empty_lanes(sampler)
        state = self.state = OwnState(self._name, turns, watch, sampler)
        self._sampler, self._last_lane = sampler, hosted[-1]
        turns.leads, turns.metrics, turns.is_over = 0 in hosted, progress.metrics, False
        turns.ends = kept.is_ahead or self.ends(progress)
        self._leave_step()
        if not turns.is_entered:
            self._reach_batch(kept.epoch)
        if not progress.kept and not progress.cursor.step:
            state.begin()
            return state.kept_in(progress)
        state.restore(kept, progress.kept)
        if not kept.is_ahead or self.ends(progress):
            return progress
        turns.ends = False
        return self.advance(progress, None, "epoch")

    def _leave_step(self) -> None:
        """A step that was not completed is done again, or others have done it."""
        if self.turns.place is AT_STEP:
            self._resume(None)

    def _reach_batch(self, epoch: int | None) -> None:
        turns = self.turns
        turns.is_entered, turns.first_epoch = True, epoch or 0
        if turns.place is Place.EPOCHS:
            self._resume()
        if turns.place is Place.RETURNED:
            raise self._returned_early()

    def begin_step(self) -> None:
        """The code of a lane runs from here on."""
        turns = self.turns
        if turns.place is Place.RETURNED:
            raise self._returned_early()
        if turns.state:
            turns.agreed = turns.kept_state()

    @classmethod
    def beside(cls, work: Callable[[], None]) -> None:
        """Both begin at one place of the stack, where this waits.

        For the message of an error torch walks the stack to its end. A `main` that had begun elsewhere would stand on
        frames that have ended since, and what lies there by then kills the process.
        """
        global _ground
        worker, before, _ground = greenlet(work), _ground, getcurrent()
        try:
            found: Any = worker.switch()
            while not worker.dead:
                found = found.switch(None)  # it is a `main` that is to begin
        finally:
            _ground = before

    def end_lane(self, lane: int) -> None:
        """The gradient of a lane is complete: `main` goes on to the next batch. After the last lane it waits for the
        result of the step."""
        if lane != self._last_lane and self.state is not None:
            with self.state.same_weights():
                self._resume(None)

    def check_agreed(self) -> None:
        """A step is done: refuse a run.state that lanes have changed."""
        turns = self.turns
        if turns.state and turns.kept_state() != turns.agreed:
            raise UnsupportedModelError(
                "run.state was changed where run.step() has given no result: there it would depend on the lanes that a "
                "worker hosts. Change it after `if result is not None:`, or after an epoch."
            )

    def is_past_epoch(self, progress: Progress) -> bool:
        """Whether all batches of the epoch are read that `main` is in, so that it does what comes after that and before
        the first batch of the next. It finds what follows from the last step in run.metrics."""
        turns = self.turns
        turns.metrics, turns.ends = progress.metrics, self.ends(progress)
        if turns.place is not AT_BATCH or turns.epoch is None or self.state is None:
            return False
        return progress.cursor.step >= (turns.epoch + 1) * self._sampler.steps_per_epoch

    def ends(self, progress: Progress) -> bool:
        """Whether the job ends here, with an epoch: of one that is not complete nothing comes after it before a longer
        job would have come to its end."""
        sampler, step = self._sampler, progress.cursor.step
        return (progress.early_stopped or step >= sampler.total_steps) and step % sampler.steps_per_epoch == 0

    def advance(self, progress: Progress, value: Any, when: str) -> Progress:
        """The turn of `main` between two steps, which all workers have alike."""
        assert self.state is not None
        self.turns.metrics, self.turns.ends = progress.metrics, self.ends(progress)
        self._begin_stream(when, progress.cursor.step)
        with self.state.changing():
            self._resume(value)
        return self.state.kept_in(progress)

    def finish(self) -> None:
        """The job is done: `main` runs to its end."""
        turns = self.turns
        turns.is_over = True
        assert self.state is not None
        replica = self.state.watch.replica
        weights = digests(replica.parameters, replica.device)
        buffers = digests(replica.model.named_buffers(), replica.device)
        if turns.place in (Place.BATCH, Place.EPOCHS):
            self._begin_stream("end")
            self._resume(STOP)
        if digests(replica.parameters, replica.device) != weights:
            raise UnsupportedModelError(
                f"{self._name}() has changed weights after the last step, of which no checkpoint knows. Work on a copy "
                "of the model; `quorate.load_model(run)` gives that of a run."
            )
        if digests(replica.model.named_buffers(), replica.device) != buffers:
            log.warning(
                "%s() has changed buffers after the last step: no checkpoint has that. Do it after the batches of the "
                "last epoch, inside the loop over run.epochs()",
                self._name,
            )
        if turns.place is not Place.RETURNED:
            raise JobError(
                f"All steps of the job are done, and {self._name}() asks for more batches. Let it end after the loop "
                "over run.epochs(), or over run.batches() where there is none."
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _prepared(self) -> tuple[Any, Any, Any]:
        assert self.turns.prepared is not None, "the model is built first"
        return self.turns.prepared

    def _reach_prepare(self) -> None:
        if self.turns.place is not Place.TOP:
            return
        self._start()
        if self.turns.prepared is None:
            raise TaskError(f"{self._name}() returned without run.prepare(model, optimizer).")

    def _start(self) -> None:
        run = Run(self.turns, self.log)
        params = {name: getattr(self, name) for name in self._params}
        here = getcurrent()
        main = self._greenlet = greenlet(lambda _: type(self)._main(run, **params), here)
        self.turns.to_loop = here.switch
        is_grounded = _ground is not None and here.parent is _ground
        self._resume(start=partial(here.parent.switch, main) if is_grounded else None)

    def _resume(self, value: Any = None, start: Callable[[], Any] | None = None) -> None:
        """It is the turn of `main`, until it waits again or returns."""
        main = self._greenlet
        assert main is not None
        try:
            with self._no_loop_beside():
                main.switch(value) if start is None else start()
        except RAISED as error:
            code = JobError.exit_code if self.turns.is_entered else RequestError.exit_code
            blame_user_code(error, f"{self._name}()", hint_for, code)
            raise
        if not main:
            self.turns.place = Place.RETURNED

    @contextmanager
    def _no_loop_beside(self) -> Iterator[None]:
        """Before its first batch `main` steps no optimizer: one that does trains by itself, perhaps for hours."""
        turns = self.turns
        if turns.is_entered or turns.prepared is None:
            yield
            return
        optimizers = turns.prepared[1]
        own = {id(each) for each in (optimizers.values() if isinstance(optimizers, Mapping) else [optimizers])}

        def refuse(optimizer: Any, *_: Any) -> None:
            if id(optimizer) in own:
                raise TaskError(
                    f"{self._name}() calls optimizer.step() before it has read a batch of run.batches(), as a loop "
                    "over a DataLoader does. Write `for batch in run.batches(dataset):` in its place, and "
                    "run.step(loss) for loss.backward(), optimizer.step() and zero_grad()."
                )

        hook = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            hook.remove()

    def _begin_stream(self, when: str, number: int = 0) -> None:
        """What `main` draws outside lanes depends on when that is, and on nobody's number of lanes."""
        seed_generators(xxhash.xxh3_64_intdigest(b"%s %d" % (when.encode(), number), self._seed) >> 1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation, in which measure() may not change what is kept."""
        before = self.turns.kept_state()
        yield
        if self.turns.kept_state() != before:
            raise UnsupportedModelError(
                "run.state was changed in measure(): workers evaluate different batches, so they would have different "
                "states. Return numbers from measure(), and read run.metrics after the epoch."
            )

    def _returned_early(self) -> JobError:
        total = self._sampler.total_steps
        return JobError(
            f"{self._name}() returned before the job was done, which has {total:,} steps: every worker must come to "
            f"the same steps. Read run.batches() to its end, without `break` or `return` in the loop. {HOW_TO_END}"
        )


_ground: greenlet | None = None


def _refuse_empty_lanes(sampler: Sampler) -> None:
    """Every lane has a batch in every step: one that has none would see no result of it either."""
    least, lanes = sampler.batch_samples(sampler.steps_per_epoch), sampler.spec.lanes
    if least < lanes:
        raise TaskError(
            f"The last batch of an epoch has {least} samples for {lanes} lanes, and with a training loop of your own "
            "each lane needs one. Use `last_batch: drop`, or another batch_size."
        )


def own_loop_of(main: Callable[..., Any]) -> type[OwnLoop]:
    """The task that a function with a loop of its own makes; what it takes besides `run` are the job's params."""
    name = getattr(main, "__name__", "main")
    parameters = list(inspect.signature(main).parameters.values())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not parameters or any(each.kind not in named for each in parameters[1:]):
        raise TaskError(
            f"task: {name}{inspect.signature(main)} must take `run` first, and then the job's params by their names: "
            f"def {name}(run, learning_rate: float = 0.1)."
        )
    hints = get_type_hints(main, include_extras=True)
    params = parameters[1:]
    defaults = {each.name: each.default for each in params if each.default is not inspect.Parameter.empty}
    return type(
        name,
        (OwnLoop,),
        {
            "__module__": main.__module__,
            "__qualname__": main.__qualname__,
            "__doc__": main.__doc__,
            "__annotations__": {each.name: hints.get(each.name, Any) for each in params},
            "_main": staticmethod(main),
            "_params": tuple(each.name for each in params),
            **defaults,
        },
    )

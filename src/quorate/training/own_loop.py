"""A training loop that the user keeps: `main(run)` in the place of a task.

The loop of Quorate pulls: it asks a task for the loss of a batch. A loop of one's own pushes. So `main` runs as a
greenlet, in the same thread, and the two take turns: the loop hands over a batch where `main` asks for one, and `main`
hands back a loss in `run.step`. To the rest of Quorate it is a task like any other.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_type_hints

import torch
from greenlet import getcurrent, greenlet

from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, RequestError, TaskError, UnsupportedModelError
from quorate.core.user_code import RAISED, blame_user_code
from quorate.data.sampler import Sampler
from quorate.data.streams import seed_generators
from quorate.observe.events import StepCompleted
from quorate.spec.job import JobSpec
from quorate.spec.strategy import RingSpec, fixes_bits
from quorate.training.hints import hint_for
from quorate.training.loop import Loop
from quorate.training.own_run import AT_BATCH, NOT_GIVEN, STOP, Place, Run, StepResult, Turns
from quorate.training.progress import Progress
from quorate.training.strategy import StepRequest
from quorate.training.task import Task


class OwnLoop(Task):
    """A task whose parts come out of `main`, as far as that has come."""

    # Not among its attributes, which are held to what they were: these change all the time.
    __slots__ = ("_batches_left", "_ends_step", "_greenlet", "_kept", "_last_lane", "_sampler", "_trained", "_turns")
    _main: ClassVar[Callable[..., Any]]
    _params: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._turns = Turns()
        self._greenlet: greenlet | None = None
        self._kept = ""
        self._trained: torch.Tensor | None = None

    def model(self) -> torch.nn.Module:
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
        turns = self._turns
        if turns.place is Place.PREPARE:
            self._resume()
        if turns.data is None or turns.place is Place.RETURNED:
            raise TaskError(
                f"{self._name}() reads no batch. Write `for batch in run.batches(dataset):` and in it run.step(loss)."
            )
        return turns.data if turns.validation is None else (turns.data, turns.validation)

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:  # noqa: ARG002
        turns = self._turns
        if turns.place is not AT_BATCH or not turns.is_entered:
            if turns.place is Place.RETURNED and turns.is_entered:
                raise self._returned_early()
            raise JobError(f"{self._name}() has a loop of its own, and this takes a quorate.Task.")
        self._batches_left -= 1
        turns.is_last = self._ends_step and not self._batches_left
        self._resume(batch)
        if turns.loss is NOT_GIVEN:
            raise self._returned_early()
        loss, turns.loss = turns.loss, NOT_GIVEN
        return loss

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        measure = self._turns.measure
        return super().metrics(model, batch) if measure is None else measure(batch)

    @property
    def collate(self) -> Any:
        return self._turns.collate or super().collate

    @property
    def clip_norm(self) -> float | None:
        """What `main` has asked for by run.clip()."""
        return self._turns.clip

    def check(self, spec: JobSpec) -> None:
        """Refuse what cannot hold for a loop of one's own."""
        size, clip = self._turns.batch_size, self._turns.clip
        if size is not None and size != spec.batch_size:
            raise TaskError(
                f"batch_size: the job says {spec.batch_size}, and run.batches() says {size}. It is the global batch, "
                "of all lanes together; give it in the job only."
            )
        if clip is not None and spec.clip_norm not in (None, clip):
            raise TaskError(f"clip_norm: the job says {spec.clip_norm}, and run.clip() says {clip}. Give it once.")
        if spec.train_metrics_every is not None and self._turns.measure is None:
            raise TaskError(
                "train_metrics_every asks for metrics of training batches: say by run.evaluate(dataset, measure) how "
                "to measure one, or leave it out."
            )
        refused = {
            f"strategy: {spec.strategy.kind}": not fixes_bits(spec.strategy),
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

    def enter(self, progress: Progress, sampler: Sampler, hosted: range) -> None:
        """A generation begins to train, from `progress` on: bring `main` to where it asks for a batch."""
        turns, step = self._turns, progress.cursor.step
        _refuse_empty_lanes(sampler)
        self._sampler, self._last_lane = sampler, hosted[-1]
        turns.leads, turns.metrics, turns.is_over = 0 in hosted, progress.metrics, False
        # At the end of an epoch, what `main` does after it is still to be done.
        turns.first_epoch = max(0, step - 1) // sampler.steps_per_epoch
        is_first, turns.is_entered = not turns.is_entered, True
        is_anothers = is_first or progress.kept != self._kept
        self._kept = progress.kept
        turns.restored = progress.kept if is_anothers and step else None
        if turns.place is Place.EPOCHS:
            self._resume()
        else:
            if turns.place is Place.STEP:
                self._resume(None)  # it is done again, or others have done it
            if not self._goes_on(step, is_first, is_anothers):
                turns.restored = progress.kept if step else None
                self._restart()
        turns.take_up_state()

    def begin_step(self, progress: Progress) -> None:
        """A step begins: where it is the first of an epoch, `main` does what it does after the last one."""
        turns = self._turns
        is_in_epoch = turns.epoch is not None and turns.place is AT_BATCH
        if is_in_epoch and turns.epoch != self._sampler.epoch_of(progress.cursor.step + 1):
            self._resume_outside(STOP)
        if turns.place is not AT_BATCH and turns.place is Place.RETURNED:
            raise self._returned_early()
        if turns.state:
            turns.agreed = turns.kept_state()

    def begin_lane(self, lane: int, batches: int) -> None:
        """A lane begins, which has so many batches."""
        self._ends_step, self._batches_left = lane == self._last_lane, batches

    def after_step(self, progress: Progress, told: StepCompleted) -> Progress:
        """A step is done: `main` gets its result, and what it keeps from then on is part of the state."""
        turns = self._turns
        if turns.state and turns.kept_state() != turns.agreed:
            raise UnsupportedModelError(
                "run.state was changed where run.step() has given no result: there it would depend on the lanes that a "
                "worker hosts. Change it after `if result is not None:`, or after an epoch."
            )
        self._resume_outside(StepResult.of(told))
        self._kept = turns.kept_state() if turns.state else ""
        if self._kept and not isinstance(self._sampler.spec.strategy, RingSpec):
            raise UnsupportedModelError("run.state is kept with `strategy: ring` only; servers know nothing of it.")
        return progress if self._kept == progress.kept else progress.keeping(self._kept)

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """What `main` finds in run.metrics from then on."""
        self._turns.metrics = metrics

    def finish(self) -> None:
        """The job is done: `main` runs to its end."""
        turns = self._turns
        turns.is_over = True
        if turns.place is Place.BATCH:
            self._resume_outside(STOP)
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
        assert self._turns.prepared is not None, "the model is built first"
        return self._turns.prepared

    def _reach_prepare(self) -> None:
        if self._turns.place is not Place.TOP:
            return
        self._start()
        if self._turns.prepared is None:
            raise TaskError(f"{self._name}() returned without run.prepare(model, optimizer).")

    def _start(self) -> None:
        run = Run(self._turns, self.log)
        params = {name: getattr(self, name) for name in self._params}
        self._greenlet = greenlet(lambda _: type(self)._main(run, **params))
        self._turns.to_loop = getcurrent().switch
        self._resume()

    def _restart(self) -> None:
        """Run `main` from its top, to where the job is now; its model and optimizer stay the first ones."""
        if self._greenlet:
            self._greenlet.throw()
        self._turns.begin_again()
        seed_generators(derive_seed(self._sampler.spec.seed, "build"))
        self._start()
        if self._turns.place is not Place.BATCH:
            raise self._returned_early()

    def _goes_on(self, step: int, is_first: bool, is_anothers: bool) -> bool:
        """Whether `main` is, from where it waits, about to do what comes after this step."""
        turns, length = self._turns, self._sampler.steps_per_epoch
        if turns.place is Place.RETURNED:
            return step >= self._sampler.total_steps
        if is_first:  # it was let into the loop to see its data, before anybody knew the step
            return step == 0
        begins = 0 if turns.epoch is None else turns.epoch * length
        ends = self._sampler.total_steps if turns.epoch is None else begins + length
        # What it did between two epochs is not in a state that was taken up at the border.
        return (begins < step or (step == begins and not is_anothers)) and step <= ends

    def _resume(self, value: Any = None) -> None:
        """It is the turn of `main`, until it waits again or returns."""
        main = self._greenlet
        assert main is not None
        try:
            main.switch(value)
        except RAISED as error:
            code = JobError.exit_code if self._turns.is_entered else RequestError.exit_code
            blame_user_code(error, f"{self._name}()", hint_for, code)
            raise
        if not main:
            self._turns.place = Place.RETURNED

    def _resume_outside(self, value: Any) -> None:
        """The same where no lane runs, and so nobody else looks at the parameters."""
        if self._trained is None:
            self._trained = next(p for p in self._prepared[0].parameters() if p.requires_grad)
        version = self._trained._version
        self._resume(value)
        if self._trained._version != version:
            raise UnsupportedModelError(
                f"{self._name}() has changed the parameters itself, as optimizer.step() does. run.step(loss) does all "
                "of backward(), the optimizer's step, zero_grad() and the scheduler's step."
            )

    def _returned_early(self) -> JobError:
        total = self._sampler.total_steps
        return JobError(
            f"{self._name}() returned before the job was done, which has {total:,} steps: every worker must come to "
            "the same steps. Read run.batches() to its end, without `break` or `return` in the loop; `steps`, `epochs` "
            "and `early_stop` of the job say when it ends."
        )


@dataclass
class TurnsLoop(Loop):
    """The loop where it takes turns with `main`, which gets the result of a step before anything follows from it."""

    main: OwnLoop = field(kw_only=True)
    may_lag: bool = False

    def _train(self) -> str | None:
        self.main.enter(self.progress, self.sampler, self.strategy.hosted)
        ending = super()._train()
        if ending in ("complete", "early stop") and self.mode.replayed_step is None:
            self.main.finish()
        return ending

    def _try_step(self) -> StepRequest | None:
        self.main.begin_step(self.progress)
        self.watch.begin()  # between steps, `main` may change them
        return super()._try_step()

    def _complete(self, *args: Any, **named: Any) -> StepCompleted:
        told = super()._complete(*args, **named)
        self.progress = self.main.after_step(self.progress, told)
        return told

    def _evaluate_if_due(self) -> None:
        super()._evaluate_if_due()
        self.main.after_evaluation(self.progress.metrics)


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

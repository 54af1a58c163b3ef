"""The loop that takes turns with `main`; and a worker that would join now, played beforehand: what it makes of a batch
shows what `main` keeps to itself."""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from quorate.core.cached import cached_property
from quorate.core.errors import LanesDiffer, QuorateError, ReplicasDiffer, SettingsDiffer, UnsupportedModelError
from quorate.core.generation import TURN
from quorate.data.sampler import Sampler
from quorate.data.streams import preserved_generators
from quorate.observe.events import LogMessage, StepCompleted
from quorate.own_loop.loop import OwnLoop
from quorate.own_loop.run import STOP, StepResult
from quorate.own_loop.state import differ, lives_on, marked_locals, numbers_of, same_numbers, variables, warning_of
from quorate.replica.device import digests, same_bits
from quorate.replica.replica import Replica, changed_outside
from quorate.replica.settings import NOTED
from quorate.replica.state_watch import StateWatch
from quorate.task.hints import out_of_memory
from quorate.task.imported_anew import imported_anew, swapped_modules, unheard
from quorate.task.progress import Evaluated, Progress
from quorate.task.task import take_log
from quorate.training.loop import Loop
from quorate.training.strategy import StepRequest

log = logging.getLogger(__name__)

AUDITED = 2
"""So many steps of a generation have a batch computed twice."""
EARLY = 8
"""Up to here every step after the first is rehearsed."""
LARGEST = 2**30
"""Bytes of parameters up to which there is room for a second model."""


class NoRoom(Exception):  # noqa: N818 (a happening, not a mistake)
    """Memory does not suffice for a second model."""


def is_rehearsed(step: int, sampler: Sampler) -> bool:
    """Early, and more and more seldom, also at the round numbers at which scripts do things; and where an epoch begins
    or ends."""
    epoch, within = divmod(step - 1, sampler.steps_per_epoch)
    is_at_border = within < 2 or within == sampler.steps_per_epoch - 1
    is_round = step & (step - 1) == 0 or str(step).rstrip("0") in ("1", "2", "5")
    return step > 1 and (step <= EARLY or is_round or (is_at_border and epoch & (epoch - 1) == 0))


class Rehearsals:
    """The turns of `main` in a generation. In some steps it sees whether `main` keeps something that counts where
    nobody saves it: a batch is given twice, and a worker is played that joins now."""

    def __init__(self, main: OwnLoop, watch: StateWatch, sampler: Sampler) -> None:
        self._main, self._watch, self._replica, self._sampler = main, watch, watch.replica, sampler
        self._tries, self._has_room = AUDITED, True
        self._rehearsal: Rehearsal | None = None

    def begin_step(self, progress: Progress) -> str | None:
        """The code of a lane runs from here on. Returns what to warn of, once."""
        self.end()
        if is_rehearsed(progress.cursor.step + 1, self._sampler):
            self._begin(progress)
        self._main.audit = self._loss if self._tries > 0 or self._rehearsal is not None else None
        self._tries -= 1
        self._main.begin_step()
        new = sorted((self._rehearsal.lost if self._rehearsal is not None else set()) - self._main.told)
        self._main.told.update(new)
        return warning_of(type(self._main).__name__, new, self._main.turns.measure) if new else None

    def after_step(self, progress: Progress, told: StepCompleted) -> Progress:
        """A step is done: `main` gets its result, and what it changes and keeps from then on is part of the state."""
        self._main.check_agreed()
        return self._have_turn(progress, StepResult.of(told), "after step")

    def after_evaluation(self, progress: Progress) -> Progress:
        """What follows from a step is done. What `main` does at the end of an epoch is part of the state, too."""
        if not self._main.is_past_epoch(progress):
            return progress
        if self._rehearsal is not None:
            # A worker may also join between the last step of an epoch and this, and has seen no batch of it.
            self.end()
            self._begin(progress)
        progress = self._have_turn(progress, STOP, "after epoch")
        self._watch.settings.begin()  # after a step the loop does it
        return progress

    def end(self) -> None:
        """No more of what is played."""
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.close()

    def _begin(self, progress: Progress) -> None:
        if self._has_room and sum(p.nbytes for _, p in self._replica.parameters) <= LARGEST:
            with self._where_there_is_room():
                self._rehearsal = Rehearsal(self._main, self._replica, progress, self._sampler)

    def _have_turn(self, progress: Progress, value: Any, when: str) -> Progress:
        """A turn between two steps, of which it is seen whether a worker that joins would do the same."""
        with self._where_there_is_room():
            if self._rehearsal is not None:
                self._rehearsal.begin_turn(value)
        after = self._main.advance(progress, value, when)
        with self._where_there_is_room():
            if self._rehearsal is not None:
                self._rehearsal.compare_turn(progress, value, when)
        return after

    @contextmanager
    def _where_there_is_room(self) -> Iterator[None]:
        """A part of a rehearsal, and of all that follow, that is given up where memory does not suffice for it."""
        try:
            yield
        except NoRoom:
            self._rehearsal, self._has_room = None, False
            log.warning(
                "memory does not suffice to rehearse a worker that joins, so it is not checked whether %s() keeps "
                "something that counts where no checkpoint has it",
                type(self._main).__name__,
            )

    def _loss(self, batch: Any) -> Any:
        """The loss of a batch that is given twice: what `main` carries from one to the next, to another lane that is,
        makes another of it."""
        main, replica, name = self._main, self._replica, type(self._main).__name__
        before, weights = marked_locals(main.frame), digests(replica.parameters, replica.device)
        own = copy.deepcopy(batch) if self._rehearsal is not None else None
        with preserved_generators(), torch.random.fork_rng(self._watch.devices):
            loss = main.loss_of(copy.deepcopy(batch))
        now = digests(replica.parameters, replica.device)
        if changed := next((each for each, digest in weights.items() if now[each] != digest), None):
            raise changed_outside(changed, f"{name}() between a batch and its run.step()")
        trained = [each for _, each in replica.trainable if each.requires_grad]
        found = numbers_of(loss, trained)
        with self._where_there_is_room():
            if self._rehearsal is not None:
                self._rehearsal.compare_loss(own, found)
        self._watch.begin_again()
        take_log(main)
        del loss
        again = main.loss_of(batch)
        if same_numbers(found, numbers_of(again, trained)):
            return again
        marks = marked_locals(main.frame)
        differ = sorted(each for each, mark in before.items() if marks.get(each) != mark)
        named = f" These have changed meanwhile: {', '.join(differ[:8])}." if differ else ""
        raise UnsupportedModelError(
            f"{name}() was given one batch twice, and the second time its loss or gradient was another one: something "
            "is carried from a batch to the next, which may be another lane's, so that the result depends on the "
            f"number of workers.{named} Keep it in run.state or in a buffer of the model, and change it where "
            "run.step() has given a result."
        )


class Rehearsal:
    """Another run of `main`, brought to the same place as a worker that joins is, on a copy of the state. Its modules
    are imported anew: what `main` keeps in globals is then that of a process which has just begun."""

    def __init__(self, main: OwnLoop, replica: Replica, progress: Progress, sampler: Sampler) -> None:
        self._first, self._state, self._step = main, replica, progress.cursor.step
        self._sampler = sampler
        self._differ: list[str] = []
        self.lost: set[str] = set()
        self._modules: dict[str, ModuleType] = {}
        with self._tried():
            code = type(main)._main
            self._modules, again = imported_anew(code, replica.spec.seed)
            self.main = main.another(again)
            with self._in_place():
                self._replica = Replica(self.main, replica.spec, replica.device)
                self.main.build_on(main)
                self._watch = StateWatch(self.main, self._replica)
                self.main.take_up(progress, sampler)
                self.take_state()
                # Not with the first lane, whose host prints and writes.
                self.main.enter(progress, sampler, range(1, 2), self._watch)
            if _order(self._replica) != _order(self._state):
                raise UnsupportedModelError("gives its parameters to the optimizer in another order, as out of a set")
            pairs = list(variables(main.frame, self.main.frame))
            if again is not code:
                shared, others = code.__globals__, again.__globals__
                pairs += [(n, shared[n], others.get(n, shared[n])) for n in shared if n[:2] != "__"]
            models = replica.model, self._replica.model
            own = {id(each) for model in models for each in (*model.modules(), *model.parameters(), *model.buffers())}
            differing = [pair for pair in pairs if differ(*pair[1:], own)]
            self._differ = sorted({name for name, _, _ in differing})
            self.lost = {name for name, one, other in differing if lives_on(one, other, own)}

    def take_state(self) -> None:
        """Have what the first one has now."""
        state = self._state.state()
        tensors = state.pop("tensors")
        self._replica.load({**copy.deepcopy(state), "tensors": tensors})  # these are copied where they are loaded

    def compare_loss(self, batch: Any, found: Sequence[torch.Tensor]) -> None:
        """Refuse a `main` that makes another loss, or another gradient, of the same batch."""
        with self._tried(), self._in_place():
            self._replica.begin_lane()
            loss = self.main.loss_of(batch)
            again = numbers_of(loss, [p for _, p in self._replica.trainable])
            self._watch.begin_again()
        if not same_numbers(found, again):
            raise self._refused("gives another loss or gradient for the same batch")

    def begin_turn(self, value: Any) -> None:
        """A turn between two steps, from what the first one has now. Refuse a schedule that has set another rate in the
        update before it, such as by a function of variables of `main`."""
        optimizers = self._replica.optimizers
        has_updated = isinstance(value, StepResult) and value.loss is not None
        if has_updated and optimizers.are_torchs_own:  # others may set anything in their step(), which is not done here
            with self._tried(), self._in_place(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no step of the optimizer goes before
                if optimizers.are_scheduled_by_job:
                    optimizers.prepare(value.step, self._sampler)
                optimizers.advance_schedules(value.step, self._sampler)
            self._compare_settings("its schedule sets")
        self.take_state()

    def compare_turn(self, progress: Progress, value: Any, when: str) -> None:
        """Refuse a `main` that makes something else of its turn between two steps, which the first one has had."""
        with self._tried(), self._in_place():
            self.main.advance(progress, value, when)
        assert self.main.state is not None and self._first.state is not None
        if self.main.state.text != self._first.state.text:
            raise self._refused("has another run.state, or other attributes or modes of modules")
        self._compare_settings("it sets")
        if changed := self._changed_tensor():
            raise self._refused(f"makes another '{changed}' of it")

    def close(self) -> None:
        with self._tried(), self._in_place():
            self.main.give_up()

    def _compare_settings(self, what: str) -> None:
        own, others = self._replica.optimizers.settings.values(), self._state.optimizers.settings.values()
        names = [name for name in others if name != NOTED]
        if changed := next((name for name in names if own.get(name) != others[name]), None):
            sets = f"{what} {changed} to {own.get(changed)}, and not to {others[changed]}"
            raise self._refused(sets.removeprefix("it "))

    def _changed_tensor(self) -> str | None:
        """Which parameter, buffer or tensor of an optimizer is not that of the first one."""
        ones, others = self._state.state_tensors(), self._replica.state_tensors()
        return next((name for name, one in ones.items() if name in others and not same_bits(one, others[name])), None)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Without a trace: what it draws and prints has been drawn and printed."""
        devices = [] if self._state.device.is_host else [self._state.parameters[0][1].device]
        try:
            with preserved_generators(), torch.random.fork_rng(devices), unheard():
                yield
        except Exception as error:
            if out_of_memory(error) is not None:
                raise NoRoom from None
            if not isinstance(error, QuorateError):
                raise
            raise self._refused(f"fails: {error.message.rstrip('.')}") from None

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """What `main` imports in a function are the modules that were imported anew."""
        with swapped_modules(self._modules, environment=self._first.environment):
            yield

    def _refused(self, what: str) -> UnsupportedModelError:
        named = f" These variables differ: {', '.join(self._differ[:8])}." if self._differ else ""
        return UnsupportedModelError(
            f"{type(self._first).__name__}() keeps something that counts where no checkpoint has it. In a worker that "
            f"joined after step {self._step}, as in a job that is resumed there, it {what}.{named} Keep it in "
            "run.state or in a buffer of the model, give schedulers to run.prepare(), count by result.step, use "
            "result.loss, and set nothing under run.is_main."
        )


def _order(replica: Replica) -> list[list[str]]:
    names = {id(each): name for name, each in replica.parameters}
    groups = (group for each in replica.optimizers.by_name.values() for group in each.param_groups)
    return [[names[id(each)] for each in group["params"]] for group in groups]


@dataclass
class TurnsLoop(Loop):
    """The loop where it takes turns with `main`, which gets the result of a step before anything follows from it."""

    main: OwnLoop = field(kw_only=True)

    @cached_property
    def _rehearsals(self) -> Rehearsals:
        return Rehearsals(self.main, self.watch, self.sampler)

    def _train(self) -> str | None:
        self.progress = self.main.enter(self.progress, self.sampler, self.strategy.hosted, self.watch)
        ending = super()._train()
        if ending in ("complete", "early stop"):
            self._rehearsals.end()
            if self.mode.replayed_step is None:
                self.main.finish()
        return ending

    def close(self) -> None:
        try:
            self._rehearsals.end()
        finally:
            super().close()

    def _step(self, step: int) -> StepRequest | None:
        if message := self._rehearsals.begin_step(self.progress):
            self.publish(LogMessage(step=self.progress.cursor.step, level="warning", message=message))
        try:
            return super()._step(step)
        except ReplicasDiffer as error:
            buffers = (name for name, _ in self.replica.buffers.committed())
            is_of_buffers = any(f"'{name}'" in error.message for name in buffers)
            if isinstance(error, LanesDiffer) or not (isinstance(error, SettingsDiffer) or is_of_buffers):
                raise
            raise UnsupportedModelError(
                f"{error} So {type(self.main).__name__}() does not do the same in every worker between two steps. Keep "
                "what it depends on in run.state, use result.loss rather than the loss of a batch, and set nothing "
                "under run.is_main."
            ) from None

    def _complete(self, *args: Any, **named: Any) -> StepCompleted:
        told = super()._complete(*args, **named)
        # What one worker raises now, as under run.is_main, is its user's, and no sign of a replica that differs.
        self.activity.phase = TURN
        self.progress = self._rehearsals.after_step(self.progress, told)
        return told

    def _evaluate(self, step: int) -> Evaluated:
        with self.main.evaluating():
            return super()._evaluate(step)

    def _next_due(self, most: int = 0) -> int:  # noqa: ARG002
        return 0  # `main` has its turn after every step

    def _evaluate_if_due(self) -> None:
        super()._evaluate_if_due()
        self.activity.phase = TURN
        self.progress = self._rehearsals.after_evaluation(self.progress)

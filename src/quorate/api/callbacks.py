"""Callbacks: code of the user's that hears of steps, evaluations and checkpoints, in the launcher.

They are called from the run's events, by a thread of their own: the workers, which train, do not know of them. So they
cannot change the bits, nor hold up a step; and what they raise ends no job.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from quorate.api.prints import RunStart, Watch
from quorate.api.tasks import importing_from
from quorate.core.errors import RequestError
from quorate.core.user_code import building_code, describe, given
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, EvaluationDone, RunBegan, StepCompleted
from quorate.observe.jsonl import EventTail, end_of_events
from quorate.observe.sinks import Sink
from quorate.spec.job import TaskReference
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import listening_to_signals

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that one call may take once the job is over."""
_NOTED_EVERY = 1.0
_UNTOLD = 10.0

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Start:
    """A run starts, or is resumed after `from_step`."""

    run: str
    folder: Path
    from_step: int
    total_steps: int | None
    steps_per_epoch: int | None
    lanes: int | None


@dataclass(frozen=True)
class StepEnd:
    """A step is completed. `loss` is None if the step was skipped; `losses`, `learning_rates` and `gradient_norms` are
    by the name of the optimizer ("" if there is only one). `log` has the numbers that the task logged."""

    step: int
    epoch: int | None
    loss: float | None
    losses: Mapping[str, float | None]
    learning_rates: Numbers
    gradient_norms: Numbers
    log: Numbers
    samples: int | None
    samples_per_second: float | None
    time: float


@dataclass(frozen=True)
class EvaluationEnd:
    """The metrics of the validation set after `step`; `best`: whether they are the best so far."""

    step: int
    metrics: Numbers
    best: bool
    time: float


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    bytes: int | None
    seconds: float | None
    time: float


@dataclass(frozen=True)
class End:
    """How a run, or this part of it, ended: complete, interrupted, terminated, or failed with an `error`."""

    status: str
    steps: int
    metrics: Numbers
    weights_digest: str
    error: str | None


class Callback:
    """Base class for code that is called when a run starts, completes a step, evaluates, saves or ends.

    Override the methods that you need.

    ::

        class Tell(quorate.Callback):
            def on_evaluation(self, evaluation):
                print(evaluation.step, evaluation.metrics["accuracy"])


        quorate.train(job, callbacks=[Tell()])

    In a job file, name the class: ``callbacks: [tell.py:Tell]``. One thread of the launcher calls the hooks in order,
    once for each event. They cannot change what is trained.
    """

    def on_start(self, start: Start) -> None:
        """Called when training starts or is resumed."""

    def on_step_end(self, step: StepEnd) -> None:
        """Called once after each step, however often the step had to be redone."""

    def on_evaluation(self, evaluation: EvaluationEnd) -> None:
        """Called after each evaluation of the validation set."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_end(self, end: End) -> None:
        """Called last, however the job ended."""


class CallbackServer:
    """A sink that follows the run's file, and calls the hooks in a thread.

    How far it has come is noted in `noted`, so that whoever resumes the run does not call for the same steps again.
    """

    def __init__(self, run: RunFolder, callbacks: Sequence[Callback], noted: str = "callbacks.json") -> None:
        self._run = run
        self._callbacks = callbacks
        self._file = run.path / noted
        self._tail = EventTail(run.events_file)
        self._done: dict[str, Any] = self._noted() or {"offset": end_of_events(run.events_file)}
        self._tail.offset = self._done["offset"]
        self._noted_at = 0.0
        self._held: list[Event] | None = []  # until training begins, what the launcher before this one had left
        self._raised: dict[tuple[str, str], int] = {}
        self._call: tuple[str, int | None, float] | None = None
        self._news, self._is_over, self._is_given_up = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="callbacks", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:  # noqa: ARG002
        """It reads the file."""
        self._news.set()

    def close(self) -> None:
        """Let them hear the rest, unless somebody asks for an end; one that hangs is given up."""
        self._is_over.set()
        self._news.set()
        is_told = False
        began = time.monotonic()
        with listening_to_signals() as signals:
            heard = len(signals.received)
            while self._thread.is_alive():
                self._thread.join(0.05)
                now, call = time.monotonic(), self._call
                if len(signals.received) > heard or (call and now - max(began, call[2]) > PATIENCE):
                    self._is_given_up.set()
                    where = "" if call is None else f" {call[0]}{_at(call[1])} has not returned;"
                    log.warning("callbacks:%s events that they have not handled yet are skipped", where)
                    break
                if now - began > _UNTOLD and not is_told:
                    is_told = True
                    log.warning("waiting for callbacks, which are behind the training; Ctrl-C ends the wait")
        for (name, hook), count in self._raised.items():
            if count > 1:
                log.warning("callback %s: %s raised %d times in all", name, hook, count)

    def _serve(self) -> None:
        while not self._is_given_up.is_set():
            self._news.wait()
            self._news.clear()
            is_last = self._is_over.is_set()
            for event in self._tail:
                if self._is_given_up.is_set():
                    return
                self._take(event)
                self._note()
            if is_last:
                break
        self._note(always=True)
        if self._held is None:
            self._tell("on_end", self._end(), None)

    def _take(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            held, self._held = self._held, None
            if held is not None:
                self._tell("on_start", self._start(event), event.step)
            for each in held or ():
                self._take(each)
        elif self._held is not None:
            self._held.append(event)
        else:
            self._hear(event)

    def _hear(self, event: Event) -> None:
        step = event.step or 0
        match event:
            case StepCompleted() if self._is_news("step", step):
                self._tell("on_step_end", _step_end(event), step)
            case EvaluationDone() if self._is_news("evaluation", step):
                numbers = MappingProxyType(dict(event.metrics or {}))
                self._tell("on_evaluation", EvaluationEnd(step, numbers, bool(event.best), event.time), step)
            case CheckpointSaved() if self._is_news("checkpoint", [step, Path(event.path).name]):
                path = self._run.checkpoints / Path(event.path).name
                self._tell("on_checkpoint", Checkpoint(step, path, event.bytes, event.seconds, event.time), step)

    def _is_news(self, kind: str, place: Any) -> bool:
        """Whether it comes after all that was told: what is redone after a loss is told in the file again."""
        if kind in self._done and place <= self._done[kind]:
            return False
        self._done[kind] = place
        return True

    def _start(self, event: RunBegan) -> Start:
        return Start(
            self._run.name,
            self._run.path,
            event.from_step or 0,
            event.total_steps,
            event.steps_per_epoch,
            event.lanes,
        )

    def _end(self) -> End:
        result = self._run.whole_result() or {}
        return End(
            result.get("status", "failed"),
            result.get("steps", self._done.get("step", 0)),
            MappingProxyType(dict(result.get("final_metrics") or {})),
            result.get("weights_digest", ""),
            (result.get("failure") or {}).get("message"),
        )

    def _tell(self, hook: str, record: Any, step: int | None) -> None:
        for callback in self._callbacks:
            name = type(callback).__name__
            self._call = f"{name}.{hook}", step, time.monotonic()
            try:
                getattr(callback, hook)(record)
            except BaseException as error:  # also SystemExit: nobody but us hears of it
                count = self._raised[name, hook] = self._raised.get((name, hook), 0) + 1
                if count == 1:
                    where = f"{hook}{_at(step)}"
                    message = "callback %s: %s raised %s. Training continues, and it is called again"
                    log.warning(message, name, where, describe(error), exc_info=error)
            self._call = None

    def _noted(self) -> dict[str, Any] | None:
        try:
            noted = json.loads(self._file.read_text())
            return noted if isinstance(noted, dict) and isinstance(noted.get("offset"), int) else None
        except (OSError, ValueError):
            return None

    def _note(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._noted_at > _NOTED_EVERY:
            self._noted_at = now
            self._done["offset"] = self._tail.offset
            with contextlib.suppress(OSError):  # a full disk: whoever resumes the run may call some again
                write_atomically(self._file, json.dumps(self._done))


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step:,}"


def _step_end(event: StepCompleted) -> StepEnd:
    finite = [loss for loss in event.losses.values() if loss is not None]
    return StepEnd(
        event.step or 0,
        event.epoch,
        sum(finite) if finite else None,
        MappingProxyType(dict(event.losses)),
        MappingProxyType(dict(event.learning_rates)),
        MappingProxyType(dict(event.gradient_norms)),
        MappingProxyType(dict(event.log or {})),
        event.samples,
        event.samples_per_second,
        event.time,
    )


class _Both:
    """A display, and callbacks that were given in Python."""

    def __init__(self, display: Sink, callbacks: CallbackServer) -> None:
        self._display, self._callbacks = display, callbacks

    def handle(self, event: Event) -> None:
        self._callbacks.handle(event)
        self._display.handle(event)

    def close(self) -> None:
        try:
            self._display.close()
        finally:
            self._callbacks.close()


def refuse_no_list(callbacks: Any) -> None:
    """Refuse what stands in the place of a list of callbacks."""
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | Mapping):
        raise RequestError(f"callbacks: {given(callbacks)} is no list of callbacks. Write callbacks=[Tell()].")


def with_callbacks(watch: Watch, callbacks: Sequence[Any]) -> Watch:
    """Show a run, and call these as well."""
    refuse_no_list(callbacks)
    for each in callbacks:
        if not isinstance(each, Callback):
            named = each if isinstance(each, type) else type(each)
            name = "Tell" if named.__module__ == "builtins" else named.__name__
            remedy = f"Give {name}()" if issubclass(named, Callback) else f"Write `class {name}(quorate.Callback):`"
            remedy = f"By name it is a key: quorate.Job(..., callbacks=[{each!r}])" if named is str else remedy
            raise RequestError(f"callbacks: {given(each)} is no callback. {remedy}.")
    if not callbacks:
        return watch

    def both(begun: RunStart) -> Sink:
        return _Both(watch(begun), CallbackServer(begun.run, callbacks, "callbacks-python.json"))

    return both


def load_callbacks(references: Sequence[str]) -> list[Callback]:
    """The callbacks that a job names, made without arguments."""
    return [_load(reference) for reference in references]


def _load(reference: str) -> Callback:
    named = TaskReference.parse(reference)
    with building_code(f"callback {reference}"):
        try:
            module = importlib.import_module(named.module or "") if named.file is None else _import_file(named.file)
        except (ModuleNotFoundError, FileNotFoundError) as error:
            raise RequestError(f"callbacks: {reference} cannot be imported: {describe(error)}") from None
        found = getattr(module, named.class_name, None)
        if not isinstance(found, type) or not issubclass(found, Callback):
            what = "is not there" if found is None else f"is {given(found)}"
            raise RequestError(
                f"callbacks: {reference} {what}. Name a class: `class {named.class_name}(quorate.Callback):`."
            )
        return found()


def _import_file(path: Path) -> ModuleType:
    with importing_from(path.parent, isolated=False):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

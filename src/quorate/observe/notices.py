"""What is said of an event: usually one line, for a terminal, a file or a notebook. A step has one only if it warns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from quorate.core.generation import names_of
from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.progress import GAP, Progress, hosting
from quorate.observe.quantities import duration, measure, plural, size
from quorate.observe.recoveries import brief

EARLY_STOP = "early stop"
LONGEST_SILENT_WAIT = 0.05
"""Seconds for which training waits for a checkpoint without a word."""


@dataclass(frozen=True)
class Notice:
    """A line or a few and their colour, which says nothing that the words do not."""

    text: str
    style: str


def notice_of(event: Event, progress: Progress) -> Notice | None:
    """What is said of an event; none if nothing is. `progress` is what was known before it."""
    make = _NOTICES.get(type(event))
    return None if make is None else make(event, progress)


def _run(event: events.RunBegan, progress: Progress) -> Notice | None:
    if progress.has_begun:
        return None
    of_all = f" of {event.total_steps:,}" if event.total_steps else ""
    start = f", from step {event.from_step:,}{of_all}" if event.from_step else ""
    place = f" in {progress.folder}" if progress.folder else ""
    return Notice(f"{progress.run}{place}: {progress.hosting}{start}", "bold")


def _generation(event: events.GenerationFormed, progress: Progress) -> Notice | None:
    if not progress.has_begun:
        return None
    now = hosting(*progress.hosts_by(event), len(event.servers or ()), event.mesh or "")
    first = progress.step if event.from_step is None else event.from_step
    again = f", from step {first:,}" if first < progress.step else ""
    back = sorted(event.processes & progress.lost.keys())
    if not back:
        return Notice(f"continuing with {now}{again}", "yellow")
    waited = duration(event.time - min(progress.lost[worker] for worker in back))
    who = f"{names_of(back, ' and ')} {'are' if len(back) > 1 else 'is'}"
    return Notice(f"{who} back after {waited}, {now}{again}", "green")


def _warnings(event: events.StepCompleted | events.EvaluationDone, progress: Progress) -> list[str]:
    """With the name of the run, which the worker that warns does not write."""
    return [warning.replace("quorate show RUN ", f"quorate show {progress.run} ") for warning in event.warnings]


def _evaluation(event: events.EvaluationDone, progress: Progress) -> Notice:
    metrics = GAP.join(f"{name} {measure(value)}" for name, value in (event.metrics or {}).items())
    best = f"{GAP}best so far" if event.best else ""
    left_out = f"{GAP}{plural(event.bad_samples, 'bad sample')} left out" if event.bad_samples else ""
    warnings = "".join(f"\n{warning}" for warning in _warnings(event, progress))
    return Notice(f"evaluation{_at(event)}: {metrics}{best}{left_out}{warnings}", "yellow" if warnings else "cyan")


def _checkpoint(event: events.CheckpointSaved, _: Progress) -> Notice:
    added = event.added_s or 0.0
    waited = f", training waited {duration(added)}" if added >= LONGEST_SILENT_WAIT else ""
    return Notice(f"checkpoint {PurePath(event.path).name}: {_cost(event)}{waited}", "dim")


def _not_saved(event: events.CheckpointFailed | events.CheckpointSkipped, _: Progress) -> Notice:
    return Notice(f"not saved{_at(event)}: {event.reason or 'no reason was given'}", "yellow")


def _cost(event: events.CheckpointSaved | events.CheckpointCopied) -> str:
    return f"{size(event.bytes or 0)} in {duration(event.seconds or 0.0)}"


def _copy_failed(event: events.CopyFailed, _: Progress) -> Notice:
    which = "" if event.step is None else f" (checkpoint of step {event.step:,})"
    return Notice(f"not copied{which}, and training continues: {event.reason}", "yellow")


def _stop(event: events.RunStopped, progress: Progress) -> Notice:
    reason = event.reason or "asked to"
    if not progress.has_begun:
        return Notice(f"stopping before the first step: {reason}", "yellow")
    ending = "stopping after the running step, which is saved"
    is_typed = reason == "interrupted"
    return Notice(f"{ending}; Ctrl-C again stops at once" if is_typed else f"{reason}: {ending}", "yellow")


def _finished(event: events.RunFinished, progress: Progress) -> Notice | None:
    if not progress.has_begun:
        return None
    result = event.result or {}
    steps = result.get("steps", progress.step)
    counted = plural(steps, "step")
    ending = result.get("ending", "complete")
    if ending == EARLY_STOP:
        why, rule = "", progress.early_stop
        if rule is not None:
            spell = "the last evaluation" if rule.patience == 1 else f"the last {rule.patience} evaluations"
            why = f": {spell} brought no better {rule.metric}"
        return Notice(f"stopped early after {counted}{why}", "green")
    if ending == "complete":
        return Notice(f"finished after {counted}", "green")
    done = f"{steps:,} of {plural(progress.total_steps, 'step')}" if progress.total_steps else counted
    return Notice(f"stopped after {done}", "yellow")


def _at(event: Event) -> str:
    return "" if event.step is None else f" at step {event.step:,}"


_NOTICES: dict[type[Event], Callable[[Any, Progress], Notice | None]] = {
    events.RunBegan: _run,
    events.GenerationFormed: _generation,
    events.WorkerLost: lambda event, _: Notice(brief(event.message or "a worker is lost"), "yellow"),
    events.StepCompleted: lambda event, progress: (
        Notice("\n".join(_warnings(event, progress)), "yellow") if event.warnings else None
    ),
    events.Resized: lambda event, _: Notice(f"asked to continue with {event.said}", "bold"),
    events.RolledBack: lambda event, progress: Notice(
        f"back to step {event.step or 0:,}: what follows it is trained again, up to {progress.place}", "yellow"
    ),
    events.MemoryRanOut: lambda event, _: Notice(event.sentence, "yellow"),
    events.EvaluationDone: _evaluation,
    events.CheckpointSaved: _checkpoint,
    events.CheckpointFailed: _not_saved,
    events.CheckpointSkipped: _not_saved,
    events.CheckpointCopied: lambda event, _: Notice(
        f"checkpoint {event.checkpoint} copied to {event.place}: {_cost(event)}", "dim"
    ),
    events.CopyFailed: _copy_failed,
    events.CopyRecovered: lambda event, _: Notice(
        f"copying to {event.place} works again, after {duration(event.seconds or 0.0)}", "green"
    ),
    events.RunStopped: _stop,
    events.RunFailed: lambda event, _: Notice(f"failed{_at(event)}: {event.failure.message}", "bold red"),
    events.RunFinished: _finished,
    events.LogMessage: lambda event, _: (
        None if event.message is None else Notice(event.message, "bold" if event.level == "info" else "yellow")
    ),
}

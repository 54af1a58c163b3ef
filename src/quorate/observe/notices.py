"""What is said of an event: usually one line, for a terminal, a file or a notebook. A step has one only if it warns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from quorate.observe.event import Event
from quorate.observe.progress import GAP, Progress, plural
from quorate.observe.quantities import duration, measure, size
from quorate.observe.recoveries import brief, workers_of

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
    say = _SAYINGS.get(event.kind)
    return None if say is None else say(event, progress)


def _run(event: Event, progress: Progress) -> Notice | None:
    if progress.has_begun:
        return None
    first = event.fields.get("from_step", 0)
    total = event.fields.get("total_steps")
    start = f", from step {first:,}" + (f" of {total:,}" if total else "") if first else ""
    place = f" in {progress.folder}" if progress.folder else ""
    return Notice(f"{progress.run}{place}: {progress.hosting}{start}", "bold")


def _generation(event: Event, progress: Progress) -> Notice | None:
    if not progress.has_begun:
        return None
    hosting, first = progress.hosting_by(event), event.fields.get("from_step", progress.step)
    again = f", from step {first:,}" if first < progress.step else ""
    back = sorted(workers_of(event) & progress.lost.keys())
    if not back:
        return Notice(f"going on with {hosting}{again}", "yellow")
    waited = duration(event.time - min(progress.lost[worker] for worker in back))
    return Notice(f"{_workers(back)} back after {waited}, {hosting}{again}", "green")


def _workers(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"worker {numbers[0]} is"
    return f"workers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} are"


def _lost(event: Event, _: Progress) -> Notice:
    return Notice(brief(event.fields.get("message", "a worker is lost")), "yellow")


def _step(event: Event, progress: Progress) -> Notice | None:
    warnings = _warnings(event, progress)
    return Notice("\n".join(warnings), "yellow") if warnings else None


def _warnings(event: Event, progress: Progress) -> list[str]:
    """With the name of the run, which the worker that warns does not write."""
    return [
        warning.replace("quorate show RUN ", f"quorate show {progress.run} ")
        for warning in event.fields.get("warnings") or ()
    ]


def _evaluation(event: Event, progress: Progress) -> Notice:
    metrics = GAP.join(f"{name} {measure(value)}" for name, value in event.fields.get("metrics", {}).items())
    best = f"{GAP}best so far" if event.fields.get("best") else ""
    bad = event.fields.get("bad_samples", 0)
    left_out = f"{GAP}{plural(bad, 'bad sample')} left out" if bad else ""
    warnings = "".join(f"\n{warning}" for warning in _warnings(event, progress))
    return Notice(f"evaluation{_at(event)}: {metrics}{best}{left_out}{warnings}", "yellow" if warnings else "cyan")


def _checkpoint(event: Event, _: Progress) -> Notice:
    name = PurePath(event.fields.get("path", "")).name
    cost = f"{size(event.fields.get('bytes', 0))} in {duration(event.fields.get('seconds', 0.0))}"
    added = event.fields.get("added_s", 0.0)
    waited = f", training waited {duration(added)}" if added >= LONGEST_SILENT_WAIT else ""
    return Notice(f"checkpoint {name}: {cost}{waited}", "dim")


def _checkpoint_failed(event: Event, _: Progress) -> Notice:
    reason = event.fields.get("reason", "no reason was given")
    return Notice(f"not saved{_at(event)}: {reason}", "yellow")


def _checkpoint_skipped(event: Event, _: Progress) -> Notice:
    return Notice(f"not saved{_at(event)}: {event.fields.get('reason', 'no reason was given')}", "yellow")


def _copied_to(event: Event, _: Progress) -> Notice:
    cost = f"{size(event.fields.get('bytes', 0))} in {duration(event.fields.get('seconds', 0.0))}"
    return Notice(
        f"checkpoint {event.fields.get('checkpoint', '')} copied to {event.fields.get('place')}: {cost}", "dim"
    )


def _copy_failed(event: Event, _: Progress) -> Notice:
    return Notice(f"not copied{_of(event)}, and training goes on: {event.fields.get('reason', '')}", "yellow")


def _copy_recovered(event: Event, _: Progress) -> Notice:
    place, lasted = event.fields.get("place"), duration(event.fields.get("seconds", 0.0))
    return Notice(f"copying to {place} works again, after {lasted}", "green")


def _stop(event: Event, progress: Progress) -> Notice:
    reason = event.fields.get("reason", "asked to")
    if not progress.has_begun:
        return Notice(f"stopping before the first step: {reason}", "yellow")
    ending = "stopping after the running step, which is saved"
    is_typed = reason == "interrupted"
    return Notice(f"{ending}; Ctrl-C again stops at once" if is_typed else f"{reason}: {ending}", "yellow")


def _failure(event: Event, _: Progress) -> Notice:
    return Notice(f"failed{_at(event)}: {event.fields.get('message', 'no reason was given')}", "bold red")


def _finished(event: Event, progress: Progress) -> Notice | None:
    if not progress.has_begun:
        return None
    result = event.fields.get("result") or {}
    steps = result.get("steps", progress.step)
    counted = plural(steps, "step")
    ending = result.get("ending", "complete")
    if ending == EARLY_STOP:
        return Notice(f"stopped early after {counted}{_why_early(progress)}", "green")
    if ending == "complete":
        return Notice(f"finished after {counted}", "green")
    done = f"{steps:,} of {plural(progress.total_steps, 'step')}" if progress.total_steps else counted
    return Notice(f"stopped after {done}", "yellow")


def _why_early(progress: Progress) -> str:
    rule = progress.early_stop
    if rule is None:
        return ""
    spell = "the last evaluation" if rule.patience == 1 else f"the last {rule.patience} evaluations"
    return f": {spell} brought no better {rule.metric}"


def _log(event: Event, _: Progress) -> Notice | None:
    message = event.fields.get("message")
    style = "bold" if event.fields.get("level") == "info" else "yellow"
    return None if message is None else Notice(str(message), style)


def _resize(event: Event, _: Progress) -> Notice:
    before, workers = event.fields.get("before"), event.fields.get("workers")
    return Notice(f"asked to go on with {workers} workers instead of {before}", "bold")


def _rollback(event: Event, progress: Progress) -> Notice:
    return Notice(f"back to step {event.step:,}: what follows it is trained again, up to {progress.place}", "yellow")


def _of(event: Event) -> str:
    return "" if event.step is None else f" (checkpoint of step {event.step:,})"


def _at(event: Event) -> str:
    return "" if event.step is None else f" at step {event.step:,}"


_SAYINGS: dict[str, Callable[[Event, Progress], Notice | None]] = {
    "run": _run,
    "generation": _generation,
    "lost": _lost,
    "step": _step,
    "resize": _resize,
    "rollback": _rollback,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_skipped": _checkpoint_skipped,
    "copied_to": _copied_to,
    "copy_failed": _copy_failed,
    "copy_recovered": _copy_recovered,
    "stop": _stop,
    "failure": _failure,
    "finished": _finished,
    "log": _log,
}

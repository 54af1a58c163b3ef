"""How a job ended, in a few lines for a person."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from quorate.observe.quantities import count, device_memory, duration, measure, plural
from quorate.observe.recoveries import Recovered
from quorate.observe.screen import Screen
from quorate.observe.waiting import waiting_in_words

COLOURS = {"complete": "green", "completed": "green", "finished": "green", "failed": "red"}
NARROWEST_LABEL = 10
WARNING = "warning: "
LARGEST_SILENT_LOSS = 0.01
"""Of the samples that were read: where fewer are bad it is told without a warning."""


def print_summary(result: dict[str, Any], screen: Screen) -> None:
    """Print a result: how it ended, its metrics, its speed, its weights and where it is kept."""
    rows = summary_rows(result)
    column = max(NARROWEST_LABEL, *(len(label) for label, _ in rows)) + 2 if rows else 0
    status = str(result.get("status", "ended"))
    early = " (stopped early)" if result.get("ending") == "early stop" else ""
    run = (str(result.get("run", "run")), "bold")
    screen.print(Text.assemble(run, "  ", (status, COLOURS.get(status, "yellow")), early), soft_wrap=True)
    for label, value in rows:
        # Never broken by us: a digest or path that is copied must be in one piece.
        style = "bold yellow" if value.startswith(WARNING) else ""
        screen.print(Text.assemble((f"  {label:<{column}}", "dim"), (value, style)), soft_wrap=True)


def summary_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a result, as labels and values."""
    rows = [(name, measure(value)) for name, value in (result.get("final_metrics") or {}).items()]
    if result.get("steps") is not None:
        rows.append(("steps", f"{result['steps']:,}{_time_spent(result)}"))
    if result.get("samples_per_second"):
        since = " since it was resumed" if result.get("from_step") else ""
        rows.append(("speed", f"{count(result['samples_per_second'])} samples/s{since}"))
    rows += _computing(result)
    if waiting := result.get("waiting_for_data"):
        rows.append(("waiting", waiting_in_words(waiting["share"], waiting["advice"])))
    for step, parts in [*(result.get("micro_batches") or ())][-1:]:
        rows.append(("memory", f"it ran out; since step {step:,} each lane computes in {parts:,} micro-batches"))
    if bad := result.get("bad_samples"):
        rows.append(("bad samples", _bad(bad, result.get("run", "RUN"))))
    if total := result.get("recovered"):
        rows.append(("recovered", recovered(Recovered(**total))))
    for each in result.get("copies") or ():
        missing = len(each.get("missing") or ())
        told = f"{plural(each.get('copied', 0), 'checkpoint')} copied" + (f", {missing:,} missing" if missing else "")
        rows.append(("copies", f"{each.get('place')}: {told}"))
    named = {"weights": result.get("weights_digest"), "folder": result.get("folder")}
    return [*rows, *((label, str(value)) for label, value in named.items() if value)]


def _computing(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What it was computed by, and what is worth knowing of that."""
    if computed_by := result.get("computed_by"):
        yield "computed by", str(computed_by)
    if memory := device_memory(result.get("device_memory")):
        yield "memory", memory
    if scale := result.get("loss_scale"):
        overflows = plural(scale["overflow_steps"], "step")
        yield "loss scale", f"{scale['final']:,.0f} at the end; {overflows} overflowed and changed no weight"


def _bad(bad: dict[str, Any], run: str) -> str:
    """How many were left out, and where they are listed."""
    counts = {source: number for source in ("training", "validation") if (number := bad.get(source))}
    # A run of an earlier version does not say of how many.
    shares = {source: number / read for source, number in counts.items() if (read := bad.get(f"{source}_read"))}
    told = {source: f"{number:,}" for source, number in counts.items()}
    for source, share in shares.items():
        percent = f"{share:.0%}" if share >= LARGEST_SILENT_LOSS else "under 1%"
        told[source] += f" of {bad[f'{source}_read']:,} ({percent})"
    of_both = " and ".join(f"{each} of the {source} set" for source, each in told.items())
    left_out = told["training"] if list(told) == ["training"] else of_both
    warning = WARNING if max(shares.values(), default=0.0) > LARGEST_SILENT_LOSS else ""
    return f"{warning}{left_out} left out; quorate show {run} --ledger lists them"


def recovered(total: Recovered) -> str:
    """How often, how long training stood still for it, and what had to be trained again."""
    times = {1: "once", 2: "twice"}.get(total.times, f"{total.times:,} times")
    again = f", {plural(total.steps, 'step')} trained again" if total.steps else ""
    return f"{times}; training stood still for {duration(total.seconds)}{again}"


def _time_spent(result: dict[str, Any]) -> str:
    """The time of the steps since the last start, and of that start: of the earlier ones it is not known any more."""
    if result.get("wall_seconds") is None:
        return ""
    before, spent = result.get("from_step", 0), f"in {duration(result['wall_seconds'])}, start-up included"
    return f", the last {result['steps'] - before:,} {spent}" if before else f" {spent}"

"""The terminal or file that people look at, through rich, and how a job ended in a few lines on it."""

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quorate.observe.quantities import count, device_memory, duration, measure, plural
from quorate.observe.recoveries import Recovered
from quorate.observe.waiting import waiting_in_words

IN_ASCII = str.maketrans({"…": "...", "×": "x", "→": "->", "−": "-", "–": "-", "—": "-", "━": "-", "╸": " ", "╺": " "})


class Screen(Console):
    """A rich console that shows text as it is: losses are not coloured by guesswork, "[red]" in a message is text.

    `NO_COLOR` takes colours away and `FORCE_COLOR` gives them to a file too; a file never gets a bar that moves.
    """

    def __init__(self, stream: TextIO, is_terminal: bool | None = None, width: int | None = None) -> None:
        is_terminal = stream.isatty() if is_terminal is None else is_terminal
        wants_colours = os.environ.get("FORCE_COLOR", "") not in ("", "0")
        super().__init__(
            file=cast(TextIO, _Forgiving(stream)),
            force_terminal=is_terminal,
            force_jupyter=False,
            color_system="auto" if is_terminal else "standard" if wants_colours else None,
            width=width,
            highlight=False,
            markup=False,
            emoji=False,
        )


class _Forgiving(io.TextIOBase):
    """A stream that ends no job.

    It falls silent when nobody reads it any more (`| head`, a closed terminal), and a character that its encoding does
    not have is written as a similar one, or by its number.
    """

    encoding: str = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        shown = text
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            shown = text.translate(IN_ASCII).encode(self.encoding, "backslashreplace").decode(self.encoding)
        if self._stream is not None:
            try:
                self._stream.write(shown)
            except OSError:
                self._stream = None
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                self._stream = None


def lines_of(facts: Sequence[str], width: int, gap: str = "   ") -> list[str]:
    """The facts in order, in as few lines as the width allows."""
    lines: list[str] = []
    for fact in facts:
        longer = f"{lines[-1]}{gap}{fact}" if lines else fact
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fact)
    return lines


# --- how a job ended

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


REUSED = "reused_from"
"""In a result: the run whose result it is or, up to the step where this one began, whose steps it has."""


def summary_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a result, as labels and values."""
    rows = [(name, measure(value)) for name, value in (result.get("final_metrics") or {}).items()]
    if result.get("steps") is not None:
        rows.append(("steps", f"{result['steps']:,}{_time_spent(result)}"))
    if result.get("samples_per_second"):
        since = " since it was resumed" if result.get("from_step") else ""
        rows.append(("speed", f"{count(result['samples_per_second'])} samples/s{since}"))
    if known := result.get(REUSED):
        what = "all" if known == result.get("run") else f"steps up to {result.get('from_step')}"
        rows.append(
            ("known", f"{what}, by run {known} of the same code, versions, machine and data; --fresh trains anew")
        )
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

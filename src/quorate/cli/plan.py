"""`quorate plan` and `quorate find-lr`: what a job needs, and at which rate it learns, told before it is trained."""

import math
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorate.cli.options import JobFile, Json, Lanes, Seed, Set, Workers, job_of, to_file
from quorate.cli.output import print_document
from quorate.observe.quantities import blocks_for, plural, size, sparkline

if TYPE_CHECKING:  # torch and rich, which a help text does without
    from quorate.api.plan import Plan
    from quorate.cli.layout import Page
    from quorate.replica.footprint import Spread

MOST_MODULES = 8


def plan(
    job_file: JobFile,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GB. By default that of this machine.")
    ] = None,
    workers: Workers = None,
    lanes: Lanes = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Show what a job needs, without training it: parameters, memory, communication.

    The task's code runs once on tensors without content, so a model of any size can be planned on any machine, without
    a GPU. One micro-batch of the data is read. If the job does not fit into memory, the plan says what to change; the
    exit code is 0 in both cases.

    \b
    Examples:
      quorate plan job.yaml
      quorate plan job.yaml --memory 80GB
      quorate plan job.yaml --memory 80GB --workers 8 --set strategy=fsdp
      quorate plan job.yaml --set batch_size=512 --json
    """
    from quorate.api.plan import parse_memory, plan_job
    from quorate.cli.layout import Page

    size_of_gpu = None if memory is None else parse_memory(memory)
    job = job_of(job_file, settings, workers=workers, lanes=lanes)
    with redirect_stdout(sys.stderr):  # what the task prints is no part of the answer
        made = plan_job(job, size_of_gpu)
    if as_json:
        print_document(to_document(made))
    else:
        show_plan(made, Page())


def to_document(made: "Plan") -> dict[str, Any]:
    """What `--json` prints."""
    document = asdict(made)
    del document["parts"], document["target"], document["traffic"], document["server"]
    document["memory"] = {
        "bytes": made.bytes,
        "parts": [{"name": part.name, "bytes": part.bytes, "note": part.note} for part in made.parts],
        "device_bytes": made.target.memory,
        "device_workers": made.target.workers,
        "room_bytes": made.target.room,
        "fits": made.fits,
        "most_samples": made.most_samples,
    }
    document["communication"] = {
        "workers": [{"sends_bytes": each.sends, "receives_bytes": each.receives} for each in made.traffic],
        "server": None
        if made.server is None
        else {"sends_bytes": made.server.sends, "receives_bytes": made.server.receives},
    }
    if made.spread is not None:
        document["spread"] = {
            **asdict(made.spread.shape),
            "units": [{"pattern": pattern, "count": count} for pattern, count in made.spread.units],
        }
    return document


def show_plan(made: "Plan", page: "Page") -> None:
    """What people read."""
    from rich.text import Text

    devices = f"{'GPUs' if made.device == 'cuda' else 'CPUs'}, {plural(made.workers, 'worker')}"
    compiled = ", compiled" if made.compiled else ""
    again = ", activations computed again" if made.checkpointed else ""
    page.title(Text.assemble((made.job, "bold"), f" on {devices}, {made.precision}{compiled}{again}"))
    page.section("Parameters")
    by_dtype = ", ".join(f"{name} {size(there)}" for name, there in made.model.by_dtype.items())
    page.row("all", f"{made.model.parameters:,}, {size(made.model.bytes)} ({by_dtype})")
    if made.model.trained != made.model.parameters:
        page.row("trained", f"{made.model.trained:,}")
    modules = [(each.name, each.kind, f"{each.parameters:,}", size(each.bytes)) for each in made.model.modules]
    page.columns(modules[:MOST_MODULES])
    if len(modules) > MOST_MODULES:
        page.row("", f"and {len(modules) - MOST_MODULES} smaller ones")

    if made.spread is not None:
        _show_spread(made.spread, page)

    page.section("Memory of a worker")
    pieces = f": a lane has {made.accumulate} micro-batches" if made.accumulate > 1 else ""
    page.row("at a time", f"{plural(made.samples, 'sample')}{pieces}")
    page.columns(
        [
            *((part.name, f"{size(part.bytes):>8}", part.note) for part in made.parts),
            (Text("together", style="bold"), Text(f"{size(made.bytes):>8}", style="bold"), ""),
        ]
    )
    _show_fit(made, page)

    page.section("Communication of a step")
    _show_traffic(made, page)
    if made.notes:
        page.section("Notes")
        for note in made.notes:
            page.line(f"  {note[0].upper()}{note[1:]}.")


def _show_fit(made: "Plan", page: "Page") -> None:
    from rich.text import Text

    target = made.target
    shared = f", shared by {plural(target.workers, 'worker')}" if target.workers > 1 else ""
    room = f"{size(target.room)} for each worker: {target.what} has {size(target.memory)}{shared}, and a tenth is left"
    page.row("room", room)
    if made.fits:
        page.row(
            "verdict", Text.assemble(("fits", "green"), f"; up to {plural(made.most_samples, 'sample')} at a time")
        )
        return
    page.row("verdict", Text.assemble(("does not fit", "red"), f": {size(made.bytes - target.room)} too much"))
    page.section("What to change")
    for advice in made.advice:
        page.line(f"- {advice}")


def _show_traffic(made: "Plan", page: "Page") -> None:
    if made.server is None and len(made.traffic) == 1:
        page.row("none", "one worker has nobody to exchange gradients with")
        return
    each = dict.fromkeys((size(one.sends), size(one.receives)) for one in made.traffic)
    for sends, receives in each:
        page.row("a worker", f"sends {sends} and receives {receives}")
    if made.server is not None:
        page.row("a server", f"sends {size(made.server.sends)} and receives {size(made.server.receives)}")
    page.row("", f"{plural(len(made.traffic), 'worker')}, {plural(made.lanes, 'lane')}")


def _show_spread(spread: "Spread", page: "Page") -> None:
    shape = spread.shape
    page.section("Spread over workers")
    page.row(
        "mesh",
        f"{plural(shape.replicate, 'replica')} × {plural(shape.shard, 'shard')} × {shape.tensor} across: "
        f"{plural(shape.size, 'worker')}, of which {shape.groups} read data of their own",
    )
    units = ", ".join(f"{pattern} ({count})" for pattern, count in spread.units)
    page.row("units", f"{units}, then the rest" if units else "the whole model at once")


if TYPE_CHECKING:  # numpy, which a help text does without
    from quorate.api.find_rate import RateCurve
    from quorate.cli.layout import Page
    from quorate.history.report.charts import Plot

WIDTH = 60


def find_lr(
    job_file: JobFile,
    steps: Annotated[int, typer.Option(metavar="N", help="The most steps to train; each has its own rate.")] = 100,
    first: Annotated[float, typer.Option("--from", metavar="RATE", help="The rate of the first step.")] = 1e-7,
    last: Annotated[float, typer.Option("--to", metavar="RATE", help="The rate of the last step.")] = 10.0,
    param: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The param that is the learning rate. By default lr, learning_rate, or one with a similar name.",
        ),
    ] = None,
    output: Annotated[Path | None, to_file("Draw the curve into a file, .svg or .png.")] = None,
    workers: Workers = None,
    lanes: Lanes = None,
    seed: Seed = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Find a learning rate: train a few steps while the rate rises, and see where the loss falls fastest.

    The rate rises exponentially from --from to --to. The test ends early once the smoothed loss is above four times its
    minimum so far. Schedules are ignored. No run is created, the job file is not changed, and the result is the same
    on any number of workers.

    \b
    Examples:
      quorate find-lr job.yaml
      quorate find-lr job.yaml --steps 200 -o rates.svg
      quorate find-lr job.yaml --param backbone_lr --from 1e-6 --to 1 --json
    """
    from quorate.api.find_rate import find_rate
    from quorate.api.train import passing_on_signals
    from quorate.cli.layout import Page
    from quorate.history.report.charts import check_plot_file, write_plots

    if output is not None:
        check_plot_file(output)
    job = job_of(job_file, settings, workers=workers, lanes=lanes, seed=seed)
    if sys.stderr.isatty():
        typer.echo(f"testing {steps} rates from {first:g} to {last:g}", err=True)
    with passing_on_signals(), redirect_stdout(sys.stderr):  # what the task prints is no part of the answer
        found = find_rate(job, first=first, last=last, steps=steps, param=param)
    if output is not None and found.rates:
        write_plots([_plot(found)], output)
    if as_json:
        document = asdict(found) | {"setting": found.setting, "plot": None if output is None else str(output)}
        print_document(document)
    else:
        show_curve(found, job_file, output, Page())


def show_curve(found: "RateCurve", job_file: Path, plot: Path | None, page: "Page") -> None:
    """What people read."""
    from rich.text import Text

    page.title(Text.assemble((found.job, "bold"), f": loss against params.{found.param}, {len(found.rates)} steps"))
    if len(found.rates) > 1:
        line = sparkline(found.smoothed, WIDTH, blocks_for(page.screen.encoding))
        page.whole("loss", Text(line, style="cyan"))
        page.row("", Text(f"{found.rates[0]:.0e} to {found.rates[-1]:.1g}", style="dim"))
    if found.left_out:
        page.row("schedule", f"{found.left_out}; it is left out of the test")
    if found.diverged:
        page.row("diverged", f"after {len(found.rates)} steps, at {found.rates[-1]:.2g}")
    if found.steepest is None or found.tenth is None:
        page.line(
            "The loss does not fall anywhere, so there is nothing to suggest. Try other rates (--from, --to), or more "
            "steps."
        )
        return
    page.row("steepest", f"{found.steepest:.2g}, where the loss falls fastest")
    page.row("minimum / 10", f"{found.tenth:.2g}, a tenth of the rate with the least loss")
    if plot is not None:
        page.whole("drawn in", str(plot))
    page.whole("try it", f"quorate train {job_file} {found.setting}")


def _plot(found: "RateCurve") -> "Plot":
    from quorate.history.report.charts import Line, Plot

    rates = [math.log10(rate) for rate in found.rates]
    lines = [Line.of("loss", rates, found.losses), Line.of("smoothed", rates, found.smoothed)]
    at = dict(zip(found.rates, zip(rates, found.smoothed, strict=True), strict=True))
    points = [] if found.steepest is None else [(f"{found.steepest:.2g}", *at[found.steepest])]
    return Plot(f"{found.job}: a learning-rate range test", f"log10 of {found.param}", lines, points)

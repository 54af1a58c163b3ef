"""`quorate find-lr`: the learning-rate range test, and its curve."""

import math
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli.options import JobFile, Json, Lanes, Seed, Set, Workers, overrides
from quorate.cli.output import print_document
from quorate.observe.quantities import blocks_for, sparkline

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
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Draw the curve into a file, .svg or .png.", show_default=False
        ),
    ] = None,
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
    from quorate.spec.load import load_job

    if output is not None:
        check_plot_file(output)
    job = load_job(job_file, os.environ, overrides(settings, workers=workers, lanes=lanes, seed=seed))
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

"""`quorate show RUN -o FILE`: the learning curves of a run as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

from quorate.api.run_history import History, history_of
from quorate.cli.layout import Page
from quorate.core.errors import RunError
from quorate.history.report.charts import Line
from quorate.history.report.plot_file import Plot, check_plot_file, write_plots
from quorate.storage.run_folder import RunFolder

NOT_DRAWN = ("learning_rate", "grad_norm", "throughput", "epoch", "loss_scale")
"""Of what a step tells: how training is done, not how well it goes."""


def draw_curves(run: RunFolder, file: Path, as_json: bool) -> dict[str, str]:
    """Draw them, and say where."""
    check_plot_file(file)
    plots = curves_of(run.name, history_of(run))
    if not plots:
        raise RunError(f"run {run.name} has no step yet, so there is nothing to draw.")
    write_plots(plots, file)
    if not as_json:
        Page().line(f"{file}: {', '.join(name for plot in plots for name in [plot.title.partition(': ')[2]])}")
    return {"plot": str(file.absolute())}


def curves_of(run: str, history: History) -> list[Plot]:
    """A plot of losses, and one for each metric and each number that was logged: of training and of evaluations."""
    lines: dict[str, list[Line]] = {}
    for name in sorted({name for record in history for name in record if name != "step"}, key=_order):
        kind, _, what = name.partition("/")
        page = "loss" if what.partition(".")[0] == "loss" and what != "loss.logged" else what
        points = [(record["step"], record[name]) for record in history if math.isfinite(record.get(name, math.nan))]
        if points and page.partition(".")[0] not in NOT_DRAWN:
            lines.setdefault(page, []).append(_line(f"{kind}/{what}", points))
    ends = _ends([line for each in lines.values() for line in each])
    return [
        Plot(f"{run}: {page}", "step", each, y_may_be_log=page == "loss", x_ends=ends) for page, each in lines.items()
    ]


def _order(name: str) -> tuple[bool, str, str]:
    """Losses first; training before evaluations."""
    kind, _, what = name.partition("/")
    return what.partition(".")[0] != "loss", what, kind


def _line(name: str, points: Sequence[tuple[float, float]]) -> Line:
    return Line.of(name, [int(step) for step, _ in points], [value for _, value in points])


def _ends(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The same steps in all plots, so that they can be compared."""
    if not lines:
        return None
    return min(float(line.xs.min()) for line in lines), max(float(line.xs.max()) for line in lines)

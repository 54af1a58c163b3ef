"""A job's progress, drawn as two lines that fit the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.observe.event import Event
from quorate.observe.pace import Pace
from quorate.observe.quantities import count, duration, measure

GAP = "   "
SHORTEST_BAR = 8


@dataclass
class Progress:
    """What is known of a job that runs: the step it is at and the numbers of that step."""

    total_steps: int | None
    workers: int
    lanes: int
    step: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def advance(self, event: Event) -> None:
        """Take in a step event."""
        if event.step is None:
            return
        self.step = event.step
        self.fields = event.fields
        self.pace.passed(event.step, event.time)

    @property
    def place(self) -> str:
        """How far it has come."""
        return f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else "")

    @property
    def facts(self) -> list[str]:
        """The numbers of the last step, the important ones first."""
        return [*self._losses(), *self._speed(), *self._time_left()]

    @property
    def hosting(self) -> str:
        """How the job runs."""
        return f"{_plural(self.lanes, 'lane')} on {_plural(self.workers, 'worker')}"

    def _losses(self) -> list[str]:
        names = [name for name in self.fields if name == "loss" or name.startswith("loss.")]
        return [f"{name} {measure(self.fields[name])}" for name in names]

    def _speed(self) -> list[str]:
        speed = self.fields.get("samples_per_second")
        return [] if speed is None else [f"{count(speed)} samples/s"]

    def _time_left(self) -> list[str]:
        seconds = self.pace.seconds_for((self.total_steps or 0) - self.step)
        return [] if seconds is None or not self.total_steps or seconds < 0 else [f"{duration(seconds)} left"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A bar with the place at its right, and below it as many facts as there is room for."""
        yield self._bar(options.max_width)
        yield Text(fitting([*self.facts, self.hosting], options.max_width), style="dim", no_wrap=True, overflow="crop")

    def _bar(self, width: int) -> Table | Text:
        place = Text(self.place, style="bold", no_wrap=True)
        if not self.total_steps or width < len(self.place) + len(GAP) + SHORTEST_BAR:
            return Text(self.place, style="bold", no_wrap=True, overflow="crop")
        line = Table.grid(padding=(0, len(GAP), 0, 0))
        bar = ProgressBar(total=self.total_steps, completed=self.step, width=width - len(self.place) - len(GAP))
        line.add_row(bar, place)
        return line


def fitting(facts: Sequence[str], width: int) -> str:
    """The first facts, as many as fit into a line; at least a part of the first."""
    line = ""
    for fact in facts:
        longer = f"{line}{GAP}{fact}" if line else fact
        if line and cell_len(longer) > width:
            break
        line = longer
    return line


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""A job's progress: what is known of it, and how a terminal shows it, in as many lines as its width asks for."""

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
from quorate.observe.recoveries import workers_of
from quorate.spec.job import EarlyStopSpec

GAP = "   "
SHORTEST_BAR = 8


@dataclass
class Progress:
    """What is known of a job that runs: how it runs, the step it is at and the numbers of that step."""

    run: str
    folder: str
    workers: int
    lanes: int
    early_stop: EarlyStopSpec | None = None
    total_steps: int | None = None
    step: int = 0
    has_begun: bool = False
    is_over: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    # Those who are lost and not back yet, and since when.
    lost: dict[int, float] = field(default_factory=dict)

    def take_in(self, event: Event) -> None:
        """Learn from an event."""
        if event.kind == "step" and event.step is not None:
            self.has_begun = True
            self.step = event.step
            self.fields = event.fields
            self.pace.passed(event.step, event.time)
        elif event.kind == "run":
            self.has_begun = True
            self.step = event.fields.get("from_step", self.step)
            self.total_steps = event.fields.get("total_steps", self.total_steps)
        elif event.kind == "lost":
            self.lost.setdefault(event.fields.get("worker", -1), event.time)
        elif event.kind == "generation":
            self.workers, self.lanes = self._hosts_by(event)
            for worker in workers_of(event):
                self.lost.pop(worker, None)
        elif event.kind == "finished":
            self.is_over = True

    @property
    def is_at_the_end(self) -> bool:
        """Whether no step is left."""
        return self.step == self.total_steps

    @property
    def place(self) -> str:
        """How far it has come."""
        return f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else "")

    @property
    def facts(self) -> list[str]:
        """The numbers of the last steps, the important ones first."""
        return [*self._losses(), *self._speed(), *self._time_left()]

    @property
    def hosting(self) -> str:
        """How the job runs."""
        return _hosting(self.workers, self.lanes)

    def hosting_by(self, generation: Event) -> str:
        """How the job runs from now on."""
        return _hosting(*self._hosts_by(generation))

    def _hosts_by(self, generation: Event) -> tuple[int, int]:
        members = generation.fields.get("members", [])
        return len(members) or self.workers, generation.fields.get("lanes", self.lanes)

    def _losses(self) -> list[str]:
        names = [name for name in self.fields if name == "loss" or name.startswith("loss.")]
        return [f"{name} {measure(self.fields[name])}" for name in names]

    def _speed(self) -> list[str]:
        speed, seconds = self.fields.get("samples_per_second"), self.pace.seconds_per_step
        if seconds and "samples" in self.fields:
            speed = self.fields["samples"] / seconds  # over many steps: that of a single one jumps about
        return [] if speed is None else [f"{count(speed)} samples/s"]

    def _time_left(self) -> list[str]:
        steps, seconds = (self.total_steps or 0) - self.step, self.pace.seconds_per_step
        if seconds is None or steps <= 0 or self.is_over:
            return []
        return [f"{duration(max(1, round(steps * seconds)))} left"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A bar with the place at its right, and below it the facts."""
        width = options.max_width
        if not self.has_begun:
            yield Text(f"starting {self.run}: {self.hosting} ...", style="dim", no_wrap=True, overflow="crop")
            return
        yield self._bar(width)
        for line in lines_of([*self.facts, self.hosting], width):
            yield Text(line, style="dim", no_wrap=True, overflow="crop")

    def _bar(self, width: int) -> Table | Text:
        """The bar and the place, beside each other where there is room for both."""
        place = Text(self.place, style="bold", no_wrap=True, overflow="crop")
        if not self.total_steps:
            return place
        room = width - cell_len(self.place) - len(GAP)
        is_narrow = room < SHORTEST_BAR
        bar = ProgressBar(
            total=self.total_steps,
            completed=self.step,
            width=width if is_narrow else room,
            complete_style="cyan",
            finished_style="green",
        )
        grid = Table.grid(padding=(0, len(GAP), 0, 0))
        for row in ([bar], [place]) if is_narrow else ([bar, place],):
            grid.add_row(*row)
        return grid


def lines_of(facts: Sequence[str], width: int) -> list[str]:
    """The facts in order, in as few lines as the width allows."""
    lines: list[str] = []
    for fact in facts:
        longer = f"{lines[-1]}{GAP}{fact}" if lines else fact
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fact)
    return lines


def _hosting(workers: int, lanes: int) -> str:
    return f"{plural(lanes, 'lane')} on {plural(workers, 'worker')}"


def plural(number: int, noun: str) -> str:
    """So many of them."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

"""A job's progress: what is known of it, and how a terminal shows it, in as many lines as its width asks for."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.quantities import count, duration, measure, plural
from quorate.observe.screen import lines_of
from quorate.observe.sinks import Round
from quorate.spec.job import EarlyStopSpec

GAP = "   "
SHORTEST_BAR = 8
SPACING = 0.5
MARKS = 60


class Pace:
    """Steps and the times at which they ended, the recent ones only: a job that slows down says so soon.

    Marks are apart by half a second at least. Of steps that take less, the last sixty would be a moment too short to
    hold an evaluation or a checkpoint, and the time left would jump about.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MARKS)
        self._latest: tuple[int, float] | None = None

    def passed(self, step: int, time: float) -> None:
        # After a restart steps are told again: what was measured before says nothing about now.
        if self._latest is not None and step <= self._latest[0]:
            self._marks.clear()
        self._latest = (step, time)
        if not self._marks or time - self._marks[-1][1] >= SPACING:
            self._marks.append(self._latest)

    @property
    def seconds_per_step(self) -> float | None:
        """How long a step takes at present; none until two have been seen."""
        if self._latest is None or self._latest[0] == self._marks[0][0]:
            return None
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._latest
        # The clock of the wall may be set back meanwhile.
        return max(0.0, last_time - first_time) / (last_step - first_step)


@dataclass
class Progress:
    """What is known of a job that runs: how it runs, the step it is at and the numbers of that step."""

    run: str
    folder: str
    workers: int
    lanes: int
    early_stop: EarlyStopSpec | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    step: int = 0
    # What a job is busy with that has not begun.
    doing: str = ""
    has_begun: bool = False
    is_over: bool = False
    latest: events.StepCompleted | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    # How the workers of a sharded gang stand to each other, in words.
    mesh: str = ""
    # Those who are lost and not back yet, and since when.
    lost: dict[int, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since = self.clock()

    def handle(self, event: Event) -> None:
        match event:
            case events.StepCompleted(step=int(step)):
                self.has_begun = True
                self.step = step
                self.latest = event
                self.pace.passed(step, event.time)
            case events.RunBegan():
                self.has_begun = True
                self.step = self.step if event.from_step is None else event.from_step
                self.total_steps = self.total_steps if event.total_steps is None else event.total_steps
                self.steps_per_epoch = event.steps_per_epoch
            case events.EvaluationDone():
                self.metrics = event.metrics or {}
            case Round():
                self.doing = event.doing
            case events.WorkerLost():
                self.lost.setdefault(-1 if event.worker is None else event.worker, event.time)
            case events.GenerationFormed():
                self.workers, self.lanes = self.hosts_by(event)
                self.mesh = event.mesh or ""
                for worker in event.processes:
                    self.lost.pop(worker, None)
            case events.RunFinished():
                self.is_over = True

    @property
    def place(self) -> str:
        return f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else "")

    @property
    def epoch(self) -> str:
        """The epoch of the last step, counted from one; empty where there are none."""
        if not self.steps_per_epoch or not self.step:
            return ""
        number, total = (-(-steps // self.steps_per_epoch) for steps in (self.step, self.total_steps or 0))
        return f"epoch {number:,}" + (f"/{total:,}" if total else "")

    @property
    def facts(self) -> list[str]:
        """The numbers of the last steps, the important ones first."""
        facts, seconds = [self.epoch] if self.epoch else [], self.pace.seconds_per_step
        if self.latest is not None:
            own = {name: value for name, value in (self.latest.log or {}).items() if type(value) in (int, float)}
            facts += _told(self.latest.by_optimizer("loss") | own)
            facts += _told({f"eval {name}": value for name, value in self.metrics.items()})
            rates = self.latest.by_optimizer("learning_rate").items()
            facts += [
                f"{name.replace('learning_rate', 'lr', 1)} {rate:.3g}" for name, rate in rates if rate is not None
            ]
            speed = self.latest.samples_per_second
            if seconds and self.latest.samples is not None:
                speed = self.latest.samples / seconds  # over many steps: that of a single one jumps about
            facts += [] if speed is None else [f"{count(speed)} samples/s"]
        facts.append(self.elapsed)
        steps = (self.total_steps or 0) - self.step
        if seconds is not None and steps > 0 and not self.is_over:
            facts.append(f"{duration(max(1, round(steps * seconds)))} left")
        return facts

    @property
    def start(self) -> str:
        """What a job that has not begun is busy with."""
        return GAP.join([f"starting {self.run}: {self.doing or self.hosting} ...", self.elapsed])

    @property
    def elapsed(self) -> str:
        return f"{duration(max(1, round(self.clock() - self._since)))} elapsed"

    @property
    def hosting(self) -> str:
        return hosting(self.workers, self.lanes, mesh=self.mesh)

    def hosts_by(self, generation: events.GenerationFormed) -> tuple[int, int]:
        """How many workers and lanes there are from this generation on."""
        lanes = self.lanes if generation.lanes is None else generation.lanes
        return len(generation.members or ()) or self.workers, lanes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A bar with the place at its right, and below it the facts."""
        width = options.max_width
        if not self.has_begun:
            yield Text(self.start, style="dim", no_wrap=True, overflow="crop")
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


def _told(numbers: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {measure(number)}" for name, number in numbers.items()]


def hosting(workers: int, lanes: int, servers: int = 0, mesh: str = "") -> str:
    """How a job runs."""
    beside = f" and {plural(servers, 'server')}" if servers else ""
    beside = f" ({mesh})" if mesh else beside
    return f"{plural(lanes, 'lane')} on {plural(workers, 'worker')}{beside}"

"""What every sink promises, and that a slow or failing one neither holds up nor ends whoever publishes."""

import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from made_events import EVERY, make_event
from quorate.observe.console import Console, NotebookConsole
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.observe.progress import Progress
from quorate.observe.screen import Screen
from quorate.observe.sinks import Guarded, Queued, Sink


class Collecting:
    """Keeps what it is given; it may take long, and it may fail at some."""

    def __init__(self, seconds: float = 0.0, fails_at: Callable[[Event], bool] = lambda _: False) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self.held = threading.Event()
        self.held.set()
        self.fails_at = fails_at
        self._seconds = seconds

    def handle(self, event: Event) -> None:
        self.held.wait(60)
        time.sleep(self._seconds)
        if self.fails_at(event):
            raise RuntimeError("the service is gone")
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int | None]:
        return [event.step for event in self.events]


def progress() -> Progress:
    return Progress("tiny-0001", "", 2, 2)


SINKS: dict[str, Callable[[Path], Sink]] = {
    "console on a terminal": lambda _: Console(Screen(io.StringIO(), is_terminal=True, width=80), progress()),
    "console in a file": lambda _: Console(Screen(io.StringIO(), is_terminal=False), progress()),
    "quiet console": lambda _: Console(Screen(io.StringIO(), is_terminal=False), progress(), is_quiet=True),
    "notebook": lambda _: NotebookConsole(lambda _: None, progress()),
    "file": lambda folder: JsonlSink(folder / "events.jsonl"),
    "file that cannot be written": lambda folder: JsonlSink(folder / "missing" / "events.jsonl"),
    "collecting": lambda _: Collecting(),
    "slow, queued": lambda _: Queued(Collecting(seconds=0.01)),
    "failing, guarded": lambda _: Guarded(Collecting(fails_at=lambda _: True)),
    "failing, queued": lambda _: Queued(Collecting(fails_at=lambda _: True)),
}


@pytest.mark.parametrize("make", SINKS.values(), ids=SINKS.keys())
def test_a_sink_takes_every_kind_in_any_order_and_is_closed_once(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    unheard_of = make_event("unheard-of", 7, {"x": 1})
    sink = make(tmp_path)
    for event in (*EVERY, unheard_of, *reversed(EVERY)):
        sink.handle(event)
    sink.close()


class TestQueued:
    def test_gives_all_in_order_and_closes_last(self) -> None:
        sink = Collecting()
        queued = Queued(sink, patience=60.0)
        for step in range(100):
            queued.handle(StepCompleted(step=step))
        queued.close()
        assert (sink.steps, sink.closed) == (list(range(100)), 1)
        assert (queued.dropped, queued.failed) == (0, 0)

    def test_a_slow_one_holds_nobody_up_and_drops_the_oldest(self) -> None:
        sink = Collecting()
        sink.held.clear()
        queued = Queued(sink, most=10, patience=60.0)
        queued.handle(StepCompleted(step=0))
        while queued._events:  # until the sink is busy with the first
            time.sleep(0.001)
        for step in range(1, 1001):
            queued.handle(StepCompleted(step=step))
        assert queued.dropped == 990
        sink.held.set()
        queued.close()
        assert sink.steps == [0, *range(991, 1001)]

    def test_closing_waits_no_longer_than_its_patience(self) -> None:
        sink = Collecting()
        sink.held.clear()
        queued = Queued(sink, patience=0.05)
        for step in range(5):
            queued.handle(StepCompleted(step=step))
        queued.close()
        assert queued.dropped >= 4
        queued.handle(StepCompleted(step=9))
        sink.held.set()

    def test_a_failing_one_is_told_once_counted_and_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        sink = Collecting(fails_at=lambda event: (event.step or 0) % 2 == 1)
        with caplog.at_level(logging.ERROR):
            queued = Queued(sink, patience=60.0)
            for step in range(6):
                queued.handle(StepCompleted(step=step))
            queued.close()
        assert (sink.steps, queued.failed, sink.closed) == ([0, 2, 4], 3, 1)
        assert len(caplog.records) == 1

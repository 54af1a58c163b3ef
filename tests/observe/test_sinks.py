"""What every sink promises, and that a slow or failing one neither holds up nor ends whoever publishes."""

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from made_events import EVERY, make_event
from quorate.observe.console import Console, NotebookConsole, QuietConsole
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.observe.progress import Progress
from quorate.observe.screen import Screen
from quorate.observe.sinks import Durable, Guarded, Queued, Sink


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
    "quiet console": lambda _: QuietConsole(Screen(io.StringIO(), is_terminal=False), progress()),
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


class TestDurable:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Iterator[JsonlSink]:
        sink = JsonlSink(tmp_path / "events.jsonl")
        yield sink
        sink.close()

    @pytest.fixture
    def offset(self, tmp_path: Path) -> Path:
        return tmp_path / "collecting.offset"

    def test_gives_what_is_new_and_another_goes_on_where_it_was(self, events: JsonlSink, offset: Path) -> None:
        first = Collecting()
        durable = Durable(events.path, first, offset)
        durable.poll()
        for step in (1, 2):
            events.handle(StepCompleted(step=step))
        durable.poll()
        durable.poll()
        assert first.steps == [1, 2]
        events.handle(StepCompleted(step=3))
        second = Collecting()  # in another process, after a kill
        again = Durable(events.path, second, offset)
        again.close()
        assert (second.steps, second.closed) == ([3], 1)

    def test_what_was_not_written_down_as_handled_is_given_again(self, events: JsonlSink, offset: Path) -> None:
        class Killed(BaseException):
            pass

        class Dying(Collecting):
            def handle(self, event: Event) -> None:
                super().handle(event)
                if event.step == 2:
                    raise Killed

        for step in (1, 2, 3):
            events.handle(StepCompleted(step=step))
        dying = Dying()
        with pytest.raises(Killed):
            Durable(events.path, dying, offset).poll()
        after = Collecting()
        Durable(events.path, after, offset).poll()
        assert dying.steps == [1, 2]
        assert after.steps[-2:] == [2, 3], "at least once"
        assert {*dying.steps, *after.steps} == {1, 2, 3}

    def test_an_event_for_which_the_sink_fails_is_given_again_before_the_next(
        self, events: JsonlSink, offset: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in (1, 2, 3):
            events.handle(StepCompleted(step=step))
        sink = Collecting(fails_at=lambda event: event.step == 2)
        durable = Durable(events.path, sink, offset)
        with caplog.at_level(logging.DEBUG):
            durable.poll()
            durable.poll()
        assert (sink.steps, durable.failed, len(caplog.records)) == ([1], 2, 1)
        assert caplog.records[0].levelno == logging.DEBUG, "its traceback is for us; who calls says why"
        sink.fails_at = lambda _: False
        Durable(events.path, sink, offset).poll()
        assert sink.steps == [1, 2, 3]

    def test_one_that_sends_batches_has_come_as_far_as_it_was_flushed(self, events: JsonlSink, offset: Path) -> None:
        class Sending(Collecting):
            def __init__(self) -> None:
                super().__init__()
                self.sent: list[int | None] = []
                self.is_away = True

            def flush(self) -> None:
                if self.is_away:
                    raise ConnectionError("nobody answers")
                self.sent += [event.step for event in self.events]
                self.events.clear()

        for step in range(1, 2502):
            events.handle(StepCompleted(step=step))
        sink = Sending()
        durable = Durable(events.path, sink, offset)
        assert not durable.poll()
        assert "nobody answers" in str(durable.trouble)
        assert (len(sink.events), offset.exists()) == (1000, False), "it is given no more than a batch"
        assert not durable.poll()
        assert len(sink.events) == 1000
        sink.is_away = False
        assert durable.poll()
        assert sink.sent == list(range(1, 2502))
        assert durable.trouble is None
        events.handle(StepCompleted(step=2502))
        sink.is_away = True
        assert not durable.poll()
        after = Sending()
        after.is_away = False
        assert Durable(events.path, after, offset).poll()
        assert after.sent == [2502], "another process is given what was not flushed"
        durable.rewind()
        assert offset.read_text() == "0"

    def test_half_a_line_is_waited_for(self, events: JsonlSink, offset: Path) -> None:
        sink = Collecting()
        durable = Durable(events.path, sink, offset)
        line = StepCompleted(step=1).to_json() + "\n"
        with events.path.open("a") as file:
            file.write(line[:20])
            file.flush()
            durable.poll()
            assert sink.steps == []
            file.write(line[20:])
            file.flush()
            durable.poll()
        assert sink.steps == [1]

    @pytest.mark.parametrize("content", ["", "x", "-3", "999999"])
    def test_an_offset_that_cannot_be_is_the_beginning(self, events: JsonlSink, offset: Path, content: str) -> None:
        offset.write_text(content)
        events.handle(StepCompleted(step=1))
        sink = Collecting()
        Durable(events.path, sink, offset).poll()
        assert sink.steps == [1]

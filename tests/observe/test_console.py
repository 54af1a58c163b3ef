import errno
import io
import os
import re
import threading
from typing import Any

import pytest
from rich.cells import cell_len

from quorate.observe.console import Console
from quorate.observe.event import Event
from quorate.observe.pace import Pace
from quorate.observe.quantities import count, duration, measure, size
from quorate.observe.summary import print_summary

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m|\x1b\[9[0-9]m")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **fields: Any) -> Event:
    told = {"loss": 2.3 / number, "samples_per_second": 12345.6, "epoch": 1, "samples": 256}
    return Event("step", number, told | fields, time=1000.0 + number)


EVALUATION = Event("evaluation", 200, {"metrics": {"accuracy": 0.91234, "loss": 0.3}, "best": True})
CHECKPOINT = Event("checkpoint", 200, {"path": "/r/step-00000200", "bytes": 1_234_567, "seconds": 0.031})
STOP = Event("stop", None, {"reason": "interrupted"})
FAILURE = Event("failure", 7, {"message": "worker 3 on [red]node-1[/red] was killed (signal 9)"})
FINISHED = Event("finished", None, {"weights_digest": "ab"})


def console(stream: io.StringIO, clock: Clock, **options: Any) -> Console:
    told: dict[str, Any] = {"is_terminal": False, "total_steps": 600, "workers": 4, "lanes": 8, "clock": clock}
    return Console(stream, **(told | options))


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(stream: io.StringIO) -> list[str]:
    return [line for line in CONTROL.sub("", stream.getvalue().replace("\r", "\n")).split("\n") if line.strip()]


class TestElsewhere:
    """Not a terminal: plain lines."""

    def test_a_step_line_at_most_every_few_seconds_and_at_the_end(self) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, total_steps=100)
        for number in range(1, 101):
            screen.handle(step(number))
            clock.now += 0.125
        screen.close()
        lines = stream.getvalue().splitlines()
        assert [line.split("   ")[0] for line in lines] == ["step 1/100", "step 41/100", "step 81/100", "step 100/100"]
        assert lines[1] == "step 41/100   loss 0.05610   12,346 samples/s   59 s left"

    def test_what_happens_besides_is_told_at_once(self) -> None:
        stream = io.StringIO()
        screen = console(stream, Clock())
        screen.handle(step(1))
        for event in (EVALUATION, CHECKPOINT, STOP, FAILURE, FINISHED, Event("log", None, {"message": "careful"})):
            screen.handle(event)
        screen.handle(Event("unheard-of", 1, {"x": 1}))
        screen.close()
        assert stream.getvalue().splitlines()[1:] == [
            "evaluation at step 200: accuracy 0.9123   loss 0.3000   best so far",
            "checkpoint step-00000200: 1.23 MB in 0.031 s",
            "stopping: interrupted",
            "failed at step 7: worker 3 on [red]node-1[/red] was killed (signal 9)",
            "finished after 1 steps",
            "careful",
        ]

    def test_no_control_characters_and_no_broken_lines(self) -> None:
        stream = io.StringIO()
        screen = console(stream, Clock(), width=40)
        screen.handle(Event("failure", 7, {"message": "long " * 40}))
        screen.close()
        assert "\x1b" not in stream.getvalue()
        assert len(stream.getvalue().splitlines()) == 1

    def test_a_new_generation_is_told_only_once_training_has_begun(self) -> None:
        stream = io.StringIO()
        screen = console(stream, Clock())
        members = [{"worker": worker} for worker in range(3)]
        screen.handle(Event("generation", None, {"members": members, "lanes": 8}))
        assert stream.getvalue() == ""
        screen.handle(step(1))
        screen.handle(Event("generation", None, {"members": members[:1], "lanes": 8}))
        assert stream.getvalue().splitlines()[-1] == "going on with 8 lanes on 1 worker"

    def test_without_a_known_end_there_is_no_time_left(self) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, total_steps=None)
        for number in (1, 2):
            screen.handle(step(number))
            clock.now += 10
        assert stream.getvalue().splitlines()[-1] == "step 2   loss 1.150   12,346 samples/s"

    def test_every_optimizer_has_its_loss(self) -> None:
        stream = io.StringIO()
        fields = {"loss.critic": 0.5, "loss.generator": 1.5}
        console(stream, Clock()).handle(Event("step", 1, fields))
        assert stream.getvalue() == "step 1/600   loss.critic 0.5000   loss.generator 1.500\n"

    def test_events_without_their_fields_do_no_harm(self) -> None:
        screen = console(io.StringIO(), Clock())
        for kind in ("step", "evaluation", "checkpoint", "stop", "failure", "finished", "generation", "log", "run"):
            screen.handle(Event(kind))
            screen.handle(Event(kind, 1))
        screen.close()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
class TestTerminal:
    def run(self, width: int, **options: Any) -> io.StringIO:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, is_terminal=True, width=width, **options)
        for number in (1, 150, 300):
            screen.handle(step(number))
            clock.now += 1
        screen.handle(EVALUATION)
        screen.handle(CHECKPOINT)
        screen.close()
        return stream

    def test_the_bar_fits(self, width: int) -> None:
        lines = shown(self.run(width))
        bars = [line for line in lines if "step 300/600" in line]
        facts = [line for line in lines if line.startswith("loss 0.007667")]
        assert bars
        assert facts
        assert all(cell_len(line.rstrip()) <= width for line in bars + facts)

    def test_a_wider_terminal_shows_more(self, width: int) -> None:
        last = shown(self.run(width))[-1]
        expected = {
            20: "loss 0.007667",
            40: "loss 0.007667   12,346 samples/s",
            80: "loss 0.007667   12,346 samples/s   5:00 left   8 lanes on 4 workers",
        }
        assert last.rstrip() == expected[min(width, 80)]

    def test_notices_stay_above_the_bar(self, width: int) -> None:
        lines = shown(self.run(width))
        at = next(number for number, line in enumerate(lines) if line.startswith("evaluation"))
        assert "best so far" in lines[at]
        assert any("step 300/600" in line for line in lines[at + 1 :])

    def test_the_cursor_is_given_back(self, width: int) -> None:
        text = self.run(width).getvalue()
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")

    def test_no_colour_when_not_wanted(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        assert COLOUR.search(self.run(width).getvalue())
        monkeypatch.setenv("NO_COLOR", "1")
        assert not COLOUR.search(self.run(width).getvalue())

    def test_a_job_without_an_end_has_no_bar(self, width: int) -> None:
        assert "━" not in self.run(width, total_steps=None).getvalue()

    def test_a_dumb_terminal_gets_lines(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert "\x1b[" not in self.run(width).getvalue()


class TestTheScreen:
    def test_has_no_thread(self) -> None:
        before = threading.active_count()
        screen = console(io.StringIO(), Clock(), is_terminal=True, width=80)
        screen.handle(step(1))
        assert threading.active_count() == before
        screen.close()

    def test_is_not_redrawn_for_every_step(self) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, is_terminal=True, width=80)
        screen.handle(step(1))
        drawn = len(stream.getvalue())
        screen.handle(step(2))
        assert len(stream.getvalue()) == drawn
        clock.now += 1
        screen.handle(step(3))
        assert len(stream.getvalue()) > drawn
        screen.close()

    def test_shows_nothing_for_a_job_that_never_began(self) -> None:
        stream = io.StringIO()
        console(stream, Clock(), is_terminal=True, width=80).close()
        assert stream.getvalue() == ""

    @pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_that_goes_away_ends_no_job(self, number: int, is_terminal: bool) -> None:
        class Gone(io.StringIO):
            def write(self, _: str) -> int:
                raise OSError(number, os.strerror(number))

        screen = console(Gone(), Clock(), is_terminal=is_terminal, width=80)
        screen.handle(step(1))
        screen.handle(FAILURE)
        screen.close()


RESULT: dict[str, Any] = {
    "run": "fashion-mnist-0001",
    "status": "complete",
    "steps": 1600,
    "wall_seconds": 102.4,
    "samples_per_second": 12345.6,
    "final_metrics": {"accuracy": 0.91234, "loss": 0.2456},
    "weights_digest": "3f" * 32,
    "folder": "runs/fashion-mnist-0001",
    "recoveries": [{"step": 3}, {"step": 9}],
}


class TestSummary:
    def test_tells_what_a_person_wants_to_know(self) -> None:
        stream = io.StringIO()
        print_summary(RESULT, stream, width=80)
        assert stream.getvalue().splitlines() == [
            "fashion-mnist-0001  complete",
            "  accuracy    0.9123",
            "  loss        0.2456",
            "  steps       1,600 in 1:42",
            "  speed       12,346 samples/s",
            "  recoveries  2",
            f"  weights     {'3f' * 32}",
            "  folder      runs/fashion-mnist-0001",
        ]
        assert max(map(len, stream.getvalue().splitlines())) <= 80

    @pytest.mark.parametrize("width", [40, 80])
    def test_a_digest_is_in_one_piece_on_a_terminal_too(self, width: int) -> None:
        stream = io.StringIO()
        print_summary(RESULT, stream, is_terminal=True, width=width)
        assert COLOUR.search(stream.getvalue())
        assert "3f" * 32 in CONTROL.sub("", stream.getvalue())

    def test_of_a_job_that_failed_before_its_first_step(self) -> None:
        stream = io.StringIO()
        print_summary({"run": "mnist-0001", "status": "failed", "final_metrics": None}, stream)
        assert stream.getvalue() == "mnist-0001  failed\n"

    def test_one_row_is_enough(self) -> None:
        stream = io.StringIO()
        print_summary({"run": "mnist-0001", "status": "stopped", "steps": 3}, stream)
        assert stream.getvalue() == "mnist-0001  stopped\n  steps       3\n"


class TestNumbers:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.031, "0.031 s"),
            (0, "0 s"),
            (9.94, "9.9 s"),
            (9.99, "10 s"),
            (42.4, "42 s"),
            (59.6, "1:00"),
            (3600, "1:00:00"),
        ],
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert duration(seconds) == text

    @pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (1e6, "1 MB"), (2.5e12, "2.5 TB")])
    def test_sizes(self, value: float, text: str) -> None:
        assert size(value) == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (1.0, "1.000"),
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (3, "3"),
            (True, "True"),
            ("x", "x"),
            (1e-9, "1.000e-09"),
        ],
    )
    def test_measures(self, value: object, text: str) -> None:
        assert measure(value) == text

    @pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (3.14159, "3.14"), (0.0, "0"), (99.96, "100")])
    def test_counts(self, value: float, text: str) -> None:
        assert count(value) == text

    def test_pace_starts_anew_when_steps_are_told_again(self) -> None:
        pace = Pace()
        pace.passed(100, 0.0)
        assert pace.seconds_for(10) is None
        pace.passed(101, 1.0)
        assert pace.seconds_for(10) == 10.0
        pace.passed(50, 500.0)
        assert pace.seconds_for(10) is None
        pace.passed(52, 504.0)
        assert pace.seconds_for(10) == 20.0

"""What the end of a job says of the samples that it has left out."""

import errno
import io
import os
import re
import threading
from typing import Any

import pytest
from rich.cells import cell_len

from made_events import make_event
from quorate.observe.console import Console
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed
from quorate.observe.progress import Pace, Progress
from quorate.observe.quantities import count, duration, measure, size
from quorate.observe.screen import WARNING, Screen, print_summary
from quorate.observe.sinks import Printed, Prints, Round
from quorate.spec.job import EarlyStopSpec
from terminal import screen_after

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m|\x1b\[9[0-9]m")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **fields: Any) -> Event:
    told = {"loss": 2.3 / number, "samples_per_second": 12345.6, "epoch": 1, "samples": 256}
    return make_event("step", number, told | fields, time=1000.0 + number)


def begin(total_steps: int | None = 600, from_step: int = 0, **fields: Any) -> Event:
    return make_event("run", None, {"from_step": from_step, "total_steps": total_steps} | fields)


def finished(ending: str, steps: int) -> Event:
    return make_event("finished", None, {"weights_digest": "ab", "result": {"ending": ending, "steps": steps}})


EVALUATION = make_event("evaluation", 200, {"metrics": {"accuracy": 0.91234, "loss": 0.3}, "best": True})
CHECKPOINT = make_event("checkpoint", 200, {"path": "/r/step-00000200", "bytes": 1_234_567, "seconds": 0.031})
STOP = make_event("stop", None, {"reason": "interrupted"})
FAILURE = make_event("failure", 7, {"message": "worker 3 on [red]node-1[/red] was killed (signal 9)"})
FINISHED = finished("complete", 600)
OPENING = "job-0001 in runs/job-0001: 8 lanes on 4 workers"


def progress(**known: Any) -> Progress:
    usual: dict[str, Any] = {"run": "job-0001", "folder": "runs/job-0001", "workers": 4, "lanes": 8}
    return Progress(**usual | known)


def console(
    stream: io.StringIO, clock: Clock, *, is_terminal: bool = False, width: int | None = None, **known: Any
) -> Console:
    return Console(Screen(stream, is_terminal, width), progress(clock=clock, **known), clock)


def shown(*events: Event, **known: Any) -> list[str]:
    """The lines that a file has after these events and the end."""
    stream = io.StringIO()
    screen = console(stream, Clock(), **known)
    for event in events:
        screen.handle(event)
    screen.close()
    return stream.getvalue().splitlines()


def formed(*workers: int, **fields: Any) -> Event:
    members = [{"worker": worker} for worker in workers]
    return make_event("generation", None, {"members": members, "lanes": 8} | fields)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)


class TestElsewhere:
    """Not a terminal: plain lines."""

    def test_the_first_line_says_which_run_it_is_and_where(self) -> None:
        assert shown() == []  # a job that is refused has no run
        assert shown(formed(0, 1), begin()) == ["job-0001 in runs/job-0001: 8 lanes on 2 workers"]

    def test_a_resumed_run_says_from_where(self) -> None:
        assert shown(begin(from_step=120), step(121)) == [
            f"{OPENING}, from step 120 of 600",
            "step 121/600   loss 0.01901   12,346 samples/s   1 s elapsed",
        ]
        assert (
            shown(begin(from_step=120), step(121), begin(from_step=120)).count(f"{OPENING}, from step 120 of 600") == 1
        )

    def test_a_step_line_at_once_then_every_few_seconds_and_at_the_end(self) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock)
        screen.handle(begin(100))
        for number in range(1, 101):
            screen.handle(step(number))
            clock.now += 0.125
        screen.close()
        _, *lines = stream.getvalue().splitlines()
        assert [line.split("   ")[0] for line in lines] == ["step 1/100", "step 41/100", "step 81/100", "step 100/100"]
        assert lines[1] == "step 41/100   loss 0.05610   256 samples/s   5 s elapsed   59 s left"
        assert lines[-1] == "step 100/100   loss 0.02300   256 samples/s   12 s elapsed"

    @pytest.mark.parametrize(
        ("ending", "words"),
        [
            ("interrupted", "stopped after 7 of 600 steps"),
            ("early stop", "stopped early after 7 steps: the last 3 evaluations brought no better accuracy"),
        ],
    )
    def test_the_last_step_is_told_when_the_job_ends_before_its_time(self, ending: str, words: str) -> None:
        rule = EarlyStopSpec(metric="accuracy", mode="max", patience=3)
        steps = [step(number) for number in range(1, 8)]
        _, first, last, end = shown(begin(), *steps, finished(ending, 7), early_stop=rule)
        assert (first.split("   ")[0], last.split("   ")[0]) == ("step 1/600", "step 7/600")
        assert "left" not in last
        assert end == words

    def test_a_rate_of_nought_is_shown(self) -> None:
        assert "   lr 0   " in shown(begin(), step(1, learning_rate=0.0))[1]

    def test_what_the_task_logs_stands_beside_the_loss(self) -> None:
        lines = shown(begin(), step(1, log={"accuracy": 0.25, "note": "text"}))
        assert "loss 2.300   accuracy 0.2500   12,346 samples/s" in lines[1]

    def test_the_last_step_is_told_when_the_job_fails(self) -> None:
        assert [line.split("   ")[0] for line in shown(step(1), step(2))] == ["step 1", "step 2"]

    def test_what_happens_besides_is_told_at_once(self) -> None:
        careful, unknown = make_event("log", None, {"message": "careful"}), make_event("unheard-of", 1, {"x": 1})
        lines = shown(begin(), step(600), EVALUATION, CHECKPOINT, STOP, FAILURE, FINISHED, careful, unknown)
        assert lines[2:] == [
            "evaluation at step 200: accuracy 0.9123   loss 0.3000   best so far",
            "checkpoint step-00000200: 1.23 MB in 0.031 s",
            "stopping after the running step, which is saved; Ctrl-C again stops at once",
            "failed at step 7: worker 3 on [red]node-1[/red] was killed (signal 9)",
            "finished after 600 steps",
            "careful",
        ]

    def test_a_save_that_failed_promises_nothing(self) -> None:
        """It may be the last one, after which no training goes on."""
        failed = make_event("checkpoint_failed", 8, {"reason": "the disk is full"})
        assert "not saved at step 8: the disk is full" in shown(failed)[0]

    def test_nothing_is_promised_to_whoever_stops_before_the_first_step(self) -> None:
        assert shown(STOP, finished("interrupted", 0)) == ["stopping before the first step: interrupted"]

    def test_termination_names_itself(self) -> None:
        terminated = make_event("stop", None, {"reason": "terminated"})
        told = ["terminated: stopping after the running step, which is saved"]
        assert shown(terminated, has_begun=True) == told

    def test_no_control_characters_and_no_broken_lines(self) -> None:
        (line,) = shown(make_event("failure", 7, {"message": "long " * 40}), width=40)
        assert "\x1b" not in line

    def test_colours_in_a_file_only_when_forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value, coloured in (("", False), ("0", False), ("1", True)):
            monkeypatch.setenv("FORCE_COLOR", value)
            stream = io.StringIO()
            screen = console(stream, Clock())
            screen.handle(begin())
            screen.handle(EVALUATION)
            screen.close()
            assert bool(COLOUR.search(stream.getvalue())) is coloured
            assert CONTROL.sub("", stream.getvalue()).splitlines()[0] == OPENING
            assert "\x1b[?25l" not in stream.getvalue()  # colours, but nothing that moves

    def test_a_new_generation_is_told_only_once_training_has_begun(self) -> None:
        assert shown(formed(0, 1, 2)) == []
        assert shown(formed(0, 1, 2), step(1), formed(0))[1:] == ["continuing with 8 lanes on 1 worker"]

    def test_a_sharded_gang_is_told_with_its_mesh(self) -> None:
        members = [{"worker": worker, "lanes": [0, 1] if worker == 0 else []} for worker in range(2)]
        gang = formed(members=members, lanes=2, mesh="tensor 2")
        assert shown(step(1), gang)[-1] == "continuing with 2 lanes on 2 workers (tensor 2)"
        assert isinstance(gang, GenerationFormed)
        assert [member.lanes for member in gang.computing] == [(0, 1), (0, 1)]

    def test_a_lost_worker_is_told_without_the_hints_and_that_it_is_back(self) -> None:
        message = "worker 1 (pid 123 on host x) was killed by SIGKILL at step 17 while in exchange. Often it is memory."
        events = [
            begin(),
            make_event("lost", 17, {"worker": 1, "message": message}, 100.0),
            formed(0, from_step=16, time=100.1),
            formed(0, 1, from_step=19, time=100.3),
            formed(0, 1, from_step=22, time=100.5),
        ]
        assert shown(*events, workers=2)[1:] == [
            "worker 1 (pid 123 on host x) was killed by SIGKILL at step 17 while in exchange",
            "continuing with 8 lanes on 1 worker",
            "worker 1 is back after 0.3 s, 8 lanes on 2 workers",
            "continuing with 8 lanes on 2 workers",
        ]

    def test_going_on_from_a_checkpoint_says_from_where(self) -> None:
        lost = [
            make_event("lost", 46, {"worker": worker, "message": f"worker {worker} is gone."}, 100.0 + worker)
            for worker in (0, 1)
        ]
        lines = shown(begin(), step(45), *lost, formed(0, 1, from_step=30, time=102.0), workers=2)
        assert lines[-1] == "workers 0 and 1 are back after 2 s, 8 lanes on 2 workers, from step 30"

    def test_without_a_known_end_there_is_no_time_left(self) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock)
        for number in (1, 2):
            screen.handle(step(number))
            clock.now += 10
        assert stream.getvalue().splitlines()[-1] == "step 2   loss 1.150   256 samples/s   10 s elapsed"

    def test_every_optimizer_has_its_loss(self) -> None:
        losses = make_event("step", 1, {"loss.critic": 0.5, "loss.generator": 1.5})
        told = ["step 1/600   loss.critic 0.5000   loss.generator 1.500   1 s elapsed"]
        assert shown(losses, total_steps=600) == told

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_events_without_their_fields_do_no_harm(self, is_terminal: bool) -> None:
        screen = console(io.StringIO(), Clock(), is_terminal=is_terminal)
        words = "step, evaluation, checkpoint, stop, failure, finished, generation, log, run, lost"
        for kind in words.split(", "):
            screen.handle(make_event(kind))
            screen.handle(make_event(kind, 1))
        screen.close()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
class TestTerminal:
    def run(self, width: int, total_steps: int | None = 600) -> io.StringIO:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, is_terminal=True, width=width)
        screen.handle(begin(total_steps, steps_per_epoch=50))
        for number in (1, 150, 300):
            screen.handle(step(number, learning_rate=0.05))
            clock.now += 1
        screen.handle(EVALUATION)
        screen.handle(CHECKPOINT)
        self.during = screen_after(stream.getvalue(), width)
        screen.handle(finished("interrupted", 300))
        screen.close()
        return stream

    def test_the_bar_and_all_numbers_are_shown_and_fit(self, width: int) -> None:
        self.run(width)
        bar = next(number for number, line in enumerate(self.during) if "step 300/600" in line)
        measured = ["eval accuracy 0.9123", "eval loss 0.3000", "lr 0.05"]
        facts = ["epoch 6/12", "loss 0.007667", *measured, "256 samples/s", "3 s elapsed", "5:00 left"]
        facts.append("8 lanes on 4 workers")
        rows = {
            20: [[fact] for fact in facts[:3]] + [facts[3:4], *([fact] for fact in facts[4:])],
            40: [facts[:2], facts[2:4], facts[4:7], facts[7:]],
            60: [facts[:3], facts[3:7], facts[7:]],
            80: [facts[:5], facts[5:]],
        }
        assert self.during[bar + 1 :] == ["   ".join(row) for row in rows.get(width, [facts])]
        assert all(cell_len(line) <= width for line in self.during)
        assert "━" in self.during[bar if width > 20 else bar - 1]

    def test_only_one_bar_is_on_the_screen_and_notices_stay_above_it(self, width: int) -> None:
        self.run(width)
        text = "\n".join(self.during)
        assert text.count("step 300/600") == 1
        assert "step 150/600" not in text
        assert "starting" not in text
        assert re.sub(r"\s+", " ", text).startswith(
            f"{OPENING} evaluation at step 200: accuracy 0.9123 loss 0.3000 best"
        )
        assert text.index("checkpoint") < text.index("step 300/600")

    def test_what_ended_it_is_told_below_the_bar_that_stays(self, width: int) -> None:
        lines = screen_after(self.run(width).getvalue(), width)
        bar = next(number for number, line in enumerate(lines) if "step 300/600" in line)
        assert " ".join(lines[bar + 1 :]).endswith("stopped after 300 of 600 steps")
        assert not any("left" in line for line in lines)

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


class TestPrints:
    """What a task prints."""

    def shown(self, prints: Prints, *printed: Printed, is_terminal: bool = False) -> list[str]:
        stream = io.StringIO()
        screen = Console(Screen(stream, is_terminal, 40), progress(), Clock(), prints)
        screen.handle(begin())
        for event in printed:
            screen.handle(event)
        if is_terminal:
            return screen_after(stream.getvalue(), 40)
        screen.close()
        return stream.getvalue().splitlines()[1:]

    FIRST = Printed(process="worker 1", lines=("a", "[red] b"), is_first=True)
    OTHER = Printed(process="worker 0", lines=("c",))

    def test_are_those_of_the_first_lane_unless_more_are_asked_for(self) -> None:
        first, other = ["[worker 1] a", "[worker 1] [red] b"], ["[worker 0] c"]
        assert self.shown(Prints.FIRST, self.FIRST, self.OTHER) == first
        assert self.shown(Prints.ALL, self.FIRST, self.OTHER) == [*first, *other]
        assert self.shown(Prints.NONE, self.FIRST, self.OTHER) == []

    def test_stay_above_the_bar(self) -> None:
        *_, a, b, bar, _ = self.shown(Prints.FIRST, self.FIRST, is_terminal=True)
        assert (a, b) == ("[worker 1] a", "[worker 1] [red] b")
        assert bar.endswith("step 0/600")

    def test_neither_move_the_cursor_nor_fill_the_screen(self) -> None:
        loud = Printed(process="worker 1", lines=("\x1b[2J\x07", "x" * 10_000), is_first=True, left_out=7)
        more, control, long = self.shown(Prints.FIRST, loud)
        assert more == "[worker 1] (7 lines before this: see `quorate logs`)"
        assert control == "[worker 1] \\x1b[2J\\x07"
        assert len(long) < 1100
        assert long.endswith("x … (10,000 characters)")


class TestTheScreen:
    def test_has_no_thread(self) -> None:
        before = threading.active_count()
        screen = console(io.StringIO(), Clock(), is_terminal=True, width=80)
        screen.handle(step(1))
        assert threading.active_count() <= before
        screen.close()

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_is_not_written_to_for_every_step(self, is_terminal: bool) -> None:
        stream, clock = io.StringIO(), Clock()
        screen = console(stream, clock, is_terminal=is_terminal, width=80)
        screen.handle(begin(100_000))
        screen.handle(step(1))
        drawn = len(stream.getvalue())
        for number in range(2, 10_000):
            screen.handle(step(number))
        assert len(stream.getvalue()) == drawn
        clock.now += 6
        screen.handle(step(10_000))
        assert len(stream.getvalue()) > drawn
        screen.close()

    def test_says_that_it_starts_and_leaves_nothing_of_a_job_that_never_began(self) -> None:
        stream = io.StringIO()
        screen = console(stream, Clock(), is_terminal=True, width=80)
        assert screen_after(stream.getvalue(), 80) == ["starting job-0001: 8 lanes on 4 workers ...   1 s elapsed"]
        screen.handle(Round(doing="compiling the model"))
        assert screen_after(stream.getvalue(), 80) == ["starting job-0001: compiling the model ...   1 s elapsed"]
        screen.close()
        assert screen_after(stream.getvalue(), 80) == []

    def test_a_resumed_run_begins_its_bar_where_it_was(self) -> None:
        stream = io.StringIO()
        screen = console(stream, Clock(), is_terminal=True, width=80)
        screen.handle(begin(from_step=300))
        _, bar, hosting = screen_after(stream.getvalue(), 80)
        assert bar.endswith("step 300/600")
        assert hosting == "1 s elapsed   8 lanes on 4 workers"
        for number in (301, 302):
            screen.handle(step(number))
        screen.close()

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

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_that_knows_ascii_only_gets_ascii(self, is_terminal: bool) -> None:
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
        screen = Console(Screen(stream, is_terminal, 80), progress())
        screen.handle(begin())
        screen.handle(step(300))
        screen.handle(make_event("log", None, {"message": "2 workers × 3 threads … ∞"}))
        screen.close()
        text = written.getvalue().decode("ascii")
        assert r"2 workers x 3 threads ... \u221e" in text
        assert is_terminal is ("---" in text)

    def test_says_little_when_it_is_quiet(self) -> None:
        stream = io.StringIO()
        screen = Console(Screen(stream, is_terminal=False), progress(), is_quiet=True)
        careful = make_event("log", None, {"message": "careful"})
        gone = make_event("lost", 1, {"worker": 1, "message": "worker 1 is gone. See its log."})
        torn = make_event("step", 1, {"samples": 7, "warnings": ["sample 3 is left out", "sample 5 is left out"]})
        left_out = make_event("evaluation", 1, {"metrics": {}, "bad_samples": 1, "warnings": ["sample 8 is left out"]})
        for event in (begin(), torn, step(2), EVALUATION, left_out, CHECKPOINT, careful, gone, STOP, FINISHED):
            screen.handle(event)
        screen.close()
        assert stream.getvalue().splitlines() == [
            "sample 3 is left out",
            "sample 5 is left out",
            "evaluation at step 1:    1 bad sample left out",
            "sample 8 is left out",
            "careful",
            "worker 1 is gone",
            "stopping after the running step, which is saved; Ctrl-C again stops at once",
        ]


RESULT: dict[str, Any] = {
    "run": "fashion-mnist-0001",
    "status": "complete",
    "steps": 1600,
    "wall_seconds": 102.4,
    "samples_per_second": 12345.6,
    "final_metrics": {"accuracy": 0.91234, "loss": 0.2456},
    "weights_digest": "3f" * 32,
    "folder": "runs/fashion-mnist-0001",
    "recoveries": [
        {"step": 3, "detect_s": 0.01, "reform_s": 0.02, "first_step_s": 0.1, "refill_s": 9.0, "steps_lost": 0},
        {"step": 9, "detect_s": 0.02, "reform_s": 0.16, "first_step_s": None, "refill_s": None, "steps_lost": 0},
    ],
    "recovered": {"times": 2, "seconds": 0.31, "steps": 0},
}


def summary(result: dict[str, Any], **terminal: Any) -> list[str]:
    stream = io.StringIO()
    print_summary(result, Screen(stream, **terminal))
    return stream.getvalue().splitlines()


class TestSummary:
    def test_tells_what_a_person_wants_to_know(self) -> None:
        lines = summary(RESULT, width=80)
        assert lines == [
            "fashion-mnist-0001  complete",
            "  accuracy    0.9123",
            "  loss        0.2456",
            "  steps       1,600 in 1:42, start-up included",
            "  speed       12,346 samples/s",
            "  recovered   twice; training stood still for 0.31 s",
            f"  weights     {'3f' * 32}",
            "  folder      runs/fashion-mnist-0001",
        ]
        assert max(map(len, lines)) <= 80

    @pytest.mark.parametrize("width", [40, 80])
    def test_a_digest_is_in_one_piece_on_a_terminal_too(self, width: int) -> None:
        text = "\n".join(summary(RESULT, is_terminal=True, width=width))
        assert COLOUR.search(text)
        assert "3f" * 32 in CONTROL.sub("", text)

    def test_where_there_is_nothing_but_ascii(self) -> None:
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
        print_summary(RESULT | {"folder": "runs/größe"}, Screen(stream))
        assert rb"runs/gr\xf6\xdfe" in written.getvalue()

    def test_of_a_resumed_run_tells_which_steps_took_that_time(self) -> None:
        lines = summary(RESULT | {"from_step": 1200})
        assert "  steps       1,600, the last 400 in 1:42, start-up included" in lines
        assert "  speed       12,346 samples/s since it was resumed" in lines

    def test_of_an_early_stop_says_so(self) -> None:
        assert summary(RESULT | {"ending": "early stop"})[0] == "fashion-mnist-0001  complete (stopped early)"

    def test_of_a_job_without_measurements_has_the_lines_that_there_are(self) -> None:
        assert summary({"run": "mnist-0001", "status": "failed", "final_metrics": None}) == ["mnist-0001  failed"]
        told = ["mnist-0001  stopped", "  steps       3"]
        assert summary({"run": "mnist-0001", "status": "stopped", "steps": 3}) == told

    @pytest.mark.parametrize(
        ("training", "validation", "told"),
        [
            (1017, 0, "1,017 left out"),
            (0, 3, "3 of the validation set left out"),
            (17, 3, "17 of the training set and 3 of the validation set left out"),
        ],
    )
    def test_bad_samples_are_counted_and_listed_elsewhere(self, training: int, validation: int, told: str) -> None:
        bad = {"training": training, "validation": validation}
        lines = summary({"run": "mnist-0001", "status": "complete", "bad_samples": bad})
        assert f"  bad samples  {told}; quorate show mnist-0001 --ledger lists them" in lines


WRITTEN: dict[Any, dict[Any, str]] = {
    duration: {0.031: "0.031 s", 0: "0 s", 9.94: "9.9 s", 9.99: "10 s", 42.4: "42 s", 59.6: "1:00", 3600: "1:00:00"},
    size: {0: "0 B", 999: "999 B", 1e6: "1 MB", 2.5e12: "2.5 TB"},
    measure: {1.0: "1.000", 3: "3", "x": "x", 1e-9: "1.000e-09", None: "not finite"},
    count: {12345.6: "12,346", 3.14159: "3.14", 0.0: "0", 99.96: "100"},
}


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [(write, value, text) for write, texts in WRITTEN.items() for value, text in texts.items()],
)
def test_numbers_are_written_as_people_do(write: Any, value: Any, text: str) -> None:
    assert write(value) == text


def test_measures_that_are_no_numbers() -> None:
    assert [measure(value) for value in (float("nan"), float("inf"), True)] == ["nan", "inf", "True"]


class TestPace:
    def test_starts_anew_when_steps_are_told_again(self) -> None:
        pace = Pace()
        told = [pace.seconds_per_step]
        for number, time in ((100, 0.0), (101, 1.0), (50, 500.0), (52, 504.0)):
            pace.passed(number, time)
            told.append(pace.seconds_per_step)
        assert told == [None, None, 1.0, None, 2.0]

    def test_of_fast_steps_reaches_back_far_enough_to_hold_an_evaluation(self) -> None:
        pace = Pace()
        for number in range(10_000):
            pace.passed(number, number * 1e-3 + (5.0 if number >= 5_000 else 0.0))
        assert pace.seconds_per_step == pytest.approx(1.5e-3, rel=0.01)

    def test_of_a_job_that_has_become_slow_forgets_the_fast_times(self) -> None:
        pace = Pace()
        for number in range(1_000):
            pace.passed(number, number * 0.01)
        for number in range(1_000, 1_100):
            pace.passed(number, 10.0 + (number - 1_000) * 10.0)
        assert pace.seconds_per_step == pytest.approx(10.0)

    def test_is_never_negative_when_the_clock_is_set_back(self) -> None:
        pace = Pace()
        pace.passed(1, 100.0)
        pace.passed(2, 40.0)
        assert pace.seconds_per_step == 0.0


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            {"training": 657, "training_read": 1920, "validation": 0, "validation_read": 9},
            f"{WARNING}657 of 1,920 (34%)",
        ),
        ({"training": 10, "training_read": 1000, "validation": 0, "validation_read": 9}, "10 of 1,000 (1%)"),
        ({"training": 1, "training_read": 1000, "validation": 0, "validation_read": 9}, "1 of 1,000 (under 1%)"),
        (
            {"training": 1, "training_read": 1000, "validation": 3, "validation_read": 9},
            f"{WARNING}1 of 1,000 (under 1%) of the training set and 3 of 9 (33%) of the validation set",
        ),
    ],
)
def test_the_share_is_told_and_a_large_one_is_a_warning(bad: dict[str, int], told: str) -> None:
    stream = io.StringIO()
    print_summary({"run": "a-0001", "status": "complete", "bad_samples": bad}, Screen(stream))
    assert f"  bad samples  {told} left out; quorate show a-0001 --ledger lists them" in stream.getvalue()

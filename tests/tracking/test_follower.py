"""A tracker has every point of a run once, wherever it fails and whenever who follows the run is killed."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.history.curves import Point
from quorate.observe.events import EvaluationDone, RunFinished, StepCompleted
from quorate.observe.jsonl import JsonlSink
from quorate.storage.run_folder import RunFolder
from quorate.tracking.tracker import Follower, Held, Tracker


class Killed(BaseException):
    pass


class Server:
    """Keeps points as a database does: the same row is there once, and nothing else is checked."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, int, float], Point] = {}
        self.ending = ""
        self.fate: Callable[[], str] = lambda: ""

    def curve(self, name: str = "train/loss") -> list[tuple[int, float]]:
        return sorted((point.step, point.value) for point in self.rows.values() if point.name == name)


class ServerTracker(Tracker):
    """As those of real servers: it asks what is there, and does not send that again."""

    name = key = "server"

    def __init__(self, server: Server, *, knows: bool = True, every: int = 1) -> None:
        super().__init__(every)
        self.server = server
        self.held = Held()
        self._knows = knows

    def load(self) -> None: ...

    def begin(self) -> bool:
        self._meet("begin")
        for point in self.server.rows.values() if self._knows else ():
            self.held.add(point)
        return bool(self.server.rows)

    def log(self, points: Sequence[Point]) -> int:
        fate = self._meet("log")
        new = [point for point in points if self.held.lacks(point)]
        for point in new:
            self.server.rows.setdefault((point.name, point.step, point.milliseconds, point.value), point)
        if fate == "unheard":
            raise ConnectionError("the answer was lost")
        if fate == "killed":
            raise Killed
        return len(new)

    def finish(self, status: str) -> None:
        self._meet("finish")
        self.server.ending = f"{status}, {sorted(self.series.curves)}"

    def _meet(self, what: str) -> str:
        fate = self.server.fate()
        if fate == "away":
            raise ConnectionError(f"nobody answers to {what}")
        return fate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path)


def make_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder, "tiny")
    (run.path / "tracking").mkdir()
    return run


def tell(run: RunFolder, *steps: int, begin: float = 0.0) -> None:
    sink = JsonlSink(run.events_file)
    for at, number in enumerate(steps):
        sink.handle(StepCompleted(step=number, time=begin + at, losses={"": 1 / number}))
        if number % 4 == 0:
            sink.handle(EvaluationDone(step=number, time=begin + at, metrics={"accuracy": 1 / number}))
    sink.close()


def test_it_begins_with_the_first_step_and_ends_with_the_run(run: RunFolder) -> None:
    server = Server()
    follower = Follower(run, ServerTracker(server))
    JsonlSink(run.events_file).append('{"kind":"log","time":1.0}')
    assert (follower.poll(), follower.has_begun) == (True, False)
    tell(run, 1, 2, 3, 4)
    assert (follower.poll(), follower.has_begun) == (True, True)
    assert (server.curve(), follower.sent, follower.last_step) == ([(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)], 5, 4)
    assert follower.finish("complete")
    assert server.ending == "complete, ['train/loss', 'val/accuracy']"


def test_one_that_is_away_is_asked_less_and_less_often_and_loses_nothing(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock, asked = Server(), Clock(), list[float]()

    def away() -> str:
        asked.append(clock.now)
        return "away"

    server.fate = away
    follower = Follower(run, ServerTracker(server), clock)
    tell(run, 1, 2)
    while clock.now < 200:
        assert not follower.poll()
        clock.now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(pauses[6:]) == {30.0}
    assert len(caplog.records) == 1
    assert "nobody answers to begin" in caplog.text
    server.fate = lambda: ""
    assert follower.poll(patiently=False)
    tell(run, 3)
    assert follower.poll()
    assert [step for step, _ in server.curve()] == [1, 2, 3]


def test_what_was_sent_before_is_sure_while_it_is_away(run: RunFolder) -> None:
    server = Server()
    tell(run, 1, 2, 3, 4, 5)
    assert Follower(run, ServerTracker(server)).poll()
    tell(run, 6, 7)
    server.fate = lambda: "away"
    later = Follower(run, ServerTracker(server))
    assert not later.poll(always_begin=True)
    assert (later.has_begun, later.last_step) == (False, 5)


def test_of_several_batches_those_that_were_taken_are_sure(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerTracker, "batch", 4)
    server, fates = Server(), iter(["", "", "", "away"])  # to begin, two batches, and the third is not taken
    server.fate = lambda: next(fates, "away")
    tell(run, *range(1, 20))
    follower = Follower(run, ServerTracker(server))
    assert not follower.poll()
    there = [step for step, _ in server.curve()]
    assert there[: follower.last_step] == [*range(1, follower.last_step + 1)] and follower.last_step > 4
    assert [record.getMessage() for record in caplog.records] == ["server: nobody answers to log. It is tried again."]
    assert not any(record.exc_info for record in caplog.records)


def test_whether_it_has_all_is_known_to_other_processes(run: RunFolder) -> None:
    def has_all(status: str) -> bool:
        return Follower(run, ServerTracker(Server())).has_all(status)

    assert has_all("failed"), "there is nothing to tell of a run without a step"
    tell(run, 1, 2)
    assert not has_all("interrupted")
    follower = Follower(run, ServerTracker(Server()))
    assert follower.poll() and not has_all("interrupted"), "nobody has told it how the run ended"
    assert follower.finish("interrupted") and has_all("interrupted")
    assert not has_all("complete")
    tell(run, 3)
    assert not has_all("interrupted")


def test_another_process_goes_on_where_the_last_was(run: RunFolder) -> None:
    server = Server()
    tell(run, 1, 2, 3, 4, 5)
    Follower(run, ServerTracker(server)).poll()
    tell(run, 4, 5, 6, begin=100.0)  # resumed from the checkpoint of step 3
    again = Follower(run, ServerTracker(server, knows=False))
    assert again.poll()
    assert [step for step, _ in server.curve()] == [1, 2, 3, 4, 5, 6]
    assert again.sent == 1


def test_a_server_that_has_lost_everything_is_given_everything(run: RunFolder) -> None:
    tell(run, 1, 2, 3)
    Follower(run, ServerTracker(Server())).poll()
    server = Server()
    assert Follower(run, ServerTracker(server)).poll(always_begin=True)
    assert [step for step, _ in server.curve()] == [1, 2, 3]


def test_a_file_that_is_another_one_is_reconciled_with_what_the_server_has(run: RunFolder) -> None:
    """As in a run that was fetched from a copy: its file begins where it was resumed."""
    server = Server()
    tell(run, 1, 2, 3, 4, 5)
    Follower(run, ServerTracker(server)).poll()
    run.events_file.unlink()
    tell(run, 4, 5, 6, begin=100.0)
    again = Follower(run, ServerTracker(server))
    assert again.poll()
    assert [step for step, _ in server.curve()] == [1, 2, 3, 4, 5, 6]
    assert again.sent == 1, "what the server had is given again, and not counted"


def test_a_file_that_cannot_be_read_now_is_read_later(run: RunFolder, tmp_path: Path) -> None:
    server = Server()
    follower = Follower(run, ServerTracker(server))
    run.events_file.mkdir()
    assert not follower.poll()
    assert "events.jsonl" in str(follower.trouble)
    run.events_file.rmdir()
    tell(run, 1, 2)
    assert follower.poll(patiently=False)
    assert [step for step, _ in server.curve()] == [1, 2]


FATES = st.sampled_from(["", "", "away", "unheard", "killed"])


@given(
    parts=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=5),
    polls=st.lists(FATES, max_size=40),
    every=st.integers(1, 3),
    knows=st.booleans(),
)
def test_any_replay_and_any_crash_come_to_the_undisturbed_curve(
    parts: list[tuple[int, int]], polls: list[str], every: int, knows: bool
) -> None:
    """The run goes back now and then, the server fails, and the process is killed after what it sent was taken."""
    fates, time, last = iter(polls), 0.0, 0
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerTracker, "batch", 3)
        run, server, clock = make_run(Path(folder)), Server(), Clock()
        server.fate = lambda: next(fates, "")
        follower = Follower(run, ServerTracker(server, knows=knows, every=every), clock)
        for back, length in parts:
            begin = max(0, last - back)
            tell(run, *range(begin + 1, begin + length + 1), begin=time)
            time, last = time + length, max(last, begin + length)
            clock.now += 100.0
            try:
                follower.poll()
            except Killed:
                follower = Follower(run, ServerTracker(server, knows=knows, every=every), clock)
        sink = JsonlSink(run.events_file)
        sink.handle(RunFinished(result={"ending": "complete"}))
        sink.close()
        is_whole = False
        while not is_whole:
            try:
                is_whole = follower.poll(patiently=False)
            except Killed:
                follower = Follower(run, ServerTracker(server, knows=knows, every=every), clock)
        due = [step for step in range(1, last + 1) if step % every == 0 or step == last]
        assert server.curve() == [(step, 1 / step) for step in due]
        assert server.curve("val/accuracy") == [(step, 1 / step) for step in range(4, last + 1, 4)]

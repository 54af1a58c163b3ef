"""Whoever reads a run through its index comes to the same as whoever reads every line of it."""

import errno
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.run_builder import MEMBERS, Story, build_run, whole_story
from quorate.history import event_index
from quorate.history.documents import detail_document, runs_document
from quorate.history.event_index import IndexedReader, IndexSink, IndexWriter, glance, index_of_events, read_timeline
from quorate.history.run_detail import RunDetail
from quorate.history.run_record import Listing, RunQuery
from quorate.history.step_rows import StepRow, plain_row
from quorate.history.timeline import EventFold, Timeline, loss_curves, step_curves
from quorate.observe.events import StepCompleted, read_event
from quorate.storage.atomic import write_fully
from quorate.storage.run_folder import RunFolder

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """So many bytes of events are worth a block."""
    before, event_index.WORTH_WRITING = event_index.WORTH_WRITING, size
    try:
        yield
    finally:
        event_index.WORTH_WRITING = before


def documents(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `show --json` and `runs --json` print."""
    listing = Listing.read(run.path.parent, RunQuery())
    return detail_document(RunDetail.read(run), None, NOW), runs_document(listing, NOW)


def without_index(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    index_of_events(run.events_file).unlink(missing_ok=True)
    with blocks_of(10**9):
        return documents(run)


def written(value: object) -> str:
    return json.dumps(value, sort_keys=True)


garbage = st.sampled_from([b"", b"{torn", b'{"kind":"step"\n'])
losses = st.one_of(st.floats(0.1, 9.0), st.sampled_from([math.nan, math.inf, None, -0.5]))


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Parts that go on from earlier steps, losses, evaluations, and steps that tell little, much, or nonsense."""
    story, at = Story(), 0
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, at))
        story.pause(draw(st.integers(0, 50))).begin(from_step=at, total_steps=30)
        for _ in range(draw(st.integers(0, 5))):
            steps = draw(st.integers(0, 5))
            names = draw(st.sampled_from([("loss",), ("loss.make", "loss.judge"), ()]))
            more: dict[str, Any] = {name: draw(losses) for name in names}
            more |= draw(
                st.sampled_from(
                    [
                        {},
                        {"samples_per_second": 123.4, "data_s": 0.25, "exchange_s": 1e-6, "longest_data_s": 0.5},
                        {"samples": None, "samples_per_second": "fast"},
                        {"warnings": ["sample 7 is left out"], "bad_samples": 1, "bad": [[7, 7]]},
                        {"log": {"temperature": 0.5, "name": "x"}, "gradient_norm": 1.5, "learning_rate": 0.1},
                        {"data_s": 0.123456789, "draws": True},
                    ]
                )
            )
            story.train(at + 1, at + steps, **{"loss": 1.0, **more})
            at += steps
            match draw(st.integers(0, 5)):
                case 0:
                    story.evaluate(at, loss=draw(st.floats(0, 1)))
                case 1:
                    story.lose(1, at + 1, from_step=at)
                case 2:
                    story.come_back(at)
                case 3:
                    story.tell("of_a_later_version", at, thing=[1])
                case 4:
                    story.tell("system", at, worker=0, cpu_percent=50.0)
    return story


@settings(max_examples=settings().max_examples // 3, deadline=None)
@given(stories(), st.lists(st.integers(0, 60), max_size=4), garbage, st.data())
def test_any_split_into_index_and_rest_gives_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, story: Story, cuts: list[int], torn: bytes, data: st.DataObject
) -> None:
    run = build_run(tmp_path_factory.mktemp("runs"), story=story)
    lines = run.events_file.read_bytes().splitlines(keepends=True) if story.events else []
    with blocks_of(data.draw(st.sampled_from([1, 400, 10**6]))):
        for cut in sorted(cuts):
            run.events_file.write_bytes(b"".join(lines[:cut]))
            reader = IndexedReader(run.events_file, for_writing=data.draw(st.booleans()))
            reader.read_on()
            assert reader.write()
        run.events_file.write_bytes(b"".join(lines) + torn)
        through_index = documents(run)
        again = documents(run)
    # As every line read one by one has it, with all steps in memory: the reader of short runs.
    expected = without_index(run)
    assert written(through_index) == written(expected)
    assert written(again) == written(expected)


def long_story(steps: int = 400) -> Story:
    story = Story().begin(total_steps=steps).train(1, steps // 2).lose(1, steps // 2 + 1, from_step=steps // 2)
    story.come_back(steps // 2).train(steps // 2 + 1, steps).evaluate(steps, loss=0.5)
    return story


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run with an index of many blocks."""
    with blocks_of(2000):
        made = build_run(tmp_path / "runs", story=long_story())
        read_timeline(made.events_file)
        assert index_of_events(made.events_file).stat().st_size > 10_000
        yield made


def same_as_without_index(run: RunFolder) -> None:
    through_index = documents(run)
    assert written(through_index) == written(without_index(run))


def test_an_index_is_read_instead_of_the_lines_before_it(run: RunFolder) -> None:
    reader = IndexedReader(run.events_file)
    assert run.events_file.stat().st_size - reader.offset < 2000
    assert reader.timeline().counts["step"] > 390
    assert reader.timeline().steps == {}


class TestAnEventsFileThatIsAnotherNow:
    def test_shorter(self, run: RunFolder) -> None:
        os.truncate(run.events_file, run.events_file.stat().st_size // 2)
        same_as_without_index(run)

    def test_gone(self, run: RunFolder) -> None:
        run.events_file.unlink()
        assert read_timeline(run.events_file).counts == {}
        same_as_without_index(run)

    def test_that_of_another_run(self, run: RunFolder) -> None:
        other = b"".join(event.to_json().encode() + b"\n" for event in Story().begin().train(1, 300, loss=7.0).events)
        run.events_file.write_bytes(other)
        assert {value for _, value in loss_curves(read_timeline(run.events_file))[0].points} == {7.0}
        same_as_without_index(run)

    def test_a_line_was_removed_in_the_middle(self, run: RunFolder) -> None:
        lines = run.events_file.read_bytes().splitlines(keepends=True)
        run.events_file.write_bytes(b"".join(lines[:150] + lines[151:]))
        same_as_without_index(run)

    def test_while_somebody_reads_on(self, run: RunFolder) -> None:
        reader = IndexedReader(run.events_file)
        reader.read_on()
        run.events_file.write_bytes(b"".join(event.to_json().encode() + b"\n" for event in whole_story().events))
        reader.read_on()
        assert reader.timeline().counts["step"] == 8


class TestAnIndexThatIsOfNoUse:
    @pytest.mark.parametrize("place", [0, 3, 40, 200, 5000])
    def test_damaged(self, run: RunFolder, place: int) -> None:
        index = index_of_events(run.events_file)
        content = bytearray(index.read_bytes())
        content[place] ^= 0x40
        index.write_bytes(content)
        same_as_without_index(run)

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_torn(self, run: RunFolder, share: float) -> None:
        index = index_of_events(run.events_file)
        os.truncate(index, int(index.stat().st_size * share))
        same_as_without_index(run)

    def test_it_is_made_again(self, run: RunFolder) -> None:
        index = index_of_events(run.events_file)
        whole = index.read_bytes()
        index.write_bytes(b"something else" * 1000)
        read_timeline(run.events_file)
        assert index.read_bytes() == whole

    def test_a_state_of_another_version(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EventFold, "restore", Mock(side_effect=KeyError("missing")))
        assert read_timeline(run.events_file).counts["step"] == 400

    def test_a_folder_where_it_cannot_be_written(self, run: RunFolder) -> None:
        index = index_of_events(run.events_file)
        index.unlink()
        index.mkdir()
        assert read_timeline(run.events_file).counts["step"] == 400
        assert glance(run.events_file).counts["step"] == 400


class TestWriters:
    def test_of_two_that_read_the_same_the_second_writes_nothing(self, tmp_path: Path) -> None:
        with blocks_of(2000):
            path = build_run(tmp_path, story=long_story()).events_file
            readers = [IndexedReader(path), IndexedReader(path)]
            for reader in readers:
                reader.read_on()
            assert [reader.write() for reader in readers] == [True, False]
            assert IndexedReader(path).timeline().counts["step"] == 400

    def test_the_launchers_follows_a_run_that_grows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_index, "_READ_AFTER", 10)
        with blocks_of(2000):
            run = build_run(tmp_path, story=Story())
            sink, story = IndexSink(run.events_file), long_story()
            for event in story.events:
                with run.events_file.open("a") as file:
                    file.write(event.to_json() + "\n")
                sink.handle(event)
            sink.close()
            assert IndexedReader(run.events_file).offset == run.events_file.stat().st_size
            same_as_without_index(run)

    def test_a_short_run_gets_none_and_is_not_even_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_index, "_READ_AFTER", 2)
        run = build_run(tmp_path, story=whole_story())
        before = threading.active_count()
        sink = IndexSink(run.events_file)
        for event in whole_story().events:
            sink.handle(event)
        assert threading.active_count() <= before
        sink.close()
        read_timeline(run.events_file, as_rows=True)
        assert not index_of_events(run.events_file).exists()

    def test_after_a_disk_was_full_half_way_nothing_is_written_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with blocks_of(2000):
            run = build_run(tmp_path, story=long_story())
            reader = IndexedReader(run.events_file)
            reader.read_on()
            room = [3]

            def write(descriptor: int, content: bytes) -> int:
                room[0] -= 1
                if not room[0]:
                    raise OSError(errno.ENOSPC, "no space")
                return write_fully(descriptor, content)

            monkeypatch.setattr(event_index, "write_fully", write)
            assert not reader.write()
            assert not reader.write()  # the size is another now: somebody else's turn
            read_timeline(run.events_file)
            assert IndexedReader(run.events_file).offset > run.events_file.stat().st_size - 2000
            same_as_without_index(run)

    def test_one_that_was_overtaken_by_a_reader_goes_on_from_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_index, "_READ_AT_ONCE", 3000)
        with blocks_of(2000):
            path = build_run(tmp_path, story=long_story()).events_file
            writer = IndexWriter(path)
            writer.handle()
            read_timeline(path)
            writer.handle()
            writer.close()
            assert IndexedReader(path).offset == path.stat().st_size
            assert written(vars(Timeline.glance(path))["counts"]) == written(vars(glance(path))["counts"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"losses": {"": 0.1 + 0.2}, "gradient_norms": {"": 1e-310}, "learning_rates": {"": 3e-4}},
        {"losses": {"make": 1.0, "judge": 2.0}, "samples": 64, "samples_per_second": 12.34, "data_s": 0.5},
        {"log": {"a": 1, "b": True, "c": "x", "d": 0.5}, "draws": True, "ledger": "ab" * 16, "epoch": 3},
    ],
)
def test_a_plain_line_gives_the_row_that_its_event_gives(fields: dict[str, Any]) -> None:
    line = StepCompleted(step=7, time=1234.567891, **fields).to_json().encode()
    event = read_event(line)
    assert isinstance(event, StepCompleted)
    row = plain_row(line)
    assert row is not None
    assert row == StepRow.of(event)


@pytest.mark.parametrize("name", ["warnings", "loss", "time", "step", "samples", "draws", "data_s"])
def test_what_is_unusual_is_read_as_an_event(name: str) -> None:
    record = StepCompleted(step=7, losses={"": 1.0}, samples=8, data_s=0.5).to_record()
    assert plain_row(json.dumps(record).encode()) is not None
    assert plain_row(json.dumps(record | {name: "odd"}).encode()) is None
    assert plain_row(json.dumps(record | {name: None}).encode()) is None


def test_curves_of_each_family(tmp_path: Path) -> None:
    story = Story().begin().train(1, 3, learning_rate=0.5, **{"gradient_norm.a": 1.0, "gradient_norm.b": 2.0})
    timeline = read_timeline(build_run(tmp_path, story=story).events_file, as_rows=True)
    assert [curve.name for curve in step_curves(timeline, "gradient_norm")] == ["gradient_norm.a", "gradient_norm.b"]
    assert step_curves(timeline, "learning_rate")[0].points == ((1, 0.5), (2, 0.5), (3, 0.5))


def test_what_is_measured_all_the_time_is_counted_and_not_kept(tmp_path: Path) -> None:
    story = Story().begin()
    for step in range(1, 200):
        story.train(step, step).tell("system", step, worker=0, host="x", cpu_percent=50.0)
        story.tell("spans", step, generation="1.1", worker=0, began=1.0, spans=[["step", 0.0, 0.5]])
    with blocks_of(2000):
        file = build_run(tmp_path, story=story).events_file
        assert read_timeline(file).ended == story.time
        content = index_of_events(file).read_bytes()
        for told in (read_timeline(file), glance(file), Timeline.read(file)):
            assert {event.kind for event in told.others} == {"generation", "run"}
            assert (told.counts["system"], told.counts["spans"]) == (199, 199)
            assert told.ended == story.time
    assert b"cpu_percent" not in content


def test_members_are_told_by_the_index_too(run: RunFolder) -> None:
    formed = [event for event in glance(run.events_file).others if event.kind == "generation"]
    assert len(formed) == 3
    assert len(MEMBERS) == 2

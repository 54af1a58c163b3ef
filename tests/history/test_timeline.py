import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.run_builder import CREATED, Story, whole_story
from quorate.core.errors import RunError
from quorate.history.timeline import Timeline
from quorate.observe.events import StepCompleted


def written(folder: Path, story: Story, garbage: bytes = b"") -> Path:
    path = folder / "events.jsonl"
    path.write_bytes(b"".join(event.to_json().encode() + b"\n" for event in story.events) + garbage)
    return path


def without_steps(timeline: Timeline) -> dict[str, object]:
    return {name: value for name, value in vars(timeline).items() if name not in ("steps", "recoveries", "waiting")}


class TestRead:
    def test_a_run_that_nothing_happened_to(self, tmp_path: Path) -> None:
        timeline = Timeline.read(written(tmp_path, whole_story()))
        assert list(timeline.steps) == list(range(1, 9))
        assert timeline.steps[4].losses == {"": 0.25}
        assert timeline.evaluations == {4: {"loss": 0.75}, 8: {"loss": 0.5}}
        assert (timeline.position, timeline.total_steps, timeline.redone) == (8, 8, 0)
        assert timeline.counts == {"generation": 1, "run": 1, "step": 8, "evaluation": 2, "finished": 1}
        assert (timeline.began, timeline.ended) == (CREATED.timestamp() + 1, CREATED.timestamp() + 13)
        assert [event.kind for event in timeline.others] == [
            "generation",
            "run",
            "evaluation",
            "evaluation",
            "finished",
        ]
        assert timeline.unreadable_lines == 0

    def test_of_a_step_that_is_told_again_the_last_telling_counts(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 6, loss=1.0).evaluate(4, loss=1.0).begin(from_step=3)
        timeline = Timeline.read(written(tmp_path, story.train(4, 5, loss=2.0).evaluate(4, loss=2.0)))
        assert list(timeline.steps) == [1, 2, 3, 4, 5, 6]
        assert [timeline.steps[step].losses[""] for step in (3, 4, 5, 6)] == [1.0, 2.0, 2.0, 1.0]
        assert timeline.evaluations == {4: {"loss": 2.0}}
        assert (timeline.position, timeline.redone, timeline.counts["step"]) == (5, 2, 8)

    def test_a_run_that_has_gone_on_is_where_its_checkpoint_was(self, tmp_path: Path) -> None:
        timeline = Timeline.read(written(tmp_path, Story().begin().train(1, 6).begin(from_step=3, total_steps=20)))
        assert (timeline.position, timeline.total_steps) == (3, 20)

    def test_time_in_which_nobody_works_on_a_run_is_not_its_own(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 4).pause(1000).begin(from_step=4).train(5, 8)
        timeline = Timeline.read(written(tmp_path, story))
        assert timeline.began is not None
        assert timeline.ended is not None
        assert timeline.ended - timeline.began > 1000
        assert timeline.active_seconds == 8.0

    def test_a_loss_begins_no_new_part(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 4).lose(1, step=5, from_step=4).train(5, 6).come_back(6).train(7, 8)
        path = written(tmp_path, story)
        timeline = Timeline.read(path)
        assert (timeline.counts["run"], timeline.position, timeline.redone) == (1, 8, 0)
        assert timeline.active_seconds == 12.0  # from `run` on, without a gap
        (recovery,) = timeline.recoveries
        assert (recovery.step, recovery.worker, recovery.steps_lost, recovery.copy_s) == (5, 1, 0, 0.125)
        glance = Timeline.glance(path)
        assert (glance.position, glance.active_seconds, glance.counts) == (8, 12.0, timeline.counts)

    def test_what_was_lost_in_an_earlier_part_is_not_mended_by_a_later_one(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 4).lose(1, step=5, from_step=4).begin(from_step=2).train(3, 8)
        (recovery,) = Timeline.read(written(tmp_path, story)).recoveries
        assert (recovery.refill_s, recovery.first_step_s) == (None, None)

    def test_only_wanted_fields_are_kept(self, tmp_path: Path) -> None:
        timeline = Timeline.read(written(tmp_path, whole_story()), keep=("samples",))
        assert (timeline.steps[2].samples, timeline.steps[2].losses) == (8, {})

    def test_a_file_that_is_not_there_tells_nothing(self, tmp_path: Path) -> None:
        timeline = Timeline.read(tmp_path / "events.jsonl")
        assert timeline == Timeline() == Timeline.glance(tmp_path / "events.jsonl")
        assert (timeline.total_steps, timeline.evaluations, timeline.ended) == (None, {}, None)

    def test_a_file_that_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=f"cannot read {tmp_path}: Is a directory"):
            Timeline.read(tmp_path)


GARBAGE = [
    b'{"kind":"step","time":17',  # torn by a crash
    b"not JSON",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[]",
    b"3",
    b"{}",
    b'{"kind": 3, "time": 1.0}',
    b'{"kind":"step","time":1.0}',
    b'{"kind":"step","time":1.0, "step": "five"}',
    b'{"kind":"step","time":1.0, "step": -1}',
    b'{"kind":"step","time":1.0, "step": true}',
    b'{"kind":"step","time":"noon", "step": 3}',
    b'{"kind":"step","time":NaN, "step": 3}',
    b'{"kind":"step","time":1' + b"0" * 400 + b', "step": 3}',
]


class TestGarbage:
    @pytest.mark.parametrize("line", GARBAGE, ids=lambda line: repr(line[:44]))
    @pytest.mark.parametrize("end", [b"", b"\n"], ids=["torn", "ended"])
    def test_a_line_that_is_no_event_costs_nothing_else(self, tmp_path: Path, line: bytes, end: bytes) -> None:
        path = written(tmp_path, whole_story(), line + end)
        for timeline in (Timeline.read(path), Timeline.glance(path)):
            assert timeline.unreadable_lines == 1
            assert (timeline.position, timeline.counts["step"], timeline.counts["finished"]) == (8, 8, 1)

    def test_empty_lines_are_nothing(self, tmp_path: Path) -> None:
        path = written(tmp_path, whole_story(), b"\n\n")
        assert Timeline.read(path).unreadable_lines == 0

    def test_fields_of_another_kind_are_passed_over(self, tmp_path: Path) -> None:
        story = whole_story().tell("run", from_step="x", total_steps=None).tell("evaluation", 9, metrics=3)
        timeline = Timeline.read(written(tmp_path, story))
        assert (timeline.position, timeline.total_steps) == (8, 8)
        assert list(timeline.evaluations) == [4, 8]

    def test_a_glance_finds_the_last_whole_step_among_torn_ones(self, tmp_path: Path) -> None:
        story = Story().begin().train(1, 5)
        torn = b'{"kind":"step","time":{"kind":"step"}\n'
        timeline = Timeline.glance(written(tmp_path, story, torn * 3))
        assert (timeline.position, timeline.counts["step"], timeline.unreadable_lines) == (5, 5, 3)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    story, at = Story(), 0
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, at))
        story.pause(draw(st.integers(0, 50))).begin(from_step=at)
        for _ in range(draw(st.integers(0, 4))):
            steps = draw(st.integers(0, 4))
            story.train(at + 1, at + steps)
            at += steps
            if draw(st.booleans()):
                story.evaluate(at, loss=1.0)
    return story


@settings(max_examples=60, deadline=None)
@given(stories())
def test_a_glance_sees_the_same_without_the_steps(tmp_path_factory: pytest.TempPathFactory, story: Story) -> None:
    path = written(tmp_path_factory.getbasetemp(), story)
    read, glance = Timeline.read(path), Timeline.glance(path)
    assert without_steps(glance) == without_steps(read)
    assert glance.steps == {}


def test_what_an_event_writes_is_recognised_as_a_step_at_a_glance(tmp_path: Path) -> None:
    """A glance goes by how a line begins; were it written otherwise, it would still be right, but slow."""
    line = StepCompleted(step=1, losses={"": 1.0}).to_json()
    assert line.startswith('{"kind":"step",')
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line}\n" + json.dumps({"step": 2, "time": 2.0, "kind": "step"}) + "\n")
    assert Timeline.glance(path).position == Timeline.read(path).position == 2

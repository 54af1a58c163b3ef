"""What a run's events say about its samples: whole epochs, and each way in which one can depart."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data.jobs import sampler
from history.run_builder import JOB, Story, build_run
from quorate.core.errors import RunError
from quorate.data.indices import ranges_of
from quorate.data.ledger import Tally
from quorate.data.sampler import LaneSampler
from quorate.history.ledger import EpochStatus, Ledger, read_ledger
from quorate.storage.run_folder import RunFolder

SAMPLES, BATCH = 30, 8
KEYS: dict[str, Any] = {"lanes": 4, "batch_size": BATCH, "steps": 9}
PER_EPOCH = 3
WHOLE, INCOMPLETE, BROKEN = EpochStatus.WHOLE, EpochStatus.INCOMPLETE, EpochStatus.BROKEN
PLAN = sampler(SAMPLES, **KEYS)


def begin(story: Story, from_step: int = 0, samples: int = SAMPLES) -> Story:
    fields = {"total_steps": 9, "steps_per_epoch": PER_EPOCH, "epoch_length": samples, "dataset_samples": samples}
    return story.tell("run", from_step=from_step, lanes=4, **fields)


def tell(story: Story, steps: Sequence[int], plan: LaneSampler = PLAN, **fields: Any) -> Story:
    """Tell steps as the loop does; `fields` go over what it would have told."""
    for step in steps:
        epoch, batch = plan.epoch_of(step), plan.batch(step)
        told: dict[str, Any] = {"epoch": epoch, "samples": len(batch), "ledger": str(Tally.of(epoch, batch))}
        if plan.is_own(epoch):
            told["own_order"] = True
        if plan.ends_epoch(step):
            told["dropped"] = sorted(plan.dropped(epoch).tolist())
            if plan.is_own(epoch):
                told["planned"] = str(plan.planned(epoch))
        story.tell("step", step, **told | fields)
    return story


def read(steps: Sequence[int], **fields: Any) -> dict[str, Any]:
    """What a step that uses these samples in epoch 1 tells."""
    return {"samples": len(steps), "ledger": str(Tally.of(1, steps)), **fields}


def run_of(folder: Path, story: Story, done: int | None = None) -> RunFolder:
    result = None if done is None else {"status": "complete", "steps": done}
    run = build_run(folder, job=JOB | KEYS, story=story, result=result)
    run.write_environment({"torch": torch.__version__})
    return run


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Ledger]:
    return lambda story, done=None: read_ledger(run_of(tmp_path, story, done))


Judged = Callable[..., Ledger]


def statuses(ledger: Ledger) -> list[EpochStatus]:
    return [entry.status for entry in ledger.epochs]


def test_skipped_steps_are_listed_and_their_samples_are_not_counted_as_used(judged: Judged) -> None:
    story = tell(begin(Story()), [1, 2, 3])
    tell(story, [4], skipped={"lanes": [2], "samples": PLAN.share(4, 2).tolist()})
    ledger = judged(tell(story, [5, 6, 7]), 7)
    assert statuses(ledger) == [WHOLE, WHOLE, INCOMPLETE]
    assert ledger.is_whole
    assert [entry.samples for entry in ledger.epochs] == [24, 16, 8]
    assert [entry.skipped_steps for entry in ledger.epochs] == [(), (4,), ()]
    assert [entry.skipped_samples for entry in ledger.epochs] == [0, 8, 0]
    assert "in each of 2 epochs, but for those listed as dropped and 8 skipped." in ledger.verdict
    assert "Skipped, since the loss was not finite: step 4, with 8 samples." in ledger.verdict


def test_of_a_step_that_is_skipped_in_part_the_rest_is_used(judged: Judged) -> None:
    story = tell(begin(Story()), [1, 2, 3])
    left_out = PLAN.share(4, 2).tolist()
    tell(story, [4], skipped={"lanes": [2], "samples": left_out, "partial": True})
    ledger = judged(tell(story, [5, 6, 7]), 7)
    assert ledger.is_whole
    assert [entry.samples for entry in ledger.epochs] == [24, 24 - len(left_out), 8]
    assert [entry.skipped_steps for entry in ledger.epochs] == [(), (4,), ()]
    assert [entry.skipped_samples for entry in ledger.epochs] == [0, len(left_out), 0]


def test_a_skipped_step_with_other_samples_breaks_the_ledger_like_any(judged: Judged) -> None:
    story = tell(begin(Story()), [1, 2, 3])
    tell(story, [4], skipped={"lanes": [2], "samples": [1]}, **read(PLAN.batch(5).tolist()))
    ledger = judged(tell(story, [5, 6]), 6)
    assert statuses(ledger) == [WHOLE, BROKEN]


def test_bad_samples_are_listed_and_count_as_neither_used_nor_lost(judged: Judged) -> None:
    story, used = tell(begin(Story()), [1, 2, 3]), PLAN.batch(4).tolist()
    tell(story, [4], **read(used[2:], bad=ranges_of(used[:2])))
    ledger = judged(tell(story, [5, 6, 7]), 7)
    assert statuses(ledger) == [WHOLE, WHOLE, INCOMPLETE]
    assert [entry.samples for entry in ledger.epochs] == [24, 22, 8]
    assert ledger.epochs[1].bad == ranges_of(used[:2])
    assert "but for those listed as dropped and 2 bad." in ledger.verdict
    named = ", ".join(map(str, sorted(used[:2])))
    assert f"Left out, since the data do not give them: samples {named}." in ledger.verdict


def test_a_bad_sample_that_was_used_all_the_same_or_is_of_another_step_breaks_the_ledger(judged: Judged) -> None:
    used, other = PLAN.batch(4).tolist(), PLAN.batch(5).tolist()
    for bad, left in ((used[:1], used), (other[:1], used[1:])):
        story = tell(tell(begin(Story()), [1, 2, 3]), [4], **read(left, bad=ranges_of(bad)))
        ledger = judged(tell(story, [5, 6]), 6)
        assert statuses(ledger) == [WHOLE, BROKEN]
        assert "step 4 did not use the samples" in ledger.verdict


def test_whole_epochs_with_what_they_dropped(judged: Judged) -> None:
    ledger = judged(tell(begin(Story()), range(1, 7)), 6)
    assert statuses(ledger) == [WHOLE, WHOLE]
    assert ledger.is_whole
    assert [(entry.first_step, entry.last_step, entry.samples) for entry in ledger.epochs] == [(1, 3, 24), (4, 6, 24)]
    assert [len(entry.dropped) for entry in ledger.epochs] == [6, 6]
    assert ledger.epochs[0].dropped != ledger.epochs[1].dropped
    assert "each of 30 samples was used exactly once in each of 2 epochs, but for those listed" in ledger.verdict
    assert "Every step used the samples that the order of the job gives it" in ledger.verdict


def test_an_epoch_in_which_the_run_ended_is_incomplete_and_not_broken(judged: Judged) -> None:
    ledger = judged(tell(begin(Story()), range(1, 6)), 5)
    assert (statuses(ledger), ledger.is_whole) == ([WHOLE, INCOMPLETE], True)
    assert "exactly once in epoch 0" in ledger.verdict
    assert "Epoch 1 is incomplete: the run has come to step 5." in ledger.verdict


def test_a_branch_begins_within_an_epoch(judged: Judged) -> None:
    ledger = judged(tell(begin(Story(), from_step=4), range(5, 10)), 9)
    assert statuses(ledger) == [INCOMPLETE, WHOLE]
    assert ledger.epochs[0].first_step == 5
    assert ledger.epochs[0].reason == "the run began after step 4, from a checkpoint of another"


def test_a_step_told_again_counts_once(judged: Judged) -> None:
    story = tell(begin(tell(begin(Story()), range(1, 6)), from_step=3), range(4, 7))
    ledger = judged(story, 6)
    assert (statuses(ledger), ledger.told_again) == ([WHOLE, WHOLE], 2)
    assert ledger.epochs[1].samples == 24


def test_a_step_told_again_with_other_samples_is_broken(judged: Judged) -> None:
    story = tell(begin(Story()), range(1, 6))
    ledger = judged(tell(tell(begin(story, from_step=3), [4], **read(range(8))), [5, 6]), 6)
    assert statuses(ledger) == [WHOLE, BROKEN]
    assert ledger.verdict == "Broken in epoch 1: step 4 was recorded twice, with other samples the second time."


def test_missing_steps_are_named(judged: Judged) -> None:
    ledger = judged(tell(begin(Story()), [1, 2, 3, 5, 6, 7, 8, 9]), 9)
    assert statuses(ledger) == [WHOLE, BROKEN, WHOLE]
    assert ledger.verdict == "Broken in epoch 1: step 4 did not record which samples were used."


def test_what_was_done_and_not_told_is_missing(judged: Judged) -> None:
    ledger = judged(tell(begin(Story()), range(1, 5)), 9)
    assert statuses(ledger) == [WHOLE, BROKEN, BROKEN]
    assert "steps 5, 6 did not record" in ledger.verdict
    assert "7, 8, 9" in ledger.epochs[2].reason


def test_the_first_step_that_departs_from_the_order_of_the_job_is_named(judged: Judged) -> None:
    """Two steps have changed their batches: the sum of the epoch alone would not show it."""
    batches = {step: PLAN.batch(step).tolist() for step in (5, 6)}
    story = tell(begin(Story()), range(1, 5))
    story = tell(tell(story, [5], **read(batches[6])), [6], **read(batches[5]))
    ledger = judged(story, 6)
    assert statuses(ledger) == [WHOLE, BROKEN]
    assert ledger.epochs[1].reason == "step 5 did not use the samples that the order of the job gives it"


def test_in_an_incomplete_epoch_too(judged: Judged) -> None:
    ledger = judged(tell(tell(begin(Story()), [1, 2, 3]), [4], **read(range(8))), 4)
    assert statuses(ledger) == [WHOLE, BROKEN]
    assert "step 4 did not use" in ledger.verdict


def test_where_every_step_was_compared_no_sum_of_all_samples_is_made(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> Tally:
        raise AssertionError("this takes long where there are many samples")

    monkeypatch.setattr(Tally, "of_order", refuse)
    assert statuses(judged(tell(begin(Story()), range(1, 7)), 6)) == [WHOLE, WHOLE]


def test_something_else_than_what_was_dropped_is_listed_though_every_step_agrees(judged: Judged) -> None:
    listed, other = sorted(PLAN.dropped(1).tolist()), PLAN.batch(4).tolist()[0]
    ledger = judged(tell(tell(begin(Story()), range(1, 6)), [6], dropped=[other, *listed[1:]]), 6)
    assert statuses(ledger) == [WHOLE, BROKEN]
    assert "some of them more than once" in ledger.epochs[1].reason


def test_a_step_without_a_good_sample_is_whole(judged: Judged) -> None:
    story, used = tell(begin(Story()), [1, 2, 3]), PLAN.batch(4).tolist()
    tell(story, [4], **read([], bad=ranges_of(used), loss=None))
    ledger = judged(tell(story, [5, 6]), 6)
    assert statuses(ledger) == [WHOLE, WHOLE]
    assert ledger.epochs[1].samples == 16
    assert ledger.epochs[1].skipped_steps == ()


def test_bad_samples_of_evaluations_are_listed_and_count_for_nothing(judged: Judged) -> None:
    story = tell(begin(Story()), [1, 2, 3]).tell("evaluation", 3, metrics={}, bad_samples=2, bad=[[2, 2], [9, 9]])
    story.tell("evaluation", 3, metrics={}, bad_samples=2)
    ledger = judged(tell(story, [4, 5, 6]).tell("evaluation", 6, metrics={}, bad=[[2, "x"]]), 6)
    assert ledger.is_whole
    assert (ledger.evaluated_bad, ledger.evaluated_bad_samples) == (((2, 2), (9, 9)), 2)
    assert "Left out of evaluations: samples 2, 9 of the validation set." in ledger.verdict


def test_a_sample_that_is_bad_twice_in_a_step_counts_twice(judged: Judged) -> None:
    """A task's own order may give it twice."""
    story, used = begin(Story()), [3, 4, 3, 8, 9, 10, 11, 12]
    for step in (1, 2, 3):
        last = {"planned": str(Tally.of(0, used * 3))} if step == 3 else {}
        told: dict[str, Any] = {"samples": 5, "ledger": str(Tally.of(0, used[3:])), "bad": ranges_of(used[:3]), **last}
        tell(story, [step], own_order=True, dropped=[], **told)
    ledger = judged(story, 3)
    assert ledger.is_whole, ledger.verdict
    assert ledger.epochs[0].bad_samples == 9


@pytest.mark.parametrize("bad", [[3], [[3]], [[4, 3]], [[-1, 3]], [[0, 2**62]], "3", [["0", "1"]]])
def test_a_step_with_bad_samples_that_are_none_has_told_nothing(judged: Judged, bad: Any) -> None:
    ledger = judged(tell(tell(begin(Story()), [1, 2]), [3], bad=bad), 3)
    assert "step 3 did not record which samples were used" in ledger.verdict


class TestBySumsAlone:
    """Where another version of torch has shuffled, single steps cannot be compared."""

    def judge(self, folder: Path, story: Story, done: int = 6) -> Ledger:
        run = run_of(folder, story, done)
        run.write_environment({"torch": "0.1"})
        return read_ledger(run)

    def test_whole(self, tmp_path: Path) -> None:
        ledger = self.judge(tmp_path, tell(begin(Story()), range(1, 7)))
        assert (statuses(ledger), ledger.is_whole) == ([WHOLE, WHOLE], True)
        assert "not compared with the order of the job: the run was made with torch 0.1" in ledger.verdict

    def test_a_sample_in_the_place_of_another(self, tmp_path: Path) -> None:
        used = PLAN.batch(5).tolist()
        story = tell(begin(Story()), range(1, 5))
        ledger = self.judge(tmp_path, tell(tell(story, [5], **read([used[1], *used[1:]])), [6]))
        assert statuses(ledger) == [WHOLE, BROKEN]
        assert "some of them more than once and others not at all" in ledger.epochs[1].reason

    @pytest.mark.parametrize(("used", "count"), [(range(7), 23), (range(9), 25)])
    def test_a_sample_too_many_or_too_few(self, tmp_path: Path, used: range, count: int) -> None:
        ledger = self.judge(tmp_path, tell(tell(tell(begin(Story()), range(1, 5)), [5], **read(used)), [6]))
        assert f"used {count} samples and dropped 6, where the training set has 30" in ledger.verdict

    def test_something_else_than_what_was_dropped_is_listed(self, tmp_path: Path) -> None:
        listed = sorted(PLAN.dropped(1).tolist())
        other = PLAN.batch(4).tolist()[0]
        story = tell(tell(begin(Story()), range(1, 6)), [6], dropped=[other, *listed[1:]])
        assert statuses(self.judge(tmp_path, story)) == [WHOLE, BROKEN]

    def test_the_same_samples_of_another_epoch_do_not_count(self, tmp_path: Path) -> None:
        story = tell(tell(begin(Story()), range(1, 6)), [6], ledger=str(Tally.of(0, PLAN.batch(6))))
        assert statuses(self.judge(tmp_path, story)) == [WHOLE, BROKEN]


class TestOrderOfOnesOwn:
    def test_counts_what_it_gives(self, tmp_path: Path) -> None:
        plan = sampler(SAMPLES, lambda epoch, generator: [epoch, *range(7), *range(4, 22)], **KEYS)
        ledger = read_ledger(run_of(tmp_path, tell(begin(Story()), range(1, 9), plan), 8))
        assert statuses(ledger) == [WHOLE, WHOLE, INCOMPLETE]
        assert [entry.is_own for entry in ledger.epochs] == [True] * 3
        assert ledger.epochs[0].dropped == (20, 21)
        assert ledger.verdict.startswith("2 epochs used the samples in an order of the task's own")

    def test_departs_where_something_else_was_used(self, tmp_path: Path) -> None:
        plan = sampler(SAMPLES, lambda epoch, generator: [epoch, *range(7), *range(4, 22)], **KEYS)
        story = tell(tell(begin(Story()), range(1, 5), plan), [5], plan, **read(range(8)))
        ledger = read_ledger(run_of(tmp_path, tell(story, [6], plan), 6))
        assert statuses(ledger) == [WHOLE, BROKEN]
        assert "the task's own order" in ledger.verdict
        story = tell(begin(Story()), range(1, 4), plan, planned=None)
        assert "did not record the order" in read_ledger(run_of(tmp_path, story, 3)).verdict


def test_another_training_set_in_another_part_is_broken(judged: Judged) -> None:
    story = begin(tell(begin(Story()), range(1, 4)), from_step=3, samples=31)
    ledger = judged(story, 3)
    assert not ledger.is_whole
    assert ledger.verdict == "Broken: the training set had 30 and then 31 samples."


def test_a_torn_line_is_a_step_that_is_not_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, tell(begin(Story()), range(1, 7)), 6)
    lines = run.events_file.read_text().splitlines(keepends=True)
    assert '"step":2,' in lines[2]
    run.events_file.write_text("".join([*lines[:2], lines[2][:40] + "\n", *lines[3:]]))
    assert "step 2 did not record" in read_ledger(run).verdict


@pytest.mark.parametrize("value", [None, 7, "ab", "x" * 32])
def test_a_ledger_that_is_none_is_a_step_that_is_not_told(judged: Judged, value: object) -> None:
    story = tell(tell(begin(Story()), [1], ledger=value), [2, 3])
    assert statuses(judged(story, 3)) == [BROKEN]


def test_a_run_that_has_told_nothing_yet(judged: Judged) -> None:
    for story in (Story(), begin(Story())):
        ledger = judged(story)
        assert (ledger.epochs, ledger.is_whole) == ((), True)
        assert "nothing to check" in ledger.verdict


def test_a_branch_that_ended_where_it_began(judged: Judged) -> None:
    ledger = judged(begin(Story(), from_step=5), 5)
    assert (ledger.epochs, ledger.is_whole) == ((), True)


def test_a_run_of_an_earlier_version_has_none(judged: Judged) -> None:
    with pytest.raises(RunError, match=r"has no ledger.*Train the job again"):
        judged(Story().begin().train(1, 8), 8)
    with pytest.raises(RunError, match="has no ledger"):
        judged(Story(), 8)
    with pytest.raises(RunError, match="does not say how the run began"):
        judged(tell(Story(), [1, 2]), 2)


def test_without_the_job_the_sums_are_judged(tmp_path: Path) -> None:
    run = run_of(tmp_path, tell(begin(Story()), range(1, 7)), 6)
    run.job_file.write_text("[")
    ledger = read_ledger(run)
    assert ledger.is_whole
    assert "recorded of its job cannot be read" in ledger.verdict


def test_events_are_read_as_they_are_written(tmp_path: Path) -> None:
    run = run_of(tmp_path, tell(begin(Story()), [1]))
    step = json.loads(run.events_file.read_text().splitlines()[1])
    assert read_ledger(run).epochs[0].samples == step["samples"]


@pytest.mark.parametrize("is_redone", [False, True])
def test_a_step_that_was_redone_with_other_samples_shows_in_the_state(tmp_path: Path, is_redone: bool) -> None:
    # Told once, with the right samples; the state is made of those of the second time.
    used = Tally.of(0, [1] * BATCH) if is_redone else Tally.of(0, PLAN.batch(1))
    state = used + Tally.of(0, PLAN.batch(2)) + Tally.of(0, PLAN.batch(3))
    run = run_of(tmp_path, tell(begin(Story()), [1, 2, 3]))
    run.write_result({"run": run.name, "status": "complete", "steps": 3, "ledger": str(state)})
    ledger = read_ledger(run)
    assert ledger.is_whole is not is_redone
    assert ("other samples than the steps have recorded" in ledger.verdict) is is_redone

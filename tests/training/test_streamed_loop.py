"""Training on a set in blocks: the same bits on any number of workers, and each sample once an epoch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bits.bit_tasks import Points, Regression
from gang import job
from quorate.core.errors import TaskError
from quorate.data.block_sampler import BlockSampler
from quorate.data.sampler import LaneSampler
from quorate.history.ledger import Account, Ledger, judge
from quorate.observe.event import Event
from quorate.observe.events import RunBegan, StepCompleted, TrainingBlocks
from quorate.worker.assembly import sampler_of
from training.recorded import Run, run

BLOCKS = (9, 0, 14, 3, 11, 1, 12)
KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 12, "epochs": 3}


class InBlocks(Points):
    """Fifty points that lie in blocks; which sample is which is as in any set."""

    blocks = BLOCKS
    window = 5
    reading_facts: ClassVar[dict[str, str]] = {"index": "/nowhere/index.quorate", "digest": "ab" * 16}


class Streamed(Regression):
    def datasets(self) -> Any:
        return InBlocks(), Points(21)


class Whole(Regression):
    """The same points, shuffled as a whole."""


class OwnOrder(Streamed):
    def order(self, epoch: int, generator: Any) -> Sequence[int] | None:
        return range(50)


def judged(folder: Path, events: Sequence[Event]) -> Ledger:
    """By the order of the job, step by step."""
    file = folder / "told.jsonl"
    file.write_text("".join(f"{event.to_json()}\n" for event in events))
    account = Account.read(file)
    order = sampler_of(job(Streamed, **KEYS), Streamed(), InBlocks())
    return judge(account, max(account.steps), order)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(Streamed, tmp_path_factory.mktemp("streamed") / "one", 1, **KEYS)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bits_and_the_same_ledger_on_any_number_of_workers(
    undisturbed: Run, tmp_path: Path, workers: int
) -> None:
    ran = run(Streamed, tmp_path / "some", workers, **KEYS)
    assert ran.ended.digest == undisturbed.ended.digest
    assert ran.told == undisturbed.told
    assert judged(tmp_path, ran.events).is_whole


def test_the_ledger_counts_every_sample_once_and_lists_what_is_dropped(undisturbed: Run, tmp_path: Path) -> None:
    ledger = judged(tmp_path, undisturbed.events)
    assert [entry.status.value for entry in ledger.epochs] == ["whole"] * 3
    assert [(entry.samples, len(entry.dropped)) for entry in ledger.epochs] == [(48, 2)] * 3
    assert len({entry.dropped for entry in ledger.epochs}) > 1
    (began,) = [event for event in undisturbed.events if isinstance(event, RunBegan)]
    assert began.data == TrainingBlocks(blocks=7, window=5, index="/nowhere/index.quorate", digest="ab" * 16)


def test_two_steps_that_have_changed_their_samples_are_found(undisturbed: Run, tmp_path: Path) -> None:
    """The sum of the epoch alone would not show it."""
    ledgers = undisturbed.fields("step", "ledger")
    changed = {1: ledgers[2], 2: ledgers[1]}
    events = [
        replace(event, ledger=changed[event.step])
        if isinstance(event, StepCompleted) and event.step in changed
        else event
        for event in undisturbed.events
    ]
    assert "step 1 did not use the samples" in judged(tmp_path, events).verdict


def test_resumed_within_epochs_on_one_three_and_two_workers(undisturbed: Run, tmp_path: Path) -> None:
    parts = [run(Streamed, tmp_path / "job", workers, stop, **KEYS) for workers, stop in ((1, 3), (3, 6), (2, None))]
    assert [part.ended.ending for part in parts] == ["interrupted", "interrupted", "complete"]
    begun = [list(part.fields("run", "from_step").values()) for part in parts]
    assert begun == [[0], [3], [6]], "each went on within an epoch of four steps"
    assert parts[-1].ended.digest == undisturbed.ended.digest
    ledger = judged(tmp_path, [event for part in parts for event in part.events])
    assert [entry.status.value for entry in ledger.epochs] == ["whole"] * 3
    assert ledger.told_again == 0
    assert ledger.is_whole


def test_blocks_are_read_in_another_order_than_a_set_as_a_whole(undisturbed: Run, tmp_path: Path) -> None:
    assert run(Whole, tmp_path / "whole", 1, **KEYS).ended.digest != undisturbed.ended.digest


def test_an_order_of_the_tasks_own_goes_before_that_of_blocks() -> None:
    spec = job(OwnOrder, **KEYS)
    assert isinstance(sampler_of(spec, Streamed(), InBlocks()), BlockSampler)
    order = sampler_of(spec, OwnOrder(), InBlocks())
    assert isinstance(order, LaneSampler)
    assert order.is_own(0)
    assert order.batch(1).tolist() == list(range(12))


class Misnamed(Points):
    """Its blocks and window are something else."""

    blocks = 4
    window = 5


def test_what_only_has_the_name_of_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(TaskError, match="or have another name"):
        sampler_of(job(Streamed, **KEYS), Streamed(), Misnamed())

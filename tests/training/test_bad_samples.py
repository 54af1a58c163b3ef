"""Bad samples that a job leaves out: the same bits and the same words on any number of workers, and an end with a
reason where nothing is left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits.bit_tasks import BatchNormAndDropout, Points, Regression
from quorate.checkpoint.store import CheckpointFolder
from quorate.data.bad_sample import BadSample
from quorate.data.indices import numbers_in
from quorate.history.ledger import Account, Ledger, judge
from quorate.observe.event import Event
from quorate.shards.dataset import Shards
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from quorate.training.loop import MOST_RANGES
from quorate.worker.assembly import sampler_of
from training.recorded import Run, on_one_and_on_three, run

KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 16, "epochs": 2, "on_bad_sample": "skip"}
RECORDS, FILES, VALIDATION = 160, 4, 21
STEPS = RECORDS // 16
LANE_0_EMPTY = 6
# What is bad is known to the test alone, and to the workers that are forked from it.
TORN: dict[str, set[int]] = {"training": set(), "validation": set()}
FOLDERS: dict[str, Path] = {}


def decoded(record: dict[str, Any]) -> Any:
    if record["id"] in TORN[record["set"]]:
        raise ValueError(f"record {record['id']} is torn")
    return torch.tensor(record["inputs"]), torch.tensor(record["target"])


class Sharded(BatchNormAndDropout):
    def datasets(self) -> Any:
        return tuple(Shards(FOLDERS[name], decode=decoded, window=10) for name in ("training", "validation"))


def write(folder: Path, name: str, records: int, files: int) -> Path:
    folder.mkdir()
    points = Points(records)
    for number in range(files):
        rows = [
            {"id": index, "set": name, "inputs": points.inputs[index].tolist(), "target": points.targets[index].item()}
            for index in range(records * number // files, records * (number + 1) // files)
        ]
        (folder / f"part-{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_index(build_index(str(folder)), folder / NAME)
    return folder


def bad_of(ran: Run) -> dict[int | None, list[int]]:
    """Of each step, the samples that it has left out."""
    told = ran.fields("step", "bad")
    bad = {step: numbers_in(ranges or ()).tolist() for step, ranges in told.items()}
    assert [len(each) for each in bad.values()] == [count or 0 for count in ran.fields("step", "bad_samples").values()]
    return bad


def order() -> Any:
    return sampler_of(gang.job(Sharded, **KEYS), Sharded(), Shards(FOLDERS["training"], decode=decoded, window=10))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On one worker: a lane's whole share is bad at the last step, another's at another, and some here and there."""
    folder = tmp_path_factory.mktemp("torn")
    FOLDERS["training"] = write(folder / "training", "training", RECORDS, FILES)
    FOLDERS["validation"] = write(folder / "validation", "validation", VALIDATION, 1)
    TORN["training"] = {*order().share(2 * STEPS, 2).tolist(), *order().share(LANE_0_EMPTY, 0).tolist(), 5, 77, 150}
    TORN["validation"] = {4, 20}
    return run(Sharded, folder / "one", 1, **KEYS)


def judged(folder: Path, events: list[Event]) -> Ledger:
    file = folder / "told.jsonl"
    file.write_text("".join(f"{event.to_json()}\n" for event in events))
    account = Account.read(file)
    return judge(account, max(account.steps), order())


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_same_bits_and_the_same_ledger_on_any_number_of_workers(alone: Run, workers: int, tmp_path: Path) -> None:
    ran = run(Sharded, tmp_path / "some", workers, **KEYS)
    assert ran.ended.tensors == alone.ended.tensors
    assert ran.ended.digest == alone.ended.digest
    assert json.dumps(ran.told) == json.dumps(alone.told)
    assert ran.ended.progress == alone.ended.progress
    assert judged(tmp_path, ran.events).is_whole


@pytest.mark.usefixtures("alone")
def test_the_same_buffers_after_a_step_in_which_lane_0_had_no_sample(tmp_path: Path) -> None:
    """A step later the lanes would agree on them again."""
    one, two = (run(Sharded, tmp_path / str(n), n, stop_at=LANE_0_EMPTY, **KEYS).ended for n in (1, 2))
    assert two.digest == one.digest
    assert two.tensors == one.tensors


def test_every_bad_sample_is_told_once_an_epoch_and_the_rest_is_used(alone: Run, tmp_path: Path) -> None:
    told = bad_of(alone)
    for epoch in (0, 1):
        found = [index for step in range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1) for index in told[step]]
        assert sorted(found) == sorted(TORN["training"])
    for step, lane in ((2 * STEPS, 2), (LANE_0_EMPTY, 0)):
        assert set(order().share(step, lane).tolist()) <= set(told[step]), "the lane had not one sample"
    assert alone.ended.progress["bad"] == 2 * len(TORN["training"])
    ledger = judged(tmp_path, alone.events)
    assert [entry.status.value for entry in ledger.epochs] == ["whole", "whole"]
    assert [entry.samples for entry in ledger.epochs] == [RECORDS - len(TORN["training"])] * 2
    assert ledger.evaluated_bad == ((4, 4), (20, 20))
    assert "Left out of evaluations: samples 4, 20 of the validation set" in ledger.verdict


def test_the_first_of_each_file_is_told_once_in_a_run_with_its_place(alone: Run) -> None:
    warnings = [line for lines in alone.fields("step", "warnings").values() for line in lines or ()]
    (more,) = [line for line in warnings if "quorate show RUN --ledger" in line]
    told = [line for line in warnings if line != more]
    for line in told:
        assert "of the training set is left out: ValueError: record" in line
    files = {f"part-{index * FILES // RECORDS}.jsonl" for index in TORN["training"]}
    assert len(files) > 1
    assert sorted(line.partition(" of part-")[2] for line in told) == sorted(f"{file[5:]})" for file in files)
    assert all(line in alone.ended.log for line in warnings), "the log of a worker has them too"


def test_an_evaluation_lists_its_own_and_tells_of_them_once(alone: Run) -> None:
    assert list(alone.fields("evaluation", "bad").values()) == [[[4, 4], [20, 20]], None], "the same as before"
    assert list(alone.fields("evaluation", "bad_samples").values()) == [2, 2]
    first, second = alone.fields("evaluation", "warnings").values()
    assert [line.partition(":")[0] for line in first[:1]] == ["sample 4 of the validation set is left out"]
    assert [line.partition(";")[0] for line in first[1:]] == ["more samples of the validation set are left out"]
    assert second is None
    assert alone.ended.progress["bad_evaluated"] == 2


# --- steps without a single sample

EMPTY = 2


class TornPoints(Points):
    """Fifty points in one block, so that an epoch is in the order of a shuffle; some cannot be read."""

    torn: frozenset[int] = frozenset()

    def __getitem__(self, index: int) -> Any:
        if index in self.torn:
            raise BadSample(f"points.bin, byte {index * 28}: torn")
        return super().__getitem__(index)


class AllTorn(TornPoints):
    torn = frozenset(range(50))


class EmptyBatch(BatchNormAndDropout):
    """The rate follows the updates, so that an update too many would show."""

    def datasets(self) -> Any:
        return TornPoints(), Points(21)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


class EmptyBatchLone(Regression):
    def datasets(self) -> Any:
        return TornPoints(), Points(21)


FEW: dict[str, Any] = {"epochs": 1, "batch_size": 10, "on_bad_sample": "skip"}


def tear_batch(monkeypatch: pytest.MonkeyPatch, task: type[Regression], **keys: Any) -> set[int]:
    batch = set(sampler_of(gang.job(task, **keys), task(), Points()).batch(EMPTY).tolist())
    monkeypatch.setattr(TornPoints, "torn", frozenset(batch))
    return batch


def saved_state(ran: Run) -> str:
    folder = CheckpointFolder(ran.folder / "checkpoints")
    newest = folder.search().newest
    assert newest is not None
    return repr(folder.load(newest).state["replica"])


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"links": "tcp", "bucket_mb": 0.0001},
        pytest.param({"accumulate": 2}, marks=pytest.mark.long),
        {"on_nonfinite_loss": "skip"},
    ],
    ids=str,
)
def test_a_step_without_a_sample_changes_nothing(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch = tear_batch(monkeypatch, EmptyBatch, **FEW | keys)
    ran = on_one_and_on_three(EmptyBatch, tmp_path, **FEW | keys)
    assert ran.ended.ending == "complete"
    assert [step for step, loss in ran.fields("step", "loss").items() if loss is None] == [EMPTY]
    assert list(ran.fields("step", "samples").values()) == [10, 0, 10, 10, 10]
    assert set(bad_of(ran)[EMPTY]) == batch
    assert ran.ended.progress["samples"] == 40
    before = run(EmptyBatch, tmp_path / "before", 1, stop_at=EMPTY - 1, **FEW | keys)
    after = run(EmptyBatch, tmp_path / "after", 1, stop_at=EMPTY, **FEW | keys)
    assert saved_state(after) == saved_state(before)


def test_a_job_of_one_lane_leaves_it_out_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tear_batch(monkeypatch, EmptyBatchLone, lanes=1, **FEW)
    ran = run(EmptyBatchLone, tmp_path / "run", lanes=1, **FEW)
    assert ran.ended.ending == "complete"
    assert [step for step, loss in ran.fields("step", "loss").items() if loss is None] == [EMPTY]
    assert ran.ended.progress["samples"] == 40
    assert ran.ended.progress["barren"] == 0, "the next step had samples"


def test_a_micro_batch_without_a_sample_is_left_out_of_its_lane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {**FEW, "batch_size": 25, "accumulate": 2}
    micro = sampler_of(gang.job(EmptyBatch, **keys), EmptyBatch(), Points()).micro_batches(1, 3)
    for part in (micro[0], micro[-1]):  # the last one is the one whose gradients may be sent at once
        monkeypatch.setattr(TornPoints, "torn", frozenset(part))
        ran = on_one_and_on_three(EmptyBatch, tmp_path / str(part[0]), **keys)
        assert bad_of(ran)[1] == sorted(part)


class NothingGood(Regression):
    def datasets(self) -> Any:
        return AllTorn(), Points(21)


class NothingToEvaluate(Regression):
    def datasets(self) -> Any:
        return Points(), AllTorn()


@pytest.mark.parametrize("keys", [{"epochs": 2}, {"steps": 3}], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_job_that_reads_nothing_good_ends_with_the_reason(workers: int, keys: dict[str, Any], tmp_path: Path) -> None:
    ran = run(NothingGood, tmp_path / "run", workers, batch_size=10, on_bad_sample="skip", **keys)
    failures = ran.ended.failures
    assert len(failures) == workers
    assert len({failure.message for failure in failures}) == 1
    steps = keys.get("steps", 5)
    assert failures[0].step == steps, "a whole epoch, or all that the job reads"
    assert f"Not one sample of the last {steps} steps could be read" in failures[0].message
    assert "points.bin, byte" in failures[0].message


def test_a_job_with_one_good_sample_an_epoch_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(AllTorn, "torn", frozenset(range(1, 50)))
    ran = run(NothingGood, tmp_path / "run", 2, batch_size=10, epochs=2, on_bad_sample="skip")
    assert ran.ended.ending == "complete"
    assert ran.ended.progress["samples"] == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_an_evaluation_without_a_sample_ends_the_job_with_the_reason(workers: int, tmp_path: Path) -> None:
    ran = run(NothingToEvaluate, tmp_path / "run", workers, batch_size=10, epochs=1, on_bad_sample="skip")
    assert {failure.message.partition(",")[0] for failure in ran.ended.failures} == {
        "Every sample of the validation set is bad and was left out (on_bad_sample: skip)"
    }
    assert "Sample 0: points.bin, byte 0: torn." in ran.ended.failure.message


class EveryOther(TornPoints):
    torn = frozenset(range(0, 3000, 2))


class HalfToEvaluate(Regression):
    def datasets(self) -> Any:
        return Points(), EveryOther(3000)


@pytest.mark.long
def test_an_evaluation_with_any_number_of_bad_samples_is_told(tmp_path: Path) -> None:
    """An event that is too large would not arrive, and its metrics with it."""
    keys = {"steps": 2, "on_bad_sample": "skip", "evaluate": {"every": 1}}
    ran = on_one_and_on_three(HalfToEvaluate, tmp_path, **keys)
    assert list(ran.fields("evaluation", "bad_samples").values()) == [1500, 1500]
    listed, again = ran.fields("evaluation", "bad").values()
    assert listed == [[number, number] for number in range(0, 2 * MOST_RANGES, 2)]
    assert again is None
    file = tmp_path / "told.jsonl"
    file.write_text("".join(f"{event.to_json()}\n" for event in ran.events))
    ledger = judge(Account.read(file), 2, None)
    assert "Left out of evaluations: samples 0, 2, 4, 6, 8, 10, 12, 14 … (1500 in all)" in ledger.verdict

"""Training on damaged shards: left out alike on any number of workers and loaders, or ended with the file's name."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from data.shards.corruption import Harm, corrupt
from data.shards.shard_files import blocks_of
from quorate.data.indices import numbers_in
from quorate.shards.index import load_index
from schemas import validate
from streamed_job import ENDINGS, SIZES, SOURCE, assert_whole, keys_of, write_set
from streamed_task import Streamed
from training.recorded import Run, run

KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 12, "epochs": 2, "seed": 3}
DAMAGES = ("a range is written over", "another sound file is in its place")


@dataclass(frozen=True)
class Damaged:
    """A folder of sound shards, one of damaged ones with the same index, and what was done to them."""

    kind: str
    sound: Path
    folder: Path
    harm: Harm


def damaged(kind: str, how: str, folder: Path) -> Damaged:
    """Damage that takes some samples away."""
    sound, others, spoilt = (folder / name for name in ("sound", "others", "train"))
    with blocks_of(150):
        write_set(kind, sound, SIZES)
        write_set(kind, others, SIZES, seed=9)
    write_set(kind, folder / "validation", (6, 7), seed=1)
    index = load_index(sound)
    for seed in range(100):
        shutil.copytree(sound, spoilt)
        harm = corrupt(index, sound, spoilt, others, how, random.Random(f"{kind} {seed} training"))
        if harm.bad:
            return Damaged(kind, sound, spoilt, harm)
        shutil.rmtree(spoilt)
    raise AssertionError("none of a hundred damages took a sample away")


READ_ALIKE = ("jsonl", "text", "hdf5")
"""Formats whose damage is told as that of the others is; reading what is damaged is tested of each, each time."""


@pytest.fixture(scope="module", params=list(ENDINGS))
def kind(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


def params(data: Damaged, folder: Path) -> dict[str, Any]:
    return {"kind": data.kind, "place": str(folder), "validation": str(data.sound)}


def trained(data: Damaged, folder: Path, workers: int, on_bad_sample: str = "skip", **keys: Any) -> Run:
    given = KEYS | keys | {"params": params(data, data.folder), "on_bad_sample": on_bad_sample}
    return run(Streamed, folder, workers, **given)


def bad_of(ran: Run) -> dict[int | None, list[int]]:
    return {step: numbers_in(bad).tolist() for step, bad in ran.fields("step", "bad").items() if bad}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind in READ_ALIKE else ()) for kind in ENDINGS],
    indirect=True,
)
@pytest.mark.parametrize("how", [DAMAGES[0], pytest.param(DAMAGES[1], marks=pytest.mark.long)])
def test_damaged_samples_are_left_out_alike_and_the_bits_are_the_same(kind: str, how: str, tmp_path: Path) -> None:
    data = damaged(kind, how, tmp_path)
    alone = trained(data, tmp_path / "one", 1)
    dropped = [set(entry) for entry in alone.fields("step", "dropped").values() if entry]
    told = [
        {index for step, bad in bad_of(alone).items() if step and (step - 1) // 8 == e for index in bad} for e in (0, 1)
    ]
    assert told == [data.harm.bad - dropped[epoch] for epoch in (0, 1)]
    other = trained(data, tmp_path / "two", 2, loader_workers=1)
    assert other.ended.digest == alone.ended.digest
    assert other.told == alone.told


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_damaged_samples_end_the_job_with_the_name_of_the_file(kind: str, workers: int, tmp_path: Path) -> None:
    data = damaged(kind, DAMAGES[0], tmp_path)
    failure = trained(data, tmp_path / "run", workers, "fail").ended.failure
    assert failure.kind == "JobError"
    (file,) = data.harm.touched
    assert f"cannot be read: {file}, " in failure.message
    assert "on_bad_sample: skip" in failure.message
    assert failure.lane is not None and failure.step is not None


# --- by the real command


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    (tmp_path / "job").mkdir()
    place = Workplace(tmp_path / "job")
    place.task.write_text(SOURCE)
    yield place
    place.clean_up()
    place.assert_nobody_left()


def bad_told(place: Workplace) -> dict[int, list[list[int]]]:
    return {event["step"]: event["bad"] for event in place.events() if event["kind"] == "step" and "bad" in event}


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("how", DAMAGES)
def test_by_the_real_command(kind: str, how: str, place: Workplace) -> None:
    data = damaged(kind, how, place.folder)
    place.write_job(**keys_of(kind))
    failed = place.train("--json", "--workers", "2")
    assert failed.code == 1, failed.stderr
    validate("error", failed.document)
    (file,) = data.harm.touched
    assert file in failed.document["failure"]["message"]
    assert file in failed.stderr

    place.write_job(**keys_of(kind, on_bad_sample="skip"))
    endings = []
    for workers in ("1", "2"):
        done = place.train("--json", "--workers", workers)
        assert done.code == 0, done.stderr
        endings.append((done.document["weights_digest"], bad_told(place)))
        ledger = assert_whole(place, bad=sorted(data.harm.bad))
        for epoch in ledger["epochs"]:
            assert set(numbers_in(epoch["bad"]).tolist()) == data.harm.bad - set(epoch["dropped"])
    assert endings[0] == endings[1]
    assert endings[0][1]

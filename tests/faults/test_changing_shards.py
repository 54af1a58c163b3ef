"""Shards that change under a running job, or before it is resumed: the file is named, and put back it goes on."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from command import Done, Running, Workplace
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from streamed_job import (
    ENDINGS,
    EPOCHS,
    SIZES,
    SOURCE,
    STEPS_AN_EPOCH,
    assert_whole,
    keys_of,
    write_data,
    write_shard,
)
from trial import undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

FEW = {"KEPT_BYTES": "1500", "PAUSE": "0.02"}  # so that each epoch reads every shard again
NUMBER = 6


@pytest.fixture(scope="module", params=["tar", "parquet"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder in which the job has run undisturbed, with a copy of what it reads."""
    folder = tmp_path_factory.mktemp(f"changing-{request.param}")
    write_data(request.param, folder)
    shutil.copytree(folder / "train", folder / "sound")
    with undisturbed_in(folder, SOURCE, **keys_of(request.param)) as shared:
        yield shared


@pytest.fixture(autouse=True)
def restored(place: Workplace) -> None:
    (place.folder / "hold").unlink(missing_ok=True)
    restore(place)


def restore(place: Workplace) -> None:
    for file in (place.folder / "sound").iterdir():
        shutil.copy(file, place.folder / "train" / file.name)


def kind_of(place: Workplace) -> str:
    return next(kind for kind, ending in ENDINGS.items() if list((place.folder / "train").glob(f"*.{ending}")))


def shard(place: Workplace) -> Path:
    return place.folder / "train" / f"shard-{NUMBER:03d}.{ENDINGS[kind_of(place)]}"


def rewrite(place: Workplace) -> None:
    """Other records, as many, in as many bytes."""
    file = shard(place)
    size = file.stat().st_size
    seed = 100
    while True:  # texts of numbers are of different lengths
        write_shard(kind_of(place), file, numpy.random.default_rng(seed), SIZES[NUMBER])
        if file.stat().st_size == size:
            return
        seed += 1


def truncate(place: Workplace) -> None:
    os.truncate(shard(place), shard(place).stat().st_size // 3)


def reindex(place: Workplace) -> None:
    """Another shard, and an index that knows it."""
    rewrite(place)
    save_index(build_index(str(place.folder / "train")), place.folder / "train" / NAME)


CHANGES = {"rewritten": rewrite, "truncated": truncate, "reindexed": reindex}
TOLD = {"rewritten": "it was written to later", "truncated": "bytes, and it had", "reindexed": "the index has"}


def held(place: Workplace, workers: int, *arguments: str) -> Running:
    """A job that is in the middle of its first epoch, and waits there."""
    running = place.start("train", "job.yaml", "--json", "--workers", str(workers), *arguments, **FEW)
    running.await_event("checkpoint", at_least=2)
    (place.folder / "hold").touch()
    return running


def let_go(place: Workplace) -> None:
    (place.folder / "hold").unlink()


def assert_named(place: Workplace, done: Done, change: str) -> None:
    assert done.code == 1, f"{done.stdout}\n{done.stderr}"
    message = done.document["failure"]["message"]
    assert f"of the training set cannot be read: {shard(place).name}, bytes " in message
    assert TOLD[change] in message
    assert "on_bad_sample: skip" in message, "with the remedy"
    assert shard(place).name in done.stderr


def assert_goes_on(place: Workplace, workers: int) -> None:
    """Once the file is back: to the undisturbed bits."""
    restore(place)
    resumed = place.run("resume", "last", "--json", "--workers", str(workers), **FEW)
    assert resumed.code == 0, resumed.stderr
    assert 0 < resumed.document["from_step"] < EPOCHS * STEPS_AN_EPOCH
    assert resumed.document["weights_digest"] == undisturbed(place)
    assert_whole(place)


def undisturbed(place: Workplace) -> str:
    import json

    digest: str = json.loads((place.runs()[0] / "result.json").read_text())["weights_digest"]
    return digest


@pytest.mark.parametrize("loaders", ["0", "1"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_shard_that_changes_under_a_running_job(place: Workplace, change: str, loaders: str) -> None:
    running = held(place, 2, "--set", f"loader_workers={loaders}")
    CHANGES[change](place)
    let_go(place)
    done = running.done()
    place.assert_nobody_left()
    assert_named(place, done, change)
    assert_goes_on(place, workers=3)


def stopped(place: Workplace) -> None:
    running = held(place, 1)
    os.kill(running.process.pid, signal.SIGTERM)
    let_go(place)
    done = running.done()
    place.assert_nobody_left()
    assert done.code == 143, done.stderr
    assert place.result()["steps"] % STEPS_AN_EPOCH, "in the middle of an epoch"


@pytest.mark.parametrize("change", ["rewritten", "truncated"])
def test_a_shard_that_changes_between_stop_and_resume(place: Workplace, change: str) -> None:
    stopped(place)
    CHANGES[change](place)
    assert_named(place, place.run("resume", "last", "--json", "--workers", "2", **FEW), change)
    assert_goes_on(place, workers=2)


def test_another_index_is_refused_on_resume_and_nothing_has_changed(place: Workplace) -> None:
    stopped(place)
    before = place.result()
    reindex(place)
    refused = place.run("resume", "last", "--json", "--workers", "2", **FEW)
    assert refused.code == 2, f"{refused.stdout}\n{refused.stderr}"
    assert "index" in refused.document["error"]
    assert place.result() == before
    assert_goes_on(place, workers=3)


def test_a_newcomer_that_finds_another_index_does_not_take_part(place: Workplace) -> None:
    """The others read by the index that they began with; whoever comes later would read something else."""
    running = held(place, 2)
    extra = place.folder / "train" / f"shard-999.{ENDINGS[kind_of(place)]}"
    write_shard(kind_of(place), extra, numpy.random.default_rng(7), 5)
    try:
        save_index(build_index(str(place.folder / "train")), place.folder / "train" / NAME)
        os.kill(place.workers()[1], signal.SIGKILL)
        running.await_event("lost")
        let_go(place)
        done = running.done()
    finally:
        extra.unlink()
    place.assert_nobody_left()
    assert done.code == 1, f"{done.stdout}\n{done.stderr}"
    message = done.document["failure"]["message"]
    # It is compared with the first that was there, which may have been itself.
    assert re.search(r"worker 1 reads other data than (worker 0|it did before) \(dataset", message), message
    assert "the same index of shards" in message
    assert_goes_on(place, workers=2)


@pytest.mark.parametrize("spoil", ["rewritten", "truncated"])
def test_where_bad_samples_are_skipped_a_change_is_told_and_the_job_ends(place: Workplace, spoil: str) -> None:
    change: Callable[[Workplace], Any] = CHANGES[spoil]
    running = held(place, 2, "--set", "on_bad_sample=skip")
    change(place)
    let_go(place)
    done = running.done()
    place.assert_nobody_left()
    assert done.code == 0, done.stderr
    told = [event.get("bad", ()) for event in place.events() if event["kind"] == "step"]
    bad = {index for ranges in told for first, last in ranges for index in range(first, last + 1)}
    first = sum(SIZES[:NUMBER])
    assert bad and bad <= set(range(first, first + SIZES[NUMBER]))

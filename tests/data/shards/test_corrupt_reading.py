"""Damaged shards: verify names them, and an epoch that is read as a worker reads it names them or leaves out exactly
their samples, never gives a wrong one, and never hangs."""

import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

from data.shards.corruption import WAYS, Harm, blocks_of, corrupt
from data.shards.shard_files import KINDS, SMALL_BLOCK, same, write_shards
from quorate.core.errors import JobError
from quorate.data.collate import collate
from quorate.data.feed import Feed
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples
from quorate.shards.dataset import Shards
from quorate.shards.index import NAME, ShardIndex, load_index, save_index
from quorate.shards.indexing import build_index, verify_shards

SIZES = (30, 12, 12, 25)
LANES, TOGETHER = 3, 4
NAMED = re.compile(r"sample (\d+) of the training set cannot be read: ([\w.-]+), (byte|row)s \d+ to \d+: ")


@dataclass(frozen=True)
class Sound:
    """A dataset as it was indexed, and other sound files of the same names; damage is done to copies."""

    folder: Path
    others: Path
    index: ShardIndex


@pytest.fixture(scope="module", params=list(KINDS))
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp(request.param)
    written = write_shards(request.param, folder / "sound", SIZES, seed=3)
    write_shards(request.param, folder / "other", SIZES, seed=4)
    with blocks_of(SMALL_BLOCK):
        index = build_index(str(written.folder))
    save_index(index, written.folder / NAME)
    assert index.blocks > len(SIZES), "some have several blocks"
    return Sound(written.folder, folder / "other", index)


def identity(record: Any) -> Any:
    return record


def without_shapes(record: Any) -> Any:
    """Lists of any length, as TFRecord has them, cannot be stacked; their bytes need not be."""
    return {name: numpy.asarray(value).tobytes() for name, value in record.items()}


def requests(samples: int, chance: random.Random) -> list[Request]:
    """A whole epoch, in some order, a few samples at a time."""
    order = chance.sample(range(samples), samples)
    parts = [tuple(order[start : start + TOGETHER]) for start in range(0, samples, TOGETHER)]
    return [Request(Source.TRAINING, 0, part, number % LANES) for number, part in enumerate(parts)]


@dataclass(frozen=True)
class Reading:
    """What an epoch gave, and the error that ended it, if one did."""

    batches: list[Batch]
    error: str | None


def read(shards: Shards, plan: list[Request], loaders: int, *, skips: bool) -> Reading:
    batches: list[Batch] = []
    feed = Feed(Samples({Source.TRAINING: shards}, collate, 5, skips=skips), iter(plan), loaders, 1)
    try:
        batches += (feed.next(request) for request in plan)
    except JobError as error:
        return Reading(batches, error.message)
    finally:
        feed.close()
        shards.close()
    return Reading(batches, None)


def assert_right(batches: list[Batch], plan: list[Request], bad: frozenset[int], undamaged: Samples) -> None:
    """Every batch has the samples that it should have, as they were, and tells the bad ones."""
    for request, batch in zip(plan, batches, strict=False):
        good = tuple(index for index in request.indices if index not in bad)
        assert batch.bad == tuple(index for index in request.indices if index in bad)
        assert tuple(batch.samples.tolist()) == good
        if not good:
            assert batch.content is None
            continue
        expected = undamaged[Request(request.source, request.epoch, good)]
        assert isinstance(expected, Batch)
        assert same(batch.content, expected.content)


def assert_verified(index: ShardIndex, harm: Harm) -> None:
    """What was touched is named, and no sample of what is called damaged is a good one."""
    flaws = verify_shards(index)
    assert {flaw.file for flaw in flaws} == harm.touched
    named = {(flaw.file, flaw.start) for flaw in flaws if flaw.records and flaw.start is not None}
    for number in range(index.blocks):
        if (index.block(number).file, index.block(number).start) in named:
            assert harm.bad >= set(range(int(index.first[number]), int(index.first[number + 1])))


def hold(sound: Sound, folder: Path, how: str, chance: random.Random) -> Harm:
    """Damage a copy, read an epoch of it under `fail` and under `skip`, and see that all is as it must be."""
    shutil.copytree(sound.folder, folder)
    harm = corrupt(sound.index, sound.folder, folder, sound.others, how, chance)
    assert_verified(load_index(folder), harm)
    columnar = sound.index.kind in ("parquet", "hdf5")
    decode = None if columnar and chance.random() < 0.5 else identity
    if sound.index.kind == "tfrecord":
        decode = without_shapes
    loaders = int(chance.random() < 0.15)
    plan = requests(len(sound.index), chance)
    undamaged = Samples({Source.TRAINING: Shards(sound.folder, decode=decode)}, collate, 5)

    strict = read(Shards(folder, decode=decode), plan, loaders, skips=False)
    assert_right(strict.batches, plan, frozenset(), undamaged)
    lenient = read(Shards(folder, decode=decode), plan, loaders, skips=True)
    assert_right(lenient.batches, plan, harm.bad, undamaged)
    if harm.gone:
        # Nobody can say that it is for ever, so it is no reason to leave samples out.
        for reading in (strict, lenient):
            assert reading.error is not None
            assert any(f"/{name} cannot be read: it is not there" in reading.error for name in harm.gone)
        return harm
    assert lenient.error is None
    assert len(lenient.batches) == len(plan), "read to the end"
    assert {index for batch in lenient.batches for index in batch.bad} == harm.bad
    if not harm.bad:
        assert strict.error is None
        assert len(strict.batches) == len(plan)
        return harm
    assert strict.error is not None
    named = NAMED.match(strict.error)
    assert named is not None, strict.error
    first = next(index for request in plan for index in request.indices if index in harm.bad)
    block = int(numpy.searchsorted(sound.index.first, first, side="right")) - 1
    assert (int(named[1]), named[2]) == (first, sound.index.block(block).file)
    assert len(strict.batches) == next(n for n, request in enumerate(plan) if first in request.indices)
    return harm


def hold_many(sound: Sound, folder: Path, seeds: range) -> Counter[str]:
    """Each way in turn; how many of the damages of each way took samples away."""
    harmful: Counter[str] = Counter()
    for seed in seeds:
        how = WAYS[seed % len(WAYS)]
        try:
            harm = hold(sound, folder / str(seed), how, random.Random(f"{sound.index.kind} {seed} corrupt"))
        except BaseException as error:
            error.add_note(f"of {sound.index.kind} {seed}: {how}")
            raise
        harmful[how] += bool(harm.bad or harm.gone)
        shutil.rmtree(folder / str(seed))
    return harmful


def test_a_damaged_epoch_is_named_or_left_out_and_the_rest_is_as_it_was(sound: Sound, tmp_path: Path) -> None:
    harmful = hold_many(sound, tmp_path, range(len(WAYS)))
    for how in ("files have changed places", "another sound file is in its place", "the file is emptied"):
        assert harmful[how] == 1


@pytest.mark.long
def test_many_damaged_epochs(sound: Sound, tmp_path: Path) -> None:
    harmful = hold_many(sound, tmp_path, range(100, 250))
    assert sum(harmful.values()) > 75
    assert harmful["bytes are appended"] == 0, "behind the records, so none of them is another"

"""Whatever happens to any file of a checkpoint of several workers is found, named, and gone around."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bits.bit_tasks import Adam
from command import Workplace
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import MANIFEST
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError
from training.recorded import run
from trial import REFERENCE, undisturbed_in


def flip(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.name} flipped"


def truncate(file: Path, chance: random.Random) -> str:
    size = chance.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} truncated to {size} bytes"


def delete(file: Path, chance: random.Random) -> str:
    file.unlink()
    return f"{file.name} deleted"


Damage = Callable[[Path, random.Random], str]
# Deleting a file can be done in one way, the others in thousands.
DAMAGES: tuple[Damage, ...] = (flip, flip, flip, truncate, truncate, delete)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with undisturbed_in(tmp_path_factory.mktemp("resumed"), workers=2) as place:
        yield place


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    """The checkpoints of two workers, of two steps."""
    place = tmp_path_factory.mktemp("damage")
    run(Adam, place, 2, steps=4, checkpoint={"every": 2, "keep": 5}, evaluate={"every": 100})
    folder = CheckpointFolder(place / "checkpoints")
    assert {len(info.manifest.parts) for info in folder.list()} == {2}
    assert len(folder.list()) >= 2
    return folder


def damage_and_look(saved: CheckpointFolder, place: Path, chance: random.Random) -> None:
    """Damage a file of the newest at random; the one before is found instead, and the damaged file is named."""
    *_, before, newest = saved.list()
    path = place / newest.path.name
    shutil.copytree(newest.path, path)
    file = chance.choice(sorted(path.iterdir()))
    what = chance.choice(DAMAGES)(file, chance)
    folder = CheckpointFolder(place)
    search = folder.search()
    assert search.newest is not None, what
    assert search.newest.path.name == before.path.name, what
    ((skipped, reason),) = ((skipped.path, skipped.reason) for skipped in search.skipped)
    assert skipped == path, what
    # Of a manifest the content is doubted, by whatever in it does not fit.
    assert file.name in reason or (file.name == MANIFEST and "manifest" in reason), f"{what}: {reason}"
    with pytest.raises(CheckpointError, match=path.name):
        folder.load(CheckpointInfo(path, newest.manifest))
    shutil.rmtree(path)


def damage_often(saved: CheckpointFolder, place: Path, times: range) -> None:
    before = saved.list()[-2]
    place.mkdir()
    shutil.copytree(before.path, place / before.path.name)
    for number in times:
        damage_and_look(saved, place, random.Random(number))
    folder = CheckpointFolder(place)
    assert folder.load(folder.list()[0]).manifest == before.manifest


def test_sixty_damages(saved: CheckpointFolder, tmp_path: Path) -> None:
    damage_often(saved, tmp_path / "checkpoints", range(60))


@pytest.mark.long
def test_a_thousand_damages(saved: CheckpointFolder, tmp_path: Path) -> None:
    damage_often(saved, tmp_path / "checkpoints", range(60, 1060))


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
@pytest.mark.usefixtures("unmeasured")
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    workplace: Workplace, number: int
) -> None:
    undisturbed = json.loads((workplace.folder / "runs" / REFERENCE / "result.json").read_text())["weights_digest"]
    assert workplace.train("--steps", "4", "--json").code == 0
    newest = workplace.last / "checkpoints" / workplace.checkpoints()[-1]
    chance = random.Random(number)
    flip(chance.choice(sorted(newest.iterdir())), chance)
    resumed = workplace.run("resume", "last", "--steps", "8", "--workers", "2", "--json")
    assert resumed.code == 0, resumed.stderr
    assert f"WARNING: checkpoint {newest.name} is damaged, so " in resumed.stderr
    assert resumed.document["from_step"] < 4
    assert resumed.document["weights_digest"] == undisturbed
    folder = CheckpointFolder(workplace.last / "checkpoints")
    assert folder.search().skipped == ()

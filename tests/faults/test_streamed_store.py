"""Jobs that read their shards from a real S3 store: one that is away for a while, and one that does not let them in."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition
from object_store import BUCKET, SECRET_KEY, SeaweedStore, s3, seaweed
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from quorate.stores.objects import FsspecStore
from streamed_job import EPOCHS, SOURCE, STEPS_AN_EPOCH, assert_whole, keys_of, write_data

__all__ = ["s3", "seaweed"]

pytestmark = [
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("unmeasured"),
]

FEW = {"KEPT_BYTES": "1500"}
AWAY = 10.0
# By the environment, for the test in which nothing helps: it need not wait for as long as people do.
GIVE_UP = """

from quorate.shards import fetching

if "GIVE_UP" in os.environ:
    assert "GIVE_UP" in vars(fetching)
    vars(fetching)["GIVE_UP"] = float(os.environ["GIVE_UP"])
"""


@pytest.fixture(params=["parquet", "tar"])
def kind(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


@pytest.fixture
def url(kind: str, s3: SeaweedStore, tmp_path: Path) -> str:
    """Where the store has the shards, indexed there."""
    write_data(kind, tmp_path / "data")
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    for name in ("train", "validation"):
        store = FsspecStore(f"{url}/{name}")
        for file in (tmp_path / "data" / name).iterdir():
            if file.name != NAME:
                store.put_file(file.name, file)
        save_index(build_index(f"{url}/{name}"), f"{url}/{name}/{NAME}")
    return url


@pytest.fixture
def place(kind: str, url: str, tmp_path: Path) -> Iterator[Workplace]:
    (tmp_path / "job").mkdir()
    place = Workplace(tmp_path / "job")
    place.task.write_text(SOURCE + GIVE_UP)
    write_job(place, kind, url)
    yield place
    place.clean_up()
    place.assert_nobody_left()


def write_job(place: Workplace, kind: str, url: str, **keys: Any) -> None:
    params = {"kind": kind, "place": f"{url}/train", "validation": f"{url}/validation"}
    place.write_job(**keys_of(kind, **keys) | {"params": params})


def reference(place: Workplace, kind: str, tmp_path: Path) -> str:
    """The digest of the same job on the same files in a folder."""
    places = {name: str(tmp_path / "data" / name) for name in ("train", "validation")}
    params = {"kind": kind, "place": places["train"], "validation": places["validation"]}
    saved = place.job.read_text()
    place.write_job(**keys_of(kind) | {"params": params, "name": "local"})
    done = place.train("--json", "--workers", "1")
    assert done.code == 0, done.stderr
    place.job.write_text(saved)
    digest: str = done.document["weights_digest"]
    return digest


def steps_told(place: Workplace) -> int:
    return max((event["step"] for event in place.events() if event["kind"] == "step"), default=0)


def test_a_store_that_is_away_for_some_seconds(place: Workplace, kind: str, s3: SeaweedStore, tmp_path: Path) -> None:
    expected = reference(place, kind, tmp_path)
    running = place.start("train", "job.yaml", "--json", "--workers", "2", PAUSE="0.02", **FEW)
    running.await_event("step", at_least=3)
    s3.stop()
    away = time.monotonic()
    try:
        await_condition("workers that wait for the store", lambda: stands_still(place))
        stood = steps_told(place)
        assert stood < EPOCHS * STEPS_AN_EPOCH
        assert running.process.poll() is None
        await_condition("some seconds", lambda: time.monotonic() > away + AWAY)
        assert steps_told(place) == stood, "nothing can be read meanwhile"
    finally:
        s3.start()
    done = running.done()
    place.assert_nobody_left()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == expected
    assert_whole(place)


def stands_still(place: Workplace) -> bool:
    before, over = steps_told(place), time.monotonic() + 1.0
    while time.monotonic() < over:
        if steps_told(place) != before:
            return False
        time.sleep(0.05)  # between two looks
    return True


def everything(place: Workplace) -> str:
    """All that a job has written."""
    files = [file for file in place.folder.rglob("*") if file.is_file() and file.suffix != ".py"]
    return "".join(file.read_bytes().decode(errors="replace") for file in files)


def test_a_store_that_stays_away_ends_the_job_which_can_be_resumed(
    place: Workplace, kind: str, s3: SeaweedStore, tmp_path: Path
) -> None:
    expected = reference(place, kind, tmp_path)
    running = place.start("train", "job.yaml", "--json", "--workers", "2", PAUSE="0.02", GIVE_UP="5", **FEW)
    running.await_event("checkpoint", at_least=2)
    s3.stop()
    try:
        done = running.done(within=300)
        place.assert_nobody_left()
        assert done.code == 1, done.stdout
        assert "cannot be reached" in done.document["failure"]["message"]
        assert "shard-0" in done.document["failure"]["message"], "and what could not be read"
        assert SECRET_KEY not in done.stdout + done.stderr + everything(place)
    finally:
        s3.start()
    resumed = place.run("resume", "last", "--json", "--workers", "3", **FEW)
    assert resumed.code == 0, resumed.stderr
    assert resumed.document["weights_digest"] == expected
    assert_whole(place)


def test_wrong_secret(place: Workplace) -> None:
    began = time.monotonic()
    done = place.train("--json", "--workers", "2", AWS_SECRET_ACCESS_KEY="a-wrong-secret")
    assert done.code in (1, 2), done.stdout
    assert "access is refused" in done.stderr
    assert "AWS_SECRET_ACCESS_KEY" in done.stderr, "what to look at"
    assert time.monotonic() - began < 30, "nobody waits for what only a person can mend"
    for secret in ("a-wrong-secret", SECRET_KEY):
        assert secret not in done.stdout + done.stderr + everything(place)


def test_missing_bucket(place: Workplace, kind: str) -> None:
    write_job(place, kind, "s3://no-such-bucket/data")
    done = place.train("--json", "--workers", "2")
    assert done.code in (1, 2), done.stdout
    assert "there is no bucket 'no-such-bucket'" in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET_KEY not in done.stdout + done.stderr + everything(place)

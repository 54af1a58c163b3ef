"""Copies of checkpoints by the real command: to a folder, and to a real S3 store that fails in every way."""

import json
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Done, Workplace, await_condition
from object_store import BUCKET, SECRET_KEY, Relay, SeaweedStore
from quorate.checkpoint.store import CheckpointFolder
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder
from quorate.stores.place import Place, place_for
from quorate.stores.transfer import Source, copy_checkpoints, fetch_checkpoint
from schemas import validate


def long(test: Any) -> Any:
    """Minutes in all, and many processes."""
    return pytest.mark.long(pytest.mark.usefixtures("unmeasured")(test))


@pytest.fixture
def to(s3: SeaweedStore) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def relay(s3: SeaweedStore) -> Iterator[Relay]:
    relay = Relay(s3.port, delay=0.0)
    yield relay
    relay.close()


def write_job(workplace: Workplace, to: str, **keys: Any) -> None:
    workplace.write_job(checkpoint={"every": 2, "keep": 3, "to": ["checkpoints", to]}, **keys)


def kinds(workplace: Workplace, kind: str) -> list[dict[str, Any]]:
    return [event for event in workplace.events() if event["kind"] == kind]


def copy_to(place: Path, run: RunFolder) -> None:
    spec = load_recorded(run.job_file, {}, []).spec
    assert copy_checkpoints(Source.of(run, spec), place_for(str(place), run.name))


def assert_all_there(workplace: Workplace, place: Place) -> None:
    whole = place.contents().whole
    assert set(workplace.checkpoints()) <= set(whole)
    for name in whole:
        back = fetch_checkpoint(place, name, workplace.temporary / "back")
        shutil.rmtree(back.path)


@long
def test_checkpoints_are_copied_and_a_machine_with_nothing_else_goes_on(
    workplace: Workplace, to: str, undisturbed: str
) -> None:
    write_job(workplace, to)
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD="7")
    running.await_event("copied_to")
    os.kill(running.process.pid, signal.SIGTERM)
    workplace.go()
    stopped = running.done()
    assert stopped.code == 143, stopped.stderr
    place = place_for(to, workplace.last.name)
    assert_all_there(workplace, place)
    assert SECRET_KEY not in stopped.stderr

    name = workplace.last.name
    shutil.rmtree(workplace.folder / "runs")
    done = workplace.run("resume", f"{to}/{name}", "--json", "--workers", "1")
    assert done.code == 0, done.stderr
    validate("train", done.document)
    assert done.document["weights_digest"] == undisturbed
    assert done.document["from_step"] > 0
    (copies,) = done.document["copies"]
    assert copies["place"] == f"{to}/{name}" and copies["missing"] == []
    assert_all_there(workplace, place)
    assert len(place.contents().whole) == 3, "retention holds there too, with those of the first machine"


@pytest.mark.long
def test_copies_in_a_folder_are_enough_to_go_on_with(workplace: Workplace, undisturbed: str) -> None:
    backup = workplace.folder / "backup"
    backup.mkdir()
    write_job(workplace, str(backup), steps=4)
    done = workplace.train("--workers", "2")
    assert done.code == 0, done.stderr
    assert f"copied to {backup}/tiny-0001" in done.stderr
    assert "2 checkpoints copied" in done.stdout
    assert_all_there(workplace, place_for(str(backup), "tiny-0001"))

    # Another machine: no runs, and the task lies elsewhere.
    shutil.rmtree(workplace.folder / "runs")
    (workplace.folder / "moved").mkdir()
    workplace.task.rename(workplace.folder / "moved" / "task.py")
    resumed = workplace.run(
        "resume", str(backup / "tiny-0001"), "--steps", "8", "--set", "task=moved/task.py:Tiny", "--json"
    )
    assert resumed.code == 0, resumed.stderr
    assert resumed.document["weights_digest"] == undisturbed
    assert resumed.document["from_step"] == 4
    assert_all_there(workplace, place_for(str(backup), "tiny-0001"))
    # What is saved here is of a later generation than what was fetched, or it could not have been committed.
    written = [info.manifest.generation for info in CheckpointFolder(workplace.last / "checkpoints").list()]
    assert written == sorted(written, key=lambda each: each or (0, 0))
    assert written[-1] is not None and written[-1][0] == 2


@long
def test_training_goes_on_while_the_store_is_down(
    workplace: Workplace, to: str, s3: SeaweedStore, undisturbed: str
) -> None:
    write_job(workplace, to)
    running = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD="7")
    running.await_event("copied_to", at_least=2)
    s3.stop()
    try:
        down = time.monotonic()
        workplace.go()
        running.await_event("finished")
        running.await_event("copy_failed")
        await_condition("half a minute", lambda: time.monotonic() > down + 30)
        assert running.process.poll() is None, "it waits for the copies"
    finally:
        s3.start()
    done = running.done()
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert done.document["copies"][0]["missing"] == []
    assert "waiting for copies" in done.stderr
    failed = kinds(workplace, "copy_failed")
    assert 1 <= len(failed) <= 3, "not one for each try"
    assert "cannot be reached" in failed[0]["reason"]
    assert kinds(workplace, "copy_recovered")
    assert_all_there(workplace, place_for(to, workplace.last.name))


def assert_ended_without_copies(workplace: Workplace, done: Done, undisturbed: str, to: str, reason: str) -> None:
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    (copies,) = done.document["copies"]
    assert copies["missing"] and set(copies["missing"]) == set(workplace.checkpoints())
    assert len(kinds(workplace, "copy_failed")) == 1
    assert re.search(reason, kinds(workplace, "copy_failed")[0]["reason"])
    assert re.search(reason, done.stderr)
    assert "A resume copies them: quorate resume tiny-0001" in done.stderr


@long
def test_wrong_secret(workplace: Workplace, to: str, undisturbed: str) -> None:
    write_job(workplace, to)
    began = time.monotonic()
    done = workplace.train("--workers", "2", "--json", AWS_SECRET_ACCESS_KEY="wrong-secret")
    assert_ended_without_copies(workplace, done, undisturbed, to, "access is refused")
    assert time.monotonic() - began < 50, "nobody waits for what only a person can mend"
    everything = done.stderr + "".join(file.read_text() for file in workplace.last.rglob("*.*l*") if file.is_file())
    assert "wrong-secret" not in everything and SECRET_KEY not in everything

    # As the warning says, with the right one.
    done = workplace.run("resume", "tiny-0001", "--steps", "10", "--json")
    assert done.code == 0, done.stderr
    assert_all_there(workplace, place_for(to, "tiny-0001"))


@long
def test_somebody_ends_the_wait_for_a_store_that_says_nothing(
    workplace: Workplace, to: str, relay: Relay, undisturbed: str
) -> None:
    write_job(workplace, to)
    running = workplace.start(
        "train", "job.yaml", "--workers", "2", "--json", HOLD="7", AWS_ENDPOINT_URL=f"http://127.0.0.1:{relay.port}"
    )
    running.await_event("copied_to", at_least=2)
    relay.silent = True
    workplace.go()
    running.await_event("finished")
    await_condition("the result", (workplace.last / "result.json").exists)
    running.interrupt()
    done = running.done(within=30)
    assert done.code == 0, done.stderr
    assert done.document["weights_digest"] == undisturbed
    assert done.document["copies"][0]["missing"]
    assert "A resume copies them" in done.stderr


def test_the_run_folder_is_no_place_for_its_copies(workplace: Workplace) -> None:
    write_job(workplace, str(workplace.folder / "runs"))
    done = workplace.train("--json")
    assert done.code == 2
    assert "is the run's own folder" in done.error
    assert not workplace.runs()


@pytest.mark.usefixtures("unmeasured")
def test_code_that_somebody_puts_beside_a_copy_is_not_run(used_workplace: Workplace) -> None:
    backup, proof = used_workplace.folder / "backup", used_workplace.folder / "proof"
    backup.mkdir()
    copy_to(backup, RunFolder(used_workplace.last))
    shutil.rmtree(used_workplace.folder / "runs")
    job = backup / "tiny-0001" / "job.yaml"
    job.write_text(job.read_text().replace(str(used_workplace.task), "/gone/task.py"))
    code = f"open({str(proof)!r}, 'w')\n"
    page = {"found_at": None, "source": {"main": "task.py", "files": {"task.py": code}}}
    (backup / "tiny-0001" / "source.json").write_text(json.dumps(page))
    refused = used_workplace.run("resume", str(backup / "tiny-0001"), "--steps", "10", "--json")
    assert refused.code == 2, refused.stderr
    assert f"would run the source at {backup}/tiny-0001 (source.json: task.py)" in refused.document["error"]
    assert "add --trust-source; or name the task by --task FILE:Class." in refused.document["error"]
    assert not proof.exists()
    trusted = used_workplace.run("resume", str(backup / "tiny-0001"), "--steps", "10", "--trust-source", "--json")
    assert trusted.code == 2 and proof.exists(), "it is run then, and has no task"

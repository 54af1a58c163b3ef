import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.only_part import part_of
from object_store import BUCKET, SeaweedStore
from quorate.api.fetch import fetch_run
from quorate.api.recorded_run import OTHERS
from quorate.api.tasks import find_task
from quorate.checkpoint.listing import read_manifest
from quorate.checkpoint.manifest import MANIFEST
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, RunError
from quorate.core.generation import Cursor
from quorate.core.runs_folder import ORIGIN, is_copy
from quorate.core.task_source import TaskSource
from quorate.spec.job import CheckpointSpec
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import keep_source, read_source
from quorate.stores.objects import FsspecStore
from quorate.stores.place import FolderPlace, place_for
from quorate.stores.transfer import LEFT_BEHIND, Source, copy_checkpoints, fetch_checkpoint, fetch_newest
from stores.copied_run import Encrypted, infos, make_source, save

CODE = TaskSource("task.py", {"task.py": b"x = 1\n", "parts/net.py": b""})


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path / "runs", 2, 4)


@pytest.fixture
def copy(source: Source, tmp_path: Path) -> Path:
    (tmp_path / "backup").mkdir()
    folder = tmp_path / "backup" / source.run.name
    copy_checkpoints(source, FolderPlace(folder))
    return folder


def test_a_copy_of_what_was_set_aside_is_not_taken_up_again(source: Source, copy: Path) -> None:
    folder = CheckpointFolder(source.run.checkpoints)
    folder.set_aside(2)
    search = fetch_newest(FolderPlace(copy), source.run.checkpoints, Cursor(2))
    assert search.newest is None
    assert "step-00000004" in search.skipped[0].reason
    assert "set aside" in search.skipped[0].reason


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def exchange(file: Path) -> None:
    """A part of another checkpoint."""
    shutil.copy(part_of(file.parent.with_name("step-00000002")), file)


@pytest.mark.parametrize("damage", [flip, cut, exchange, Path.unlink])
def test_a_damaged_part_is_found_and_the_one_before_is_used(
    copy: Path, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(part_of(copy / "step-00000004"))
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(copy)).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [2]
    assert "step-00000004" in caplog.text and "an earlier one is used" in caplog.text
    assert "step-00000004" in run.events_file.read_text()
    assert '"level":"warning"' in run.events_file.read_text()


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_manifest_is_no_way_back(copy: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(copy / "step-00000004" / MANIFEST)
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(copy)).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [2]


def test_a_manifest_cannot_reach_outside(copy: Path, tmp_path: Path) -> None:
    """One that was made for it, digest and all."""
    newest = copy / "step-00000004"
    manifest = read_manifest(newest)
    (part,) = manifest.parts
    (newest / part.file).rename(copy / "x")
    crafted = replace(manifest, parts=(replace(part, file="../x"),))
    (newest / MANIFEST).write_text(crafted.to_json())
    with pytest.raises(CheckpointError, match=r"is not whole: .*\.\./x.*the checkpoint"):
        fetch_checkpoint(FolderPlace(copy), newest.name, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(copy)).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [2]
    assert not list((tmp_path / "elsewhere").rglob("x"))


@pytest.mark.parametrize("created", ['"yesterday"', "7", "null"])
def test_an_origin_that_is_damaged_is_told(source: Source, copy: Path, tmp_path: Path, created: str) -> None:
    (copy / ORIGIN).write_text(f'{{"run": "{source.run.name}", "created": {created}}}')
    for runs in (tmp_path / "elsewhere", source.run.path.parent):
        with pytest.raises(CheckpointError, match=rf"{ORIGIN} is damaged .*Use another copy"):
            fetch_run(runs, str(copy))


@pytest.mark.parametrize("damage", [flip, cut, exchange, Path.unlink])
def test_a_damaged_checkpoint_here_is_replaced_by_its_good_copy(
    source: Source, copy: Path, damage: Callable[[Path], None]
) -> None:
    folder = CheckpointFolder(source.run.checkpoints)
    damage(part_of(source.run.checkpoints / "step-00000004"))
    assert folder.search().newest == infos(source)["step-00000002"]
    fetch_run(source.run.path.parent, str(copy))
    assert folder.search().newest == infos(source)["step-00000004"]
    assert sorted(entry.name for entry in source.run.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def test_what_a_dead_fetch_left_is_swept_and_what_is_young_is_not(source: Source, copy: Path) -> None:
    runs = source.run.path.parent
    left = [folder / f".fetching-{age}" for folder in (runs, source.run.checkpoints) for age in ("old", "young")]
    for folder in left:
        (folder / "tiny").mkdir(parents=True)
        (folder / "tiny" / "part").write_text("half")
        long_ago = time.time() - LEFT_BEHIND - 10
        # It is what changed last that counts: a fetch writes deep inside.
        for path in (folder, folder / "tiny", *([folder / "tiny" / "part"] if folder.name.endswith("old") else [])):
            os.utime(path, (long_ago, long_ago))
    fetch_run(runs, str(copy))
    assert [folder.exists() for folder in left] == [False, True, False, True]


def test_comes_back_as_the_same_run(source: Source, copy: Path, tmp_path: Path) -> None:
    assert is_copy(str(copy)) and not is_copy(str(source.run.path))
    run = RunFolder(fetch_run(tmp_path / "elsewhere", f"{copy}/").path)
    assert run.path == tmp_path / "elsewhere" / source.run.name
    assert run.created == source.run.created
    # No source lies there, so none is to be put there.
    assert run.job_file.read_text() == source.run.job_file.read_text().replace("source: true", "source: false")
    assert run.read_environment() == source.run.read_environment()
    (info,) = CheckpointFolder(run.checkpoints).list()
    CheckpointFolder(run.checkpoints).verify(info)
    assert info.cursor == Cursor(4)
    assert [entry.name for entry in (tmp_path / "elsewhere").iterdir()] == [run.name]
    assert fetch_run(tmp_path / "elsewhere", str(copy)).path == run.path, "and once more, with nothing new to fetch"


def test_brings_what_is_newer_to_a_run_that_is_here(source: Source, copy: Path, tmp_path: Path) -> None:
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(copy)).path)
    save(source, 6)
    copy_checkpoints(source, FolderPlace(copy))
    fetch_run(tmp_path / "elsewhere", str(copy))
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [4, 6]


def test_a_checkpoint_of_another_job_is_passed_over_here_and_there(source: Source, copy: Path, tmp_path: Path) -> None:
    job = load_recorded(source.run.job_file, {}, []).spec.model_dump(mode="json")
    save(source, 6, job=job)
    foreign = save(source, 8, job=job | {"seed": 99}).path
    copy_checkpoints(source, FolderPlace(copy))
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(copy)).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [6]
    assert "step-00000008 at" in run.events_file.read_text() and "is not of this run" in run.events_file.read_text()

    shutil.copytree(foreign, run.checkpoints / foreign.name)
    shutil.rmtree(foreign)
    shutil.rmtree(copy / foreign.name)
    save(source, 8, job=job)
    copy_checkpoints(source, FolderPlace(copy))
    fetch_run(tmp_path / "elsewhere", str(copy))
    mine = CheckpointFolder(run.checkpoints).list()
    assert [(info.cursor.step, info.manifest.job) for info in mine] == [(6, job), (8, job)]
    assert (run.path / OTHERS / foreign.name / "manifest.json").exists(), "it is set aside, and not replaced"


def test_where_all_are_of_another_job_it_is_the_job_that_was_changed(source: Source, tmp_path: Path) -> None:
    job = load_recorded(source.run.job_file, {}, []).spec.model_dump(mode="json")
    shutil.rmtree(source.run.checkpoints)
    save(source, 8, job=job | {"seed": 99})
    copy_checkpoints(source, FolderPlace(tmp_path / "copy"))
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(tmp_path / "copy")).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [8]


def test_another_run_of_that_name_is_left_alone(copy: Path, tmp_path: Path) -> None:
    other = make_source(tmp_path / "elsewhere", 8)
    with pytest.raises(RunError, match="is another run than the one at"):
        fetch_run(tmp_path / "elsewhere", str(copy))
    assert list(infos(other)) == ["step-00000008"]


def test_says_what_is_missing(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no copy of a run at"):
        fetch_run(tmp_path / "elsewhere", str(copy.parent))
    shutil.rmtree(copy / "step-00000002")
    part_of(copy / "step-00000004").unlink()
    with pytest.raises(RunError, match="there is no valid checkpoint at"):
        fetch_run(tmp_path / "elsewhere", str(copy))
    assert not list((tmp_path / "elsewhere").iterdir()), "nothing half fetched is left"


def test_damage_on_a_store_is_found(source: Source, s3: SeaweedStore, tmp_path: Path) -> None:
    to = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    place = place_for(to, source.run.name)
    save(source, 6)
    copy_checkpoints(source, place)
    store = FsspecStore(str(place))
    parts = {name: part_of(info.path) for name, info in infos(source).items()}
    content = bytearray(parts["step-00000006"].read_bytes())
    content[-1] ^= 1
    store.put(f"step-00000006/{parts['step-00000006'].name}", bytes(content))
    store.remove(f"step-00000004/{parts['step-00000004'].name}")
    search = fetch_newest(place, tmp_path / "back")
    assert search.newest is not None and search.newest.cursor == Cursor(2)
    assert [skipped.path.name for skipped in search.skipped] == ["step-00000006", "step-00000004"]
    assert "damaged" in search.skipped[0].reason
    assert "there is no object" in search.skipped[1].reason


def test_the_source_of_the_task_goes_with_the_copies_unless_they_are_not_to_have_it(
    source: Source, tmp_path: Path
) -> None:
    keep_source(source.run.path, CODE, tmp_path / "task.py")
    place = FolderPlace(tmp_path / "backup")
    copy_checkpoints(source, place)
    assert place.read("source.json") is not None
    copy_checkpoints(replace(source, with_source=False), place)
    assert place.read("source.json") is None, "encryption was switched on: what lies there in plain is removed"


def put_source(copy: Path, code: TaskSource) -> None:
    page = {"found_at": None, "source": json.loads(code.to_json())}
    (copy / "source.json").write_text(json.dumps(page))


def test_code_beside_a_copy_is_not_kept_unless_that_is_asked_for(copy: Path, tmp_path: Path) -> None:
    put_source(copy, CODE)
    fetched = fetch_run(tmp_path / "elsewhere", str(copy))
    assert read_source(fetched.path) is None
    with pytest.raises(RunError) as refused:
        find_task(RunFolder(fetched.path), "/gone/task.py:Tiny", untrusted=fetched.untrusted)
    assert refused.value.message == (
        f"the task /gone/task.py is not here, and resuming would run the source at {copy} (source.json: "
        "task.py, parts/net.py): anybody who can write there may have changed it. If you trust it, add --trust-source; "
        "or name the task by --task FILE:Class."
    )
    assert find_task(RunFolder(fetched.path), "/gone/task.py:Tiny", "/a.py:Tiny", fetched.untrusted).kept is None
    again = fetch_run(tmp_path / "elsewhere", str(copy), trust_source=True)
    kept = read_source(again.path)
    assert (again.untrusted, kept and kept.source) == ("", CODE)


@pytest.fixture
def encrypted(tmp_path: Path) -> Encrypted:
    return Encrypted(tmp_path, CODE.digest)


def test_code_beside_encrypted_copies_is_kept_only_if_a_checkpoint_under_the_key_tells_its_digest(
    encrypted: Encrypted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_source(encrypted.copy, TaskSource("task.py", {"task.py": b"import os; os.abort()\n"}))
    fetched = fetch_run(tmp_path / "elsewhere", str(encrypted.copy), {}, encrypted.asked, trust_source=True)
    assert read_source(fetched.path) is None
    assert "is not the code that the encrypted checkpoint records" in fetched.untrusted
    assert "is left out: its digest is" in caplog.text
    put_source(encrypted.copy, CODE)
    kept = read_source(fetch_run(tmp_path / "elsewhere", str(encrypted.copy), {}, encrypted.asked).path)
    assert kept is not None and kept.source == CODE


def test_a_planted_newest_copy_does_not_block_the_good_ones(encrypted: Encrypted, tmp_path: Path) -> None:
    encrypted.plant(9, encrypted.copy)
    run = RunFolder(fetch_run(tmp_path / "elsewhere", str(encrypted.copy), {}, encrypted.asked).path)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [4]
    assert "step-00000009 at" in run.events_file.read_text() and "cannot be trusted" in run.events_file.read_text()
    encrypted.plant(12, encrypted.copy)
    fetch_run(tmp_path / "elsewhere", str(encrypted.copy), {}, encrypted.asked)
    assert [info.cursor.step for info in CheckpointFolder(run.checkpoints).list()] == [4], "nor when it is here"


def test_encryption_is_not_switched_off_by_editing_the_job_beside_the_copies(
    encrypted: Encrypted, tmp_path: Path
) -> None:
    encrypted.plant(9, encrypted.copy)
    job = encrypted.copy / "job.yaml"
    job.write_text(job.read_text().partition("checkpoint:")[0])
    with pytest.raises(RunError, match=r"step-00000004 is encrypted, and the job of run tiny-0001 says .*: null"):
        fetch_run(tmp_path / "elsewhere", str(encrypted.copy))
    assert not list((tmp_path / "elsewhere").iterdir())
    fetched = fetch_run(tmp_path / "elsewhere", str(encrypted.copy), {}, encrypted.asked)
    assert [info.cursor.step for info in CheckpointFolder(fetched.path / "checkpoints").list()] == [4]


@pytest.mark.parametrize("evidence", ["manifest", "part"])
def test_nor_by_editing_the_job_of_a_run_here(encrypted: Encrypted, evidence: str) -> None:
    folder = encrypted.source.run.checkpoints
    for path in folder.glob("*/*.enc") if evidence == "manifest" else folder.glob(f"*/{MANIFEST}"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"is encrypted, and the job of run tiny-0001 says .*rekey tiny-0001"):
        CheckpointFolder.of_job(folder, CheckpointSpec())

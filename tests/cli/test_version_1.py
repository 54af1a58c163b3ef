"""A run from before version 2 of job files is in `version_1/`, as `quorate train job.yaml` of commit 0da90d7 left it.
It is shown, compared and resumed like any other."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from command import Workplace
from quorate.checkpoint.selection import saved_job
from quorate.checkpoint.store import CheckpointFolder
from quorate.spec.changes import changes, refused_on_resume
from quorate.spec.load import load_job, load_recorded
from quorate.storage.run_folder import RunFolder

OLD = Path(__file__).parent / "version_1"
RUN = "exact-0001"


@pytest.fixture
def old(workplace: Workplace) -> Workplace:
    """A folder with the old job, its task and its run."""
    shutil.copytree(OLD, workplace.folder, dirs_exist_ok=True)
    (workplace.folder / "runs").mkdir()
    (workplace.folder / RUN).rename(workplace.folder / "runs" / RUN)
    return workplace


def test_an_old_run_is_shown_and_compared_by_the_present_names(old: Workplace) -> None:
    shown = old.run("show", RUN, "--json")
    assert (shown.code, shown.stderr) == (0, "")
    job = {each["key"]: each["value"] for each in shown.document["job"]}
    assert job["on_nonfinite_loss"] == "skip" and "on_poison" not in job
    old.job.write_text(
        old.job.read_text().replace("version: 1", "version: 2").replace("on_poison", "on_nonfinite_loss")
    )
    assert old.train().code == 0
    compared = old.run("diff", RUN, "exact-0002", "--json")
    assert [each["key"] for each in compared.document["keys"]] == ["task"], "a key with another name is the same key"
    assert compared.document["same_weights"]


@pytest.mark.parametrize(
    "job_is_gone",
    [pytest.param(False, id=""), pytest.param(True, id="with the job of its checkpoint", marks=pytest.mark.long)],
)
def test_an_old_run_is_resumed_to_the_bits_of_an_undisturbed_one(old: Workplace, job_is_gone: bool) -> None:
    assert old.train("--steps", "12", "--workers", "1").code == 0
    undisturbed = old.result()
    run = old.folder / "runs" / RUN
    if job_is_gone:
        (run / "job.yaml").unlink()
    resumed = old.run("resume", RUN, "--steps", "12", "--task", "exact.py:Exact", "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.document["weights_digest"] == undisturbed["weights_digest"]
    skipped = [event["step"] for event in old.events(run) if event.get("skipped")]
    assert skipped == [3, 7, 10], "it skips after the resume as it did before"
    assert "on_nonfinite_loss: skip" in (run / "job.yaml").read_text()


def test_the_job_of_an_old_checkpoint_is_that_of_its_run() -> None:
    run = RunFolder(OLD / RUN)
    spec = load_recorded(run.job_file, {}, []).spec
    (info,) = CheckpointFolder(run.checkpoints).list()
    assert info.manifest.job["on_poison"] == "skip", "the sample is of version 1"
    saved = saved_job(info)
    assert saved is not None and changes(saved, spec) == ()
    changed = spec.model_copy(update={"on_nonfinite_loss": "fail"})
    assert [change.key for change in refused_on_resume(saved, changed)] == ["on_nonfinite_loss"]


def test_a_renamed_key_leaves_the_digest_of_a_job_as_it_was() -> None:
    from quorate.api.model_artifact import job_digest
    from quorate.tracking.provenance import parameters_of

    # As version 1 made it: of the keys that affect results, by their names then.
    spec = load_recorded(OLD / RUN / "job.yaml", {}, []).spec
    keys = parameters_of(spec) | {"task": "Exact"}
    keys["on_poison"] = keys.pop("on_nonfinite_loss")
    assert job_digest(spec) == hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def test_a_version_1_file_is_accepted_with_one_line_that_says_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    spec = load_job(OLD / "job.yaml", {}, []).spec
    assert (spec.version, spec.on_nonfinite_loss) == (2, "skip")
    assert caplog.messages == [
        f"{OLD / 'job.yaml'} is of version 1, and is read as version 2. Write version: 2 (job.yaml line 1) and "
        "on_nonfinite_loss instead of on_poison (job.yaml line 9)."
    ]
    caplog.clear()
    load_recorded(OLD / RUN / "job.yaml", {}, [])
    assert caplog.messages == [], "nobody is to edit what a run has recorded"

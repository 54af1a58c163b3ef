import json
import os
import shutil
import signal
from dataclasses import replace

import pytest

from checkpoint.only_part import part_of
from command import Workplace, in_step
from quorate.checkpoint.manifest import Manifest


def test_a_branch_an_extension_and_a_broken_checkpoint(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(steps=4)
    short = workplace.train("--workers", "1", "--json")
    assert (short.code, short.document["steps"]) == (0, 4)

    # A changed source is allowed as a branch, which goes on from the checkpoint with the changed meaning.
    source = workplace.task.read_text()
    workplace.task.write_text(f"{source}\nCHANGED = True\n")
    branched = workplace.run("resume", "last", "--branch", "--steps", "6", "--set", "clip_norm=0.1", "--json")
    assert branched.code == 0, branched.stderr
    assert (branched.document["run"], branched.document["steps"]) == ("tiny-0002", 6)
    assert [run.name for run in workplace.runs()] == ["tiny-0001", "tiny-0002"]
    assert [event["step"] for event in workplace.events() if event["kind"] == "step"] == [5, 6]
    assert branched.document["weights_digest"] != undisturbed
    assert [event["from_step"] for event in workplace.events() if event["kind"] == "run"] == [4]

    # The newest checkpoint is broken: the one before it is used, and more steps end as if nothing had happened.
    workplace.task.write_text(source)
    first = workplace.runs()[0]
    state = part_of(first / "checkpoints" / "step-00000004-evaluated")
    state.write_bytes(state.read_bytes()[:-1])
    extended = workplace.run("resume", str(first), "--steps", "8", "--workers", "2", "--json")
    assert extended.code == 0, extended.stderr
    told = "WARNING: checkpoint step-00000004-evaluated is damaged, so step-00000002 is used: part 1-of-"
    assert told in extended.stderr
    assert extended.document["from_step"] == 2
    assert (extended.document["run"], extended.document["steps"]) == ("tiny-0001", 8)
    assert extended.document["weights_digest"] == undisturbed
    assert [event["from_step"] for event in workplace.events(first) if event["kind"] == "run"] == [0, 2]
    assert "steps: 8  # --steps" in (first / "job.yaml").read_text()


@pytest.mark.usefixtures("unmeasured")
def test_a_run_in_use_is_refused_with_the_pid_and_a_dead_launcher_does_not_pass_for_complete(
    used_workplace: Workplace,
) -> None:
    workplace = used_workplace
    assert workplace.result()["status"] == "complete"
    running = workplace.start("resume", "tiny-0001", "--steps", "16", "--workers", "1", HOLD=in_step(2, workers=1))
    running.await_event("step", at_least=9)
    in_use = workplace.start("resume", "last", "--steps", "16").done()
    assert in_use.code == 2
    assert f"run tiny-0001 is in use by process {running.process.pid}" in in_use.error
    os.kill(running.process.pid, signal.SIGKILL)
    running.done()
    workplace.assert_nobody_left()
    assert not (workplace.last / "result.json").exists()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.long
def test_a_run_that_stopped_early_goes_on_only_as_a_branch_with_another_patience(workplace: Workplace) -> None:
    # The loss falls, and is expected to rise: the second evaluation is the last.
    early_stop = {"metric": "loss", "mode": "max", "patience": 1}
    workplace.write_job(evaluate={"every": 1}, early_stop=early_stop)
    stopped = workplace.train("--workers", "1", "--json")
    assert (stopped.document["status"], stopped.document["ending"]) == ("complete", "early stop")
    assert stopped.document["steps"] == 2
    for arguments in ([], ["--steps", "12"], ["--branch", "--steps", "12"]):
        refused = workplace.run("resume", "last", *arguments)
        assert (refused.code, refused.stdout) == (2, "")
        assert refused.error == (
            "run tiny-0001 stopped early (early_stop: loss, patience 1) after 2 steps; start a branch without "
            "early_stop: quorate resume tiny-0001 --branch --set early_stop=null"
        )
    another = ("--branch", "--set", "early_stop=null", "--steps", "4", "--workers", "1", "--json")
    branched = workplace.run("resume", "last", *another)
    assert branched.code == 0, branched.stderr
    assert (branched.document["run"], branched.document["ending"]) == ("tiny-0002", "complete")
    assert branched.document["steps"] == 4
    assert [event["step"] for event in workplace.events() if event["kind"] == "step"] == [3, 4]


@pytest.mark.usefixtures("unmeasured")
def test_a_result_that_is_cut_off_is_warned_of_and_does_not_keep_a_run_from_going_on(
    used_workplace: Workplace, undisturbed: str
) -> None:
    file = used_workplace.last / "result.json"
    file.write_bytes(file.read_bytes()[:30])
    resumed = used_workplace.run("resume", "last", "--workers", "2", "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.stderr.count("WARNING: ") == 1
    assert f"WARNING: {file} is not JSON" in resumed.stderr
    assert (resumed.document["steps"], resumed.document["weights_digest"]) == (8, undisturbed)
    assert used_workplace.result()["status"] == "complete"


@pytest.mark.usefixtures("unmeasured")
def test_a_lost_job_a_cut_environment_and_a_newer_checkpoint_of_another_run_do_not_keep_a_run_from_going_on(
    used_workplace: Workplace, undisturbed: str
) -> None:
    run = used_workplace.last
    (run / "result.json").unlink()
    environment = (run / "environment.json").read_text()
    (run / "environment.json").write_text(environment[:40])
    shutil.rmtree(run / "checkpoints" / "step-00000008-evaluated")
    # Whole, and of a job with another seed: somebody has copied it here.
    foreign = shutil.copytree(run / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000100")
    manifest = Manifest.from_json((foreign / "manifest.json").read_text())
    job = {**manifest.job, "seed": 7, "name": "other"}
    (foreign / "manifest.json").write_text(replace(manifest, step=100, phase=0, job=job).to_json())
    (run / "job.yaml").unlink()

    resumed = used_workplace.run("resume", "last", "--workers", "2", "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.stderr.count("WARNING: ") == 4
    for told in (
        "runs/tiny-0001/job.yaml is gone: the job in checkpoint step-00000006 is used",
        "step-00000100 is not of this run, so step-00000006 is used: its job has seed 7 where the run has 0",
        "environment.json is not JSON",
        "checkpoint step-00000100 was moved to runs/tiny-0001/checkpoints-of-other-runs",
    ):
        assert told in resumed.stderr
    assert (resumed.document["from_step"], resumed.document["weights_digest"]) == (6, undisturbed)
    assert json.loads((run / "environment.json").read_text()) == json.loads(environment)
    assert (run / "checkpoints-of-other-runs" / "step-00000100" / "manifest.json").is_file()
    assert "seed: 0" in (run / "job.yaml").read_text()


@pytest.mark.usefixtures("unmeasured")
def test_a_run_folder_that_was_edited_is_refused_by_what_its_checkpoint_knows(used_workplace: Workplace) -> None:
    job = used_workplace.last / "job.yaml"
    whole = job.read_text()
    assert "\nseed: 0" in whole
    job.write_text(whole.replace("\nseed: 0", "\nseed: 7"))
    edited = used_workplace.run("resume", "last", "--steps", "16")
    assert edited.code == 2
    assert "job.yaml was changed since checkpoint step-00000008-evaluated was saved: seed: 0 → 7" in edited.error
    job.write_text(whole)
    (used_workplace.last / "environment.json").unlink()
    used_workplace.task.write_text(used_workplace.task.read_text() + "\nCHANGED = True\n")
    changed = used_workplace.run("resume", "last", "--steps", "16")
    assert changed.code == 2
    assert "the task's code has changed since run tiny-0001 began" in changed.error
    assert "--branch" in changed.error
    assert used_workplace.result()["status"] == "complete", "what is refused leaves the run as it was"

"""Runs that are submitted to a Ray cluster: they go on without whoever submitted them, and are found through Ray."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ray_nodes import RayNodes
from command import await_condition
from quorate.api import detached
from quorate.spec.load import load_job
from schemas import validate

TASK = Path(__file__).parent / "ray_task.py"
PATIENCE = 600.0
STEPS = 30


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2, takes_jobs=True)
    yield cluster
    cluster.close()


def ray(*arguments: str, environment: dict[str, str]) -> None:
    subprocess.run([Path(sys.executable).with_name("ray"), *arguments], env=environment, check=True, timeout=PATIENCE)


class Shell:
    """Somebody who types commands, in a folder of their own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._environment = {key: value for key, value in environment.items() if not key.startswith("QUORATE_")}

    def type(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "quorate", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + (done.stderr if code else "")

    def ask(self, *arguments: str) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.type(*arguments, "--json"))
        return fields

    def await_status(self, run: str, *wanted: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            shown = self.ask("show", run)
            return shown if shown["status"] in wanted else None

        return await_condition(f"{run} is {' or '.join(wanted)}", look, PATIENCE)

    def await_steps(self, run: str, count: int) -> None:
        await_condition(f"{count} steps of {run}", lambda: self.ask("show", run)["steps"] >= count, PATIENCE)


def submitter(tmp_path: Path, nodes: RayNodes, name: str, **keys: Any) -> Shell:
    """A person with a project, and a storage that others see as well."""
    shell = Shell(tmp_path / "project", nodes.environment)
    storage = tmp_path / "shared"
    storage.mkdir()
    shutil.copy(TASK, shell.folder / "task.py")
    job = {
        "version": 2,
        "name": name,
        "task": "task.py:Small",
        "lanes": 3,
        "batch_size": 12,
        "steps": STEPS,
        "seed": 5,
        "workers": 2,
        "checkpoint": {"every": 10},
        "engine": {"kind": "ray", "storage": str(storage)},
        **keys,
    }
    (shell.folder / "job.yaml").write_text(yaml.safe_dump(job))
    return shell


def test_a_detached_run_goes_on_without_client_and_project_and_is_found_through_ray(
    tmp_path: Path, nodes: RayNodes
) -> None:
    go = tmp_path / "go"
    client = submitter(tmp_path, nodes, "follow", params={"pause": 3, "go": str(go)})
    local = client.ask("train", "job.yaml", "--set", "engine=local", "--set", "params.pause=0", "--workers", "1")
    submitted = client.ask("train", "job.yaml", "--detach")
    validate("train-detach", submitted)
    run = submitted["run"]
    assert run == "follow-0002", "the number after the one in the folder of runs"
    shutil.rmtree(client.folder)  # the client has ended, and nothing of it is left

    other = Shell(tmp_path / "elsewhere", nodes.environment)
    other.await_status(run, "running")
    other.await_steps(run, 2)
    assert other.ask("top", run, "--once")["status"] == "running"
    other.type("resize", run, "--workers", "1")
    go.touch()
    followed = other.type("logs", run, "-f")
    assert "the job ends: complete" in followed
    shown = other.await_status(run, "complete")
    assert shown["weights_digest"] == local["weights_digest"]
    assert "1 worker" in other.type("show", run)


def test_a_detached_run_is_stopped_from_elsewhere_and_saves(tmp_path: Path, nodes: RayNodes) -> None:
    client = submitter(tmp_path, nodes, "stopped", params={"pause": 2, "go": str(tmp_path / "never")})
    run = client.ask("train", "job.yaml", "--detach")["run"]
    other = Shell(tmp_path / "elsewhere", nodes.environment)
    other.await_status(run, "running")
    other.await_steps(run, 1)
    stopped = other.ask("stop", run)
    assert stopped["status"] == "interrupted" and stopped["steps"] >= 1


def test_rays_own_stop_saves_as_well_and_the_run_is_resumed_detached_to_the_same_bits(
    tmp_path: Path, nodes: RayNodes
) -> None:
    go = tmp_path / "go"
    client = submitter(tmp_path, nodes, "again", params={"pause": 2, "go": str(go)}, checkpoint={"every": 1000})
    local = client.ask("train", "job.yaml", "--set", "engine=local", "--set", "params.pause=0", "--workers", "1")
    submitted = client.ask("train", "job.yaml", "--detach")
    run = submitted["run"]
    client.await_status(run, "running")
    client.await_steps(run, 2)
    assert "in use" in client.type("resume", run, "--detach", code=2)
    ray("job", "stop", submitted["submission"], environment=nodes.environment)
    stopped = client.await_status(run, "terminated")
    assert stopped["steps"] >= 2
    (saved,) = client.ask("checkpoints", "ls", run)["checkpoints"]
    assert saved["step"] == stopped["steps"], "nothing that was trained is lost"

    again = client.ask("resume", run, "--detach", "--workers", "1")
    validate("train-detach", again)
    assert again["run"] == run and again["submission"] != submitted["submission"]
    client.await_steps(run, stopped["steps"] + 1)
    go.touch()
    shown = client.await_status(run, "complete")
    assert shown["weights_digest"] == local["weights_digest"]
    assert "is complete" in client.type("resume", run, "--detach", code=2)
    assert not (Path(again["folder"]) / "resume.yaml").exists()
    assert json.loads((Path(again["folder"]) / "submission.json").read_text())["id"] == again["submission"]


@pytest.mark.parametrize("token", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another" * 5}])
def test_a_token_that_is_missing_or_wrong_is_told_with_the_remedy(
    tmp_path: Path, nodes: RayNodes, token: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {key: value for key, value in nodes.environment.items() if not key.startswith("RAY_AUTH_")}
    monkeypatch.setattr(nodes, "environment", {**bare, "HOME": str(tmp_path), **token})
    refused = submitter(tmp_path, nodes, "unknown").type("train", "job.yaml", "--detach", code=2)
    assert "asks for a token" in refused and "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to it" in refused


def test_a_resume_that_is_refused_on_the_cluster_is_told_and_leaves_the_run_as_it_was(
    tmp_path: Path, nodes: RayNodes
) -> None:
    client = submitter(tmp_path, nodes, "changed", params={"pause": 2, "go": str(tmp_path / "never")})
    run = client.ask("train", "job.yaml", "--detach")["run"]
    client.await_status(run, "running")
    client.await_steps(run, 1)
    client.ask("stop", run)
    before = client.ask("show", run)
    submission = (Path(before["folder"]) / "submission.json").read_text()
    refused = client.type("resume", run, "--detach", "--set", "engine.runtime_env.py_modules=[/nowhere]", code=2)
    assert "Ray has not taken the job" in refused
    assert (Path(before["folder"]) / "submission.json").read_text() == submission, "it names no job that never was"
    task = client.folder / "task.py"
    task.write_text(task.read_text().replace("lr=0.1", "lr=0.2"))
    client.ask("resume", run, "--detach")
    told = client.type("logs", run, "-f", code=1)
    assert "has ended before its launcher began" in told and "--branch" in told
    client.ask("stop", run)
    assert client.ask("show", run)["status"] == before["status"] == "interrupted"


def test_a_run_that_is_not_in_the_storage_cannot_be_resumed_detached(tmp_path: Path, nodes: RayNodes) -> None:
    client = submitter(tmp_path, nodes, "home")
    run = client.ask("train", "job.yaml", "--set", "engine=local", "--steps", "10")["run"]
    ray_keys = ["--set", "engine.kind=ray", "--set", f"engine.storage={tmp_path / 'shared'}"]
    refusal = client.type("resume", run, "--steps", "20", "--detach", *ray_keys, code=2)
    assert "Move its folder there" in refusal


def test_a_module_that_nodes_do_not_have_is_told_in_the_run(tmp_path: Path, nodes: RayNodes) -> None:
    client = submitter(tmp_path, nodes, "absent")
    (client.folder / "task.py").write_text("import a_module_that_is_not_there\n")
    run = client.ask("train", "job.yaml", "--detach")["run"]
    client.type("logs", run, "-f")
    shown = client.await_status(run, "failed")
    assert "engine: {runtime_env: {pip: [a_module_that_is_not_there]}}" in json.dumps(shown)


BROKEN = """import sys

class Broken:
    def find_spec(self, name, *_):
        if name == "quorate.api.detached":
            raise ModuleNotFoundError("No module named 'a_module_that_is_not_there'")

sys.meta_path.insert(0, Broken())
"""
"""What Python imports first of all in the folder that Ray has sent, and not here."""


def test_a_launcher_that_dies_on_import_is_a_failed_run_and_hides_no_other(tmp_path: Path, nodes: RayNodes) -> None:
    client = submitter(tmp_path, nodes, "unborn")
    client.ask("train", "job.yaml", "--set", "engine=local", "--steps", "1")
    (client.folder / "sitecustomize.py").write_text(BROKEN)
    run = client.ask("train", "job.yaml", "--detach")["run"]
    for verb in (["runs"], ["show", run], ["top", run, "--once"]):  # submitted, or failed already
        client.type(*verb)
    shown = client.await_status(run, "failed", "complete")
    assert "No module named 'a_module_that_is_not_there'" in shown["reason"]
    listed = client.type("runs")
    assert "complete" in listed and "No module named 'a_module_that_is_not_there'" in " ".join(listed.split())
    assert f"run {run} is not running (failed)" in client.type("stop", run, code=2)
    assert client.ask("show", run)["status"] == "failed"


def test_secrets_of_a_job_are_in_nothing_that_ray_is_given(
    tmp_path: Path, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = submitter(tmp_path, nodes, "secret", params={"password": "xyzzy-plugh"}, runs=str(tmp_path / "runs"))
    (client.folder / ".env").write_text("TOKEN=xyzzy-plugh\n")
    given: dict[str, Any] = {}

    class Jobs:
        def submit_job(self, **keys: Any) -> None:
            with zipfile.ZipFile(keys["runtime_env"]["working_dir"]) as sent:
                given.update({**keys, "files": {name: sent.read(name).decode() for name in sent.namelist()}})

    monkeypatch.setattr(detached, "jobs_at", lambda _: Jobs())
    run, _ = detached.submit(load_job(client.folder / "job.yaml", {}, []))
    assert list(given["files"]) == ["task.py"]
    assert "xyzzy-plugh" not in repr(given)
    assert "xyzzy-plugh" in run.job_file.read_text() and run.job_file.stat().st_mode & 0o077 == 0

"""The folder of runs that a job file names, or not."""

from pathlib import Path

import pytest

from quorate.spec.load import load_job
from quorate.spec.override import Override

JOB = "task: package.module:Task\nbatch_size: 8\nsteps: 1\n"


@pytest.mark.parametrize(
    ("said", "here", "folder"),
    [
        ("", "project", "runs"),
        ("", "elsewhere", "{root}/project/mine/runs"),
        ("runs: out\n", "project", "{root}/project/mine/out"),
        ("runs: out\n", "project/mine", "out"),
        ("runs: runs\n", "project", "{root}/project/mine/runs"),
        ("runs: /data/runs\n", "project", "/data/runs"),
    ],
)
def test_it_is_relative_to_the_job_file(
    said: str, here: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project/mine", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "project" / "mine" / "job.yaml"
    file.write_text(JOB + said)
    monkeypatch.chdir(tmp_path / here)
    job = load_job(file, {}, [])
    assert job.spec.runs == folder.format(root=tmp_path)
    assert job.origins["runs"] == ("job.yaml line 4" if said else "default")
    assert load_job(file, {"QUORATE_RUNS": "mine"}, []).spec.runs == "mine", "to the working folder where it is typed"
    assert load_job(file, {}, [Override("runs", "typed", "--runs")]).spec.runs == "typed"

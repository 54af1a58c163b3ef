"""Which engine a job gets, and what is said where it cannot have it."""

import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from quorate.api import session
from quorate.api.prints import NoDisplay, RunStart
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.engines.ray import option
from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import ResolvedJob

TRAINED = """
import sys
import quorate
import quorate.api.run_part
import quorate.cli.app
job = quorate.Job(task="package.module:Task", batch_size=8, steps=1)
quorate.api.run_part.refuse_missing_engine(job.spec)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray"))
"""


def resolved(runs: Path, **keys: Any) -> ResolvedJob:
    job = {"task": "task.py:Task", "batch_size": 8, "steps": 1, "runs": str(runs), "engine": "ray", **keys}
    return resolve_mapping(job, "job.yaml", {}, [])


def no_display(_: RunStart) -> NoDisplay:
    raise AssertionError("nothing begins")


def has_ray(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(option, "find_spec", lambda name: ModuleSpec(name, None) if there else None)


def test_without_the_library_the_line_that_installs_it_is_told_before_a_run_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_cryptography() -> None:
        raise RequestError("encrypted links need the package `cryptography`")

    has_ray(monkeypatch, False)
    monkeypatch.setattr(session, "refuse_without_library", without_cryptography)  # Ray's extra has it
    with pytest.raises(RequestError, match=rf"engine: ray needs .* {re.escape(install_of('ray'))}"):
        session.start(resolved(tmp_path / "runs"), no_display)
    assert not (tmp_path / "runs").exists()


def test_faults_are_brought_about_on_this_machine(tmp_path: Path) -> None:
    from quorate.api.chaos import FaultRequest, try_under

    request = FaultRequest.of(["kill worker 1 at step 1"], None, False, None, None)
    with pytest.raises(RequestError, match=r"--set engine=local"):
        try_under(request, resolved(tmp_path / "runs"), None, no_display)


def test_ray_is_not_loaded_for_a_job_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").touch()  # there to be imported, whether or not Ray is installed
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, env=environment)
    assert (done.stderr, done.stdout) == ("", "[]\n")

"""A newcomer gets from `git clone` to a model of their own by the README alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import first_hour
from docs.first_hour import ROOT, blocks_of, newcomers_environment, publish, reuse_environment, run, script_of
from quorate.observe.quantities import measure

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the working tree, as it is, can be cloned from."""
    return publish(tmp_path_factory.mktemp("origin"))


def assert_trained(clone: Path, printed: str) -> None:
    """A model of one's own was trained on three workers, evaluated, shown and listed."""
    code = "import json, quorate; r = quorate.open_run(); print(json.dumps([quorate.__file__, r.status, r.metrics]))"
    python = clone / ".venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", code], cwd=clone, env=newcomers_environment(), capture_output=True, text=True, check=True
    )
    told: list[Any] = json.loads(done.stdout)
    assert told[0].startswith(str(clone))  # the clone's own code has done it
    assert told[1] == "complete"
    assert told[2]["accuracy"] > 0.9
    assert "tumours-0001 in runs/tumours-0001: 4 lanes on 3 workers" in printed
    shown = f"accuracy +{re.escape(measure(told[2]['accuracy']))}"
    assert len(re.findall(shown, printed)) >= 3  # by train, eval and show
    assert "load_breast_cancer" in (clone / "tumours" / "task.py").read_text()


def test_the_readme_tells_what_to_type_and_which_file_to_write() -> None:
    kinds = [block.file for block in blocks_of(README)]
    assert kinds == [None, "tumours/task.py", None]


def test_a_reused_environment_leaves_make_nothing_to_do(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    reuse_environment(tmp_path)
    every_stamp = re.findall(r"^(\.venv/\.stamp-[a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(every_stamp) >= 3
    assert subprocess.run(["make", "--question", *every_stamp], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.long
def test_the_first_hour_with_what_is_installed_here(address: Path, tmp_path: Path) -> None:
    script = script_of(README, address, before_install=f"{sys.executable} {first_hour.__file__} --reuse .")
    assert_trained(tmp_path / "quorate", run(script, tmp_path, within=200))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_first_hour_with_everything_installed_anew(address: Path, tmp_path: Path) -> None:
    assert_trained(tmp_path / "quorate", run(script_of(README, address), tmp_path, within=1000))

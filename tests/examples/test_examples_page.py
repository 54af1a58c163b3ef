"""The examples' page says what there is, and its commands are those that work; the notebook runs as a script."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.example_files import EXAMPLES, ROOT, module_of
from quorate.spec.load import load_job
from quorate.tune.loading import read_search
from quorate.tune.proposal import with_task

FOLDERS = (EXAMPLES, EXAMPLES / "models")
PAGES = [(folder / "README.md").read_text() for folder in FOLDERS]
COMMANDS = [
    shlex.split(line, comments=True)
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.mark.parametrize(("folder", "page"), [*zip(FOLDERS, PAGES, strict=True)], ids=["examples", "models"])
def test_every_example_has_its_line(folder: Path, page: str) -> None:
    files = {path.name for path in folder.iterdir() if path.suffix in (".py", ".yaml")}
    assert set(re.findall(r"\]\((\w+\.(?:py|yaml))\)", page)) == files


SEARCHES = sorted(EXAMPLES.glob("*_search.yaml"))


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: str(search.stem))
def test_every_search_file_is_valid_and_searches_what_its_task_has(search: Path) -> None:
    found = with_task(read_search(search, {}))
    assert found.spec.name.replace("-", "_") == search.stem
    assert found.spec.trials is not None
    assert found.trial_job(found.spec.params(1), 1).spec.params


@pytest.mark.parametrize("job", sorted({*EXAMPLES.glob("*.yaml")} - set(SEARCHES)), ids=lambda job: str(job.stem))
def test_every_job_file_is_valid_and_named_like_its_task(job: Path) -> None:
    spec = load_job(job, {}, []).spec
    assert spec.name.replace("-", "_") == job.stem
    task = Path(spec.task.rpartition(":")[0])
    assert task.parent == job.parent and task.is_file()
    assert task.stem == job.stem or (task.stem, spec.engine.kind) == ("digits", "ray"), "the same task, elsewhere"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_names_files_and_datasets_that_exist(command: list[str]) -> None:
    program, first, *others = command
    assert program in ("python", "quorate", "grep")
    files = [word for word in (first, *others) if re.search(r"\.(py|yaml)$", word)]
    assert all((ROOT / file).is_file() for file in files)
    if first in ("scripts/datasets.py", "scripts/shards.py"):
        script: Any = module_of(ROOT / first)
        assert set(others) <= set(script.DATASETS)


@pytest.mark.long  # it trains three times
def test_the_notebook_runs_as_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "notebook.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\nthe same bits\n" in done.stdout
    (digits,), (guesses,) = (re.findall(rf"{name}: +(.*)\n", done.stdout) for name in ("these digits", "it reads"))
    right = [one == other for one, other in zip(digits.split(), guesses.split(), strict=True)]
    assert sum(right) >= 10, done.stdout
    accuracies = re.findall(r"with seed (\d): accuracy (\S+), .* weights (\w+)", done.stdout)
    assert [seed for seed, _, _ in accuracies] == ["7", "8"]
    assert accuracies[0][2] != accuracies[1][2]
    assert sorted(run.name for run in (tmp_path / "runs").glob("digits-*")) == [f"digits-000{n}" for n in (1, 2, 3)]


def test_the_notebook_is_cells() -> None:
    cells = re.split(r"^# %%.*\n", (EXAMPLES / "notebook.py").read_text(), flags=re.MULTILINE)
    assert cells[0] == "", "nothing stands before the first cell"
    for cell in cells[1:]:
        compile(cell, "a cell", "exec")

"""The examples on data in shards: their commands as the page has them, and the same bits on any number of workers."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from examples.example_files import EXAMPLES, ROOT, module_of

PAGE = (EXAMPLES / "README.md").read_text()
SMALL = ("--digits", "200", "--copies", "2")
shards: Any = module_of(ROOT / "scripts" / "shards.py")


def commands_about(name: str) -> list[list[str]]:
    """What the page has a newcomer type for an example, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (told,) = [lines for block in blocks for lines in block.split("\n\n") if f"shards.py {name}" in lines]
    return [shlex.split(line, comments=True) for line in told.splitlines()]


@pytest.fixture
def checkout(workplace: Workplace) -> Workplace:
    """A folder in which the commands find what they name."""
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, workplace.folder / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return workplace


def typed(checkout: Workplace, command: list[str]) -> str:
    """Type a command, at a small scale; what it printed."""
    program, *words = command
    if program == "python":
        done = subprocess.run(
            [sys.executable, *words, *SMALL], cwd=checkout.folder, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout
    is_training = words[0] == "train"
    ended = checkout.run(*words, *(("--workers", "1", "--epochs", "2") if is_training else ()))
    assert ended.code == 0, ended.stderr
    return ended.stdout


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", shards.DATASETS)
def test_the_commands_of_the_page_train_the_same_on_one_worker_and_on_two(name: str, checkout: Workplace) -> None:
    commands = commands_about(name)
    assert [words[:3] for words in commands[1:3]] == [["quorate", "data", "index"]] * 2
    printed = [typed(checkout, command) for command in commands]
    assert printed[0].startswith(f"{name}: 320 for train and 40 for validation in data/{name}")
    assert "8 " in printed[1] and "320 records" in printed[1]
    job = next(words[2] for words in commands if words[:2] == ["quorate", "train"])
    alone = checkout.run("show", "last", "--json").document
    together = checkout.run("train", job, "--workers", "2", "--epochs", "2", "--json").document
    assert alone["status"] == together["status"] == "complete"
    assert alone["weights_digest"] == together["weights_digest"]
    ledger = checkout.run("show", "last", "--ledger", "--json")
    assert ledger.code == 0, "each sample exactly once"


@pytest.mark.parametrize("name", shards.DATASETS)
def test_the_same_call_writes_the_same_files(name: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert shards.main([name, "--to", str(tmp_path / folder), "--digits", "20", "--copies", "1"]) == 0
    files = sorted(file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*.*"))
    assert len(files) == sum(shards.SHARDS.values())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_is_held_out_is_not_drawn_for_training() -> None:
    drawn = shards.draw(50, 3)
    assert (len(drawn["train"].labels), len(drawn["validation"].labels)) == (120, 10)
    assert all(part.pixels.shape[1:] == (28, 28) and part.pixels.float().std() > 10 for part in drawn.values())
    kinds = [part.labels.bincount(minlength=10) for part in drawn.values()]
    whole = shards.draw(50, 1)
    assert (kinds[0] == 3 * whole["train"].labels.bincount(minlength=10)).all()


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["digits-zip"], ["--digits", "0"], ["--copies", "none"]):
        with pytest.raises(SystemExit) as ended:
            shards.main(arguments)
        assert ended.value.code == 2
    assert "there are digits-parquet and digits-tar" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert shards.main(["digits-tar", "--to", str(tmp_path / "file"), "--digits", "20"]) == 1
    assert "(--to: " in capsys.readouterr().err

"""What Tab offers, asked as a shell asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The name of the variable, and of the program that is completed, come from how the command is called.
COMMAND = "import sys; sys.argv = ['quorate']; from quorate.cli.main import run; run()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for run in ("runs/tiny-0001", "runs/tiny-0002", "elsewhere/other-0001", "elsewhere/no-run"):
        (folder / run).mkdir(parents=True)
    for run in ("runs/tiny-0001", "runs/tiny-0002", "elsewhere/other-0001"):
        (folder / run / "created").touch()
    (folder / "searched" / "find-0001" / "trials").mkdir(parents=True)
    (folder / "searched" / "find-0001" / "search.yaml").touch()
    (folder / "searched" / "tiny-0003").mkdir()
    (folder / "searched" / "tiny-0003" / "created").touch()
    (folder / "examples").mkdir()
    files = ("job.yaml", "join.yml", "notes.txt", ".hidden.yaml", "my job.yaml", "examples/digits.yaml")
    for file in files:
        (folder / file).touch()
    return folder


def ask(place: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=place,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def bash(place: Path, line: str) -> list[str]:
    """What bash is given for the last word of a line."""
    words = line.split(" ")
    answer = ask(place, _QUORATE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    return answer.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quorate resume ", ["tiny-0001", "tiny-0002", "last"]),
        ("quorate doctor l", ["last"]),
        ("quorate diff tiny-0001 tiny", ["tiny-0001", "tiny-0002"]),
        ("quorate resume --runs elsewhere ", ["other-0001", "last"]),
        ("quorate resume --runs absent ", []),
        ("quorate show --runs searched ", ["find-0001", "tiny-0003", "last"]),
        ("quorate resume --runs searched ", ["tiny-0003", "last"]),
        ("quorate tune --runs searched --resume ", ["find-0001", "last"]),
        ("quorate train jo", []),  # the shell goes on to offer files
    ],
)
def test_bash(place: Path, line: str, offered: list[str]) -> None:
    assert bash(place, line) == offered


def test_zsh_and_fish(place: Path) -> None:
    zsh = ask(place, _QUORATE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="quorate resume tiny")
    assert zsh.split("((")[1].split("))")[0].split() == ['"tiny-0001"', '"tiny-0002"']
    fish = ask(
        place,
        _QUORATE_COMPLETE="complete_fish",
        _TYPER_COMPLETE_ARGS="quorate resume tiny",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert fish.split() == ["tiny-0001", "tiny-0002"]

"""What Tab offers, asked as a shell asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quorate.cli.options import job_files

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
        ("quorate train jo", ["job.yaml", "join.yml"]),
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


def test_job_files_of_a_folder_and_those_below(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert job_files("") == ["examples/digits.yaml", "job.yaml", "join.yml"]
    assert job_files("ex") == ["examples/digits.yaml"]
    assert job_files("./jo") == ["./job.yaml", "./join.yml"]
    assert job_files(f"{place}/jo") == [f"{place}/job.yaml", f"{place}/join.yml"]


def test_a_home_is_kept_as_it_was_typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    assert job_files("~/jo") == ["~/job.yaml", "~/join.yml"]


@pytest.mark.parametrize("typed", ["absent/", "job.yaml/x", "~nobody-has-this-name/x", "\0"])
def test_where_nothing_can_be_offered_nothing_is_said(place: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.chdir(place)
    assert job_files(typed) == []

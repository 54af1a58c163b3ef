import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from command import Workplace
from quorate.cli.app import app

GROUP: Any = typer.main.get_command(app)
VERBS: list[str] = sorted(GROUP.commands)

# What takes long to import, and is not needed to answer.
HEAVY = ["torch", "numpy", "pandas", "ray", "mlflow", "grpc", "pydantic", "yaml", "rich", "asyncio"]
HEAVY += ["importlib.metadata", "quorate.spec", "quorate.api"]

ANSWER = """
import sys
sys.argv = ["quorate", *{arguments!r}]
from quorate.cli.main import run
try:
    run()
finally:
    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


def help_of(*verb: str, columns: int = 80) -> str:
    """What a person sees, and that it took nothing heavy to show it."""
    code = ANSWER.format(arguments=[*verb, "--help"], heavy=HEAVY)
    environment = os.environ | {"COLUMNS": str(columns)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    return done.stdout


def examples_of(verb: str) -> list[str]:
    return re.findall(r"^\s*(quorate .*)$", GROUP.commands[verb].help, re.MULTILINE)


def test_the_package_is_imported_without_them() -> None:
    code = f"import sys, quorate; print([name for name in {[*HEAVY, 'typer']!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("columns", [80, 40])
def test_the_help_names_every_verb_with_its_whole_first_sentence(columns: int) -> None:
    text = " ".join(help_of(columns=columns).split())
    assert "to the same bits on any number of workers." in text
    for verb in VERBS:
        sentence = " ".join(GROUP.commands[verb].help.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        assert f" {verb} {sentence}." in text


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_answers_at_once_and_shows_its_examples_as_they_are_typed(verb: str) -> None:
    text = help_of(verb)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    examples = examples_of(verb)
    assert len(examples) >= 2
    for example in examples:
        assert example in [line.strip() for line in lines]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_in_the_help_can_be_parsed(verb: str) -> None:
    for example in examples_of(verb):
        command, named, *arguments = shlex.split(example)
        assert (command, named) == ("quorate", verb)
        with GROUP.commands[verb].make_context(verb, arguments) as context:
            assert context.params or GROUP.commands[verb].commands  # of a group, its own verbs have the rest


def test_an_example_with_a_wrong_flag_would_be_found() -> None:
    with pytest.raises(typer.TyperException, match="--worker"):
        GROUP.commands["train"].make_context("train", ["job.yaml", "--worker", "2"])


@pytest.mark.parametrize("verb", VERBS)
def test_every_parameter_of_a_verb_is_explained(verb: str) -> None:
    for parameter in GROUP.commands[verb].params:
        assert parameter.help, f"{parameter.name} of {verb} has no help"


def test_a_narrow_terminal_gets_a_narrow_help() -> None:
    wide = [line for line in help_of("train", columns=50).splitlines() if len(line) > 50]
    assert all(line.strip() in examples_of("train") for line in wide)


def test_the_module_is_the_command(workplace: Workplace) -> None:
    assert workplace.run("--version").stdout == f"quorate {version('quorate')}\n"


def test_the_verbs_stand_in_panels() -> None:
    panels = re.findall(r"^(Start|Look|Control|Manage|More):\n  (\w+)", help_of(), re.MULTILINE)
    assert panels == [("Start", "init"), ("Look", "runs"), ("Control", "resize"), ("Manage", "track"), ("More", "eval")]


@pytest.mark.parametrize(
    "typed",
    [
        ["show", "last", "--plot", "file"],
        ["trace", "last", "--chrome", "file"],
        ["find-lr", "job.yaml", "--plot", "file"],
        ["checkpoints", "export", "last", "file"],
    ],
    ids=" ".join,
)
def test_a_file_to_write_is_o_in_the_help_and_its_former_name_is_understood(typed: list[str]) -> None:
    *path, last = (word for word in typed if word in VERBS or word == "export")
    parent = GROUP.commands[path[0]] if path else GROUP
    verb, arguments = parent.commands[last], typed[len(path) + 1 :]
    with verb.make_context(last, list(arguments)) as context:
        assert "file" in (str(context.params["output"]), str(context.params.get("out")))
    with verb.make_context(last, [arguments[0], "-o", "file"]) as context:
        assert str(context.params["output"]) == "file"
    text = help_of(*path, last)
    assert "-o, --output" in text.replace("--output, -o", "-o, --output")
    assert not re.search(r"--plot|--chrome|OUT\b|\[\]", text)


def test_files_of_a_project_take_the_place_of_no_module_of_python(tmp_path: Path) -> None:
    for name in ("random", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('in the place of that of Python')")
    command = [sys.executable, "-m", "quorate", "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "There are no runs" in done.stdout, done.stderr

"""Every block of code in README and docs runs, or says why it cannot here."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import quorate
from docs.blocks import PAGES, PREAMBLE, ROOT, Block, all_blocks, blocks_of, script_of
from quorate.cli.app import app
from quorate.spec.load import resolve_mapping
from quorate.spec.yaml_document import read_yaml
from quorate.tune.loading import read_mapping

BLOCKS = list(all_blocks())
IN_ANOTHER_TEST = {"README.md": "test_first_hour.py clones and installs it"}
RUN = [page for page in PAGES if page not in IN_ANOTHER_TEST and any(block.is_run for block in blocks_of(page))]
JOB = {"task": "task.py:Task", "batch_size": 64, "epochs": 1}


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in languages], ids=named)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark], ids=named)
def test_a_mark_is_known_and_says_why(block: Block) -> None:
    assert block.mark in ("parse", "background", "running")
    assert block.mark != "parse" or block.reason


def test_most_blocks_are_run() -> None:
    can_run = [block for block in BLOCKS if block.language in ("sh", "python") and "reference/" not in block.page]
    assert sum(block.is_run for block in can_run) > 0.6 * len(can_run)


@of("sh")
def test_commands_are_those_of_the_command_line(block: Block) -> None:
    group: Any = typer.main.get_command(app)
    for line in block.commands:
        words = shlex.split(line)
        if words[:1] == ["quorate"] and not words[1].startswith("-"):
            verb = group.commands[words[1]]
            rest = words[2:]
            while hasattr(verb, "commands"):
                verb, rest = verb.commands[rest[0]], rest[1:]
            verb.make_context(words[1], [word for word in rest if word != "&"], resilient_parsing=False)


@of("python")
def test_python_names_public_things(block: Block) -> None:
    compile(block.text, named(block), "exec")
    for name in re.findall(r"\bquorate\.([A-Za-z]\w*)", block.text):
        assert hasattr(quorate, name)


@of("yaml")
def test_yaml_is_that_of_a_job_or_a_search(block: Block) -> None:
    keys = read_yaml(block.text).value
    if block.mark == "parse":
        return
    if "space" in keys:
        read_mapping(keys, block.page, {}, resolve_mapping(JOB, "job", {}, ())).accepted()
    else:
        resolve_mapping(({} if "steps" in keys else JOB) | JOB | keys, block.page, {}, ())


@of("json")
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


def test_no_language_is_left_out() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "python", "yaml", "json"}


def test_a_job_of_an_earlier_block_is_not_taken_for_the_one_that_is_waited_for(tmp_path: Path) -> None:
    """Its folder changes when it ends, also after the next one was asked for."""
    script = """
        made() { mkdir -p "runs/$1"; echo '"kind":"step"' > "runs/$1/events.jsonl"; echo > "runs/$1/created"; }
        sleep() { made digits-0003; }  # while somebody waits
        made digits-0001; touch -d '1 hour ago' runs/digits-0001/created; made digits-0002
        begin
        touch -d '1 hour' runs/digits-0001
        wait_for_step
        echo "$newest"
    """
    command = ["bash", "-c", PREAMBLE + script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "runs/digits-0003/created\n"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_one_after_another(page: str, tmp_path: Path) -> None:
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PATH": path, "PYTHONPATH": modules}
    done = subprocess.run(
        ["bash", "-c", script_of(page)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-6000:]}"

"""The real command."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarking.command_line import start_benchmark
from benchmarks.__main__ import app
from command import Workplace, await_condition
from schemas import validate

GROUP: Any = typer.main.get_command(app)
ENDLESS = 1_000_000 + os.getpid()  # by which the processes of this test are known from those of another run
ALLREDUCE = ("allreduce", "--processes", "2", "--rounds", "1")


@pytest.fixture
def temporary(workplace: Workplace) -> Path:
    """A folder for what is temporary, in which nothing may be left."""
    folder = workplace.folder / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.long
def test_quorate_and_gloo_are_measured_side_by_side(workplace: Workplace, temporary: Path) -> None:
    systems = ("--systems", "quorate-shm,quorate-tcp,gloo", "--sizes", "1KB,64KB", "--repeats", "3")
    running = start_benchmark(workplace, *ALLREDUCE, *systems, "--output", "sums.json", "--json", TMPDIR=str(temporary))
    done = running.done(within=100)
    assert done.code == 0, done.stderr
    validate("bench", done.document)
    rows = done.document["rows"]
    assert [(row["bytes"], row["system"]) for row in rows] == [
        (size, system) for size in (1024, 65536) for system in ("quorate-shm", "quorate-tcp", "gloo")
    ]
    for row in rows:
        assert row["ms"] > 0
        assert set(row["ratio_to"]) == ({"gloo"} if row["system"] != "gloo" else set())
    assert rows[0]["ratio_to"]["gloo"] == pytest.approx(rows[2]["ms"] / rows[0]["ms"])
    assert done.document["not_measured"] == []
    assert json.loads((workplace.folder / "sums.json").read_text()) == done.document
    assert not workplace.runs()
    assert list(temporary.iterdir()) == []


def test_ctrl_c_ends_every_process(workplace: Workplace, temporary: Path) -> None:
    endless = ("--systems", "gloo", "--sizes", "1MB", "--repeats", str(ENDLESS))
    running = start_benchmark(workplace, *ALLREDUCE, *endless, "--json", TMPDIR=str(temporary))
    await_condition("the processes of Gloo", lambda: len(_exchanging()) >= 3)
    running.interrupt()
    done = running.done()
    assert (done.code, done.document["status"], done.document["rows"]) == (130, "interrupted", [])
    validate("bench", done.document)
    assert _exchanging() == []
    assert list(temporary.iterdir()) == []


def _exchanging() -> list[str]:
    """The command lines of running scripts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = entry.joinpath("cmdline").read_text()
        except OSError:
            continue
        if "benchmarks.peers.gloo_allreduce" in line and f'"repeats": [{ENDLESS}]' in line:
            found.append(line)
    return found


def test_a_wrong_request_is_refused_before_anything_is_measured(workplace: Workplace) -> None:
    done = start_benchmark(workplace, "scaling", "--workers", "16", "--json").done()
    assert done.code == 2
    assert "16 workers cannot host 8 lanes" in done.error
    assert done.document["status"] == "refused"


def test_saves_that_would_not_reach_a_disk_are_refused(workplace: Workplace) -> None:
    done = start_benchmark(workplace, "checkpoint", "--size", "20MB", "--json", TMPDIR="/dev/shm").done()
    assert done.code == 2
    assert "is in memory" in done.error


@pytest.mark.parametrize("name", GROUP.commands)
def test_the_help_of_a_benchmark_has_examples_that_can_be_parsed(name: str) -> None:
    command = GROUP.commands[name]
    examples = re.findall(r"^\s*python -m benchmarks (.*)$", command.help, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        named, *arguments = shlex.split(example)
        assert named == name
        with command.make_context(name, arguments) as context:
            assert context.params
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} of {name} has no help"


def test_every_benchmark_has_a_verb() -> None:
    assert list(GROUP.commands) == [
        "allreduce",
        "nccl",
        "step",
        "tracking",
        "audits",
        "startup",
        "scaling",
        "overlap",
        "compress",
        "links",
        "servers",
        "recovery",
        "ddp",
        "changes",
        "checkpoint",
        "sharded",
        "data",
        "looking",
        "ray",
        "tune",
        "gpu",
    ]

"""Runs, a stored copy and a search that the tagged version has written are read, exported and resumed as before.

Whoever removes something on purpose says so in REMOVED, in one line each. Whoever adds a verb, a key, a name or an
event adds it to `fixtures/surface.json`.
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import written_before
from command import Workplace
from quorate.cli.app import app
from written_before import KEY, QUESTIONS, RUNS, STORED, export_of, lay_out, leaves

REMOVED: dict[str, list[str]] = {
    "names": [],  # of quorate.__all__
    "verbs": [  # "data index"
        "checkpoints copy",  # a job copies to checkpoint.to; any tool copies a run's folder
        "data preview",  # data verify, and Python
    ],
    "options": ["plan --gpus"],  # "train --detach"; those of a removed verb go with it
    "keys": [  # "nccl.debug", or a whole section: "nccl"
        "strategy.compress.momentum",  # the optimizer has one
        "strategy.compress.random_k",  # top_k is for the same
        "strategy.compress.rank",
        "strategy.compress.start",
        "strategy.hierarchical",
        "strategy.plan",
    ],
    "events": [],
    "exit codes": [],
    "answers": [],  # patterns of what is no longer in a document: "show */pace/*"
}
ANSWERS: dict[str, dict[str, Any]] = json.loads(written_before.ANSWERS.read_text())
SURFACE: dict[str, list[str]] = json.loads(written_before.SURFACE.read_text())
STEPS = "8"


def key_is_removed(key: str) -> bool:
    return any(key == removed or key.startswith(f"{removed}.") for removed in REMOVED["keys"])


def still_promised(question: str, answer: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The part of an answer that has not been removed on purpose."""
    for path, value in answer.items():
        _, section, name, *_ = (*path.split("/"), "", "")
        of_removed_key = section in ("job", "keys") and key_is_removed(name)
        if not of_removed_key and not any(fnmatch(question + path, pattern) for pattern in REMOVED["answers"]):
            yield path, value


@pytest.fixture
def written(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    for name, value in KEY.items():
        monkeypatch.setenv(name, value)
    lay_out(workplace.folder)
    return workplace


def weights(place: Workplace, run: str) -> dict[str, Any]:
    exported = place.run(*export_of(run), "--json")
    assert exported.code == 0, exported.stderr
    return {name: each.tolist() for name, each in load_file(place.folder / "weights.safetensors").items()}


def test_they_are_told_as_before(written: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written.folder)
    different = []
    for question, words in QUESTIONS.items():
        if " ".join(words[:1]) in REMOVED["verbs"] or " ".join(words[:2]) in REMOVED["verbs"]:
            continue
        asked = CliRunner().invoke(app, [*words, "--json"])
        assert asked.exit_code == 0, asked.output
        told = dict(leaves(json.loads(asked.stdout), written.folder))
        different += [
            f"{question}{path}: was {value!r}, is {told.get(path, 'missing')!r}"
            for path, value in still_promised(question, ANSWERS[question])
            if path not in told or told[path] != value
        ]
    assert not different, "\n".join(different)


def test_their_models_are_exported_as_before(written: Workplace) -> None:
    for run in RUNS:
        assert weights(written, run) == ANSWERS[f"export {run}"], run


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run == RUNS[0] else pytest.mark.long) for run in (*RUNS[:4], STORED)]
)
def test_they_are_resumed_to_the_weights_of_an_undisturbed_run(run: str, written: Workplace) -> None:
    """Their arithmetic is exact: with every strategy it comes to the same weights."""
    chosen = ["--task", "task.py:Exact", "--set", "checkpoint.to=[checkpoints]"] if run == STORED else []
    resumed = written.run("resume", run, "--steps", STEPS, *chosen, "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.document["from_step"] == 6
    undisturbed = written.run("train", "ring.yaml", "--steps", STEPS, "--json")
    assert undisturbed.code == 0, undisturbed.stderr
    assert weights(written, Path(run).name) == weights(written, undisturbed.document["run"])


def test_what_users_can_name_is_as_before() -> None:
    present = written_before.surface()
    for kind, before in SURFACE.items():
        promised = [each for each in before if each not in REMOVED[kind]]
        if kind == "options":
            promised = [each for each in promised if each.partition(" --")[0] not in REMOVED["verbs"]]
        if kind == "keys":
            promised = [each for each in before if not key_is_removed(each)]
        assert present[kind] == promised, kind

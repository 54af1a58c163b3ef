"""`quorate checkpoints`, by the real command on a run that is there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import Done, Workplace
from schemas import validate

pytestmark = pytest.mark.usefixtures("unmeasured")

LOAD = """
import json, sys
import torch
from torch import nn

state = torch.load(sys.argv[1]) if sys.argv[1].endswith(".pt") else None
if state is None:
    from safetensors.torch import load_file
    state = load_file(sys.argv[1])
model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
model.load_state_dict(state)
assert "quorate" not in sys.modules
print(json.dumps({name: value.tolist() for name, value in model.state_dict().items()}))
"""


def run(workplace: Workplace, verb: str, *arguments: str, code: int = 0, **environment: str) -> dict[str, Any]:
    """The document of a verb that ends with a code, held against its schema."""
    done = workplace.run("checkpoints", verb, *arguments, "--json", **environment)
    assert done.code == code, done.stderr
    validate("error" if "error" in done.document else f"checkpoints-{verb}", done.document)
    return done.document


def in_words(workplace: Workplace, verb: str, *arguments: str) -> Done:
    return workplace.run("checkpoints", verb, *arguments)


def part_of(workplace: Workplace, name: str) -> Path:
    return sorted((workplace.last / "checkpoints" / name).glob("*.safetensors"))[0]


def loaded(file: Path) -> dict[str, Any]:
    """What PyTorch reads from a file, in a process that does not know Quorate."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def test_ls_tells_what_each_is_and_why_it_is_kept(used_workplace: Workplace) -> None:
    document = run(used_workplace, "ls", "last")
    assert [each["name"] for each in document["checkpoints"]] == used_workplace.checkpoints()
    assert [each["step"] for each in document["checkpoints"]] == [4, 6, 8]
    assert [each["kept"] for each in document["checkpoints"]] == [["last"], ["last"], ["last", "best"]]
    assert [bool(each["metrics"]) for each in document["checkpoints"]] == [True, False, True]
    assert not any(each["problem"] or each["encrypted"] for each in document["checkpoints"])
    told = in_words(used_workplace, "ls", "last").stdout
    assert "last, best" in told
    assert "4 evaluated" in told


def test_damage_is_found_named_and_told_by_the_exit_code(used_workplace: Workplace) -> None:
    assert run(used_workplace, "verify", "last")["damaged"] == 0
    flipped, cut = part_of(used_workplace, "step-00000006"), part_of(used_workplace, "step-00000008-evaluated")
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    document = run(used_workplace, "verify", "last", code=1)
    assert [each["whole"] for each in document["checkpoints"]] == [True, False, False]
    assert flipped.name in document["checkpoints"][1]["problem"]
    assert "truncated" in document["checkpoints"][2]["problem"]
    assert run(used_workplace, "verify", "last", "--checkpoint", "4")["damaged"] == 0
    assert run(used_workplace, "verify", "last", "--checkpoint", "last", code=1)["checkpoints"][0]["step"] == 8
    listed = run(used_workplace, "ls", "last")["checkpoints"]
    assert [bool(each["problem"]) for each in listed] == [False, False, True], "only what shows without reading"
    assert cut.name in in_words(used_workplace, "verify", "last").stdout


def test_the_only_whole_one_is_not_removed_unless_forced(used_workplace: Workplace) -> None:
    removed = run(used_workplace, "rm", "last", "--checkpoint", "6")
    assert removed["removed"] == ["step-00000006"]
    part_of(used_workplace, "step-00000008-evaluated").unlink()
    refused = run(used_workplace, "rm", "last", "--checkpoint", "4", code=2)
    assert "no valid checkpoint left" in refused["error"]
    assert used_workplace.checkpoints() == ["step-00000004-evaluated", "step-00000008-evaluated"]
    assert run(used_workplace, "rm", "last", "--checkpoint", "last")["removed"] == ["step-00000008-evaluated"]
    assert "has no checkpoint '5'" in run(used_workplace, "rm", "last", "--checkpoint", "5", code=2)["error"]
    run(used_workplace, "rm", "last", "--checkpoint", "4", "--force")
    assert used_workplace.checkpoints() == []
    assert not list((used_workplace.last / "checkpoints").iterdir())
    assert "has no checkpoint yet" in in_words(used_workplace, "ls", "last").stdout


@pytest.mark.long
def test_pytorch_reads_what_is_exported_without_quorate(used_workplace: Workplace) -> None:
    folder = used_workplace.folder
    document = run(used_workplace, "export", "last", "out/model.safetensors")
    assert (document["step"], document["format"], document["tensors"]) == (8, "safetensors", 4)
    assert run(used_workplace, "export", "last", "model.pt")["format"] == "torch"
    assert loaded(folder / "out/model.safetensors") == loaded(folder / "model.pt")
    refused = run(used_workplace, "export", "last", "model.pt", "--checkpoint", "4", code=2)
    assert "already exists" in refused["error"]
    assert not list(folder.glob("**/*.partial"))


def test_checkpoints_get_another_key_and_none_again(used_workplace: Workplace) -> None:
    first, second = used_workplace.folder / "first.key", "5e" * 32
    first.write_text("a1" * 32)
    names = used_workplace.checkpoints()
    encrypted = run(used_workplace, "rekey", "last", "--new-key-file", "first.key")
    assert (encrypted["rewritten"], encrypted["encrypted"]) == (names, True)
    assert all(each["encrypted"] for each in run(used_workplace, "ls", "last")["checkpoints"])
    assert run(used_workplace, "rekey", "last", "--new-key-env", "KEY", KEY=second)["rewritten"] == names
    first.unlink()
    verified = run(used_workplace, "verify", "last")
    assert (verified["damaged"], verified["authenticated"]) == (0, False)
    assert "KEY, which should hold the key, is not set" in verified["not_authenticated"]
    assert "Who wrote them was not checked" in used_workplace.run("checkpoints", "verify", "last").stdout
    without = run(used_workplace, "rekey", "last", "--decrypt", code=1)
    assert "KEY, which should hold the key, is not set" in without["error"]
    assert run(used_workplace, "rekey", "last", "--decrypt", KEY=second)["encrypted"] is False
    kept = [file for file in used_workplace.last.rglob("*") if file.is_file()]
    assert not any(second.encode() in file.read_bytes() for file in kept)


def test_the_best_is_no_other_when_it_is_gone(used_workplace: Workplace) -> None:
    run(used_workplace, "rm", "last", "--checkpoint", "best")
    told = run(used_workplace, "verify", "last", "--checkpoint", "best", code=2)["error"]
    assert "the best evaluation of run tiny-0001 is that of step 8 (loss" in told
    assert "There are those of steps 4, 6. Choose one of them by its step" in told


def test_what_another_key_leaves_as_it_was_is_told(used_workplace: Workplace) -> None:
    (used_workplace.folder / "a.key").write_text("a1" * 32)
    names, folder = used_workplace.checkpoints(), used_workplace.last / "checkpoints"
    (folder / names[0] / "manifest.json").write_text("{}")
    (folder / ".writing-step-00000009-ab").mkdir()
    (folder / names[1] / "1-of-9.left.safetensors").write_text("in plain")
    for _ in range(2):
        told = run(used_workplace, "rekey", "last", "--new-key-file", "a.key", code=1)["error"]
        assert f"{names[0]} is damaged and stays as it was, not under the new key" in told
        assert "1 of 3 are so; the other 2 are as asked for" in told
    assert sorted(entry.name for entry in folder.iterdir()) == names
    assert not list(folder.glob(f"{names[1]}/*.safetensors")), "only encrypted ones"
    run(used_workplace, "rm", "last", "--checkpoint", names[0])
    assert run(used_workplace, "rekey", "last", "--new-key-file", "a.key")["rewritten"] == []


@pytest.mark.long
def test_a_run_goes_on_under_another_key_to_the_same_bits(used_workplace: Workplace) -> None:
    key = "5e" * 32
    run(used_workplace, "rekey", "last", "--new-key-env", "KEY", KEY=key)
    resumed = used_workplace.run("resume", "last", "--steps", "10", "--json", KEY=key)
    assert resumed.code == 0, resumed.stderr
    assert all(each["encrypted"] for each in run(used_workplace, "ls", "last")["checkpoints"])
    undisturbed = used_workplace.train("--steps", "10", "--json")
    assert resumed.document["weights_digest"] == undisturbed.document["weights_digest"]


def test_who_asks_for_a_copy_is_told_what_makes_one(used_workplace: Workplace) -> None:
    told = run(used_workplace, "copy", "last", "there", "--checkpoint", "best", code=2)["error"]
    assert "quorate checkpoints copy is gone: a job copies its checkpoints to the places in checkpoint.to" in told
    there = used_workplace.folder / "there" / "tiny-0001"
    shutil.copytree(used_workplace.last, there)
    assert [each["problem"] for each in run(used_workplace, "verify", str(there))["checkpoints"]] == [None] * 3


def test_one_new_key_is_asked_for(used_workplace: Workplace) -> None:
    assert "give exactly one of" in run(used_workplace, "rekey", "last", code=2)["error"]
    both = run(used_workplace, "rekey", "last", "--new-key-env", "A", "--decrypt", code=2)
    assert "give exactly one of" in both["error"]
    assert "set keys of the job" in run(
        used_workplace, "rekey", "last", "--new-key-env", "QUORATE_K", code=2, QUORATE_K="ab" * 32
    )["error"]  # fmt: skip

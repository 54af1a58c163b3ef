"""A job that leaves bad samples out names the first of them, counts them in the end, and lists them on request."""

import json

import pytest

from command import Workplace
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from schemas import validate

TASK = """
import torch, quorate

def decode(record):
    return torch.tensor([float(record["value"])])

class Torn(quorate.Task):
    def model(self):
        return torch.nn.Linear(1, 1)
    def datasets(self):
        shards = quorate.Shards("shards", decode=decode)
        return shards, shards
    def loss(self, model, batch):
        return model(batch).square().mean()
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-4)
"""
BAD = range(3, 40, 3)


@pytest.mark.long
def test_bad_samples_are_named_counted_and_listed(workplace: Workplace) -> None:
    (workplace.folder / "torn.py").write_text(TASK)
    keys = {"task": "torn.py:Torn", "batch_size": 8, "lanes": 2, "epochs": 1, "on_bad_sample": "skip"}
    (workplace.folder / "torn.yaml").write_text(json.dumps(keys))
    shards = workplace.folder / "shards"
    shards.mkdir()
    rows = [{"value": "torn" if index in BAD else index} for index in range(40)]
    (shards / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_index(build_index(str(shards)), shards / NAME)

    done = workplace.run("train", "torn.yaml", "--workers", "2", "--quiet")
    assert done.code == 0, done.stderr
    count = len(BAD)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("  bad samples ")]
    both = f"{count} of 40 (32%) of the training set and {count} of 40 (32%) of the validation set"
    assert row.split(maxsplit=2)[2] == f"warning: {both} left out; quorate show torn-0001 --ledger lists them"
    told = [line for line in done.stderr.splitlines() if "of the training set is left out: ValueError" in line]
    assert len(told) == 1, "all of one file are bad for the same reason"
    assert all("record" in line and "a.jsonl" in line for line in told)
    assert done.stderr.count("`quorate show torn-0001 --ledger` lists them all") == 2

    result = json.loads((workplace.runs()[-1] / "result.json").read_text())
    validate("train", result)
    read = {"training_read": 40, "validation_read": 40}
    assert result["bad_samples"] == {"training": count, "validation": count} | read
    assert f"sample {BAD[0]}: record {BAD[0]} of a.jsonl" in workplace.run("show", "last", "--ledger").stdout
    shown = workplace.run("show", "last", "--ledger", "--json")
    assert shown.code == 0, shown.stderr
    validate("show", shown.document)
    ledger, ranges = shown.document["ledger"], [[number, number] for number in BAD]
    assert (ledger["validation_bad_samples"], ledger["validation_bad"]) == (count, ranges)
    assert (ledger["epochs"][0]["bad_samples"], ledger["epochs"][0]["bad"]) == (count, ranges)

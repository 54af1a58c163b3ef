"""`quorate predict` and `quorate eval --test`."""

import json
import os
import signal
from pathlib import Path

import pytest

import schemas
from command import Workplace, await_condition

TASK = """
import os, time
import torch, quorate
from torch import nn

class Points:
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3,), float(self.first + index)), torch.tensor(float(index))

def others():
    return Points(1000, 7)

class Predicting(quorate.Task):
    def model(self):
        return nn.Linear(3, 2)

    def datasets(self):
        return Points(0, 32), Points(100, 30), Points(200, 9)

    def loss(self, model, batch):
        return (model(batch[0] * 0.01) ** 2).mean()

    def metrics(self, model, batch):
        return {"least": batch[0].min(), "loss": self.loss(model, batch)}

    def predict(self, model, batch):
        if os.environ.get("PAUSE") and 0 < len(list(__import__("pathlib").Path("out.jsonl.parts").glob("*.rows"))) > 3:
            time.sleep(600)
        inputs, _ = batch
        scores = model(inputs * 0.01)
        odd = torch.where(inputs[:, 0] % 2 == 1, float("nan"), inputs[:, 0])
        return {"first": inputs[:, 0], "scores": scores, "odd": odd, "name": [f"n{int(each[0])}" for each in inputs]}

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("predicting"))
    place.task.write_text(TASK)
    place.write_job(task="task.py:Predicting", steps=4)
    assert place.train("--workers", "2").code == 0
    return place


def rows_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("data", "first", "count", "numbers"),
    [("train", 0, 32, [2]), ("validation", 100, 30, [1, 3]), ("task.py:others", 1000, 7, [2])],
)
def test_every_sample_in_order_on_any_number_of_workers(
    trained: Workplace, data: str, first: int, count: int, numbers: list[int]
) -> None:
    files = [trained.folder / f"{workers}.jsonl" for workers in numbers]
    for workers, file in zip(numbers, files, strict=True):
        done = trained.run("predict", "last", data, "-o", file.name, "--workers", str(workers), "--json")
        assert done.code == 0, done.stderr
        schemas.validate("predict", done.document)
        assert (done.document["rows"], done.document["earlier"], done.document["step"]) == (count, 0, 4)
    rows = rows_of(files[0])
    assert [row["sample"] for row in rows] == list(range(count))
    assert [row["first"] for row in rows] == list(range(first, first + count))
    assert rows[1]["odd"] is None and rows[0]["name"] == f"n{first}"
    assert len({file.read_bytes() for file in files}) == 1
    assert not list(trained.folder.glob("*.parts"))


@pytest.mark.long
def test_as_parquet(trained: Workplace) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    done = trained.run("predict", "last", "validation", "-o", "out.parquet")
    assert done.code == 0, done.stderr
    assert done.stdout == "30 rows of tiny-0001 at step 4 are in out.parquet.\n"
    table = parquet.read_table(trained.folder / "out.parquet").to_pydict()
    assert table["sample"] == list(range(30))
    assert table["odd"][1] != table["odd"][1]
    assert len(table["scores"][0]) == 2


@pytest.mark.faults
def test_a_killed_one_goes_on_where_it_was(trained: Workplace) -> None:
    running = trained.start("predict", "last", "validation", "-o", "out.jsonl", "--workers", "2", PAUSE="yes")
    parts = trained.folder / "out.jsonl.parts"
    await_condition("some batches", lambda: len(list(parts.glob("*.rows"))) > 3)
    os.killpg(running.process.pid, signal.SIGKILL)
    running.done()
    trained.assert_nobody_left()
    kept = sum(len(file.read_text().splitlines()) for file in parts.glob("*.rows"))
    done = trained.run("predict", "last", "validation", "-o", "out.jsonl", "--workers", "3")
    assert done.code == 0, done.stderr
    assert 0 < kept < 30
    assert f"30 rows ({kept} of them from before)" in done.stdout
    assert [row["sample"] for row in rows_of(trained.folder / "out.jsonl")] == list(range(30))
    # Of another set nothing is taken over.
    parts.mkdir()
    (parts / "0.rows").write_text('{"sample": 99}\n')
    (parts / "of").write_text("something else")
    assert trained.run("predict", "last", "test", "-o", "out.jsonl").code == 0
    assert [row["sample"] for row in rows_of(trained.folder / "out.jsonl")] == list(range(9))


def test_eval_on_the_test_set(trained: Workplace) -> None:
    assert trained.run("eval", "last", "--json").document["metrics"]["least"] > 100
    found = trained.run("eval", "last", "--test", "--json").document["metrics"]["least"]
    assert 200 <= found < 209


def test_refusals(trained: Workplace, used_workplace: Workplace) -> None:
    for arguments, told in (
        (["last", "test", "-o", "out.csv"], ".jsonl (JSON lines) or .parquet"),
        (["last", "test", "-o", "nowhere/out.jsonl"], "there is no folder nowhere"),
        (["last", "tset", "-o", "out.jsonl"], "there is no dataset tset"),
        (["last", "task.py:nothing", "-o", "out.jsonl"], "has no function nothing"),
    ):
        done = trained.run("predict", *arguments)
        assert (done.code, told in " ".join(done.stderr.split())) == (2, True), done.stderr
    done = used_workplace.run("predict", "last", "validation", "-o", "out.jsonl")
    assert done.code == 2 and "Tiny has no predict(self, model, batch)" in " ".join(done.stderr.split()), done.stderr
    done = used_workplace.run("eval", "last", "--test")
    assert done.code == 2 and "datasets() gives no test set; it gives train, validation" in done.error

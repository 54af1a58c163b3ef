"""What keeps samples from being cached reaches whoever follows the job, and once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bits.bit_tasks import Points, Regression
from quorate.shards.dataset import Shards
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from training.recorded import Run, run

FOLDERS: dict[str, Path] = {}


def plain(record: dict[str, Any]) -> Any:
    return torch.tensor(record["inputs"]), torch.tensor(record["target"])


def drawing(record: dict[str, Any]) -> Any:
    inputs, target = plain(record)
    return inputs + torch.rand(()), target


class Cached(Regression):
    decode = staticmethod(plain)

    def datasets(self) -> Any:
        cache = {"folder": FOLDERS["cache"], "gb": 0.1}
        return Shards(FOLDERS["data"], decode=self.decode, cache=cache, cache_key="v1"), Points(21)


class Drawing(Cached):
    decode = staticmethod(drawing)


@pytest.fixture
def shards(tmp_path: Path) -> None:
    folder = FOLDERS["data"] = tmp_path / "data"
    FOLDERS["cache"] = tmp_path / "cache"
    folder.mkdir()
    points = Points(40)
    rows = [{"inputs": points.inputs[index].tolist(), "target": points.targets[index].item()} for index in range(40)]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_index(build_index(str(folder)), folder / NAME)


def told(ran: Run) -> list[str]:
    return [
        line
        for kind in ("step", "evaluation")
        for lines in ran.fields(kind, "warnings").values()
        for line in lines or ()
    ]


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize(("workers", "loaders"), [(1, 0), (2, 2)])
def test_a_decode_that_draws_is_told_once(workers: int, loaders: int, tmp_path: Path) -> None:
    keys = {"batch_size": 8, "epochs": 2, "loader_workers": loaders}
    ran = run(Drawing, tmp_path / "run", workers, **keys)
    assert ran.ended.ending == "complete"
    (line,) = told(ran)
    assert line.startswith("decoded samples are no longer cached: decode() draws random numbers")
    assert set(ran.fields("step", "draws").values()) == {True}


@pytest.mark.usefixtures("shards")
def test_of_a_cache_that_works_nothing_is_told(tmp_path: Path) -> None:
    ran = run(Cached, tmp_path / "run", 1, batch_size=8, epochs=2)
    assert told(ran) == []
    assert set(ran.fields("step", "draws").values()) == {None}
    assert any(FOLDERS["cache"].rglob("*.kept"))

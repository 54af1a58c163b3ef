"""Which samples of a batch are left out as bad, with what is wrong; and one set that is both of a task's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD, BadSample, LeftOut
from quorate.data.collate import collate
from quorate.data.columns import Columns
from quorate.data.feed import batch_of
from quorate.data.reading import Request, Source
from quorate.data.samples import Fetched, FetchTrouble, Samples
from quorate.data.shards.dataset import Shards
from quorate.data.shards.index_file import NAME, save_index
from quorate.data.shards.indexing import build_index
from quorate.data.shards.reader import LIMIT


class Torn:
    """Every other sample is."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 2:
            raise BadSample(f"a.bin, byte {index}: " + "torn " * 200)
        return torch.tensor(index)


def fetched(dataset: Any, indices: range) -> Fetched | FetchTrouble:
    return Samples({Source.TRAINING: dataset}, collate, 1, skips=True)[Request(Source.TRAINING, 0, tuple(indices))]


def test_the_first_bad_samples_of_a_batch_say_what_is_wrong() -> None:
    answer = fetched(Torn(), range(50))
    assert isinstance(answer, Fetched)
    batch = batch_of(answer)
    assert batch.samples.tolist() == list(range(0, 50, 2))
    assert batch.bad == tuple(range(1, 50, 2))
    assert [why.partition(":")[0] for why in batch.why] == [f"a.bin, byte {index}" for index in batch.bad[:MOST_TOLD]]
    assert max(map(len, batch.why)) < 400, "it travels with the step"


def test_what_is_left_is_in_order_also_where_a_sample_comes_twice() -> None:
    left_out = LeftOut()
    assert left_out.others((3, 1, 3)) == (3, 1, 3)
    for index in (4, 4):
        left_out.add(index, BadSample("torn"))
    assert list(left_out.others((3, 4, 1, 4, 3))) == [3, 1, 3]
    assert left_out.indices == (4, 4)


def test_of_several_batches_the_first_say_what_is_wrong() -> None:
    left_out, why = LeftOut(), [f"torn {number}" for number in range(MOST_TOLD)]
    left_out.extend((7, 3), why[:2])
    left_out.extend((), ())
    left_out.extend(tuple(range(20, 40)), why)
    left_out.extend((50,), why[:1])
    assert left_out.indices == (7, 3, *range(20, 40), 50)
    assert left_out.reasons[:3] == ((7, "torn 0"), (3, "torn 1"), (20, "torn 0"))
    assert len(left_out.reasons) == MOST_TOLD


@pytest.mark.parametrize("error", [TypeError("no such type"), ValueError("torn"), RuntimeError("broken"), OSError("?")])
def test_trouble_in_columns_names_the_set(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(columns: Columns, indices: Any) -> Any:
        raise error

    monkeypatch.setattr(Columns, "batch", refuse)
    answer = fetched(TensorDataset(torch.arange(9)), range(3))
    assert isinstance(answer, FetchTrouble)
    with pytest.raises(JobError, match=rf"the training set cannot be read: {type(error).__name__}: "):
        batch_of(answer)


def test_memory_that_runs_out_is_no_trouble_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(columns: Columns, indices: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Columns, "batch", refuse)
    with pytest.raises(MemoryError):
        fetched(TensorDataset(torch.arange(9)), range(3))


def identity(record: Any) -> Any:
    return record


def test_one_set_for_training_and_validation_expects_the_blocks_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'id': index})}\n" for index in range(20)))
    save_index(build_index(str(tmp_path)), tmp_path / NAME)
    expected: list[tuple[Shards, list[int]]] = []
    monkeypatch.setattr(Shards, "expect", lambda self, blocks: expected.append((self, list(blocks))))
    both, other = Shards(tmp_path, decode=identity), Shards(tmp_path, decode=identity)
    ahead = {Source.TRAINING: [7, 2, 5], Source.VALIDATION: [0, 2]}

    samples = Samples({Source.TRAINING: both, Source.VALIDATION: both}, collate, 1)
    samples.expect(ahead)
    assert expected == [(both, [7, 2, 5, 0])]
    samples.divide_memory(2)
    assert both.limit == LIMIT // 2

    apart = Samples({Source.TRAINING: both, Source.VALIDATION: other}, collate, 1)
    apart.expect(ahead)
    assert expected[1:] == [(both, [7, 2, 5]), (other, [0, 2])]
    apart.divide_memory(1)
    assert both.limit + other.limit == LIMIT

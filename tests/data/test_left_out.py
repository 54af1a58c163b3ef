"""Which samples of a batch are left out as bad, with what is wrong; and one set that is both of a task's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from data.shards.shard_files import index_folder
from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD, BadSample, LeftOut, without_numbers
from quorate.data.collate import collate
from quorate.data.datasets import LIMIT, Columns
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, batch_of
from quorate.shards.dataset import Shards


class Torn:
    """Every other sample is."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 2:
            raise BadSample(f"{index % 4}-{index // 8}.bin, byte {index}: " + "torn " * 200)
        return torch.tensor(index)


def fetched(dataset: Any, indices: range) -> Batch | FetchFailure:
    return Samples({Source.TRAINING: dataset}, collate, 1, skips=True)[Request(Source.TRAINING, 0, tuple(indices))]


def test_the_first_bad_samples_of_a_batch_say_what_is_wrong() -> None:
    answer = fetched(Torn(), range(50))
    assert isinstance(answer, Batch)
    batch = batch_of(answer)
    assert batch.samples.tolist() == list(range(0, 50, 2))
    assert batch.bad == tuple(range(1, 50, 2))
    first = [index for index in batch.bad if index % 8 in (1, 3)][:MOST_TOLD]
    told = {index: why.partition(":")[0] for index, why in zip(batch.bad, batch.why, strict=False) if why}
    assert told == {index: f"{index % 4}-{index // 8}.bin, byte {index}" for index in first}, "once for each file"
    assert max(map(len, batch.why)) < 400, "it travels with the step"


def test_what_is_left_is_in_order_also_where_a_sample_comes_twice() -> None:
    left_out = LeftOut()
    assert left_out.others((3, 1, 3)) == (3, 1, 3)
    for index in (4, 4):
        left_out.add(index, BadSample("torn"))
    assert list(left_out.others((3, 4, 1, 4, 3))) == [3, 1, 3]
    assert left_out.indices == (4, 4)


def test_of_several_batches_the_first_say_what_is_wrong() -> None:
    left_out, why = LeftOut(), [f"{number}.bin, byte 7: torn" for number in range(MOST_TOLD)]
    left_out.extend((7, 3), why[:2])
    left_out.extend((), ())
    left_out.extend(tuple(range(20, 40)), why)
    left_out.extend((50,), ("eleven.bin, byte 7: torn",))
    assert left_out.indices == (7, 3, *range(20, 40), 50)
    numbers = (7, 3, *range(22, 20 + MOST_TOLD))
    assert left_out.reasons == tuple(zip(numbers, why, strict=True)), "the first two come again"


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ("a-1.parquet, row 7: column x has no value", "a-1.parquet, row 1,234: column x has no value", True),
        ("a-1.parquet, row 7: column x has no value", "a-2.parquet, row 7: column x has no value", False),
        ("1.jsonl, byte 0: torn", "2.jsonl, byte 0: torn", False),
        ("2024/a.jsonl, byte 0: torn", "2025/a.jsonl, byte 0: torn", False),
        ("a.tar, bytes 0 to 9: digest 12ab", "a.tar, bytes 9 to 18: digest 34cd", False),
        ("ValueError: bad (in record 3 of 1.tar)", "ValueError: bad (in record 40 of 1.tar)", True),
    ],
)
def test_a_reason_is_of_a_file_and_not_of_a_row(one: str, other: str, is_alike: bool) -> None:
    assert (without_numbers(one) == without_numbers(other)) is is_alike


def shards_of(folder: Path, lines: list[str]) -> Path:
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return index_folder(folder) / "a.jsonl"


def trouble(folder: Path, index: int) -> FetchFailure:
    answer = Samples({Source.TRAINING: Shards(folder)}, collate, 1)[Request(Source.TRAINING, 0, (index,))]
    assert isinstance(answer, FetchFailure)
    return answer


def test_a_record_that_was_always_bad_is_mended_and_not_restored(tmp_path: Path) -> None:
    shards_of(tmp_path, ['{"id": 1}', '{"id": '])
    hint = trouble(tmp_path, 1).hint
    assert hint.startswith("Repair the record")
    assert f"`quorate data index {tmp_path} --force`" in hint
    assert "on_bad_sample: skip" in hint


def test_bytes_that_have_changed_are_restored_or_listed_anew(tmp_path: Path) -> None:
    file = shards_of(tmp_path, ['{"id": 1}', '{"id": 2}'])
    file.write_text('{"id": 1}\n{"id": 3}\n')
    hint = trouble(tmp_path, 1).hint
    assert hint.startswith("Restore the file")
    assert f"`quorate data index {tmp_path} --force`" in hint
    answer = fetched(Shards(tmp_path), range(2))
    assert isinstance(answer, Batch)
    assert answer.bad == (0, 1)
    (why,) = answer.why
    assert why.endswith("; and with it the 1 other record of this block")


def test_samples_of_shards_that_are_not_alike_are_named_with_their_files(tmp_path: Path) -> None:
    shards_of(tmp_path, ['{"id": [1]}', '{"id": [1, 2]}'])
    answer = fetched(Shards(tmp_path), range(2))
    assert isinstance(answer, FetchFailure)
    assert "samples 0 (record 0 of a.jsonl) and 1 (record 1 of a.jsonl) of the training set differ" in answer.message
    assert "(at ['id'])" in answer.message
    assert "decode=" in answer.hint


def test_a_column_of_times_is_named_with_the_remedy(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when = pyarrow.array([0, 1], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"x": [1.0, 2.0], "when": when}), tmp_path / "a.parquet")
    index_folder(tmp_path)
    answer = fetched(Shards(tmp_path), range(2))
    assert isinstance(answer, FetchFailure)
    assert answer.message.startswith("sample 0 (record 0 of a.parquet) of the training set holds a datetime64")
    assert "cannot be stacked (at ['when'])" in answer.message
    assert "columns=" in answer.hint
    assert "decode=" in answer.hint


@pytest.mark.parametrize("error", [TypeError("no such type"), ValueError("torn"), RuntimeError("broken"), OSError("?")])
def test_trouble_in_columns_names_the_set(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(columns: Columns, indices: Any) -> Any:
        raise error

    monkeypatch.setattr(Columns, "batch", refuse)
    answer = fetched(TensorDataset(torch.arange(9)), range(3))
    assert isinstance(answer, FetchFailure)
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
    shards_of(tmp_path, [f'{{"id": {index}}}' for index in range(20)])
    expected: list[tuple[Shards, list[int]]] = []
    monkeypatch.setattr(Shards, "prefetch", lambda self, blocks: expected.append((self, list(blocks))))
    both, other = Shards(tmp_path, decode=identity), Shards(tmp_path, decode=identity)
    ahead = {Source.TRAINING: [7, 2, 5], Source.VALIDATION: [0, 2]}

    samples = Samples({Source.TRAINING: both, Source.VALIDATION: both}, collate, 1)
    samples.prefetch(ahead)
    assert expected == [(both, [7, 2, 5, 0])]
    samples.divide_memory(2)
    assert both.limit == LIMIT // 2

    apart = Samples({Source.TRAINING: both, Source.VALIDATION: other}, collate, 1)
    apart.prefetch(ahead)
    assert expected[1:] == [(both, [7, 2, 5]), (other, [0, 2])]
    apart.divide_memory(1)
    assert both.limit + other.limit == LIMIT

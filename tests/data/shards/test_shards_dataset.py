"""Shards are a dataset like any other: by index, whole columns at once, in any process, and bad records by name."""

import itertools
import os
import pickle
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
import torch

from data.shards.shard_files import KINDS, same, small_blocks, write_indexed, write_shards
from quorate.core.errors import RequestError, TaskError
from quorate.data.bad_sample import BadSample, Unreachable
from quorate.data.collate import UnlikeSamples, collate
from quorate.data.datasets import check_dataset
from quorate.data.fingerprint import fingerprint
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples
from quorate.shards.dataset import MOST_SAMPLES, Shards, _index_path, merged
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")
COLUMNAR = ("parquet", "hdf5")


def identity(record: Any) -> Any:
    return record


def samples_of(dataset: Any, **options: Any) -> Samples:
    return Samples({Source.TRAINING: dataset}, options.pop("collate_with", collate), 1, **options)


def fetched(samples: Samples, *indices: int) -> Batch:
    answer = samples[Request(Source.TRAINING, 0, indices)]
    assert isinstance(answer, Batch), answer
    return answer


def trouble(samples: Samples, *indices: int) -> FetchFailure:
    answer = samples[Request(Source.TRAINING, 0, indices)]
    assert isinstance(answer, FetchFailure), answer
    return answer


def spoil(file: Path, start: int, content: bytes = b"\xff\xfe\xfd") -> None:
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(content)
    later = time.time() + 10  # whatever the clock of the file system can tell apart
    os.utime(file, (later, later))


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_is_a_sample_by_its_number(kind: str, tmp_path: Path) -> None:
    written = write_indexed(kind, tmp_path)
    shards = Shards(tmp_path, decode=identity)
    assert len(shards) == len(written.records) == sum(shards.blocks)
    assert len(shards.blocks) > 3, "several blocks"
    order = numpy.random.default_rng(0).permutation(len(shards)).tolist()
    assert all(same(shards[index], written.records[index]) for index in order)
    assert same(shards[-1], written.records[-1])
    with pytest.raises(IndexError):
        shards[len(shards)]
    assert check_dataset(shards, "training") is shards


@pytest.mark.parametrize("kind", COLUMNAR)
def test_columns_at_once_are_what_collating_gives(kind: str, tmp_path: Path) -> None:
    write_indexed(kind, tmp_path)
    shards = Shards(tmp_path)
    wanted = [40, 3, 4, 47, 0, 31]
    at_once = shards.batch(wanted)
    assert same(at_once, collate([shards[index] for index in wanted]))
    assert same(fetched(samples_of(shards), *wanted).content, at_once)
    assert any(isinstance(column, torch.Tensor) for column in at_once.values())
    one = shards.batch([7])
    next(column for column in one.values() if isinstance(column, torch.Tensor)).zero_()
    assert not same(one, shards.batch([7])), "a batch has memory of its own"


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i2", "f2", "f8", "c8", "?", "S5"])
def test_columns_of_every_kind_make_batches(kind: str, tmp_path: Path) -> None:
    values = numpy.arange(40).astype(kind)
    pairs = values.reshape(20, 2).repeat(2, axis=0)
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        opened["x"] = values
        opened["pairs"] = pairs
    save_index(build_index(str(tmp_path)), tmp_path / NAME)
    shards = Shards(tmp_path)
    for wanted in ([3], [39, 0, 3]):
        batch = fetched(samples_of(shards), *wanted).content
        if kind == "S5":
            assert batch["x"] == values[wanted].tolist()
            assert batch == collate([shards[index] for index in wanted])
            assert type(shards[3]["x"]) is bytes
        else:
            assert batch["x"].numpy().dtype == values.dtype
            assert (batch["x"].numpy() == values[wanted]).all()
            assert (batch["pairs"].numpy() == pairs[wanted]).all()


def test_records_and_texts_of_numpy_are_values_of_python() -> None:
    parts = [(numpy.array([row]), numpy.array([(1 - row, 2.5)], "i4,f4")) for row in (1, 0)]
    assert [column.tolist() for column in merged(parts, 2)] == [[1, 0], [2.5, 2.5]]
    assert merged([(numpy.arange(2), numpy.array(["a", "bc"]))], 2) == ["a", "bc"]
    with pytest.raises(UnlikeSamples, match="cannot be stacked"):
        merged([(numpy.arange(1), numpy.zeros(1, numpy.longdouble))], 1)


def test_some_columns_in_the_order_in_which_they_are_asked_for(tmp_path: Path) -> None:
    written = write_indexed("parquet", tmp_path)
    shards = Shards(tmp_path, columns=["weight", "id"])
    assert list(shards.batch([3])) == ["weight", "id"]
    assert shards.batch([3])["id"].item() == written.records[3]["id"]
    assert shards.fingerprint != Shards(tmp_path).fingerprint


def test_a_decode_of_ones_own_makes_the_samples(tmp_path: Path) -> None:
    written = write_indexed("tar", tmp_path)
    shards = Shards(tmp_path, decode=lambda record: (len(record["bin"]), record["__key__"]))
    batch = fetched(samples_of(shards), 5, 2).content
    assert batch[0].tolist() == [len(written.records[index]["bin"]) for index in (5, 2)]


def test_random_numbers_in_decode_are_those_of_the_sample(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    shards = Shards(tmp_path, decode=lambda _: torch.rand(2))
    both, alone = fetched(samples_of(shards), 3, 4).content, fetched(samples_of(shards), 4).content
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])


def test_the_fingerprint_is_that_of_the_index_and_no_record_is_read(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_indexed("parquet", tmp_path / name, seed=seed)
    prints = {name: fingerprint(samples_of(Shards(tmp_path / name))) for name in "abc"}
    assert prints["a"] == prints["b"] != prints["c"]
    for file in (tmp_path / "a").glob("*.parquet"):
        file.unlink()
    assert fingerprint(samples_of(Shards(tmp_path / "a"))) == prints["a"]


def test_a_decode_that_gives_something_else_each_time_is_refused(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    numbers = itertools.count()
    shards = Shards(tmp_path, decode=lambda _: next(numbers))
    with pytest.raises(TaskError, match="Sample 0 of the training set is another one each time"):
        fingerprint(samples_of(shards))


def test_it_can_be_pickled_and_reads_in_a_forked_child(tmp_path: Path) -> None:
    written = write_indexed("jsonl", tmp_path)
    shards = Shards(tmp_path, decode=identity)
    shards.prefetch([0, 1, 2])
    assert shards[0] == written.records[0]
    again = pickle.loads(pickle.dumps(shards))
    assert again[40] == written.records[40]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if shards[30] == written.records[30] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shards.close()
    assert shards[1] == written.records[1], "it may be read from again"
    shards.close()


def test_the_default_window_is_smaller_for_large_samples(tmp_path: Path) -> None:
    assert Shards(write_indexed("text", tmp_path / "small").folder).window == MOST_SAMPLES
    large = Shards(write_indexed("tar", tmp_path / "large").folder, window=3)
    assert large.window == 3
    assert 1 <= Shards(tmp_path / "large").window < MOST_SAMPLES


def test_a_relative_path_is_looked_for_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("task", "working"):
        write_indexed("text", tmp_path / place / "data", sizes=(5,) if place == "task" else (3,))
    (tmp_path / "task/mine.py").write_text("import quorate\ndef build(path): return quorate.Shards(path)\n")
    code: dict[str, Any] = {}
    exec(compile((tmp_path / "task/mine.py").read_text(), str(tmp_path / "task/mine.py"), "exec"), code)
    monkeypatch.chdir(tmp_path / "working")
    assert len(code["build"]("data")) == 5
    (tmp_path / "task/data").rename(tmp_path / "task/moved")
    assert len(code["build"]("data")) == 3
    (tmp_path / "working/data" / NAME).unlink()
    for path in ("data", f"data/{NAME}"):
        with pytest.raises(RequestError, match="has no index of its shards yet"):
            code["build"](path)
    beside, working = tmp_path / "task/no", tmp_path / "working/no"
    told = rf"^no: there is no such folder: looked for {beside} \(next to .*\) and {working} \(in the working folder\)"
    with pytest.raises(RequestError, match=told):
        code["build"]("no")


def test_where_the_index_lies_is_told_as_it_was_read(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet/i.quorate"
    write_indexed("text", folder)
    for path in (f"{folder}/", str(folder / NAME)):
        assert Shards(path).index_path == str(folder / NAME)
    save_index(build_index(str(folder), root="i.quorate"), folder.parent / NAME)
    for path in (f"file://{folder.parent}//", f"file://{folder.parent}/{NAME}"):
        assert Shards(path).index_path == f"file://{folder.parent}/{NAME}"


@pytest.mark.parametrize("place", ["s3://imagenet/train", "s3://imagenet", "gs://a//i"])
def test_a_bucket_may_begin_with_any_letter(place: str) -> None:
    assert _index_path(place) == f"{place}/{NAME}"


def test_shards_without_an_index_are_refused_with_the_command_to_type(tmp_path: Path) -> None:
    write_shards("tar", tmp_path)
    with pytest.raises(RequestError, match=f"quorate data index {tmp_path}"):
        Shards(tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window= takes a whole number"),
        ({"window": True}, "window= takes a whole number"),
        ({"columns": "id"}, "columns= takes a list"),
        ({"columns": ["idd"]}, "no column 'idd'; they have id, "),
        ({"columns": ["id", "name", "id"]}, "names 'id' more than once"),
        ({"decode": "identity"}, "decode= takes a function"),
        ({"cache": "/tmp"}, "cache= takes"),
        ({"cache": {"gb": 1}}, 'cache= takes .*its "folder" is missing'),
        ({"cache": {"foldr": "/tmp/x"}}, "cache= takes .*folder.*gb.*, and no 'foldr'"),
        ({"cache": {"folder": "/tmp/x", "gb": 0}}, "a number above 0 .* not the int 0"),
        ({"cache": {"folder": "/tmp/x", "gb": 1e-10}}, "a number above 0"),
        ({"cache": {"folder": "/tmp/x", "gb": float("inf")}}, "not the float inf"),
        ({"cache": {"folder": "/tmp/x", "gb": float("nan")}}, "not the float nan"),
        ({"cache": {"folder": "/tmp/x", "gb": True}}, "not the bool True"),
        ({"cache": {"folder": 5}}, "a path or a text, not the int 5"),
        ({"cache": {"folder": "s3://me:secret@bucket/x"}}, "on a local disk, such as .*, not s3://…@bucket/x"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_indexed("parquet", tmp_path)
    with pytest.raises(TaskError, match=text):
        Shards(tmp_path, **options)


def test_a_cache_that_cannot_be_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    (tmp_path / "file").touch()
    told = r"cannot be made: Not a directory\. Give cache= another folder, or leave it out\."
    with pytest.raises(RequestError, match=told):
        Shards(tmp_path, cache={"folder": tmp_path / "file"})


def test_batches_of_records_without_decode_are_what_the_class_says(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1, "t": "a", "l": [1, 2]}\n{"n": 2, "t": "b", "l": [3, 4]}\n')
    save_index(build_index(str(tmp_path)), tmp_path / NAME)
    batch = fetched(samples_of(Shards(tmp_path)), 0, 1).content
    assert (batch["n"].tolist(), batch["t"]) == ([1, 2], ["a", "b"])
    assert [each.tolist() for each in batch["l"]] == [[1, 3], [2, 4]]
    for kind in ("tar", "text"):
        records = write_indexed(kind, tmp_path / kind).records
        batch = fetched(samples_of(Shards(tmp_path / kind)), 3, 1).content
        one, other = records[3], records[1]
        assert batch == ([one, other] if kind == "text" else {name: [one[name], other[name]] for name in one})


def test_columns_of_what_has_none_are_refused(tmp_path: Path) -> None:
    write_indexed("tar", tmp_path)
    with pytest.raises(TaskError, match="these shards are tar"):
        Shards(tmp_path, columns=["jpg"])


def test_an_iterable_dataset_is_refused_with_both_remedies() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(TaskError, match=r"(?s)quorate\.Stream\(open.*quorate\.Shards\(PATH\).*quorate data index PATH"):
        check_dataset(Endless(), "training")


# --- bad data


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_block_is_named_and_only_its_samples_are_bad(kind: str, tmp_path: Path) -> None:
    written = write_indexed(kind, tmp_path)
    file = written.files[0]
    shards = Shards(tmp_path, decode=None if kind in COLUMNAR else identity)
    block = shards.index.block(1)
    size = file.stat().st_size
    # HDF5 counts its blocks in rows; the first bytes of a picture lie somewhere behind the middle.
    start = block.start + block.length // 2 if kind != "hdf5" else size - 200
    spoil(file, start)
    strict, lenient = samples_of(shards, collate_with=list), samples_of(shards, collate_with=list, skips=True)
    first = len(written.records) - 1
    bad = [index for index in range(30) if fetched(lenient, index).bad]
    assert bad, "the fault was brought about"
    told = trouble(strict, 0, *bad)
    assert told.kind == "sample"
    assert told.index == bad[0]
    assert file.name in told.message
    assert "the index has" in told.message
    assert "on_bad_sample: skip" in told.hint
    if kind != "hdf5":
        assert bad == list(range(block.row, block.row + block.records))
        assert f"bytes {block.start} to {block.start + block.length}" in told.message
    assert "changed since it was indexed" in told.message, "it was written to later"
    answer = fetched(lenient, bad[0], first)
    assert answer.bad == (bad[0],)
    assert len(answer.content) == 1
    assert fetched(lenient, *bad[:2]).content is None


@pytest.mark.parametrize("kind", COLUMNAR)
def test_bad_samples_are_left_out_of_columns(kind: str, tmp_path: Path) -> None:
    written = write_indexed(kind, tmp_path)
    sound = samples_of(Shards(tmp_path), skips=True)
    expected = fetched(sound, 0, 31, 40).content
    name = sorted(written.files)[1]
    is_picture = kind == "hdf5"
    start = name.read_bytes().index(written.records[30]["group/picture"].tobytes()) if is_picture else 8
    spoil(name, start)
    spoilt = samples_of(Shards(tmp_path), skips=True)
    answer = fetched(spoilt, 0, 30, 31, 40)
    assert answer.bad == (30,), "the only record of the second file"
    assert same(answer.content, expected)
    assert fetched(spoilt, 30).content is None


def test_a_file_that_was_cut_off_is_told_as_changed_with_both_sizes(tmp_path: Path) -> None:
    file = write_indexed("tar", tmp_path).files[2]
    size = file.stat().st_size
    os.truncate(file, size // 2)
    told = trouble(samples_of(Shards(tmp_path, decode=len)), 47)
    assert f"{size // 2:,} bytes, and it had {size:,}" in told.message


def test_a_file_that_changed_without_leaving_a_trace_is_told_as_damaged(tmp_path: Path) -> None:
    file = write_indexed("text", tmp_path).files[0]
    before = file.stat()
    spoil(file, 10)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    told = trouble(samples_of(Shards(tmp_path)), 0)
    assert "has the size that was indexed" in told.message


def test_a_missing_file_ends_the_job_also_where_bad_samples_are_skipped(tmp_path: Path) -> None:
    write_indexed("parquet", tmp_path).files[0].unlink()
    for shards in (Shards(tmp_path), Shards(tmp_path, decode=identity)):
        told = trouble(samples_of(shards, skips=True), 0)
        assert told.kind == "access"
        assert "shard-000.parquet cannot be read: it is not there" in told.message


def refuse_third(record: str) -> int:
    if record.startswith("3 "):
        raise ValueError("no such word")
    return len(record)


def test_a_record_that_decode_raises_for_is_bad(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    shards = Shards(tmp_path, decode=refuse_third)
    told = trouble(samples_of(shards), 2, 3, 4)
    assert told.index == 3
    assert told.message == "ValueError: no such word (in decode() of record 3 of shard-000.txt)"
    assert 'raise ValueError("no such word")' in told.traceback
    answer = fetched(samples_of(shards, skips=True), 2, 3, 4)
    assert answer.bad == (3,)
    assert len(answer.content) == 2


class SlowDown(Exception):
    """As botocore has it: neither an OSError nor of this project."""

    __module__ = "botocore.exceptions"


class Unauthorized(Exception):
    """As Google's libraries for the cloud have it."""

    __module__ = "google.api_core.exceptions"


class DecodeError(Exception):
    """As protobuf has it, which is Google's too."""

    __module__ = "google.protobuf.message"


MACHINES: list[BaseException] = [
    MemoryError(), OSError(28, "no space"), SystemExit(1), TimeoutError("slow"), ConnectionError("gone"),
    torch.OutOfMemoryError("none left"), ImportError("no module"), urllib.error.URLError("no host"), SlowDown("slow"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("can't start new thread"), RuntimeError("CUDA error: an illegal memory access"),
    OSError("decoder jpeg not available"), TaskError("no index"), subprocess.TimeoutExpired("ffmpeg", 5),
    Unauthorized("no"),
]  # fmt: skip


@pytest.mark.parametrize("error", MACHINES, ids=lambda error: f"{type(error).__name__} {error}"[:40])
def test_trouble_of_the_machine_in_decode_is_never_skipped(error: BaseException, tmp_path: Path) -> None:
    write_indexed("text", tmp_path)

    def fail(_: str) -> int:
        raise error

    def wrap(_: str) -> int:
        try:
            raise error
        except Exception as cause:
            raise ValueError("cannot be decoded") from cause

    for decode in (fail, wrap):
        told = trouble(samples_of(Shards(tmp_path, decode=decode), skips=True), 2)
        assert told.kind == "code"


def test_memory_that_torch_does_not_get_is_no_bad_sample(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    shards = Shards(tmp_path, decode=lambda _: torch.empty(2**58, dtype=torch.int8))
    told = trouble(samples_of(shards, skips=True), 2)
    assert told.kind == "code"
    assert "memory" in told.message


def test_shards_that_decode_reads_and_cannot_reach_end_the_job(tmp_path: Path) -> None:
    write_indexed("text", tmp_path / "a")
    write_indexed("text", tmp_path / "b").files[0].unlink()
    other = Shards(tmp_path / "b")
    told = trouble(samples_of(Shards(tmp_path / "a", decode=lambda _: other[0]), skips=True), 2)
    assert told.kind == "access"


@pytest.mark.parametrize(
    "error",
    [
        OSError("image file is truncated"),
        RuntimeError("shape '[3]' is invalid"),
        KeyError("jpg"),
        UnicodeError("bad"),
        DecodeError("Wrong wire type in tag."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_follows_from_the_record_is_a_bad_sample(error: Exception, tmp_path: Path) -> None:
    write_indexed("text", tmp_path)

    def fail(_: str) -> int:
        raise error

    assert fetched(samples_of(Shards(tmp_path, decode=fail), skips=True), 2).bad == (2,)


def test_what_wraps_shards_passes_bad_samples_on(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)
    wrapped: Any = torch.utils.data.Subset(Shards(tmp_path, decode=refuse_third), [3, 4, 5])  # type: ignore[arg-type]
    assert fetched(samples_of(wrapped, skips=True), 0, 1).bad == (0,)


def test_other_code_of_the_user_is_no_bad_sample(tmp_path: Path) -> None:
    write_indexed("text", tmp_path)

    def refuse(samples: Any) -> Any:
        raise ValueError("cannot stack")

    told = trouble(samples_of(Shards(tmp_path), collate_with=refuse, skips=True), 0)
    assert told.index is None
    assert told.kind == "code"


def test_missing_numbers_are_bad_samples_of_their_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"x": pa.array([1.5, None, 2.5])}), tmp_path / "a.parquet")
    save_index(build_index(str(tmp_path)), tmp_path / NAME)
    answer = fetched(samples_of(Shards(tmp_path), skips=True), 0, 1, 2)
    assert answer.bad == (1,)
    assert answer.content["x"].tolist() == [1.5, 2.5]


def test_bad_samples_and_errors_survive_pickling() -> None:
    bad = pickle.loads(pickle.dumps(BadSample("a.tar, byte 5", "traceback")))
    assert (bad.message, bad.traceback) == ("a.tar, byte 5", "traceback")
    assert pickle.loads(pickle.dumps(Unreachable("a.tar is away"))).message == "a.tar is away"

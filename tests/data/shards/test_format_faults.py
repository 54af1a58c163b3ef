"""What formats must not do: hand out what they keep, blame the data for the machine, or take one thing for another."""

import bz2
import gzip
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy
import pyarrow as pa
import pytest
from pyarrow import parquet

from data.shards.shard_files import SMALL_BLOCK, add_member, small_blocks, write_shards
from data.shards.test_formats import read_block
from quorate.core.errors import RequestError
from quorate.data.bad_sample import Unreachable
from quorate.shards.files import shard_place
from quorate.shards.formats.format import BadRecord, Block
from quorate.shards.formats.kinds import format_of
from quorate.shards.index import ShardIndex
from quorate.shards.indexing import build_index

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")


def opened(index: ShardIndex, columns: list[str] | None = None) -> Any:
    """The first block."""
    return read_block(index, 0, columns)


def indexed(file: Path, content: bytes) -> ShardIndex:
    file.write_bytes(content)
    return build_index(str(file.parent))


def table_block(folder: Path, table: pa.Table) -> Any:
    parquet.write_table(table, folder / "a.parquet")
    return opened(build_index(str(folder)))


def zipped(content: bytes) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as new:
        new.writestr("a", content)
    return raw.getvalue()


def zstandard(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


# --- parquet


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_texts_are_made_once_and_counted(kind: pa.DataType, tmp_path: Path) -> None:
    values = ["one", None, "ä" * 50, "ж" * 50, "🙂" * 50]
    records = table_block(tmp_path, pa.table({"t": pa.array(values, kind)}))
    first, again = (records.columns([4, 0, 1])["t"] for _ in range(2))
    assert first.tolist() == [values[4], "one", None]
    assert all(one is other for one, other in zip(first, again, strict=True)), "not made anew for each batch"
    assert records[3]["t"] == values[3]
    assert records.nbytes >= sum(map(sys.getsizeof, records.columns(range(5))["t"]))


def test_few_objects_are_those_that_many_are(tmp_path: Path) -> None:
    values = [{"a": number, "b": [str(number)]} for number in range(50)]
    records = table_block(tmp_path, pa.table({"s": values}))
    for count in (1, 15, 16, 50):
        assert records.columns(range(count))["s"].tolist() == values[:count]


def test_objects_of_a_row_may_be_changed_and_the_block_stays(tmp_path: Path) -> None:
    rows = {"lists": [[1, 2], [3]], "nested": [[["a"]], [["b"]]], "struct": [{"x": [1]}, {"x": [2]}]}
    records = table_block(tmp_path, pa.table(rows))
    for _ in range(2):
        for row in (records[0], {name: column[0] for name, column in records.columns([0, 0]).items()}):
            assert (row["lists"].tolist(), row["nested"], row["struct"]) == ([1, 2], [["a"]], {"x": [1]})
            row["lists"][0] = 99
            row["nested"][0].append("more")
            row["struct"]["x"].clear()
    twice = records.columns([1, 1])
    twice["struct"][0]["x"].append(7)
    assert twice["struct"][1] == {"x": [2]}, "nor is one row of a batch another"


def test_lists_that_are_equally_long_come_as_lists(tmp_path: Path) -> None:
    words = [["a", "b"], ["c", "d"], ["e", "f"]]
    records = table_block(tmp_path, pa.table({"words": words}))
    assert records.columns([2, 0])["words"].tolist() == [["e", "f"], ["a", "b"]]
    assert records[1] == {"words": ["c", "d"]}


def test_lists_of_numbers_are_arrays_and_those_that_lack_something_are_as_they_are(tmp_path: Path) -> None:
    lists = [[1, 2], None, [], [3, None], [4]]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int32())):
        table = pa.table({"l": pa.array([[9, 9, 9], *lists, [8]], kind).slice(1, 5)})
        records = table_block(tmp_path, table)
        found = [records[row]["l"] for row in range(5)]
        assert [each.tolist() if isinstance(each, numpy.ndarray) else each for each in found] == lists
        assert [type(each) for each in found] == [numpy.ndarray, type(None), numpy.ndarray, list, numpy.ndarray]
        assert found[0].dtype == numpy.int32
        columns = records.columns([4, 1, 3, 0])["l"]
        assert [columns[0].tolist(), columns[1], columns[2], columns[3].tolist()] == [[4], None, [3, None], [1, 2]]


def test_a_text_that_is_not_utf_8_is_told_by_column_and_row_and_others_stay_good(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"b\xffd", b"fine"]).view(pa.string())
    records = table_block(tmp_path, pa.table({"id": [1, 2, 3], "text": texts}))
    assert records[2] == {"id": 3, "text": "fine"}
    assert records.columns([2, 0])["text"].tolist() == ["fine", "good"]
    told = r"a.parquet, row 1: column text has the byte 0xff, which is not UTF-8"
    with pytest.raises(BadRecord, match=told):
        records[1]
    with pytest.raises(BadRecord, match=told):
        records.columns([0, 1])


def test_a_tensor_is_given_in_the_order_of_its_dimensions(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 2], permutation=[2, 0, 1])
    storage = pa.array([list(range(12)), list(range(12, 24))], pa.list_(pa.int32(), 12))
    records = table_block(tmp_path, pa.table({"t": pa.ExtensionArray.from_storage(kind, storage)}))
    expected = numpy.arange(24, dtype=numpy.int32).reshape(2, 2, 3, 2).transpose(0, 3, 1, 2)
    numpy.testing.assert_array_equal(records.columns([1, 0])["t"], expected[[1, 0]])
    numpy.testing.assert_array_equal(records[1]["t"], expected[1])


def test_memory_that_runs_out_is_not_the_fault_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards("parquet", tmp_path)
    index = build_index(str(tmp_path))
    asked: list[int] = []

    def full(*given: object, **options: object) -> None:
        asked.append(1)
        raise pa.ArrowMemoryError("malloc of size 1099511627776 failed")

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", full)
    with pytest.raises(MemoryError, match="malloc"):
        opened(index)
    assert asked


def test_a_codec_that_is_missing_here_is_told_with_the_remedy_and_is_no_bad_record(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": range(100)}), file, compression="snappy")
    # The footer says of the column "a" that its codec is 1, which is snappy; 3 is LZO, which pyarrow has nowhere.
    content, told = file.read_bytes(), b"\x18\x01a\x15"
    assert content.count(told + b"\x02") == 1
    index = indexed(file, content.replace(told + b"\x02", told + b"\x06"))
    with pytest.raises(Unreachable, match=r"a.parquet cannot be decoded .*LZO compression.*Install the same"):
        opened(index)


def test_a_footer_that_cannot_be_read_is_told_where_it_is(tmp_path: Path) -> None:
    write_shards("parquet", tmp_path, (9,))
    index = build_index(str(tmp_path))
    block = index.block(0)
    with pytest.raises(BadRecord, match=r"shard-000.parquet, the last 100 bytes: its footer cannot be read"):
        format_of("parquet").open(b"", block, index.schema, lambda: b"x" * 100)


def test_what_a_row_group_takes_is_counted_and_does_not_grow(tmp_path: Path) -> None:
    rows = 20_000
    numbers = pa.array([None if row == 5 else row for row in range(rows)], pa.int64())
    table = pa.table({"text": [f"text {row}" for row in range(rows)], "list": [[row] for row in range(rows)]})
    table = table.append_column("flag", pa.array([True] * rows)).append_column("number", numbers)
    records = table_block(tmp_path, table)
    kept = records.nbytes
    flags, converted = rows, 8 * rows
    assert kept >= table.nbytes + flags + converted, "what Arrow has, and what NumPy has beside it"
    before = pa.total_allocated_bytes()
    for row in range(rows):
        records[row]
    assert records.nbytes == kept
    assert pa.total_allocated_bytes() <= before + 1000, "nothing is kept of what was handed out"


# --- hdf5


def test_memory_that_runs_out_in_hdf5_is_not_the_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_shards("hdf5", tmp_path)
    asked: list[int] = []

    def full(*given: object) -> None:
        asked.append(1)
        raise MemoryError

    monkeypatch.setattr(h5py.Dataset, "__getitem__", full)
    with shard_place(str(tmp_path)).open(written.files[0].name) as file, pytest.raises(MemoryError):
        format_of("hdf5").read(file, Block("a.h5", 0, 3, 3))
    assert asked


def test_a_filter_that_is_missing_here_is_told_with_the_remedy_and_is_no_bad_record(tmp_path: Path) -> None:
    file = tmp_path / "a.h5"
    with h5py.File(file, "w") as new:
        new.create_dataset("x", data=numpy.zeros((100, 40)), chunks=(10, 40), compression="lzf")
    # The number of the filter, 32000, becomes 32099, behind which nobody has registered one.
    content, told = file.read_bytes(), b"\x7d\x08\x00\x01\x00\x03\x00lzf"
    assert content.count(b"\x00" + told) == 1
    file.write_bytes(content.replace(b"\x00" + told, b"\x63" + told))
    with (
        shard_place(str(tmp_path)).open("a.h5") as shard,
        pytest.raises(Unreachable, match=r"filter lzf \(32099\).*PLUGIN_PATH"),
    ):
        format_of("hdf5").read(shard, Block("a.h5", 0, 3, 3))
    with pytest.raises(Unreachable, match=r"dataset x is compressed"):
        build_index(str(tmp_path))


@pytest.mark.parametrize(
    ("chunk", "rows"),
    [(1, 25), (10, 30), (60, 60), (90, 90), (2000, 100)],
    ids=["small", "several", "one", "almost-too-large", "too-large"],
)
def test_a_block_has_whole_chunks_of_the_largest_dataset_as_long_as_they_are_small(
    chunk: int, rows: int, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as new:
        new.create_dataset("large", data=numpy.zeros((2000, 76), "u1"), chunks=(chunk, 4))
        new.create_dataset("label", data=numpy.zeros(2000, "i4"), chunks=(1999,))
    index = build_index(str(tmp_path))
    assert index.records.tolist()[0] == rows
    assert int(index.records.max()) * 80 <= 4 * SMALL_BLOCK


def test_of_some_columns_nothing_is_kept_of_the_others(tmp_path: Path) -> None:
    write_shards("hdf5", tmp_path)
    index = build_index(str(tmp_path))
    format, block = format_of("hdf5"), index.block(0)
    with shard_place(str(tmp_path)).open(block.file) as file:
        content = format.read(file, block)
    before = sys.getrefcount(content)
    records = format.open(content, block, index.schema, lambda: b"", ["label"])
    assert records[0] == {"label": 0}
    assert sys.getrefcount(content) == before


# --- tar


def pax_tar(words: dict[str, str], content: bytes = b"1") -> bytes:
    """A file with those words in its extended header, and another behind it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as new:
        member = tarfile.TarInfo("a.x")
        member.size, member.pax_headers = len(content), words
        new.addfile(member, io.BytesIO(content))
        add_member(new, "b.x", b"2")
    return raw.getvalue()


@pytest.mark.parametrize("word", ["GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.size"])
def test_a_sparse_file_in_a_tar_is_refused_with_the_remedy(word: str, tmp_path: Path) -> None:
    content = pax_tar({word: "1", "GNU.sparse.name": "big.x"})
    with pytest.raises(RequestError, match=r"a.tar, byte 0: big.x was written without its holes.*without --sparse"):
        indexed(tmp_path / "a.tar", content)


def test_a_sparse_file_of_the_old_kind_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as new:
        member = tarfile.TarInfo("a.x")
        member.type = tarfile.GNUTYPE_SPARSE
        new.addfile(member)
    with pytest.raises(RequestError, match=r"a.tar, byte 0: a.x was written without its holes"):
        build_index(str(tmp_path))


@pytest.mark.parametrize(("size", "why"), [("-1024", "cannot be read"), ("99999999999999", "cut off")])
def test_a_size_that_no_file_can_have_is_refused_before_anything_is_read(size: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(pax_tar({"size": size}) + bytes(20 * SMALL_BLOCK))
    asked: list[int] = []

    with shard_place(str(tmp_path)).open("a.tar") as shard:

        def watched(start: int, length: int) -> bytes:
            asked.append(start + length)
            return shard.read(start, length)

        with pytest.raises(BadRecord, match=rf"a.tar, byte \d+: .*{why}"):
            list(format_of("tar").scan(replace(shard, read=watched), {}))
    assert max(asked) <= 2 * SMALL_BLOCK, "no more than the headers"


def test_tars_one_behind_the_other_are_refused_and_zeros_are_not(tmp_path: Path) -> None:
    first, second = pax_tar({}), pax_tar({})
    padded = first + bytes(3 * SMALL_BLOCK + 100)
    assert len(indexed(tmp_path / "a.tar", padded)) == 2
    place = len(padded) // 512 * 512 + 512
    content = padded.ljust(place, b"\0") + second
    with pytest.raises(RequestError, match=rf"a.tar, byte {place}: there is more behind the end.*tar --concatenate"):
        indexed(tmp_path / "a.tar", content)


def test_a_tar_that_was_cut_off_behind_a_member_is_refused_and_one_unit_of_zeros_is_an_end(tmp_path: Path) -> None:
    whole = pax_tar({})
    behind = len(whole.rstrip(b"\0"))
    end = behind // 512 * 512 + 512
    for keep in (0, 1024, behind, end, end + 100):
        with pytest.raises(RequestError, match=rf"a.tar, byte {min(keep, end)}: .*without its end mark.*cut off"):
            indexed(tmp_path / "a.tar", whole[:keep])
    assert len(indexed(tmp_path / "a.tar", whole[: end + 512])) == 2


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar here")
@pytest.mark.parametrize("options", [["-b1"], ["--format=ustar"], ["--sort=name"]], ids=" ".join)
def test_what_tar_itself_writes_has_an_end(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("0.bin", "1.bin", "0.cls", "1.cls"):
        (tmp_path / "data" / name).write_bytes(b"1")
    names = ["data"] if "--sort=name" in options else ["data/0.bin", "data/0.cls", "data/1.bin", "data/1.cls"]
    done = subprocess.run(["tar", *options, "-cf", "a.tar", *names], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this tar does not know it: {done.stderr}")
    assert len(build_index(str(tmp_path))) == 2


def test_what_is_written_to_a_stream_has_an_end(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w|") as new:  # as the writers of WebDataset do
        add_member(new, "a.x", b"1")
    assert len(indexed(tmp_path / "a.tar", raw.getvalue())) == 1


def test_a_name_in_a_tar_that_is_not_utf_8_is_called_so(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as new:
        add_member(new, "näme.x", b"1")
    with pytest.raises(RequestError, match=r"a.tar, byte 0: the name n\\xe4me.x is not in UTF-8: rename the file"):
        build_index(str(tmp_path))


# --- lines


def test_json_that_was_cut_off_in_a_line_is_refused_and_a_whole_line_needs_no_newline(tmp_path: Path) -> None:
    lines = [f'{{"number": {row}, "text": "ä"}}' for row in range(200)]
    content = "\n".join(lines).encode()
    begin = content.rfind(b"\n") + 1
    umlaut = content.rfind("ä".encode())
    for keep in (begin + 1, umlaut + 1, len(content) - 1):
        with pytest.raises(RequestError, match=rf"a.jsonl, byte {begin}: the file ends in the middle of a line.*cut"):
            indexed(tmp_path / "a.jsonl", content[:keep])
    assert indexed(tmp_path / "a.jsonl", content).blocks > 2
    for end in (b"", b"  ", b"\n\n \t", b'\n{"number": NaN}', b'\n"\xff"', b"\n" + b"[" * 9999 + b"]" * 9999):
        assert len(indexed(tmp_path / "a.jsonl", content + end)) == 200 + bool(end.strip())
    assert len(indexed(tmp_path / "a.jsonl", b"\xef\xbb\xbf{}")) == 1


@pytest.mark.parametrize("kind", ["tar", "jsonl", "text"])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zipped, zstandard])
def test_what_is_compressed_under_another_name_is_refused(kind: str, pack: Any, tmp_path: Path) -> None:
    for file in write_shards(kind, tmp_path).files:
        file.write_bytes(pack(file.read_bytes()))
    told = r"^shard-000.\w+ is compressed as a whole.*Rename it to shard-000.\w+\.(gz|bz2|xz|zip|zst), and unpack it"
    with pytest.raises(RequestError, match=told):
        build_index(str(tmp_path))


@pytest.mark.parametrize("before", range(8))
def test_integers_of_any_length_are_exact(before: int, tmp_path: Path) -> None:
    values: list[Any] = [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**18, -(10**40), 0.1, 1e300, "9" * 30, True]
    lines = [{"v": value} for value in values]
    content = " " * before + "".join(f"{json.dumps(line)}\n" for line in lines) + '{"v": 0.1234567890123456789012}'
    records = opened(indexed(tmp_path / "a.jsonl", content.encode()))
    found = [records[row]["v"] for row in range(len(records))]
    assert found == [*values, 0.1234567890123456789012]
    assert [type(value) for value in found] == [*map(type, values), float]


def test_long_integers_are_found_wherever_they_stand(tmp_path: Path) -> None:
    values = [sign * 10 ** (19 + number % 4) + number for number in range(40) for sign in (1, -1)]
    records = opened(indexed(tmp_path / "a.jsonl", "".join(f"[{value}]\n" for value in values).encode()))
    assert [records[row][0] for row in range(len(records))] == values


def test_a_line_of_nul_bytes_is_a_bad_record(tmp_path: Path) -> None:
    records = opened(indexed(tmp_path / "a.jsonl", b"{}\n\0\0\0\n \t\r\n[]\n"))
    assert (len(records), records[0], records[2]) == (3, {}, [])
    with pytest.raises(BadRecord, match=r"a.jsonl, byte 3: the line is not JSON"):
        records[1]


def test_fields_are_those_of_the_first_record_that_can_be_decoded(tmp_path: Path) -> None:
    bad = b"{nothing}\n" * (SMALL_BLOCK // 4)
    index = indexed(tmp_path / "a.jsonl", bad + b'{"a": 1, "b": [2]}\n' * 300)
    assert index.blocks > 2
    assert index.schema == {"a": "integer", "b": "list"}
    with pytest.raises(BadRecord, match=r"a.jsonl, byte 10: the line is not JSON"):
        opened(index)[1]


def test_a_bad_line_is_told_where_it_is_behind_a_mark_blanks_and_long_numbers(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 123456789012345678901234}\r\n\n \n[1]\r\n{bad\n'
    records = opened(indexed(tmp_path / "a.jsonl", content))
    assert [records[0], records[1]] == [{"a": 123456789012345678901234}, [1]]
    with pytest.raises(BadRecord, match=rf"a.jsonl, byte {content.index(b'{bad')}: the line is not JSON"):
        records[2]

"""What every kind of shard must do, and then what is particular to each."""

import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy
import pyarrow as pa
import pytest
import xxhash
from pyarrow import parquet

from data.shards.shard_files import KINDS, SMALL_BLOCK, add_member, assert_same, small_blocks, write_shards
from quorate.core.errors import RequestError
from quorate.shards.blocks import ShardBlocks
from quorate.shards.files import shard_place
from quorate.shards.formats.format import BadRecord, Block, ColumnRecords, DamagedBlock, Records, ShardFile
from quorate.shards.formats.kinds import format_of, is_compressed_shard, kind_of
from quorate.shards.index import ShardIndex
from quorate.shards.indexing import build_index

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")
every_kind = pytest.mark.parametrize("kind", KINDS)


def read_block(index: ShardIndex, number: int, columns: list[str] | None = None) -> Records:
    """A block as a reader gets it, by nothing but the index and ranges of the file."""
    format, block = format_of(index.kind), index.block(number)
    shard = int(index.shard_of_block[number])
    with shard_place(index.place).open(block.file) as file:
        content = format.read(file, block)
        assert xxhash.xxh3_128_digest(content) == index.digests[number].tobytes()
        tail = file.read(int(index.tails[shard]), file.size)
    return format.open(content, block, index.schema, lambda: tail, columns)


def all_records(index: ShardIndex) -> list[Any]:
    opened = (read_block(index, number) for number in range(index.blocks))
    return [records[row] for records in opened for row in range(len(records))]


def index_of(kind: str, folder: Path) -> ShardIndex:
    write_shards(kind, folder)
    return build_index(str(folder))


# --- the contract


@every_kind
def test_the_records_of_all_blocks_are_those_that_were_written_in_order(kind: str, tmp_path: Path) -> None:
    written = write_shards(kind, tmp_path)
    index = build_index(str(tmp_path))
    assert index.kind == kind
    assert len(index) == len(written.records)
    assert index.shards == tuple(file.name for file in written.files)
    assert (numpy.bincount(index.shard_of_block) > 1).any(), "a shard has several blocks, or nothing is tested"
    for found, expected in zip(all_records(index), written.records, strict=True):
        assert_same(found, expected)


@every_kind
def test_blocks_know_their_rows_and_their_size(kind: str, tmp_path: Path) -> None:
    index = index_of(kind, tmp_path)
    rows = dict.fromkeys(index.shards, 0)
    for number in range(index.blocks):
        block = index.block(number)
        records = read_block(index, number)
        assert len(records) == block.records > 0
        assert records.nbytes > 0
        assert block.row == rows[block.file]
        rows[block.file] += block.records


@every_kind
def test_every_byte_of_a_shard_is_under_a_digest(kind: str, tmp_path: Path) -> None:
    written = write_shards(kind, tmp_path, (30,))
    index = build_index(str(tmp_path))
    [file] = written.files
    assert index.sizes.tolist() == [file.stat().st_size]
    content = file.read_bytes()
    assert xxhash.xxh3_128_digest(content[int(index.tails[0]) :]) == index.tail_digests[0].tobytes()
    if format_of(kind).unit == "row":
        assert index.tails[0] == 0, "the file as a whole"
        return
    ends = index.start + index.length
    assert index.start.tolist() == [0, *ends[:-1]]
    assert index.tails[0] == ends[-1]


@every_kind
def test_a_block_with_another_byte_is_refused_by_file_and_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(kind, tmp_path)
    format, block = type(format_of(kind)), index.block(1)
    read = format.read

    def changed(*given: Any) -> bytes:
        content = bytearray(read(*given))
        content[len(content) // 2] ^= 1
        return bytes(content)

    monkeypatch.setattr(format, "read", changed)
    place = f"{format.unit}s {block.start} to {block.start + block.length}"
    with pytest.raises(DamagedBlock, match=f"{block.file}, {place}: digest .*{index.digests[1].tobytes().hex()}; the"):
        ShardBlocks(index).read(1)


@every_kind
def test_bytes_that_are_no_block_are_a_bad_record_or_fewer_records_and_never_other_errors(
    kind: str, tmp_path: Path
) -> None:
    index = index_of(kind, tmp_path)
    block = index.block(0)
    shard = Path(index.place, block.file).read_bytes()
    with pytest.raises(BadRecord, match=block.file):
        records = format_of(kind).open(b"\xff\n" * 20, block, index.schema, lambda: shard[int(index.tails[0]) :])
        for row in range(len(records)):
            records[row]


@pytest.mark.parametrize("kind", ["parquet", "hdf5"])
def test_columns_are_what_the_records_are_one_by_one(kind: str, tmp_path: Path) -> None:
    index = index_of(kind, tmp_path)
    records = read_block(index, 0)
    assert isinstance(records, ColumnRecords)
    rows = [3, 0, 3, len(records) - 1]
    columns = records.columns(rows)
    assert set(columns) == set(index.schema)
    for name, column in columns.items():
        assert len(column) == len(rows)
        for position, row in enumerate(rows):
            numpy.testing.assert_array_equal(column[position], records[row][name])


@pytest.mark.parametrize("kind", ["parquet", "hdf5"])
def test_only_the_columns_that_were_asked_for_are_given(kind: str, tmp_path: Path) -> None:
    index = index_of(kind, tmp_path)
    wanted = sorted(index.schema)[-1:]
    records = read_block(index, 0, wanted)
    assert isinstance(records, ColumnRecords)
    assert list(records[0]) == list(records.columns([0])) == wanted


@pytest.mark.parametrize("kind", ["tar", "jsonl", "text"])
def test_others_have_no_columns(kind: str, tmp_path: Path) -> None:
    write_shards(kind, tmp_path)
    assert not isinstance(read_block(build_index(str(tmp_path)), 0), ColumnRecords)


@every_kind
def test_a_shard_without_records_is_in_the_index_and_has_no_block(kind: str, tmp_path: Path) -> None:
    written = write_shards(kind, tmp_path, (3, 2))
    contents = {"tar": bytes(10240), "jsonl": b"\n\n", "text": b"", "tfrecord": b""}
    file = written.files[0].with_name(f"shard-000-empty.{KINDS[kind]}")
    if kind == "parquet":
        parquet.write_table(parquet.read_table(written.files[0]).slice(0, 0), file)
    elif kind == "hdf5":
        with h5py.File(written.files[0]) as old, h5py.File(file, "w") as new:
            for name in ("label", "group/picture"):
                new[name] = old[name][:0]
    else:
        file.write_bytes(contents[kind])
    index = build_index(str(tmp_path))
    assert len(index.shards) == 3
    assert numpy.bincount(index.shard_of_block, minlength=3)[0] == 0
    for found, expected in zip(all_records(index), written.records, strict=True):
        assert_same(found, expected)


def test_the_kind_of_a_file_is_told_by_its_ending() -> None:
    names = ["a.tar", "b/c.PARQUET", "x.jsonl", "x.ndjson", "x.txt", "x.h5", "x.hdf5", "README.md", "tar", "x.json"]
    kinds = ["tar", "parquet", "jsonl", "jsonl", "text", "hdf5", "hdf5", None, None, None]
    assert [kind_of(name) for name in names] == kinds
    assert [is_compressed_shard(name) for name in ("a.tar.gz", "a.tgz", "x.jsonl.zst", "notes.gz")] == [
        True,
        True,
        True,
        False,
    ]
    with pytest.raises(RequestError, match=r"'csv' is not a kind of shard; there are tar, parquet"):
        format_of("csv")


# --- tar


def indexed_tar(folder: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> ShardIndex:
    with tarfile.open(folder / "a.tar", "w", format=format) as opened:
        for name, content in members:
            add_member(opened, name, content)
    return build_index(str(folder))


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_names_of_any_length_and_alphabet(format: int, tmp_path: Path) -> None:
    long = "folder/" * 20 + "x" * 90
    names = [long, "näme"] if format != tarfile.USTAR_FORMAT else ["folder/" * 14 + "x" * 90, "plain"]
    index = indexed_tar(tmp_path, [(f"{name}.{field}", b"1") for name in names for field in ("A.Png", "cls")], format)
    assert [record["__key__"] for record in all_records(index)] == names
    assert all(list(record) == ["__key__", "a.png", "cls"] for record in all_records(index))
    assert index.schema == {"a.png": "bytes", "cls": "bytes"}


def test_tar_files_without_a_key_or_an_ending_are_no_part_of_a_record(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        opened.addfile(folder)
        for name in ("folder/README", "folder/.hidden.txt", "folder/1.x", "folder/note", "folder/1.y", "folder/2.x"):
            add_member(opened, name, name.encode())
    assert all_records(build_index(str(tmp_path))) == [
        {"__key__": "folder/1", "x": b"folder/1.x", "y": b"folder/1.y"},
        {"__key__": "folder/2", "x": b"folder/2.x"},
    ]


def test_a_tar_record_never_spans_two_blocks(tmp_path: Path) -> None:
    members = [(f"{key:04d}.{field}", bytes([key]) * 700) for key in range(20) for field in ("a", "b", "c")]
    members.insert(30, ("big.a", bytes(5 * SMALL_BLOCK)))
    index = indexed_tar(tmp_path, members)
    assert index.blocks > 5
    assert all(len(record) == 4 or record["__key__"] == "big" for record in all_records(index))


@pytest.mark.parametrize("count", [2, 50])
def test_files_of_a_record_that_do_not_follow_each_other_are_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.shards.formats.tar._KEYS", 3)
    members = [(f"{key}.{field}", b"1") for field in ("bin", "cls") for key in range(count)]
    place = count * 1024
    with pytest.raises(RequestError, match=rf"a.tar, byte {place}: the record 0 was there before.*--sort=name"):
        indexed_tar(tmp_path, members, tarfile.USTAR_FORMAT)
    assert len(indexed_tar(tmp_path, sorted(members), tarfile.USTAR_FORMAT)) == count


def test_a_tar_record_with_two_files_of_one_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a.tar, byte 1024: the record a has two files .x"):
        indexed_tar(tmp_path, [("a.x", b"1"), ("a.X", b"2")])


def test_a_link_in_a_tar_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        add_member(opened, "a.x", b"1")
        link = tarfile.TarInfo("b.x")
        link.type, link.linkname = tarfile.SYMTYPE, "a.x"
        opened.addfile(link)
    with pytest.raises(RequestError, match=r"a.tar, byte 1024: b.x is a link .*tar it with -h"):
        build_index(str(tmp_path))


@pytest.mark.parametrize(
    ("keep", "why"), [(700, "byte 512: the file ends in the middle"), (1100, "ends before the 600 bytes of a.x")]
)
def test_a_tar_that_was_cut_off_is_refused_at_its_place(keep: int, why: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as opened:
        add_member(opened, "readme", b"")
        add_member(opened, "a.x", bytes(600))
    file = tmp_path / "a.tar"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(RequestError, match=rf"a.tar, byte 512: .*{why.split(': ')[-1]}"):
        build_index(str(tmp_path))


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(RequestError, match=r"a.tar, byte 0: there is no header of a tar file"):
        build_index(str(tmp_path))


# --- lines


def indexed_lines(folder: Path, content: bytes, ending: str) -> ShardIndex:
    (folder / f"a.{ending}").write_bytes(content)
    return build_index(str(folder))


def test_lines_end_with_lf_or_crlf_or_with_the_file(tmp_path: Path) -> None:
    index = indexed_lines(tmp_path, "\ufeffone\r\n\n two \r\n\rx\nlast".encode(), "txt")
    assert all_records(index) == ["one", "", " two ", "\rx", "last"]


def test_an_empty_line_of_text_is_a_record_and_the_newline_at_the_end_is_none(tmp_path: Path) -> None:
    assert all_records(indexed_lines(tmp_path, b"\n\na\n", "txt")) == ["", "", "a"]


def test_empty_lines_of_json_are_no_records(tmp_path: Path) -> None:
    index = indexed_lines(tmp_path, b'\n{"a": 1}\r\n \t\r\n\n[2]\n  {"a": NaN}\n\n', "jsonl")
    first, second, third = all_records(index)
    assert (first, second) == ({"a": 1}, [2])
    assert third["a"] != third["a"]


def test_only_empty_lines_for_longer_than_a_block(tmp_path: Path) -> None:
    content = b"{}\n" + b"\n" * (3 * SMALL_BLOCK) + b"[]\n" + b" \n" * (2 * SMALL_BLOCK)
    index = indexed_lines(tmp_path, content, "jsonl")
    assert all_records(index) == [{}, []]


def test_a_line_that_is_longer_than_several_blocks_is_one_record(tmp_path: Path) -> None:
    long = "x" * (5 * SMALL_BLOCK)
    assert all_records(indexed_lines(tmp_path, f"a\n{long}\nb".encode(), "txt")) == ["a", long, "b"]


def test_bytes_that_are_not_utf_8_are_named_by_file_and_offset(tmp_path: Path) -> None:
    index = indexed_lines(tmp_path, b"good\nab\xffcd\n", "txt")
    records = read_block(index, 0)
    assert records[0] == "good"
    with pytest.raises(BadRecord, match=r"a.txt, byte 7: byte 0xff is not UTF-8"):
        records[1]


def test_bytes_of_json_that_are_not_utf_8_are_named_by_file_and_offset(tmp_path: Path) -> None:
    records = read_block(indexed_lines(tmp_path, b'{}\n{"a": "\xff"}\r\n', "jsonl"), 0)
    with pytest.raises(BadRecord, match=r"a.jsonl, byte 10: byte 0xff is not UTF-8"):
        records[1]


def test_a_line_that_is_no_json_is_named_by_file_and_offset(tmp_path: Path) -> None:
    records = read_block(indexed_lines(tmp_path, b'{}\n\n{"a": \n', "jsonl"), 0)
    assert records[0] == {}
    with pytest.raises(BadRecord, match=r"a.jsonl, byte 4: the line is not JSON: Expecting value"):
        records[1]


# --- parquet


def indexed_table(folder: Path, table: pa.Table, **options: Any) -> ShardIndex:
    parquet.write_table(table, folder / "a.parquet", **options)
    return build_index(str(folder))


def columns_of(index: ShardIndex, rows: list[int]) -> dict[str, Any]:
    records = read_block(index, 0)
    assert isinstance(records, ColumnRecords)
    return records.columns(rows)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_a_parquet_block_is_decoded_from_no_more_than_its_bytes_and_the_footer(
    compression: str, tmp_path: Path
) -> None:
    table = pa.table({"a": range(1000), "b": [f"text {row % 7}" for row in range(1000)]})
    options = {"compression": compression, "write_page_index": True, "bloom_filter_options": {"a": True}}
    index = indexed_table(tmp_path, table, row_group_size=300, **options)
    assert index.records.tolist() == [300, 300, 300, 100]
    assert all_records(index) == table.to_pylist()


def test_parquet_types_become_arrays_of_their_own_type(tmp_path: Path) -> None:
    numbers = numpy.arange(24, dtype=numpy.float32)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 4)
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(numbers), 2), 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(numbers.reshape(6, 2, 2).copy())
    table = pa.table(
        {
            "u8": pa.array(range(6), pa.uint8()),
            "half": pa.array(numpy.arange(6, dtype=numpy.float16)),
            "bool": [True, False] * 3,
            "fixed": fixed,
            "nested": nested,
            "tensor": tensors,
            "list": [[1, 2], [], [3], None, [4, 5], [6]],
            "text": ["a", "b", None, "d", "e", "f"],
            "bytes": [b"a"] * 6,
            "word": pa.array(["x", "y"] * 3).dictionary_encode(),
            "struct": [{"x": 1, "y": "z"}] * 6,
            "when": pa.array(range(6), pa.timestamp("us")),
        }
    )
    index = indexed_table(tmp_path, table)
    columns = columns_of(index, [5, 2])
    kinds = {name: (str(column.dtype), column.shape) for name, column in columns.items()}
    assert kinds["u8"] == ("uint8", (2,))
    assert kinds["half"] == ("float16", (2,))
    assert kinds["bool"] == ("bool", (2,))
    assert kinds["fixed"] == ("float32", (2, 4))
    assert kinds["nested"] == kinds["tensor"] == ("float32", (2, 2, 2))
    assert kinds["text"] == kinds["bytes"] == kinds["word"] == kinds["list"] == ("object", (2,))
    assert kinds["when"] == ("datetime64[us]", (2,))
    assert columns["fixed"].tolist() == [[20, 21, 22, 23], [8, 9, 10, 11]]
    assert columns["tensor"].tolist() == columns["nested"].tolist() == [[[20, 21], [22, 23]], [[8, 9], [10, 11]]]
    assert columns["text"].tolist() == ["f", None]
    record = read_block(index, 0)[3]
    assert record["list"] is None
    assert record["struct"] == {"x": 1, "y": "z"}
    assert type(record["u8"]) is int


def test_a_number_that_is_missing_is_never_another_number(tmp_path: Path) -> None:
    # Before version 26 PyArrow itself does not read a list of fixed size that is missing.
    missing = None if int(pa.__version__.partition(".")[0]) >= 26 else [4.0, 5.0]
    lists = pa.array([[1.0, 2.0], missing, [None, 3.0]], pa.list_(pa.float32(), 2))
    index = indexed_table(tmp_path, pa.table({"n": pa.array([1, None, 3], pa.int64()), "l": lists}))
    assert columns_of(index, [0])["n"].dtype == numpy.int64
    for row, column in ((1, "n"), (2, "l")):
        with pytest.raises(BadRecord, match=rf"a.parquet, row {row}: column {column} has no value"):
            columns_of(index, [0, row])
    records = read_block(index, 0)
    assert records[1]["n"] is None
    assert records[1]["l"] is None if missing is None else list(records[1]["l"]) == missing
    assert records[2] == {"n": 3, "l": [None, 3.0]}


def test_what_a_record_is_changed_to_does_not_change_the_block(tmp_path: Path) -> None:
    for kind, name in (("parquet", "vector"), ("hdf5", "group/picture")):
        write_shards(kind, tmp_path / kind)
        records = read_block(build_index(str(tmp_path / kind)), 0)
        assert isinstance(records, ColumnRecords)
        before = records.columns([0])[name].copy()
        records[0][name][...] = 0
        records.columns([0])[name][...] = 0
        numpy.testing.assert_array_equal(records.columns([0])[name], before)


def test_footers_are_read_once_and_kept_below_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards("parquet", tmp_path, (20, 20, 20))
    index = build_index(str(tmp_path))
    format = format_of("parquet")
    asked: list[int] = []

    def open_block(number: int) -> None:
        shard = int(index.shard_of_block[number])
        content = Path(index.place, index.shards[shard]).read_bytes()
        block = index.block(number)

        def tail() -> bytes:
            asked.append(shard)
            return content[int(index.tails[shard]) :]

        format.open(content[block.start : block.start + block.length], block, index.schema, tail)

    for number in range(index.blocks):
        open_block(number)
    assert asked == [0, 1, 2]
    monkeypatch.setattr("quorate.shards.formats.parquet.FOOTERS", 1)
    format = format_of("parquet")
    asked.clear()
    for number in (0, 1, index.blocks - 1, 0):
        open_block(number)
    assert asked == [0, 2, 0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a parquet file"),
        (b"PAR1 and no more", "cut off"),
        (b"PAR1\xff\xff\xff\x00PAR1", "longer than the file"),
    ],
)
def test_what_is_no_whole_parquet_file_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(RequestError, match=rf"a.parquet, byte \d+: .*{why}"):
        build_index(str(tmp_path))


# --- hdf5


@pytest.mark.parametrize("layout", [{}, {"chunks": (3, 2)}, {"chunks": (5, 4), "compression": "lzf"}])
def test_hdf5_rows_have_the_same_digests_however_they_are_laid_out(layout: dict[str, Any], tmp_path: Path) -> None:
    rows = numpy.arange(400, dtype=">i2").reshape(100, 4)
    for name, options in (("plain", {}), ("other", layout)):
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / "a.h5", "w") as opened:
            opened.create_dataset("x", data=rows, **options)
            opened["version"] = 3
    plain, other = (build_index(str(tmp_path / name)) for name in ("plain", "other"))
    assert plain.schema == {"x": "int16 [4]"}
    numpy.testing.assert_array_equal(plain.digests, other.digests)
    assert_same(all_records(other)[7], {"x": rows[7].astype("<i2")})


def test_hdf5_datasets_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        opened["x"], opened["y"] = numpy.zeros(3), numpy.zeros(4)
    with pytest.raises(RequestError, match=r"a.h5, row 3: the dataset y has 4 rows, and x has 3"):
        build_index(str(tmp_path))


def test_hdf5_values_without_a_fixed_size_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        opened["x"] = ["text", "of any length"]
    with pytest.raises(RequestError, match=r"a.h5, row 0: the dataset x is of object, which has no fixed size"):
        build_index(str(tmp_path))


def test_what_is_no_hdf5_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"x" * 4096)
    with pytest.raises(RequestError, match=r"a.h5, byte 0: it cannot be read as HDF5"):
        build_index(str(tmp_path))


def test_trouble_with_the_disk_is_not_taken_for_damaged_data(tmp_path: Path) -> None:
    written = write_shards("hdf5", tmp_path)

    def failing(start: int, length: int) -> bytes:
        raise OSError(5, "Input/output error")

    file = ShardFile("a.h5", written.files[0].stat().st_size, failing)
    with pytest.raises(OSError, match="Input/output"):
        format_of("hdf5").read(file, Block("a.h5", 0, 3, 3))

import os
import random
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from time import monotonic, process_time

import numpy
import pytest
from safetensors import safe_open

from data.shards.shard_files import KINDS, add_member, write_shards
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.data.bad_sample import Unreachable
from quorate.shards import fetching, indexing
from quorate.shards.fetching import StoreAway
from quorate.shards.index import NAME, ShardIndex, encode, load_index, save_index
from quorate.shards.indexing import Flaw, build_index, index_data, verify_shards
from quorate.storage.objects import StoreError
from quorate.stores.objects import FsspecStore

every_kind = pytest.mark.parametrize("kind", KINDS)


def big_index(shards: int, blocks: int) -> ShardIndex:
    numbers = numpy.arange(shards * blocks, dtype=numpy.int64)
    digests = numpy.random.default_rng(0).integers(0, 256, (shards * blocks, 16), dtype=numpy.uint8)
    return ShardIndex(
        kind="tar",
        schema={"jpg": "bytes"},
        shards=tuple(f"folder/shard-{number:06d}.tar" for number in range(shards)),
        sizes=numbers[:shards],
        tails=numbers[:shards],
        tail_digests=digests[:shards],
        shard_of_block=numpy.repeat(numpy.arange(shards), blocks),
        start=numbers,
        length=numbers + 1,
        records=numbers % 7 + 1,
        digests=digests,
    )


class TestFile:
    @every_kind
    def test_is_read_back_as_it_was_written(self, kind: str, small_blocks: None, tmp_path: Path) -> None:
        write_shards(kind, tmp_path)
        index = build_index(str(tmp_path))
        save_index(index, tmp_path / NAME)
        for place in (tmp_path, str(tmp_path) + "/", tmp_path / NAME):
            found = load_index(place)
            assert found.digest == index.digest
            assert (found.kind, found.schema, found.shards) == (kind, index.schema, index.shards)
            assert [found.block(number) for number in range(found.blocks)] == [
                index.block(number) for number in range(index.blocks)
            ]
            assert found.place == str(tmp_path)

    def test_is_a_safetensors_file_that_others_read(self, tmp_path: Path) -> None:
        index = big_index(5, 3)
        save_index(index, tmp_path / NAME)
        with safe_open(tmp_path / NAME, "numpy") as opened:
            assert opened.metadata()["kind"] == "tar"
            numpy.testing.assert_array_equal(opened.get_tensor("records"), index.records)

    def test_of_ten_thousand_shards_loads_at_once(self, tmp_path: Path) -> None:
        save_index(big_index(10_000, 10), tmp_path / NAME)
        began = process_time()
        index = load_index(tmp_path)
        assert (len(index.shards), index.blocks) == (10_000, 100_000)
        assert process_time() - began < 0.5

    def test_any_flipped_bit_is_found(self, tmp_path: Path) -> None:
        file = tmp_path / NAME
        save_index(big_index(3, 2), file)
        content = file.read_bytes()
        chance = random.Random(0)
        for _ in range(300):
            position = chance.randrange(len(content))
            damaged = bytearray(content)
            damaged[position] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(RequestError, match=r"index\.quorate (is damaged|has version)"):
                load_index(tmp_path)

    @pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
    def test_that_was_cut_off_is_refused_with_the_command(self, keep: int, tmp_path: Path) -> None:
        file = tmp_path / NAME
        save_index(big_index(3, 2), file)
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(RequestError, match=rf"is damaged.*quorate data index {tmp_path} --force"):
            load_index(tmp_path)

    def test_that_is_not_there_is_refused_with_the_command(self, tmp_path: Path) -> None:
        for place in (str(tmp_path), f"{tmp_path}/{NAME}"):
            with pytest.raises(RequestError, match=rf"no index of its shards yet.*: quorate data index {tmp_path}$"):
                load_index(place)

    def test_in_a_folder_that_is_not_there_is_no_matter_of_an_index(self, tmp_path: Path) -> None:
        for place in (f"{tmp_path}/no", f"{tmp_path}/no/{NAME}"):
            with pytest.raises(RequestError, match=rf"^{tmp_path}/no: there is no such folder\.$"):
                load_index(place)

    def test_is_not_a_file_of_data(self, tmp_path: Path) -> None:
        file = write_shards("jsonl", tmp_path, (3,)).files[0]
        with pytest.raises(RequestError, match=rf"^{file} is a data file.*Give the folder .*, such as {tmp_path}$"):
            load_index(file)

    def test_in_a_store(self) -> None:
        index = big_index(2, 2)
        save_index(index, f"memory://some/prefix/{NAME}")
        for place in ("memory://some/prefix/", f"memory://some/prefix/{NAME}"):
            found = load_index(place)
            assert (found.digest, found.place) == (index.digest, "memory://some/prefix")
        with pytest.raises(RequestError, match="quorate data index memory://other"):
            load_index("memory://other")


class TestBuilding:
    @every_kind
    def test_the_same_files_give_the_same_bytes(self, kind: str, small_blocks: None, tmp_path: Path) -> None:
        write_shards(kind, tmp_path, (9, 4, 7, 1, 3))
        first = encode(build_index(str(tmp_path)))
        assert encode(build_index(str(tmp_path))) == first

    def test_also_in_another_process(self, tmp_path: Path) -> None:
        write_shards("tar", tmp_path, (9, 4))
        code = f"from quorate.shards.indexing import build_index; print(build_index({str(tmp_path)!r}).digest)"
        environment = os.environ | {"PYTHONHASHSEED": "7"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == build_index(str(tmp_path)).digest

    def test_of_shards_in_folders_below_and_no_other_files(self, tmp_path: Path) -> None:
        write_shards("text", tmp_path / "b", (2,))
        write_shards("text", tmp_path / "a" / "deep", (3,))
        for name in ("README.md", ".hidden.txt", "a/labels.csv", NAME):
            (tmp_path / name).write_text("x")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "x.txt").write_text("x\n")
        index = build_index(str(tmp_path))
        assert index.shards == ("a/deep/shard-000.txt", "b/shard-000.txt")
        assert index.records.tolist() == [3, 2]

    @every_kind
    def test_in_a_store_is_the_same_as_in_a_folder(self, kind: str, small_blocks: None, tmp_path: Path) -> None:
        written = write_shards(kind, tmp_path)
        url = f"memory://index-{kind}/prefix"
        for file in written.files:
            FsspecStore(url).put(file.name, file.read_bytes())
        assert encode(build_index(url)) == encode(build_index(str(tmp_path)))

    def test_follows_links_to_folders_and_files_and_ends_where_they_lead_back(self, tmp_path: Path) -> None:
        folder = tmp_path / "data"
        write_shards("text", tmp_path / "elsewhere", (2, 3))
        write_shards("text", folder / "here", (1,))
        (folder / "there").symlink_to(tmp_path / "elsewhere")
        (folder / "one.txt").symlink_to(tmp_path / "elsewhere" / "shard-001.txt")
        (folder / "here" / "back").symlink_to(folder)
        (folder / "itself").symlink_to(folder)
        index = build_index(str(folder))
        assert index.shards == ("here/shard-000.txt", "one.txt", "there/shard-000.txt", "there/shard-001.txt")
        assert index.records.tolist() == [1, 3, 2, 3]
        assert verify_shards(index) == ()

    @pytest.mark.parametrize("name", ["folder", "shard-001.txt"])
    def test_refuses_a_link_that_leads_nowhere_and_verify_names_it(self, name: str, tmp_path: Path) -> None:
        write_shards("text", tmp_path, (2, 3))
        index = build_index(str(tmp_path))
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "not mounted")
        with pytest.raises(RequestError, match=rf"/{name} is a link that leads nowhere.*, or remove the link"):
            build_index(str(tmp_path))
        lost = [Flaw(name, "is a link that leads nowhere", records=3)] if name in index.shards else []
        assert list(verify_shards(index)) == lost
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(name)
        with pytest.raises(RequestError, match="leads nowhere"):
            build_index(str(tmp_path))

    def test_tells_how_far_it_is(self, tmp_path: Path) -> None:
        write_shards("text", tmp_path, (1, 2, 3))
        told: list[tuple[int, int]] = []
        build_index(str(tmp_path), progress=lambda done, total: told.append((done, total)))
        assert told == [(1, 3), (2, 3), (3, 3)]


class TestRefusals:
    def refused(self, folder: Path, text: str) -> None:
        with pytest.raises(RequestError, match=text):
            build_index(str(folder))

    @pytest.mark.parametrize(
        ("files", "place", "text"),
        [
            ({}, "no", "no: there is no such folder"),
            ({"a.txt": "x"}, "a.txt", "is a file. Give the folder that it is in"),
            ({"a.csv": "x"}, ".", r"has no shards: none of its 1 files ends with \.tar, \.parquet"),
            ({"a.tar": "", "b.txt": ""}, ".", r"several kinds, such as a.tar and b.txt\. Put those of each kind"),
            ({"a.tar.gz": "x"}, ".", r"a.tar.gz is compressed as a whole.*Unpack it"),
            ({"a.tgz": "x"}, ".", r"a.tgz is compressed as a whole.*Unpack it"),
            ({"a.jsonl.zst": "x"}, ".", r"a.jsonl.zst is compressed as a whole.*Unpack it"),
            ({"a.jsonl": "\n\n"}, ".", "the 1 jsonl shards there have no record at all"),
            ({"a\nb.txt": "x\n"}, ".", "a shard whose name cannot be listed"),
        ],
    )
    def test_a_folder_that_cannot_be_meant(self, files: dict[str, str], place: str, text: str, tmp_path: Path) -> None:
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        self.refused(tmp_path / place, text)

    def test_a_shard_that_cannot_be_read_is_named_among_many(self, tmp_path: Path) -> None:
        written = write_shards("tar", tmp_path, (2,) * 20)
        content = bytearray(written.files[13].read_bytes())
        content[0] ^= 255
        written.files[13].write_bytes(content)
        self.refused(tmp_path, r"shard-013.tar, byte 0: there is no header of a tar file.*Repair or remove this shard")

    def test_a_shard_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_shards("text", tmp_path, (1,))

        def refuse(*arguments: object) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("os.pread", refuse)
        with pytest.raises(Unreachable, match=r"shard-000.txt cannot be read: .*Permission denied"):
            build_index(str(tmp_path))

    @pytest.mark.parametrize("kind", ["parquet", "hdf5"])
    def test_shards_of_different_schemas(self, kind: str, tmp_path: Path) -> None:
        import h5py
        import pyarrow as pa
        from pyarrow import parquet

        for number, dtype in enumerate(("int32", "int64")):
            if kind == "parquet":
                parquet.write_table(pa.table({"a": numpy.zeros(2, dtype)}), tmp_path / f"{number}.parquet")
            else:
                with h5py.File(tmp_path / f"{number}.h5", "w") as opened:
                    opened["a"] = numpy.zeros(2, dtype)
        self.refused(tmp_path, r"1.\w+ has another schema than 0.\w+: a is int64, and int32 in the first")

    @pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("hdf5", "h5py")])
    def test_a_kind_whose_package_is_not_installed(
        self, kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_shards(kind, tmp_path, (2,))
        monkeypatch.setitem(sys.modules, package, None)
        self.refused(tmp_path, rf"need the package {package}: {re.escape(install_of(kind))}")


class TestPassingTrouble:
    """A store that fails now and then, and one object of it that always does."""

    @pytest.fixture
    def url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(fetching, "FIRST_PAUSE", 0.001)
        url = f"memory://{tmp_path.name}"
        for file in write_shards("jsonl", tmp_path, (5,) * 6).files:
            FsspecStore(url).put(file.name, file.read_bytes())
        return url

    def failing(self, monkeypatch: pytest.MonkeyPatch, always: str = "") -> list[str]:
        read, failed = FsspecStore.read, []

        def fail(store: FsspecStore, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key == always or key not in failed:
                failed.append(key)
                raise StoreError("the store cannot be reached")
            return read(store, key, start, length)

        monkeypatch.setattr(FsspecStore, "read", fail)
        return failed

    def test_is_tried_again(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sound = build_index(url)
        failed = self.failing(monkeypatch)
        assert encode(build_index(url)) == encode(sound)
        assert sorted(failed) == sorted(sound.shards), "every shard has failed once"
        failed.clear()
        assert verify_shards(sound) == ()
        assert sorted(failed) == sorted(sound.shards)

    def test_a_library_with_one_connection_is_opened_by_every_thread(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, readers = FsspecStore.read, set()

        def note(store: FsspecStore, key: str, start: int = 0, length: int | None = None) -> bytes:
            readers.add((store, threading.get_ident()))
            return read(store, key, start, length)

        monkeypatch.setattr(FsspecStore, "read", note)
        assert not FsspecStore(url).serves_threads
        build_index(url)
        assert readers
        assert len({store for store, _ in readers}) == len(readers), "no two threads share a store"

    @pytest.mark.long
    def test_that_does_not_pass_names_the_shard(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetching, "GIVE_UP", 2.0)
        sound = build_index(url)
        self.failing(monkeypatch, always="shard-003.jsonl")
        with pytest.raises(Unreachable, match=r"^shard-003.jsonl cannot be read \(tried \d+ times .* be reached"):
            build_index(url)
        [flaw] = verify_shards(sound)
        assert (flaw.file, flaw.records) == ("shard-003.jsonl", 5)
        assert re.match(r"cannot be read \(tried \d+ times in .* s\): the store cannot be reached$", flaw.problem)

    def test_a_store_that_stays_away_ends_the_verifying_of_all_shards(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sound = build_index(url)
        asked = set()

        def fail(store: FsspecStore, key: str, start: int = 0, length: int | None = None) -> bytes:
            asked.add(key)
            raise StoreError("the store cannot be reached")

        monkeypatch.setattr(FsspecStore, "read", fail)
        monkeypatch.setattr(fetching, "GIVE_UP", 2.0)
        monkeypatch.setattr(indexing, "REMOTE_THREADS", 2)
        with pytest.raises(StoreAway, match=r"^shard-00\d.jsonl cannot be read \(tried \d+ times .* be reached"):
            verify_shards(sound)
        assert len(asked) < len(sound.shards), "of the rest there is nothing to learn"


@pytest.mark.parametrize("url", ["s3://AKIA:SECRET@bucket/a", "s3://bucket/a?token=SECRET"])
def test_an_address_with_a_secret_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    write_shards("text", tmp_path, (1,))
    for refuse in (
        lambda: load_index(url),
        lambda: load_index(f"{url}/{NAME}"),
        lambda: build_index(url),
        lambda: index_data(url, str(tmp_path / NAME)),
        lambda: index_data(str(tmp_path), f"{url}/{NAME}"),
    ):
        with pytest.raises(RequestError, match="has a password or a query in it") as told:
            refuse()
        assert "SECRET" not in told.value.message.replace("AWS_SECRET_ACCESS_KEY", "")
    assert not (tmp_path / NAME).exists()


@pytest.mark.long
def test_ten_thousand_shards_are_indexed_in_seconds(tmp_path: Path) -> None:
    for number in range(10_000):
        with tarfile.open(tmp_path / f"{number:05d}.tar", "w") as opened:
            for record in range(3):
                add_member(opened, f"{record}.jpg", bytes(1000))
                add_member(opened, f"{record}.cls", b"1")
    began = monotonic()
    index = build_index(str(tmp_path))
    assert monotonic() - began < 20
    assert len(index) == 30_000

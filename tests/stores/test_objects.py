import gc
import pickle
import re
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from object_store import BUCKET, SECRET_KEY, SeaweedStore
from quorate.core.addresses import has_secret, shown
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.shards.blocks import ShardBlocks
from quorate.shards.formats.format import DamagedBlock
from quorate.shards.indexing import build_index
from quorate.storage.objects import ObjectMissing, StoreError
from quorate.storage.run_folder import RunFolder
from quorate.stores import objects
from quorate.stores.objects import FsspecStore, refuse_unknown_store


@pytest.fixture
def store(s3: SeaweedStore) -> FsspecStore:
    return FsspecStore(f"s3://{BUCKET}/{uuid.uuid4().hex}/prefix/")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PATIENCE", 2.0)


class TestStore:
    def test_gives_back_what_was_put(self, store: FsspecStore, tmp_path: Path) -> None:
        content = bytes(range(256)) * 4000
        (tmp_path / "large").write_bytes(content)
        store.put("small", b"few")
        store.put_file("folder/large", tmp_path / "large")
        store.fetch("folder/large", tmp_path / "back", len(content))
        assert store.read("small") == b"few"
        assert (tmp_path / "back").read_bytes() == content
        listed = store.list()
        assert {key: each.bytes for key, each in listed.items()} == {"small": 3, "folder/large": len(content)}
        assert all(abs((each.modified or 0) - time.time()) < 60 for each in listed.values())

    def test_of_several_who_create_an_object_one_does(self, store: FsspecStore) -> None:
        with ThreadPoolExecutor(4) as threads:
            created = list(threads.map(lambda number: store.create("key", str(number).encode()), range(4)))
        assert sum(created) == 1
        assert store.read("key") == str(created.index(True)).encode()
        assert store.names() == ("key",)

    def test_coordinators_that_begin_at_once_get_numbers_of_their_own(self, store: FsspecStore, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        run.keep_in(store)
        with ThreadPoolExecutor(4) as threads:
            taken = list(threads.map(lambda launch: run.incarnations.take(2, launch), "abcd"))
        assert sorted(taken) == [3, 4, 5, 6] and run.incarnations.newest() == 6
        last = "abcd"[taken.index(6)]
        assert run.incarnations.is_taken_by_other("another") and not run.incarnations.is_taken_by_other(last)

    def test_hosts_find_the_coordinator_by_the_token_which_is_not_in_the_store(
        self, store: FsspecStore, tmp_path: Path
    ) -> None:
        here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
        for run in (here, there):
            run.path.mkdir()
            run.keep_in(store)
        here.write_address("10.0.0.5:1", "the-token-of-the-job")
        assert there.read_address("the-token-of-the-job") == "10.0.0.5:1" and there.read_address("another") is None
        assert not [key for key in store.list() if b"the-token-of-the-job" in store.read(key)]
        here.remove_address()
        assert there.read_address("the-token-of-the-job") is None

    def test_reads_ranges(self, store: FsspecStore) -> None:
        content = bytes(range(256))
        store.put("key", content)
        assert store.size("key") == 256
        assert store.read("key", 0, 10) == content[:10]
        assert store.read("key", 100, 50) == content[100:150]
        assert store.read("key", 250, 50) == content[250:]
        assert store.read("key", 250) == content[250:]

    def test_a_range_behind_the_end_of_an_object_is_empty(self, store: FsspecStore) -> None:
        store.put("key", b"short by now")
        assert store.read("key", 100, 50) == b""
        assert store.read("key", 100) == b""
        with pytest.raises(ObjectMissing):
            store.read("none", 100, 50)

    def test_a_shard_that_has_become_shorter_is_damaged_and_not_out_of_reach(self, store: FsspecStore) -> None:
        content = b"a record\n" * 1000
        store.put("shard.txt", content)
        blocks = ShardBlocks(build_index(store.url))
        try:
            assert len(blocks.read(0)) == 1000
            store.put("shard.txt", b"a record\n")
            with pytest.raises(DamagedBlock, match="the file has changed since it was indexed: 9 bytes"):
                blocks.read(0)
            store.put("shard.txt", b"")
            with pytest.raises(DamagedBlock, match="the file has changed since it was indexed: 0 bytes"):
                blocks.read(0)
        finally:
            blocks.close()

    def test_replaces_and_removes(self, store: FsspecStore) -> None:
        store.put("key", b"old")
        store.put("key", b"newer")
        assert store.read("key") == b"newer"
        assert store.list()["key"].bytes == 5
        store.remove("key")
        store.remove("key")
        assert store.list() == {}

    def test_names_a_missing_object(self, store: FsspecStore, tmp_path: Path) -> None:
        for read in (
            lambda: store.read("none"),
            lambda: store.size("none"),
            lambda: store.fetch("none", tmp_path / "file", 1),
        ):
            with pytest.raises(ObjectMissing, match="there is no object none"):
                read()

    def test_a_prefix_is_no_other_prefix(self, store: FsspecStore) -> None:
        FsspecStore(f"{store.url}-2").put("key", b"of another")
        assert store.list() == {}


class TestTrouble:
    def test_wrong_secret(self, store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        for act in (lambda: store.put("key", b"x"), lambda: store.read("key"), store.list):
            with pytest.raises(StoreError, match=r"access is refused.*AWS_SECRET_ACCESS_KEY") as caught:
                act()
            assert caught.value.lasts
            assert "wrong-secret" not in caught.value.message
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        store.put("key", b"x")  # what is mended is seen

    def test_no_credentials(self, store: FsspecStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(StoreError, match="no credentials are found"):
            store.put("key", b"x")

    def test_missing_bucket(self, s3: SeaweedStore) -> None:
        store = FsspecStore("s3://no-such-bucket/prefix")
        for act in (lambda: store.put("key", b"x"), lambda: store.read("key"), store.list):
            with pytest.raises(StoreError, match="there is no bucket 'no-such-bucket'") as caught:
                act()
            assert caught.value.lasts and not isinstance(caught.value, ObjectMissing)

    @pytest.mark.usefixtures("impatient")
    def test_store_that_is_down(self, store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StoreError, match=r"cannot be reached.*AWS_ENDPOINT_URL|does not answer in time") as caught:
            store.put("key", b"x")
        assert not caught.value.lasts

    @pytest.mark.usefixtures("impatient")
    def test_store_that_says_nothing(self, store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            began = time.monotonic()
            with pytest.raises(StoreError, match="does not answer in time") as caught:
                store.read("key")
        assert time.monotonic() - began < 20
        assert not caught.value.lasts

    def test_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RequestError, match=rf"needs the package s3fs: {re.escape(install_of('s3'))}"):
            refuse_unknown_store("s3://bucket/prefix")

    def test_unknown_kind(self) -> None:
        with pytest.raises(RequestError, match="'sss' is not a kind of store"):
            refuse_unknown_store("sss://bucket")
        with pytest.raises(StoreError, match="'sss' is not a kind of store") as caught:
            FsspecStore("sss://bucket").list()
        assert caught.value.lasts

    def test_a_protocol_in_capitals_is_the_same(self) -> None:
        refuse_unknown_store("S3://bucket/X")
        assert FsspecStore("S3://bucket/X").url == "s3://bucket/X"
        place = uuid.uuid4().hex
        FsspecStore(f"Memory://{place}").put("key", b"x")
        assert FsspecStore(f"memory://{place}").read("key") == b"x"

    @pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("ftp://127.0.0.1:9/x", r"the store cannot be reached \(ConnectionRefusedError\)"),
            ("ftp:///x", "cannot be opened: the library for ftp:// needs host, and this address does not say"),
            ("reference://x", "cannot be opened: the library for reference:// needs fo, and"),
        ],
    )
    def test_a_library_that_cannot_be_opened(self, url: str, why: str) -> None:
        with pytest.raises(StoreError, match=why):
            FsspecStore(url).list()
        gc.collect()


SECRETS = (
    "s3://AKIA:SECRET@bucket/a",
    "s3://AKIA:p@SECRET@bucket/a",
    "s3://AKIA:wJ/SECRET@bucket/a",
    "s3://AKIA:SECRET/a",
    "https://host/a?token=SECRET",
    "s3://bucket/a folder?SECRET",
)
HARMLESS = (
    "s3://bucket/a@b/c:d@e", "ftp://host:21/a@b", "ftp://[::1]:21/a", "file:///data/x:y@z", "/a:b@c?d=e", "memory://a"
)  # fmt: skip


class TestSecrets:
    @pytest.mark.parametrize("url", SECRETS)
    def test_an_address_with_one_is_refused_without_repeating_it(self, url: str) -> None:
        assert has_secret(url)
        for refuse in (FsspecStore, refuse_unknown_store):
            with pytest.raises(RequestError, match=r"password or a query in it.*AWS_ACCESS_KEY_ID.*settings") as told:
                refuse(url)
            assert "SECRET" not in told.value.message.replace("AWS_SECRET", "")
            assert "AKIA" not in told.value.message

    @pytest.mark.parametrize("url", HARMLESS)
    def test_an_address_without_one_is_shown_as_it_is(self, url: str) -> None:
        assert not has_secret(url)
        assert shown(url) == url

    def test_a_user_alone_is_none_and_is_not_shown(self) -> None:
        assert str(FsspecStore("sftp://me@host/a")) == "sftp://…@host/a"

    @pytest.mark.parametrize("url", SECRETS[:-1])
    def test_is_not_shown(self, url: str) -> None:
        assert "SECRET" not in shown(url)
        assert "SECRET" not in shown(f"it has failed at '{url}' and elsewhere")
        assert shown("ftp://me:p@ss@host/a@b") == "ftp://…@host/a@b"
        assert shown("https://host/a?b=c and https://other/d") == "https://host/a?… and https://other/d"

    @pytest.mark.parametrize(
        "text", ['Invalid bucket name "AKIA:SECRETKEY@bucket"', "GET /a?X-Amz-Signature=SECRET failed"]
    )
    def test_is_not_told_by_what_a_library_says(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = FsspecStore("memory://place")

        def fail(*_: object, **__: object) -> None:
            raise ValueError(text)

        monkeypatch.setattr(store, "_do", fail)
        with pytest.raises(StoreError, match=r"the store cannot do it: (Invalid bucket|GET /a)") as told:
            store.read("key")
        assert "SECRET" not in told.value.message


def test_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(StoreError("a message", lasts=True)))
    assert (error.message, error.lasts) == ("a message", True)

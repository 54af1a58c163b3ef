import pickle
import socket
import time
import uuid
from pathlib import Path

import pytest

from object_store import BUCKET, SECRET_KEY, SeaweedStore
from quorate.core.errors import RequestError
from quorate.storage import objects
from quorate.storage.objects import ObjectMissing, ObjectStore, StoreError, refuse_unknown_store, shown


@pytest.fixture
def store(s3: SeaweedStore) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}/prefix/")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PATIENCE", 2.0)


class TestStore:
    def test_gives_back_what_was_put(self, store: ObjectStore, tmp_path: Path) -> None:
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

    def test_replaces_and_removes(self, store: ObjectStore) -> None:
        store.put("key", b"old")
        store.put("key", b"newer")
        assert store.read("key") == b"newer"
        assert store.list()["key"].bytes == 5
        store.remove("key")
        store.remove("key")
        assert store.list() == {}

    def test_names_a_missing_object(self, store: ObjectStore, tmp_path: Path) -> None:
        for read in (lambda: store.read("none"), lambda: store.fetch("none", tmp_path / "file", 1)):
            with pytest.raises(ObjectMissing, match="there is no object none"):
                read()

    def test_a_prefix_is_no_other_prefix(self, store: ObjectStore) -> None:
        ObjectStore(f"{store.url}-2").put("key", b"of another")
        assert store.list() == {}


class TestTrouble:
    def test_wrong_secret(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        for act in (lambda: store.put("key", b"x"), lambda: store.read("key"), store.list):
            with pytest.raises(StoreError, match=r"access is refused.*AWS_SECRET_ACCESS_KEY") as caught:
                act()
            assert caught.value.lasts
            assert "wrong-secret" not in caught.value.message
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        store.put("key", b"x")  # what is mended is seen

    def test_no_credentials(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(StoreError, match="no credentials are found"):
            store.put("key", b"x")

    def test_missing_bucket(self, s3: SeaweedStore) -> None:
        store = ObjectStore("s3://no-such-bucket/prefix")
        for act in (lambda: store.put("key", b"x"), lambda: store.read("key"), store.list):
            with pytest.raises(StoreError, match="there is no bucket 'no-such-bucket'") as caught:
                act()
            assert caught.value.lasts and not isinstance(caught.value, ObjectMissing)

    @pytest.mark.usefixtures("impatient")
    def test_store_that_is_down(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StoreError, match=r"cannot be reached.*AWS_ENDPOINT_URL|does not answer in time") as caught:
            store.put("key", b"x")
        assert not caught.value.lasts

    @pytest.mark.usefixtures("impatient")
    def test_store_that_says_nothing(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            began = time.monotonic()
            with pytest.raises(StoreError, match="does not answer in time") as caught:
                store.read("key")
        assert time.monotonic() - began < 20
        assert not caught.value.lasts

    def test_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RequestError, match=r"needs the package s3fs: pip install 'quorate\[s3\]'"):
            refuse_unknown_store("s3://bucket/prefix")

    def test_unknown_kind(self) -> None:
        with pytest.raises(RequestError, match="'sss' is no kind of store"):
            refuse_unknown_store("sss://bucket")


def test_a_password_is_not_shown() -> None:
    assert shown("ftp://me:secret@host/a@b") == "ftp://…@host/a@b"
    assert "secret" not in str(ObjectStore("ftp://me:secret@host/a"))


def test_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(StoreError("a message", lasts=True)))
    assert (error.message, error.lasts) == ("a message", True)

"""`quorate data`, by the real command and, where only what is said is looked at, in this process."""

import io
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from data.shards.shard_files import KINDS, write_shards
from object_store import BUCKET, SeaweedStore
from quorate.cli.app import app
from quorate.cli.data import counting
from quorate.core.errors import RequestError
from quorate.history.streaming import shown_place
from quorate.shards.index import NAME, encode, load_index
from quorate.stores.objects import FsspecStore
from schemas import validate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shards"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a verb prints for people."""
    result = app(["data", *arguments], standalone_mode=False)
    assert (result or 0) == code
    return capsys.readouterr().out


def document(workplace: Workplace, verb: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = workplace.run("data", verb, *arguments, "--json")
    assert done.code == code, done.stderr
    validate("error" if "error" in done.document else f"data-{verb}", done.document)
    return done.document


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_the_documents_of_all_verbs_are_as_their_schemas_say(kind: str, workplace: Workplace) -> None:
    folder = workplace.folder / "shards"
    written = write_shards(kind, folder)
    indexed = document(workplace, "index", "shards")
    assert (indexed["kind"], indexed["shards"], indexed["records"]) == (kind, 3, 48)
    assert indexed["index"] == str(folder / NAME)
    assert indexed["digest"] == load_index(folder).digest
    assert document(workplace, "verify", "shards")["flaws"] == []
    stats = document(workplace, "stats", "shards")
    assert stats["bytes"] == indexed["bytes"] == sum(file.stat().st_size for file in written.files)
    assert stats["shard_records"] == {"min": 1, "median": 17, "max": 30}
    content = bytearray(written.files[0].read_bytes())
    content[700] ^= 1
    written.files[0].write_bytes(content)
    verified = document(workplace, "verify", "shards", code=1)
    assert [flaw["file"] for flaw in verified["flaws"]] == [written.files[0].name]
    assert verified["damaged_records"] > 0
    assert "already exists" in document(workplace, "index", "shards", code=2)["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_words(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_shards(kind, folder)
    assert run(capsys, "index", str(folder)).startswith(f"3 {kind} shards with 48 records in ")
    assert "all are as they were indexed" in run(capsys, "verify", str(folder))
    stats = run(capsys, "stats", str(folder))
    assert "1 to 30 records" in stats
    assert all(name in stats for name in load_index(folder).schema)
    gone = written.files[1]
    gone.unlink()
    told = run(capsys, "verify", str(folder), code=1).splitlines()
    assert told[0] == f"{gone.name}: is missing"
    assert told[-1] == "1 of 3 shards are not as they were indexed; 1 of 48 records cannot be read."


def test_an_index_elsewhere_finds_its_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards("text", folder)
    for output in (tmp_path / "beside.quorate", tmp_path / "other" / "x.quorate"):
        output.parent.mkdir(exist_ok=True)
        run(capsys, "index", str(folder), "--output", str(output))
        assert not (folder / NAME).exists()
        assert "all are as they were" in run(capsys, "verify", str(output))
    # One above the shards is moved with them.
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert load_index(moved / "beside.quorate").place == str(moved / "shards")


def test_an_index_is_replaced_only_if_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards("text", folder)
    run(capsys, "index", str(folder))
    write_shards("text", folder, (1, 2, 3, 4))
    before = (folder / NAME).read_bytes()
    with pytest.raises(Exception, match=r"already exists\. .*--force rebuilds it"):
        run(capsys, "index", str(folder))
    assert (folder / NAME).read_bytes() == before
    run(capsys, "index", str(folder), "--force")
    assert len(load_index(folder)) == 10


def test_new_shards_are_counted_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_shards("text", folder)
    run(capsys, "index", str(folder))
    (folder / "zz.txt").write_text("new\n")
    told = run(capsys, "verify", str(folder), code=1).splitlines()
    assert told[0] == "zz.txt: is not in the index"
    assert told[1].startswith("3 text shards with 48 records in ") and "all are as they were indexed" in told[1]
    assert told[2].startswith("1 new, not in the index: `quorate data index PATH --force`")
    written.files[1].unlink()
    told = run(capsys, "verify", str(folder), code=1).splitlines()
    assert told[-2] == "1 of 3 shards are not as they were indexed; 1 of 48 records cannot be read."
    assert told[-1].startswith("1 new, ")


def test_folders_with_indexes_of_their_own_are_not_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "val"):
        write_shards("text", folder / name, (2,))
        run(capsys, "index", str(folder / name))
    for output in ([], ["--output", str(folder.parent / "all.quorate")]):
        with pytest.raises(
            RequestError, match=r"\(train/index.quorate, val/index.quorate\).*/train; --force makes one"
        ):
            run(capsys, "index", str(folder), *output)
    assert not (folder / NAME).exists()
    run(capsys, "index", str(folder), "--force")
    assert len(load_index(folder)) == 4


def test_places_are_shown_by_their_shortest_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards("text", folder)
    (folder.parent / "code").mkdir()
    around = folder.parent / "code" / ".." / "shards"
    assert f" {folder / NAME}\n" in run(capsys, "index", str(around))
    assert f" {folder}\n" in run(capsys, "stats", str(around))
    # Behind a link, .. is not the folder that the link lies in.
    (folder.parent / "link").symlink_to(folder, target_is_directory=True)
    assert shown_place(f"{folder.parent}/link/../x/y") == f"{folder.parent}/x/y"
    (folder / "deep").mkdir()
    (folder.parent / "far").symlink_to(folder / "deep", target_is_directory=True)
    assert shown_place(f"{folder.parent}/far/../x") == f"{folder.parent}/far/../x"


@pytest.mark.long
def test_shards_in_a_store(s3: SeaweedStore, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"s3://{BUCKET}/data"
    written = write_shards("parquet", folder)
    store = FsspecStore(url)
    for file in written.files:
        store.put(file.name, file.read_bytes())
    run(capsys, "index", url)
    run(capsys, "index", str(folder))
    assert encode(load_index(url)) == encode(load_index(folder))
    assert "all are as they were" in run(capsys, "verify", url)
    store.put(written.files[0].name, written.files[1].read_bytes())
    store.remove(written.files[2].name)
    told = run(capsys, "verify", url, code=1)
    assert f"{written.files[0].name}: has" in told
    assert f"{written.files[2].name}: is missing" in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("as_json", "told"), [(False, True), (True, False)])
def test_shards_are_counted_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, as_json: bool, told: bool) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with counting("indexed", as_json) as show:
        for done in range(1, 1201):
            show(done, 1200)
    assert ("indexed 1,200 of 1,200 shards" in terminal.getvalue()) is told
    assert terminal.getvalue().endswith("\x1b[2K") is told, "and is gone afterwards"
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    with counting("indexed", as_json=False) as show:
        show(1, 1)
    assert file.getvalue() == ""

"""`quorate data`, by the real command and, where only what is said is looked at, in this process."""

import io
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from command import Workplace
from data.shards.shard_files import KINDS, write_shards, write_tar
from object_store import BUCKET, SeaweedStore
from quorate.api.preview import write_contact_sheet
from quorate.cli.app import app
from quorate.cli.data_view import counting
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
    preview = document(workplace, "preview", "shards", "--records", "2", "--from", "30")
    assert [(each["sample"], each["row"], each["bad"]) for each in preview["preview"]] == [(30, 0, None), (31, 0, None)]
    assert [each["file"] for each in preview["preview"]] == [file.name for file in written.files[1:]]
    content = bytearray(written.files[0].read_bytes())
    content[700] ^= 1
    written.files[0].write_bytes(content)
    verified = document(workplace, "verify", "shards", code=1)
    assert [flaw["file"] for flaw in verified["flaws"]] == [written.files[0].name]
    assert verified["damaged_records"] > 0
    previewed = document(workplace, "preview", "shards", "--records", "48")["preview"]
    bad = [each for each in previewed if each["bad"] is not None]
    assert len(bad) == verified["damaged_records"]
    assert all(not each["fields"] and written.files[0].name in each["bad"] for each in bad)
    assert "already exists" in document(workplace, "index", "shards", code=2)["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_words(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_shards(kind, folder)
    assert run(capsys, "index", str(folder)).startswith(f"3 {kind} shards with 48 records in ")
    assert "all are as they were indexed" in run(capsys, "verify", str(folder))
    stats = run(capsys, "stats", str(folder))
    assert "1 to 30 records" in stats
    assert all(name in stats for name in load_index(folder).schema)
    preview = run(capsys, "preview", str(folder), "--records", "3").splitlines()
    assert [line.split()[0] for line in preview] == ["sample", "0", "1", "2", "3"]
    assert preview[-1] == "3 of 48 records."
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


def picture(number: int, form: str = "PNG", size: tuple[int, int] = (20, 10)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (255, number, 0)).save(content, form)
    return content.getvalue()


def sheet_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    run(capsys, "index", str(folder))
    file = folder.parent / "sheet.png"
    assert f"{file}: 5 pictures." in run(capsys, "preview", str(folder), "--records", "5", "-o", str(file))
    with Image.open(file) as opened:
        assert opened.format == "PNG"
        return opened.convert("RGB")


def colours(sheet: Any) -> set[tuple[int, ...]]:
    return {sheet.getpixel((x, y)) for x in range(0, sheet.width, 3) for y in range(0, sheet.height, 3)}


def test_pictures_become_a_contact_sheet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    forms = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
    rows = [{"__key__": str(at), "cls": b"1", "img": picture(40 * at, form)} for at, form in enumerate(forms)]
    write_tar(folder / "a.tar", rows)
    sheet = sheet_of(folder, capsys)
    assert sheet.size == (3 * 100 + 4, 2 * 100 + 4)
    reds = {colour[1] for colour in colours(sheet) if colour[0] > 240}
    assert all(any(abs(found - 40 * at) < 12 for found in reds) for at in range(5)), "each of them is on it"


@pytest.mark.parametrize("shape", [(12, 9), (12, 9, 3), (3, 12, 9), (1, 12, 9), (144,)])
def test_arrays_of_the_shape_of_pictures_are_pictures(
    shape: tuple[int, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import h5py

    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as opened:
        dtype = numpy.uint8 if len(shape) == 1 else numpy.float32
        opened["x"] = numpy.ones((5, *shape), dtype) * (255 if dtype == numpy.uint8 else 1)
        opened["label"] = numpy.arange(5)
    assert (255, 255, 255) in colours(sheet_of(folder, capsys))


def test_a_picture_that_is_broken_is_shown_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    contents = [*(picture(0) for _ in range(4)), picture(0)[:30]]
    parquet.write_table(pa.table({"image": contents, "n": list(range(5))}), folder / "a.parquet")
    assert (160, 0, 0) in colours(sheet_of(folder, capsys))


def test_records_without_pictures_give_no_sheet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards("jsonl", folder)
    run(capsys, "index", str(folder))
    with pytest.raises(Exception, match="none of these 10 records has a picture"):
        run(capsys, "preview", str(folder), "-o", "no.png")


def test_a_sheet_never_replaces_what_is_no_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    file = folder / "a.tar"
    write_tar(file, [{"__key__": str(at), "img": picture(at)} for at in range(5)])
    before = file.read_bytes()
    run(capsys, "index", str(folder))
    for name in (file, folder / "new", folder / "png"):
        with pytest.raises(RequestError, match=r"is not a name for a contact sheet.*\.png"):
            run(capsys, "preview", str(folder), "-o", str(name))
        with pytest.raises(RequestError, match="is not a name for a contact sheet"):
            write_contact_sheet(name, [picture(0)])
    assert file.read_bytes() == before
    assert {each.name for each in folder.iterdir()} == {"a.tar", NAME}
    for _ in range(2):
        run(capsys, "preview", str(folder), "-o", str(folder / "Sheet.PNG"))


def test_a_preview_shows_long_and_strange_values_in_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"a": "x\\ny\\u0007", "b": [1, 2], "c": null}\n{"d": "' + "z" * 500 + '"}\n7\n')
    run(capsys, "index", str(folder))
    head, first, second, third, _ = run(capsys, "preview", str(folder)).splitlines()
    assert head.split() == ["sample", "file", "row", "a", "b", "c", "d", "record"]
    assert first.split() == ["0", "a.jsonl", "0", "x", "y\ufffd", "[1,", "2]", "None", "-", "-"]
    assert second.split()[-2] == "z" * 59 + "…"
    assert third.split()[-1] == "7"


def test_a_preview_marks_what_is_bad_and_shows_the_rest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_shards("jsonl", folder, (3, 2, 2)).files
    run(capsys, "index", str(folder))
    files[0].write_text(files[0].read_text().replace("0", "9", 1))
    files[1].unlink()
    lines = run(capsys, "preview", str(folder), "--from", "1", "--records", "5").splitlines()
    assert [line.split()[:3] for line in lines[1:6]] == [
        ["1", files[0].name, "1"],
        ["2", files[0].name, "2"],
        ["3", files[1].name, "0"],
        ["4", files[1].name, "1"],
        ["5", files[2].name, "0"],
    ]
    assert [line.endswith(" bad") for line in lines[1:6]] == [True] * 4 + [False]
    assert lines[6].startswith("samples 1 to 2: shard-000.jsonl, bytes 0 to ")
    assert lines[6].endswith(". The block that it is in ends with sample 2.")
    assert lines[7].startswith("samples 3 to 4: ") and "shard-001.jsonl cannot be read: it is not there" in lines[7]
    assert lines[8] == "5 of 7 records, 4 of them bad."


def test_a_preview_from_beyond_the_end_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards("text", folder, (2, 2))
    run(capsys, "index", str(folder))
    assert run(capsys, "preview", str(folder), "--from", "3").splitlines()[-1] == "1 of 4 records."
    with pytest.raises(RequestError, match=r"there is no record 4: .* has 4, and the first is 0"):
        run(capsys, "preview", str(folder), "--from", "4")


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
    assert run(capsys, "preview", url) == run(capsys, "preview", str(folder))
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

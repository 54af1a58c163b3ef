"""The digest of an index is that of the data, wherever they lie; where they lie is checked too."""

import json
import shutil
from pathlib import Path

import pytest

from data.shards.shard_files import write_shards
from quorate.core.errors import RequestError
from quorate.shards.index import NAME, load_index
from quorate.shards.indexing import index_data


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The file of an index that lies elsewhere than its shards."""
    write_shards("text", tmp_path / "data", (3, 2))
    file = tmp_path / "indexes" / "texts.quorate"
    file.parent.mkdir()
    index_data(str(tmp_path / "data"), str(file))
    return file


def test_shards_that_were_moved_and_are_indexed_again_have_the_same_digest(index: Path, tmp_path: Path) -> None:
    before = load_index(index)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    index_data(str(tmp_path / "moved"), str(index), force=True)
    after = load_index(index)
    assert after.place != before.place
    assert after.digest == before.digest
    beside = index_data(str(tmp_path / "moved"))[0]
    assert beside.digest == before.digest


def test_another_place_in_the_file_is_damage(index: Path, tmp_path: Path) -> None:
    content = index.read_bytes()
    root = str(tmp_path / "data").encode()
    assert content.count(root) == 1, "it would be found by its place"
    index.write_bytes(content.replace(root, root[:-4] + b"date"))
    with pytest.raises(RequestError, match=rf"is damaged.*: quorate data index PATH --output {index} --force$"):
        load_index(index)


def test_an_index_of_another_version_is_refused_with_the_command(index: Path, tmp_path: Path) -> None:
    beside = Path(index_data(str(tmp_path / "data"))[1])
    assert beside.name == NAME
    for file, output in ((beside, ""), (index, f" --output {index}")):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["__metadata__"]["version"] = "1"
        old = json.dumps(header).encode()
        file.write_bytes(len(old).to_bytes(8, "little") + old + content[8 + size :])
        command = f"quorate data index {tmp_path / 'data'}{output} --force"
        with pytest.raises(RequestError, match=rf"has version 1, and .* version 2\. Make it again with: {command}$"):
            load_index(file)

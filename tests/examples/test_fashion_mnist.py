"""The example with idx files: its bits on any number of workers, its reader, and what it says of wrong files."""

import gzip
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gang
import quorate
from command import Workplace
from examples.example_files import EXAMPLES, ROOT, example, idx_bytes, module_of, write_fashion

fashion: Any = module_of(EXAMPLES / "fashion_mnist.py")

NAMES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
LABELS = "train-labels-idx1-ubyte"


def trained(folder: Path, data: Path, workers: int, **keys: Any) -> gang.Ended:
    task, spec = example(
        "fashion_mnist", {"data": str(data), "width": 4}, batch_size=32, steps=6, evaluate={"every": 3}, **keys
    )
    folder.mkdir()
    return gang.train(task, spec, workers, folder)


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_any_number_of_workers_gives_one_digest(tmp_path: Path) -> None:
    data = write_fashion(tmp_path / "data")
    ends = [trained(tmp_path / str(workers), data, workers) for workers in (1, 2, 3)]
    assert len({end.digest for end in ends}) == 1
    assert all(end.progress == ends[0].progress for end in ends), "metrics must be equal too, to the last bit"
    assert trained(tmp_path / "other", data, 2, seed=8).digest != ends[0].digest, "the digest tells models apart"


def test_files_that_are_not_gzipped_hold_the_same(tmp_path: Path) -> None:
    packed, plain = write_fashion(tmp_path / "packed"), write_fashion(tmp_path / "plain", packed=False)
    assert all(file.suffix != ".gz" for file in plain.iterdir())
    for part, count in (("train", 96), ("t10k", 40)):
        loaded = fashion.load(packed, part)
        assert len(loaded) == count
        for one, other in zip(loaded.tensors, fashion.load(plain, part).tensors, strict=True):
            assert torch.equal(one, other)


def test_a_relative_path_counts_from_the_folder_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    task = fashion.FashionMnist()
    task.data = Path("here")
    with pytest.raises(quorate.RequestError, match=re.escape(f"no folder {EXAMPLES / 'here'} ")):
        task.datasets()


# --- what it says


def refusal(folder: Path, part: str = "train") -> str:
    with pytest.raises(quorate.RequestError) as caught:
        fashion.load(folder, part)
    message = caught.value.message
    assert str(folder) in message
    assert "python scripts/datasets.py fashion-mnist" in message, "it says how to get the data"
    assert "apt install dataset-fashion-mnist" in message
    return message


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named_with_its_folder(name: str, tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data")
    (folder / name).unlink()
    assert refusal(folder, name.partition("-")[0]).startswith(f"There is no {name} in {folder} (params.data).")


def test_the_command_that_fetches_the_data_exists() -> None:
    command = re.search(r"python (\S+) (\S+)", fashion.HOW_TO_GET_IT)
    assert command is not None
    assert command[2] in module_of(ROOT / command[1]).DATASETS


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "plain"])
def test_a_file_that_was_cut_off_is_named_with_both_numbers(packed: bool, tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data", packed=packed)
    file = next(folder.glob("train-images*"))
    file.write_bytes(file.read_bytes()[:20000])
    message = refusal(folder)
    assert message.startswith(f"{file} is damaged: its header promises 96 × 28 × 28 = 75,264 bytes, and it holds ")
    assert packed == ("its end is missing" in message)


def test_a_page_instead_of_a_file(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data", packed=False)
    (folder / LABELS).write_bytes(b"<html>not found</html>")
    assert "it begins with 3c 68 74, and idx files of bytes with 00 00 08" in refusal(folder)


def test_a_gzipped_file_with_a_flipped_bit(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data")
    file = folder / f"{LABELS}.gz"
    content = bytearray(file.read_bytes())
    content[-6] ^= 1  # in its checksum
    file.write_bytes(content)
    assert f"{file} is damaged: it has {len(content)} bytes and cannot be unpacked" in refusal(folder)


def test_images_and_labels_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data")
    other = write_fashion(tmp_path / "other", training=95)
    (other / f"{LABELS}.gz").rename(folder / f"{LABELS}.gz")
    assert "the images have the shape (96, 28, 28), and with 95 labels it should be (95, 28, 28)" in refusal(folder)


def test_a_label_that_is_no_class(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "data", packed=False)
    (folder / LABELS).write_bytes(idx_bytes(torch.full((96,), 10, dtype=torch.uint8)))
    assert f"A label of {LABELS} in {folder} is 10; they should be from 0 to 9." in refusal(folder)


@pytest.mark.usefixtures("unmeasured")
def test_the_command_tells_it_in_one_message_and_leaves_nothing(workplace: Workplace) -> None:
    empty = workplace.folder / "empty"
    empty.mkdir()
    job = str(EXAMPLES / "fashion_mnist.yaml")
    done = workplace.run("train", job, "--workers", "1", "--runs", "runs", "--set", f"params.data={empty}", "--json")
    assert done.code == 2
    assert done.document["error"].startswith(f"There is no train-images-idx3-ubyte.gz in {empty} (params.data).\n")
    assert done.document["error"].endswith(fashion.HOW_TO_GET_IT)
    assert "Traceback" not in done.stderr
    assert not workplace.runs()


# --- the reader, in general


@given(shape=st.lists(st.integers(0, 5), max_size=4), packed=st.booleans())
def test_any_shape_is_read_as_it_was_written(
    shape: list[int], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("idx")
    content = torch.randint(0, 256, shape).to(torch.uint8)
    data = idx_bytes(content)
    file = folder / ("some.gz" if packed else "some")
    file.write_bytes(gzip.compress(data) if packed else data)
    assert torch.equal(fashion.read_idx(folder, "some"), content)


WHOLE = idx_bytes(torch.arange(60).to(torch.uint8).view(3, 4, 5))
PACKED = gzip.compress(WHOLE)


@given(data=st.data(), packed=st.booleans())
def test_no_part_of_a_file_passes_for_the_whole(
    data: st.DataObject, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = PACKED if packed else WHOLE
    folder = tmp_path_factory.mktemp("idx")
    (folder / ("some.gz" if packed else "some")).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(quorate.RequestError, match="some"):
        fashion.read_idx(folder, "some")


@given(surplus=st.binary(min_size=1, max_size=9))
def test_more_than_the_header_promises_is_refused(surplus: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("idx")
    (folder / "some").write_bytes(WHOLE + surplus)
    with pytest.raises(quorate.RequestError, match=f"3 × 4 × 5 = 60 bytes, and it holds {60 + len(surplus)}"):
        fashion.read_idx(folder, "some")


def test_bytes_that_are_not_gzip_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.gz").write_bytes(zlib.compress(WHOLE))
    with pytest.raises(quorate.RequestError, match="cannot be unpacked"):
        fashion.read_idx(tmp_path, "some")

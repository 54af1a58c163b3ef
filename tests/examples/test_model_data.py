"""What the models of examples/models read: images and tokens, crops and flips, hidden tokens, and wrong files."""

import re
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from pyarrow import parquet

import gang
import quorate
from bert import IGNORED, masked
from cifar import BYTES, TRAINING, VALIDATION, cropped_and_flipped, load
from command import Workplace
from examples.example_files import example
from images import DEVIATION, MEAN, normalised, synthetic_images
from quorate.data.datasets import columns_of
from tokens import Windows, padded, synthetic_windows, token_windows


def written_cifar(folder: Path, images: int = 8) -> Path:
    """The six files, with so few images each, of which every pixel is random."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    for name in (*TRAINING, *VALIDATION):
        records = torch.randint(0, 256, (images, BYTES), dtype=torch.uint8, generator=generator)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.numpy().tobytes())
    return folder


# --- images


def test_normalised_pixels_are_as_they_are_usually_written() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(normalised(images), (images / 255 - mean) / deviation)
    assert images.dtype == torch.uint8, "the batch stays as it was"


def test_synthetic_data_is_a_small_pool_that_is_read_by_column() -> None:
    images, windows = synthetic_images(1_281_167, 8, 1000, seed=1), synthetic_windows(10**6, 9, 50_257, seed=1)
    assert (len(images), len(windows)) == (1_281_167, 10**6)
    for dataset in (images, windows):
        columns = columns_of(dataset)
        assert columns is not None, "a batch is one selection of rows, not hundreds of samples to stack"
        assert len(columns.tensors[0]) <= 1024
    assert images[0][0].dtype == torch.uint8
    assert images[0][0].shape == (3, 8, 8)
    assert windows[10**6 - 1][0].shape == (9,)


@pytest.mark.usefixtures("unmeasured")
def test_images_are_read_from_shards_where_they_are_there(workplace: Workplace) -> None:
    data = workplace.folder / "imagenet"
    for part in ("train", "validation"):
        (data / part).mkdir(parents=True)
        images, labels = synthetic_images(16, 32, 7, seed=5).dataset.tensors  # type: ignore[attr-defined]
        columns = {"image": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(images.numpy()), "label": labels.numpy()}
        parquet.write_table(pyarrow.table(columns), data / part / "0.parquet")
        assert workplace.run("data", "index", str(data / part)).code == 0
    params = {"data": str(data), "side": 32, "classes": 7, "width": 4, "depth": 18}
    task, spec = example(
        "models/resnet50", params, lanes=2, batch_size=8, steps=2, evaluate={"every": "end", "metric": "accuracy"}
    )
    (workplace.folder / "trained").mkdir()
    ended = gang.train(task, spec, 1, workplace.folder / "trained")
    assert ended.digest
    assert len(ended.losses) == 2


# --- CIFAR-10


def test_cifar_is_read_as_its_authors_wrote_it(tmp_path: Path) -> None:
    folder = written_cifar(tmp_path / "data")
    images, labels = load(folder, TRAINING).tensors
    assert (images.shape, images.dtype, labels.shape) == ((40, 3, 32, 32), torch.uint8, (40,))
    record = (folder / TRAINING[1]).read_bytes()[2 * BYTES : 3 * BYTES]
    assert labels[10] == record[0]
    red, green = record[1:1025], record[1025:2049]
    assert bytes(images[10, 0].flatten().tolist()) == red
    assert bytes(images[10, 1].flatten().tolist()) == green
    assert columns_of(load(folder, VALIDATION)) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"There is no test_batch.bin in .*data \(params.data\)"),
        (b"", "it has 0 bytes, which is not a multiple of 3,073"),
        (b"x" * BYTES + b"y", "it has 3,074 bytes, which is not a multiple of 3,073"),
        (b"\x0a" + b"x" * (BYTES - 1), r"A class in .* is 10; they should be from 0 to 9"),
    ],
    ids=["missing", "empty", "cut", "class"],
)
def test_wrong_files_of_cifar_are_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = written_cifar(tmp_path / "data") / "test_batch.bin"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(quorate.RequestError, match=message) as caught:
        load(file.parent, VALIDATION)
    assert "python scripts/datasets.py cifar-10" in caught.value.message


def test_every_crop_is_the_image_moved_and_perhaps_mirrored() -> None:
    torch.manual_seed(2)
    images = torch.randint(1, 256, (64, 3, 10, 10), dtype=torch.uint8)
    cropped = cropped_and_flipped(images, margin=2)
    assert (cropped.shape, cropped.dtype) == (images.shape, torch.uint8)
    seen = set()
    for image, crop in zip(torch.nn.functional.pad(images, (2,) * 4), cropped, strict=True):
        (found,) = [
            (down, right, flipped)
            for down in range(5)
            for right in range(5)
            for flipped in (False, True)
            if torch.equal(crop, _window(image, down, right, flipped))
        ]
        seen.add(found)
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == set(range(5))
    assert {flipped for _, _, flipped in seen} == {False, True}


def _window(image: torch.Tensor, down: int, right: int, flipped: bool) -> torch.Tensor:
    window = image[:, down : down + 10, right : right + 10]
    return window.flip(2) if flipped else window


def test_crops_follow_the_generator_and_only_training_sees_them(tmp_path: Path) -> None:
    task_type, _ = example("models/cifar_resnet18", {})
    task: Any = task_type()
    task.width, task.data = 4, written_cifar(tmp_path / "data")
    _, validation = task.datasets()
    model, batch = task.model().eval(), list(validation.tensors)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(task.loss(model, batch).item())
    assert losses[0] == losses[1] != losses[2]
    one, other = task.metrics(model, batch), task.metrics(model, batch)
    assert one["loss"] == other["loss"]


# --- tokens


def written_tokens(folder: Path, tokens: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("train.bin", "val.bin"):
        numpy.asarray(tokens, numpy.uint16).tofile(folder / name)
    return folder


def test_a_file_of_tokens_is_read_as_windows_one_after_the_other(tmp_path: Path) -> None:
    training, _ = token_windows(written_tokens(tmp_path / "data", range(50_000, 50_035)), 10, 50_257)
    assert len(training) == 3, "what does not fill a window is left out"
    assert training[2][0].tolist() == list(range(50_020, 50_030))
    assert training[2][0].dtype == torch.int32


def test_wrong_files_of_tokens_are_named(tmp_path: Path) -> None:
    folder = written_tokens(tmp_path / "data", range(20))
    with pytest.raises(
        quorate.RequestError, match=re.escape(f"{folder / 'train.bin'} has 20 tokens of 16 bits, and a")
    ):
        token_windows(folder, 21, 50_257)
    with pytest.raises(quorate.RequestError, match="has a token 19, and the vocabulary has 19"):
        Windows(folder / "train.bin", 20, 19)[0]
    (folder / "val.bin").unlink()
    with pytest.raises(quorate.RequestError, match=r"There is no val.bin in .*data \(params.data\)"):
        token_windows(folder, 10, 50_257)
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(quorate.RequestError, match="has 0 tokens"):
        token_windows(folder, 10, 50_257)


def test_vocabularies_are_padded_to_a_multiple_of_64() -> None:
    assert [padded(size) for size in (50_257, 30_522, 64, 65)] == [50_304, 30_528, 64, 128]


# --- hidden tokens


def test_of_every_window_as_many_tokens_are_hidden() -> None:
    torch.manual_seed(4)
    tokens = torch.randint(1000, 2000, (200, 128), dtype=torch.int32)
    shown, hidden = masked(tokens, 3000, mask_token=103)
    chosen = hidden != IGNORED
    assert (chosen.sum(1) == 19).all(), "15 % of 128"
    assert torch.equal(hidden[chosen], tokens[chosen].long()), "the model is to foretell what was there"
    assert torch.equal(shown[~chosen], tokens[~chosen])
    assert chosen.float().mean(0).std() < 0.05, "no place is chosen much more often than another"
    mask, same = (shown == 103)[chosen].float().mean(), (shown == tokens)[chosen].float().mean()
    assert mask == pytest.approx(0.8, abs=0.03)
    assert same == pytest.approx(0.1, abs=0.03)
    others = shown[chosen & (shown != 103) & (shown != tokens)]
    assert others.max() < 3000 and len(set(others.tolist())) > 100


def test_hidden_tokens_follow_the_generator() -> None:
    tokens = torch.randint(0, 100, (4, 20), dtype=torch.int32)
    shown = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        shown.append(masked(tokens, 100, 103)[0])
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[0], shown[2])

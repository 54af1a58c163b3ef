"""Tokens for the language models: from files where they are there, and random ones where they are not.

Real tokens lie in two files, `train.bin` and `val.bin`, in the folder that `params.data` names: numbers of 16 bits, one
after the other, as nanoGPT's `prepare.py` writes them. A relative path counts from the folder of this file.

Without such a folder, tokens are random integers: a small pool of windows, drawn once from a fixed seed and read over
and over. There is nothing to learn from them, but they cost a GPU the same as real ones.
"""

import logging
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

import quorate

SYNTHETIC = 1_000_000
POOL = 1024

log = logging.getLogger("examples")


def token_windows(data: Path, length: int, vocabulary: int) -> tuple[Any, Any]:
    """The training and the validation set: windows of so many tokens."""
    folder = (Path(__file__).parent / data.expanduser()).resolve()
    if folder.is_dir():
        return tuple(Windows(folder / name, length, vocabulary) for name in ("train.bin", "val.bin"))  # type: ignore[return-value]
    log.warning("There is no folder %s (params.data): training on random tokens.", folder)
    return synthetic_windows(SYNTHETIC, length, vocabulary, 1), synthetic_windows(POOL, length, vocabulary, 2)


class Windows:
    """A file of tokens as windows, one after the other. A sample is a list of one tensor, as of a TensorDataset."""

    def __init__(self, file: Path, length: int, vocabulary: int) -> None:
        if not file.is_file():
            raise quorate.RequestError(f"There is no {file.name} in {file.parent} (params.data).")
        self._tokens = numpy.memmap(file, numpy.uint16, mode="r") if file.stat().st_size else numpy.empty(0)
        self._file, self._length, self._vocabulary = file, length, vocabulary
        if len(self._tokens) < length:
            raise quorate.RequestError(
                f"{file} has {len(self._tokens):,} tokens of 16 bits, and a window needs {length:,}."
            )

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        start = index * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length].astype(numpy.int32))
        if window.max() >= self._vocabulary:
            raise quorate.RequestError(
                f"{self._file} has a token {window.max():,}, and the vocabulary has {self._vocabulary:,} "
                "(params.vocabulary): was it made for another model?"
            )
        return [window]


def synthetic_windows(samples: int, length: int, vocabulary: int, seed: int) -> Subset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, vocabulary, (min(POOL, samples), length), dtype=torch.int32, generator=generator)
    return Subset(TensorDataset(windows), (torch.arange(samples) % len(windows)).tolist())


def padded(vocabulary: int, multiple: int = 64) -> int:
    """The next multiple: GPUs multiply matrices of an odd width at about half the speed."""
    return -(-vocabulary // multiple) * multiple


def decayed_in_part(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices decay; biases and what normalises do not."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]

"""Torch's DataLoader over an IterableDataset, as one writes it: files are dealt to the loader processes."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.flow import batch_ms, samples_per_second
from benchmarks.peers.raw_decode_data import records_of
from benchmarks.synthetic_shards import BATCH, FEATURES, decoded, provide, shards_in
from benchmarks.told import answer, read_order, reading


class Files(IterableDataset[Any]):
    """Files, of which each loader process reads its share."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def mine(self) -> list[Path]:
        """Those that this process reads."""
        info = get_worker_info()
        return self._files if info is None else self._files[info.id :: info.num_workers]


class Rows(Files):
    """Batches of rows, shuffled within two row groups at a time."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        from pyarrow import parquet

        for file in self.mine():
            with parquet.ParquetFile(file) as opened:
                for number in range(0, opened.num_row_groups, 2):
                    groups = [number, number + 1][: opened.num_row_groups - number]
                    table = opened.read_row_groups(groups, use_threads=False).combine_chunks()
                    features = torch.from_numpy(table["features"].chunk(0).flatten().to_numpy()).view(-1, FEATURES)
                    labels = torch.from_numpy(table["label"].chunk(0).to_numpy())
                    order = torch.randperm(len(labels))
                    for part in torch.split(order, BATCH["parquet"]):
                        yield {"features": features[part], "label": labels[part]}


class Pictures(Files):
    """One decoded record after the other; the DataLoader makes batches of them."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for file in self.mine():
            for record in records_of(file):
                yield decoded(record)


def loader_of(kind: str, files: list[Path], loaders: int) -> DataLoader[Any]:
    """The usual DataLoader."""
    if kind == "parquet":
        return DataLoader(Rows(files), batch_size=None, num_workers=loaders)
    return DataLoader(Pictures(files), batch_size=BATCH[kind], num_workers=loaders, drop_last=True)


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    kind, loaders = order["kind"], order["loaders"]
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.set_num_threads(1)
    files = shards_in(provide(Path(order["folder"]), kind, order["size"]), order["most"])
    moments, samples = [], 0
    for batch in loader_of(kind, files, loaders):
        samples += len(batch["label"] if isinstance(batch, dict) else batch[1])
        moments.append(perf_counter())
    # The last batch of a file may be smaller than the others.
    whole = BATCH[kind] * len(moments) / samples
    ms = [one * whole for one in batch_ms(moments)]
    details = {"samples_per_second": samples_per_second(BATCH[kind], ms)}
    answer(reading(order["case"], 1 + loaders, ms, size=order["size"], details=details))


if __name__ == "__main__":
    main()

"""The libraries alone, in one thread: row groups to tensors by pyarrow, records to samples by tarfile.

Nothing is shuffled, checked, put together to batches or passed on: nobody who reads these files by these libraries in
one thread can be faster.
"""

import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.synthetic_shards import BATCH, FEATURES, decoded, provide, shards_in
from benchmarks.told import answer, read_order, reading

FEWEST = 8
"""Files that are read: the same ones again where there are fewer."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    kind = order["kind"]
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.set_num_threads(1)
    files = shards_in(provide(Path(order["folder"]), kind, order["size"]), order["most"])
    read = {"parquet": _rows, "tar": _records}[kind]
    sum(read(files[0]))  # so that everything is imported, and the first file is where the others are
    ms: list[float] = []
    for file in files * max(1, -(-FEWEST // len(files))):
        began = perf_counter()
        samples = sum(read(file))
        ms.append((perf_counter() - began) / samples * BATCH[kind] * 1000)
    rate = BATCH[kind] * 1000 * len(ms) / sum(ms)
    answer(reading(order["case"], 1, ms, size=order["size"], details={"samples_per_second": rate}))


def _rows(file: Path) -> Iterator[int]:
    """How many rows each group has that was decoded."""
    import pyarrow as pa
    from pyarrow import parquet

    pa.set_cpu_count(1)
    with parquet.ParquetFile(file) as opened:
        for number in range(opened.num_row_groups):
            table = opened.read_row_group(number, use_threads=False)
            features = torch.from_numpy(table["features"].chunk(0).flatten().to_numpy()).view(-1, FEATURES)
            labels = torch.from_numpy(table["label"].chunk(0).to_numpy())
            assert len(features) == len(labels)
            yield len(labels)


def _records(file: Path) -> Iterator[int]:
    """One for each record that was decoded."""
    for record in records_of(file):
        decoded(record)
        yield 1


def records_of(file: Path) -> Iterator[dict[str, bytes]]:
    """The records of a tar file, as tarfile reads it from front to end."""
    key, record = "", dict[str, bytes]()
    with tarfile.open(file, "r|") as opened:
        for member in opened:
            content = opened.extractfile(member)
            if content is None:
                continue
            name, _, ending = member.name.partition(".")
            if name != key and record:
                yield record
                record = {}
            key, record[ending] = name, content.read()
    if record:
        yield record


if __name__ == "__main__":
    main()

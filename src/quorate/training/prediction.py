"""What predict() gives of each batch: written down by whoever computes it, and put together in the order of samples."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.core.errors import MetricError
from quorate.core.user_code import given, likely_slip, user_code
from quorate.data.samples import Batch
from quorate.storage.atomic import write_atomically
from quorate.training.evaluation import Evaluator
from quorate.training.hints import hint_for
from quorate.training.measurement import Measured

SUFFIX = ".rows"


@dataclass
class Predictor(Evaluator):
    """Has each batch predicted in the place of its metrics, and writes the rows of a batch to a file in `folder`."""

    folder: Path = field(kw_only=True)

    def _measure(self, batch: int, read: Batch, seed: int) -> Measured:
        device = self.replica.device
        device.seed(seed)
        content, samples = device.move(read.content), read.samples.tolist()
        with user_code("predict()", hint_for), device.autocast():
            predicted = self.task.predict(self.replica.model, content)
        columns = {name: _column(name, value, len(samples)) for name, value in _named(predicted).items()}
        rows = (
            {"sample": sample} | {name: column[i] for name, column in columns.items()}
            for i, sample in enumerate(samples)
        )
        with user_code("predict()", lambda _: "A row holds numbers, texts, and lists and dicts of them."):
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_atomically(self.folder / f"{batch}{SUFFIX}", text)
        return Measured({"rows": (float(len(samples)), 1.0)}, {})


def predicted_in(folder: Path) -> frozenset[int]:
    """The batches that are done."""
    return frozenset(int(file.stem) for file in folder.glob(f"*{SUFFIX}"))


def rows_in(folder: Path, constant: Callable[[str], Any] = float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each batch, in order; `constant` reads what JSON has no number for: NaN, Infinity, -Infinity."""
    for batch in sorted(predicted_in(folder)):
        lines = (folder / f"{batch}{SUFFIX}").read_text().splitlines()
        yield [json.loads(line, parse_constant=constant) for line in lines]


def _named(predicted: Any) -> Mapping[str, Any]:
    if not isinstance(predicted, Mapping):
        return {"prediction": predicted}
    return {str(name): value for name, value in predicted.items()}


def _column(name: str, value: Any, samples: int) -> list[Any]:
    """A value for each sample, of tensors and arrays as numbers and lists of them."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list | tuple) or len(rows) != samples:
        many = f", which has {len(rows)} rows" if isinstance(rows, list | tuple) else ""
        raise MetricError(
            f"predict() returned {given(value)} as '{name}'{many}, for a batch of {samples} samples: give a row for "
            f"each of them, in their order.{likely_slip(value)}"
        )
    return [row.tolist() if hasattr(row, "tolist") else row for row in rows]

"""Predictions of a run's checkpoint over a dataset, as a file: `quorate predict`."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from quorate.api.evaluate import look_at_checkpoint
from quorate.api.prints import NoDisplay, Watch
from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.digests import content_digest
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.engines.engine import SOURCE, Prepared
from quorate.spec.override import Override
from quorate.storage.atomic import move_into_place, temporary_of, write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.training.run_mode import RunMode

LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
PARTS = ".parts"
"""Beside the output: what is done of it, until all is."""


@dataclass(frozen=True)
class Predicted:
    """What was predicted by which state, and where it is; `earlier` rows were there from a run that was killed."""

    run: str
    step: int
    file: Path
    rows: int
    earlier: int


def predict_run(
    runs: Path,
    reference: str,
    data: str,
    output: Path,
    which: str | int,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    averaged: bool | None = None,
    trust_job: bool = False,
    watch: Watch = lambda _: NoDisplay(),
) -> Predicted:
    """Write what the task's predict() gives of a dataset, in the order of its samples. What was killed goes on where it
    was, if it was of the same checkpoint, data and code."""
    _refuse_output(output)
    if ":" not in data and data not in ("train", "validation", "test"):
        raise RequestError(f"there is no dataset {data}: name train, validation, test, or a function, file.py:function")
    parts, earlier = Path(f"{output.absolute()}{PARTS}"), 0

    def take_up(run: RunFolder, info: CheckpointInfo, now: Prepared) -> None:
        nonlocal earlier
        weights = info.manifest.weights_digest
        of: dict[str, Any] = {
            "run": run.name,
            "weights": weights,
            "averaged": averaged,
            "data": data,
            "code": now.facts.get(SOURCE),
        }
        of |= {"job": sorted((one.key, str(one.value)) for one in overrides if one.key != "workers")}
        told, known = content_digest(json.dumps(of).encode()), parts / "of"
        if not known.exists() or known.read_text() != told:
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir(parents=True)
            write_atomically(known, told)
        earlier = sum(file.read_text().count("\n") for file in parts.glob("*.rows"))

    mode = RunMode(evaluates_only=True, averaged=averaged, data=data, predict_to=str(parts))
    look = partial(look_at_checkpoint, runs, reference, which, environment, overrides, mode, trust_job=trust_job)
    run, info, _, _ = look(accept=take_up, watch=watch)
    temporary = temporary_of(output.absolute())
    rows = (_write_parquet if output.suffix == PARQUET else _write_lines)(parts, temporary)
    move_into_place(temporary, output.absolute())
    shutil.rmtree(parts, ignore_errors=True)
    return Predicted(run.name, info.cursor.step, output, rows, earlier)


def _refuse_output(output: Path) -> None:
    if output.suffix not in (*LINES, PARQUET):
        raise RequestError(f"{output}: predictions are written as .jsonl (JSON lines) or .parquet, by the suffix.")
    if not output.absolute().parent.is_dir():
        raise RequestError(f"{output}: there is no folder {output.parent}.")
    if output.suffix == PARQUET and find_spec("pyarrow") is None:
        raise RequestError(f"{output} needs the library pyarrow: {install_of('parquet')}. Or write .jsonl.")


def _write_lines(parts: Path, file: Path) -> int:
    from quorate.training.prediction import rows_in

    count = 0
    with file.open("w") as lines:
        for row in chain.from_iterable(rows_in(parts, lambda _: None)):  # JSON has no NaN
            lines.write(f"{json.dumps(row)}\n")
            count += 1
    return count


def _write_parquet(parts: Path, file: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    from quorate.training.prediction import rows_in

    # First of all: a column may be empty in one batch and have its type in another.
    schemas: Any = (pyarrow.Table.from_pylist(rows).schema for rows in rows_in(parts))
    schema = pyarrow.unify_schemas(dict.fromkeys(schemas), promote_options="permissive")
    count = 0
    with parquet.ParquetWriter(file, schema) as writer:
        for rows in rows_in(parts):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count

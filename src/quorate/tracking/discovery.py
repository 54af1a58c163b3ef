"""Where Prometheus finds the running jobs: `prometheus.json` in the folder of runs, as `file_sd_configs` reads it.

Every launcher that has an endpoint writes itself in, and out again at its end. One that was killed cannot: whoever
writes next leaves out those whose run nobody is at work on. Not at once, since Prometheus tells of a launcher that does
not answer only as long as it is listed.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError
from quorate.core.regular_file import open_regular, read_regular
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

FILE = "prometheus.json"
RUN_LABEL = "__meta_quorate_run"
"""Which run an entry is of. Prometheus drops labels of this kind unless it is told to keep them: samples tell their run
themselves."""

_LOCK = ".prometheus.lock"
_PATIENCE = 5.0
_KEPT = 600.0
"""Seconds after its last event for which a run stays listed that nobody is at work on."""
_AGAIN = 0.01


def announce(run: RunFolder, job: str, address: str) -> Path:
    """Write a run in, in place of what it had there before. Raises OSError where the file cannot be written."""
    entry = {"targets": [address], "labels": {"job": job, RUN_LABEL: run.name}}
    return _replace(run, [entry])


def withdraw(run: RunFolder) -> None:
    """Write a run out."""
    _replace(run, [])


def _replace(run: RunFolder, own: list[dict[str, Any]]) -> Path:
    runs = run.path.parent
    file = runs / FILE
    with _locked(runs):
        # Of two at one address the older cannot be alive, and would tell of the younger as if it were its own.
        taken = [entry["targets"] for entry in own]
        others = [
            entry
            for entry in _entries(file)
            if _run_of(entry) != run.name and _is_wanted(runs, entry) and entry.get("targets") not in taken
        ]
        write_atomically(file, json.dumps([*others, *own], indent=2) + "\n")
    return file


@contextlib.contextmanager
def _locked(runs: Path) -> Iterator[None]:
    """One writer at a time: of two that read the same list, the second would undo what the first has added."""
    descriptor = open_regular(runs / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        over = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A writer that was stopped half way must not keep a job from being started.
                if time.monotonic() > over:
                    raise TimeoutError(f"another process has kept {runs / _LOCK} locked for {_PATIENCE:g} s") from None
                time.sleep(_AGAIN)
        yield
    finally:
        # Not only closed: a child that was forked meanwhile has a copy.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _entries(file: Path) -> list[dict[str, Any]]:
    """What is written there. What a person has broken is written anew."""
    try:
        entries = json.loads(read_regular(file))
    except (FileNotFoundError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _run_of(entry: dict[str, Any]) -> str:
    labels = entry.get("labels")
    return str(labels.get(RUN_LABEL, "")) if isinstance(labels, dict) else ""


def _is_wanted(runs: Path, entry: dict[str, Any]) -> bool:
    """Whether a launcher is at work on the entry's run, or was until a while ago. Of what was written by others nothing
    is known: it stays."""
    name = _run_of(entry)
    if not name:
        return True
    if Path(name).name != name:
        return False
    run = RunFolder(runs / name)
    try:
        return run.holder() is not None or time.time() - run.events_file.stat().st_mtime < _KEPT
    except FileNotFoundError:
        return False
    except QuorateError:  # whoever may not look at it cannot tell
        return True

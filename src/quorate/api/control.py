"""Asking a running job for something, from another process of its owner."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from quorate.coordinator.client import SupervisorClient
from quorate.core.errors import LinkError, RunError
from quorate.storage.run_folder import RunFolder

PATIENCE = 10.0


def resize(runs: Path, name: str, workers: int) -> RunFolder:
    """Have a running job go on with another number of workers, from its next step boundary on."""
    run = RunFolder.find(runs, name)
    with _coordinator_of(run) as client:
        client.resize(workers)
    return run


@contextlib.contextmanager
def _coordinator_of(run: RunFolder) -> Iterator[SupervisorClient]:
    address, token = _place(run)
    client = SupervisorClient(address, token, timeout=PATIENCE)
    try:
        yield client
    except LinkError as error:
        raise RunError(f"run {run.name} cannot be asked: {error.message}. `quorate doctor` looks into it.") from None
    finally:
        client.close()


def _place(run: RunFolder) -> tuple[str, str]:
    try:
        told = json.loads(run.address_file.read_text())
        return str(told["address"]), str(told["token"])
    except FileNotFoundError:
        raise RunError(
            f"run {run.name} is not running, so there is nobody to ask. Look at it with `quorate show {run.name}`; "
            f"`quorate resume {run.name} --workers N` goes on with as many workers as you like."
        ) from None
    except PermissionError:
        raise RunError(f"run {run.name} belongs to somebody else: only its owner may ask it for something.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"where the coordinator of run {run.name} is cannot be read: {error!r}.") from None

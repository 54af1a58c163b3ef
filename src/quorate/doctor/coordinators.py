"""The coordinators of running jobs: whether they answer."""

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError, LinkError, RunError
from quorate.core.regular_file import read_regular
from quorate.doctor.report import Finding, Level
from quorate.storage.run_folder import RunFolder

PATIENCE = 10.0

Call = Callable[[str, str], bool]
"""Call the coordinator at an address, with a token: whether its job has ended. LinkError if nobody answers."""


def running(runs: Path) -> Sequence[RunFolder]:
    """The runs in a folder that say where their coordinator is."""
    return [run for run in RunFolder.all_in(runs) if run.address_file.exists()]


def check_coordinator(run: RunFolder, call: Call) -> Finding:
    """The coordinator of one run."""
    name = f"run {run.name}"
    try:
        address, token = _read_address(run.address_file)
    except FileNotFoundError:
        return Finding(name, Level.NOTE, _without_coordinator(run))
    except RunError as error:
        return Finding(name, Level.WARNING, f"where its coordinator is cannot be read: {error.message}", _remedy(run))
    try:
        ended = call(address, token)
    except FrameError:
        text = f"another job's coordinator listens at {address}"
    except LinkError as error:
        text = str(error)
    else:
        doing = "its job has just ended" if ended else "its job is under way"
        return Finding(name, Level.OK, f"its coordinator answers at {address}: {doing}")
    return _unreachable(run, name, text)


def _unreachable(run: RunFolder, name: str, text: str) -> Finding:
    holder = run.holder()
    if holder is None:
        left = f"{text}; nobody is at work on this run any more"
        return Finding(name, Level.WARNING, left, f"quorate resume {run.name}")
    return Finding(name, Level.PROBLEM, f"{text}, although {holder} is at work on this run", _remedy(run))


def _remedy(run: RunFolder) -> str:
    log = run.logs / "coordinator.log"
    return f"Look into {log}; if the job does not go on, stop it, and then: quorate resume {run.name}"


def _without_coordinator(run: RunFolder) -> str:
    if run.holder() is not None:
        return "starts or ends just now: its coordinator does not listen"
    result = run.whole_result()
    ending = "without a result" if result is None else result.get("status", "over")
    return f"is not running ({ending})"


def _read_address(file: Path) -> tuple[str, str]:
    """The coordinator's address and token; FileNotFoundError if there is none, as when no job runs."""
    try:
        fields: dict[str, Any] = json.loads(read_regular(file))
        split_address(fields["address"])
        return fields["address"], str(fields["token"])
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{file} is damaged") from None


def call_coordinator(address: str, token: str) -> bool:
    """Ask whether the job has ended. A port that nobody listens on is found at once, without gRPC's patience."""
    from quorate.coordinator.client import SupervisorClient

    try:
        socket.create_connection(split_address(address), timeout=PATIENCE).close()
    except OSError as error:
        raise LinkError(f"nobody listens at {address} ({error.strerror or error})") from None
    client = SupervisorClient(address, token, timeout=PATIENCE)
    try:
        return client.news(timeout=0).outcome is not None
    finally:
        client.close()

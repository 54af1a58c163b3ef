"""The coordinators of running jobs: whether they answer."""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.core.errors import FrameError, LinkError
from quorate.core.regular_file import read_regular
from quorate.doctor.finding import Finding, Level
from quorate.storage.run_folder import RunFolder
from quorate.wire.sockets import split_address

PATIENCE = 10.0

Call = Callable[[str, str], bool]
"""Call the coordinator at an address, with a token: whether its job has ended. LinkError if nobody answers."""


@dataclass(frozen=True)
class Place:
    """What a run folder says about its coordinator; `trouble` if that cannot be read."""

    address: str = ""
    token: str = ""
    trouble: str = ""


def running(runs: Path) -> Sequence[RunFolder]:
    """The runs in a folder that say where their coordinator is."""
    return [run for run in RunFolder.all_in(runs) if run.address_file.exists()]


def check_coordinator(run: RunFolder, call: Call) -> Finding:
    """The coordinator of one run."""
    name = f"run {run.name}"
    place = read_place(run.address_file)
    if place is None:
        return Finding(name, Level.NOTE, _without_coordinator(run))
    if place.trouble:
        return Finding(name, Level.WARNING, f"where its coordinator is cannot be read: {place.trouble}", _remedy(run))
    try:
        ended = call(place.address, place.token)
    except FrameError:
        text = f"another job's coordinator listens at {place.address}"
    except LinkError as error:
        text = str(error)
    else:
        doing = "its job has just ended" if ended else "its job is under way"
        return Finding(name, Level.OK, f"its coordinator answers at {place.address}: {doing}")
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


def read_place(file: Path) -> Place | None:
    """What is written about the coordinator; None if nothing is, as when no job runs."""
    try:
        fields: dict[str, Any] = json.loads(read_regular(file))
        split_address(fields["address"])
        return Place(fields["address"], str(fields["token"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Place(trouble=f"{file}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Place(trouble=f"{file} is damaged")


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

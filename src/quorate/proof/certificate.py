"""Certificates: segments of a run between checkpoints came to the same bits again, and somebody signs that."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quorate.api.evaluate import scratch_folder
from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.errors import RequestError, RunError
from quorate.core.generation import Phase
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.history.identity import Identity
from quorate.observe.events import GenerationFormed
from quorate.observe.jsonl import EventTail
from quorate.proof.again import Again, Record, Trainer, facts_of, state_digest
from quorate.storage.atomic import write_new_file
from quorate.storage.run_folder import RunFolder

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError:
    raise RequestError(f"certificates need the package `cryptography`: {install_of('encryption')}") from None

FORMAT = "quorate-certificate-1"
FEWEST = 3
"""Workers that are tried even where there are fewer cores, so that there is another number than the run's."""


def ends_of(trainer: Trainer) -> list[CheckpointInfo]:
    """Where segments end; the first begins with the job. A checkpoint that was saved before the evaluation of its step,
    as when a run is stopped, is none: an undisturbed run has no such state."""
    evaluated = Record(trainer.run, 0, 0).evaluated
    whole = [info for info in trainer.whole_checkpoints() if info.cursor.step]
    ends = [info for info in whole if (info.cursor.phase is Phase.EVALUATED) == (info.cursor.step in evaluated)]
    if not ends:
        raise RunError(f"run {trainer.run.name} has no checkpoint to certify. Keep them: checkpoint.every, keep")
    return ends


def evidence(trainer: Trainer, ends: Sequence[CheckpointInfo]) -> dict[str, Any]:
    """Digests of what a run has left: its states, and all that the events say of steps and evaluations. Whoever changes
    any of it draws other segments."""
    run, events = trainer.run, hashlib.sha256()
    for event in EventTail(run.events_file):
        if facts := facts_of(event):
            events.update(_canonical([event.kind, event.step, facts]))
    identity, folder = Identity.of_run(run), trainer.folder_of(run)
    return {
        "name": run.name,
        "identity": None if identity is None else {"digest": identity.digest, **asdict(identity)},
        "events": events.hexdigest(),
        "states": {str(end.cursor.step): state_digest(folder, end) for end in ends},
    }


def drawn(about: dict[str, Any], challenge: str, count: int) -> list[int]:
    """Which segments are trained again, by their places: a matter of the evidence, and of a word of somebody else."""
    seed = _canonical([about, challenge])
    places = range(len(about["states"]))
    return sorted(sorted(places, key=lambda place: hashlib.sha256(seed + b"/%d" % place).digest())[:count])


def certify(trainer: Trainer, key: Path, count: int | None, challenge: str = "") -> tuple[dict[str, Any], list[Again]]:
    """Train so many segments of a run again, or all; the signed document, which is no certificate if a segment differs,
    and what has come of each."""
    private, run = read_key(key), trainer.run
    if run.holder() is not None:
        raise RunError(f"run {run.name} is running. Certify it when it has ended, or end it: quorate stop {run.name}")
    ends = ends_of(trainer)
    about, numbers, found = evidence(trainer, ends), _other_workers(trainer), list[Again]()
    machine: dict[str, Any] = {}
    for turn, place in enumerate(range(len(ends)) if count is None else drawn(about, challenge, count)):
        with scratch_folder() as scratch:
            start, end = ends[place - 1] if place else None, ends[place]
            folder, workers = scratch / run.name, numbers[turn % len(numbers)]
            found.append(trainer.to_step(start, end.cursor.step, folder, workers, end))
            machine = RunFolder(folder).read_environment() or {}
    document: dict[str, Any] = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "quorate": version("quorate"),
        "run": about,
        "challenge": challenge,
        "all": count is None,
        "segments": [asdict(each) | {"recorded": about["states"][str(each.step)]} for each in found],
        "computed_by": machine,
        "public_key": private.public_key().public_bytes_raw().hex(),
    }
    for segment in document["segments"]:
        del segment["folder"]
    return document | {"signature": private.sign(_canonical(document)).hex()}, found


def problems_of(file: Path, trainer: Trainer | None = None) -> tuple[dict[str, Any], list[str]]:
    """A certificate, and what is wrong with it or with the run that it is to be about; nothing is trained."""
    try:
        document = json.loads(file.read_text())
        signed = _canonical({name: value for name, value in document.items() if name != "signature"})
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        about, segments = document["run"], document["segments"]
        steps, count = sorted(map(int, about["states"])), len(about["states"] if document["all"] else segments)
        wanted = [steps[place] for place in drawn(about, document["challenge"], count)]
        problems = []
        try:
            public.verify(bytes.fromhex(document["signature"]), signed)
        except InvalidSignature:
            problems.append("the signature is wrong: the document was changed after it was signed")
        if any(each["difference"] or each["state_digest"] != about["states"][str(each["step"])] for each in segments):
            problems.append("a segment came to another state than the run recorded")
        if [each["step"] for each in segments] != wanted or document["format"] != FORMAT:
            problems.append("its segments are not those that are drawn for this run")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{file} is no certificate that can be read: {error}") from None
    if trainer is not None:
        there = evidence(trainer, ends_of(trainer))
        names = [name for name in ("identity", "events", "states") if there[name] != about.get(name)]
        problems += [f"the {name} of run {trainer.run.name} are not what was certified" for name in names]
    return document, problems


def make_key(file: Path) -> str:
    """Write a new private key, for its owner only, and return the public one."""
    private = Ed25519PrivateKey.generate()
    try:
        write_new_file(file, [private.private_bytes_raw().hex().encode() + b"\n"], 0o600)
    except OSError as error:
        raise RequestError(f"cannot write {file}: {error.strerror or error}. Choose another file.") from None
    return private.public_key().public_bytes_raw().hex()


def read_key(file: Path) -> Ed25519PrivateKey:
    """The private key in a file that nobody else can read."""
    try:
        if file.stat().st_mode & 0o077:
            raise RequestError(f"others can read the key {file}, so what it signs may be anybody's: chmod 600 {file}")
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(file.read_text()))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read the key {file}: {error}. `quorate key new FILE` makes one.") from None


def _other_workers(trainer: Trainer) -> list[int]:
    """Numbers of workers that the run never had, if there are any that its lanes allow."""
    lanes, events = trainer.job.spec.lanes, EventTail(trainer.run.events_file)
    used = {len(event.workers) for event in events if isinstance(event, GenerationFormed)}
    usual = range(1, min(lanes, max(usable_cores(), FEWEST)) + 1)
    return [n for n in usual if n not in used] or [n for n in range(1, lanes + 1) if n not in used] or list(usual)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

"""Certificates: segments of a run between its checkpoints were trained again, to the same bits, and somebody signs it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quorate.api.evaluate import scratch_folder
from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.cached import cached_property
from quorate.core.errors import RequestError, RunError
from quorate.core.generation import Phase
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.history.identity import Identity
from quorate.observe.events import GenerationFormed
from quorate.observe.jsonl import EventTail
from quorate.proof.again import Again, Record, Trainer, facts_of, state_digest
from quorate.storage.atomic import write_atomically, write_new_file

FORMAT = "quorate-certificate-1"
FEWEST = 3
"""Workers that are tried even where there are fewer cores, so that there is another number than the run's."""


@dataclass(frozen=True)
class Segment:
    """What lies between two checkpoints: from the start of the job where there is no `start`."""

    start: CheckpointInfo | None
    end: CheckpointInfo

    @property
    def steps(self) -> tuple[int, int]:
        return 0 if self.start is None else self.start.cursor.step, self.end.cursor.step


@dataclass(frozen=True)
class Evidence:
    """What a run has left that a certificate is about. Whoever changes any of it draws other segments."""

    trainer: Trainer

    @cached_property
    def segments(self) -> list[Segment]:
        """Between checkpoints as an undisturbed run saves them: one that was saved before its evaluation is no end."""
        record = Record(self.trainer.run, 0, 0)
        whole = [
            info
            for info in self.trainer.whole_checkpoints()
            if (info.cursor.phase is Phase.EVALUATED) == (info.cursor.step in record.evaluated)
        ]
        starts: list[CheckpointInfo | None] = [None, *whole]
        pairs = [Segment(start, end) for start, end in zip(starts, whole, strict=False) if end.cursor.step]
        if not pairs:
            name = self.trainer.run.name
            raise RunError(f"run {name} has no checkpoint to certify. Keep them along the run: checkpoint.every and keep")
        return pairs

    @cached_property
    def described(self) -> dict[str, Any]:
        """Digests of the states that were kept, and of all that the events say of steps and evaluations."""
        run, events = self.trainer.run, hashlib.sha256()
        for event in EventTail(run.events_file):
            if facts := facts_of(event):
                events.update(_canonical([event.kind, event.step, facts]))
        identity = Identity.of_run(run)
        return {
            "name": run.name,
            "identity": None if identity is None else {"digest": identity.digest, **asdict(identity)},
            "events": events.hexdigest(),
            "states": {str(each.steps[1]): state_digest(self.trainer.folder, each.end) for each in self.segments},
        }

    def other_workers(self) -> list[int]:
        """Numbers of workers that the run never had, if there are any that its lanes allow."""
        lanes, events = self.trainer.job.spec.lanes, EventTail(self.trainer.run.events_file)
        used = {len(event.workers) for event in events if isinstance(event, GenerationFormed)}
        usual = range(1, min(lanes, max(usable_cores(), FEWEST)) + 1)
        return [n for n in usual if n not in used] or [n for n in range(1, lanes + 1) if n not in used] or list(usual)


def seed_of(described: Mapping[str, Any], challenge: str) -> str:
    """What segments are drawn by: all that a run has left, and a word of somebody else."""
    return hashlib.sha256(_canonical([described, challenge])).hexdigest()


def drawn(seed: str, segments: int, count: int) -> list[int]:
    """Which segments are trained again, by their places; the same wherever it is asked."""
    order = sorted(range(segments), key=lambda place: hashlib.sha256(f"{seed}/{place}".encode()).digest())
    return sorted(order[:count])


@dataclass(frozen=True)
class Certified:
    """What came of it. With segments that differ the document is no certificate."""

    document: dict[str, Any]
    again: Sequence[Again]

    @property
    def differing(self) -> list[Again]:
        return [each for each in self.again if each.difference is not None]


def certify(trainer: Trainer, key: Path, count: int | None, challenge: str = "") -> Certified:
    """Train so many segments of a run again, or all, and sign what was found."""
    private = read_key(key)
    if trainer.run.holder() is not None:
        raise RunError(f"run {trainer.run.name} is running. Certify it when it has ended: quorate stop ends it")
    evidence = Evidence(trainer)
    segments, seed = evidence.segments, seed_of(evidence.described, challenge)
    places = range(len(segments)) if count is None else drawn(seed, len(segments), count)
    numbers, found, computed_by = evidence.other_workers(), list[Again](), dict[str, Any]()
    for turn, place in enumerate(places):
        segment = segments[place]
        with scratch_folder() as scratch:
            folder, workers = scratch / trainer.run.name, numbers[(int(seed, 16) + turn) % len(numbers)]
            again = trainer.to_step(segment.start, segment.steps[1], folder, workers)
            computed_by = again.run.read_environment() or {}
        found.append(again.held_against(trainer, segment.end))
    states = evidence.described["states"]
    document = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "quorate": version("quorate"),
        "run": evidence.described,
        "drawing": {"seed": seed, "challenge": challenge, "all": count is None},
        "segments": [
            {
                "from_step": each.from_step,
                "to_step": each.step,
                "workers": each.workers,
                "compared": each.compared,
                "recorded": states[str(each.step)],
                "found": each.digest,
            }
            for each in found
        ],
        "computed_by": computed_by,
        "public_key": private.public_key().public_bytes_raw().hex(),
    }
    document["signature"] = private.sign(_canonical(document)).hex()
    return Certified(document, found)


def problems_of(file: Path, trainer: Trainer | None = None) -> list[str]:
    """What is wrong with a certificate, or with the run that it is to be about; nothing is trained."""
    _, _, ed25519 = _cryptography()
    try:
        document = json.loads(file.read_text())
        signature = bytes.fromhex(document.pop("signature"))
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        about, drawing = document["run"], document["drawing"]
        ends = [(int(each["to_step"]), each["recorded"], each["found"]) for each in document["segments"]]
        steps, seed = sorted(map(int, about["states"])), seed_of(about, drawing["challenge"])
        places = range(len(steps)) if drawing["all"] else drawn(seed, len(steps), len(ends))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{file} is no certificate that can be read: {error}") from None
    problems = []
    try:
        public.verify(signature, _canonical(document))
    except _cryptography()[0]:
        problems.append("the signature is wrong: the document was changed after it was signed")
    if document.get("format") != FORMAT:
        problems.append(f"its format is {document.get('format')!r}, and this version of Quorate knows {FORMAT}")
    if any(then != now or about["states"].get(str(step)) != then for step, then, now in ends):
        problems.append("a segment ends in another state than the run recorded")
    if drawing["seed"] != seed or [step for step, _, _ in ends] != [steps[place] for place in places]:
        problems.append("its segments are not those that are drawn for this run")
    if trainer is not None:
        there = Evidence(trainer).described
        names = [name for name in ("identity", "events", "states") if there[name] != about.get(name)]
        problems += [f"the {name} of run {trainer.run.name} are not those that were certified" for name in names]
    return problems


def make_key(file: Path) -> str:
    """Write a new private key, for its owner only, and return the public one."""
    _, serialization, ed25519 = _cryptography()
    private = ed25519.Ed25519PrivateKey.generate()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    try:
        write_new_file(file, [private.private_bytes(*form)], 0o600)
    except OSError as error:
        raise RequestError(f"cannot write {file}: {error.strerror or error}. Choose another file.") from None
    return str(private.public_key().public_bytes_raw().hex())


def read_key(file: Path) -> Any:
    """The private key in a file."""
    _, serialization, ed25519 = _cryptography()
    try:
        if file.stat().st_mode & 0o077:
            raise RequestError(f"others can read the key {file}, so what it signs may be anybody's: chmod 600 {file}")
        private = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"cannot read the key {file}: {error}. `quorate key new FILE` makes one.") from None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise RequestError(f"{file} is not an Ed25519 key. `quorate key new FILE` makes one.")
    return private


def _canonical(document: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise RequestError(f"certificates need the package `cryptography`: {install_of('encryption')}") from None
    return InvalidSignature, serialization, ed25519

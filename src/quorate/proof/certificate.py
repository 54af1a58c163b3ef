"""Certificates: segments of a run between checkpoints came to the same bits again, and somebody signs that."""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quorate.api.evaluate import scratch_folder
from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.errors import RequestError, RunError
from quorate.core.generation import Phase
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.history.difference import Pair, differing
from quorate.history.identity import PROVEN, Identity
from quorate.observe.events import GenerationFormed
from quorate.observe.jsonl import EventTail
from quorate.proof.again import TWIN, Again, Difference, Record, Trainer, facts_of, state_digest
from quorate.spec.meaning import LENGTH
from quorate.storage.atomic import explaining, write_new_file
from quorate.storage.identity_file import read_identity
from quorate.storage.run_folder import RunFolder

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError:
    raise RequestError(f"certificates need the package `cryptography`: {install_of('encryption')}") from None

FORMAT = "quorate-certificate-2"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_OF_RESULT = ("steps", "weights_digest", "final_metrics")
FEWEST = 3
"""Workers that are tried even where there are fewer cores, so that there is another number than the run's."""


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Segment(_Strict):
    """A segment that was trained again, as a certificate has it."""

    from_step: _Count
    step: _Positive
    workers: _Positive
    compared: _Positive
    recorded: _Digest
    state_digest: _Digest
    difference: None


class KnownIdentity(_Strict):
    """The identity of a run, as a certificate has it."""

    digest: _Digest
    facts: dict[str, Any]
    data: str
    any_length: bool


class Evidence(_Strict):
    """What a certificate says of the run; see `evidence`."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    identity: KnownIdentity
    events: _Digest
    states: Annotated[dict[Annotated[str, Field(pattern="^[1-9][0-9]{0,17}$")], _Digest], Field(min_length=1)]
    recorded_to: _Count
    covered: _Positive
    left_out: dict[
        Annotated[str, Field(pattern="^step-[0-9]+(-evaluated)?$")], Annotated[str, Field(pattern="^[a-z ,]+$")]
    ]
    result: dict[str, Any] | None


class Certificate(_Strict):
    """What is in the file."""

    format: Literal["quorate-certificate-2"]
    created: str
    quorate: str
    run: Evidence
    challenge: str
    all: bool
    segments: Annotated[list[Segment], Field(min_length=1)]
    computed_by: dict[str, Any]
    others: list[Literal["machine", "versions"]]
    public_key: _Digest
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]


EARLIER = "was saved before the evaluation of its step"
UNENDED = "was saved before an evaluation that the run has not come to"
UNKEPT = "was saved before the evaluation of its step, and nothing after it"


@dataclass(frozen=True)
class Ends:
    """The checkpoints at which segments end; the first segment begins with the job. `left_out` says by name why another
    checkpoint is no end; `recorded_to` is the last step in the events."""

    infos: list[CheckpointInfo]
    left_out: dict[str, str]
    recorded_to: int

    @property
    def covered(self) -> int:
        return self.infos[-1].cursor.step


def ends_of(trainer: Trainer) -> Ends:
    """Each whole checkpoint but those that were saved before the evaluation of their step, as when a run is stopped: an
    undisturbed run has no such state."""
    record, every, ends = Record(trainer.run, 0, 0), trainer.job.spec.evaluate.every, list[CheckpointInfo]()
    whole, left_out = trainer.sorted_checkpoints()
    for info in reversed(whole):
        if info.cursor.phase is not Phase.EVALUATED and info.cursor.step in record.evaluated:
            left_out[info.path.name] = EARLIER if ends else UNKEPT
        elif record.lacks_evaluation(info, every):
            left_out[info.path.name] = UNENDED
        elif info.cursor.step:
            ends.insert(0, info)
    if not ends:
        raise RunError(f"run {trainer.run.name} has no checkpoint to certify. Keep them: checkpoint.every, keep")
    return Ends(ends, left_out, record.newest)


def evidence(trainer: Trainer, ends: Ends) -> dict[str, Any]:
    """Digests of what a run has left: its states, all that the events say of steps and evaluations, and its result.
    Whoever changes any of it draws other segments."""
    run, events = trainer.run, hashlib.sha256()
    for event in EventTail(run.events_file):
        if facts := facts_of(event):
            events.update(_canonical([event.kind, event.step, facts]))
    identity, folder = Identity.of_run(run), trainer.folder_of(run)
    if identity is None:
        raise RunError(f"run {run.name} has no identity, so nobody knows what was computed: {_why_unknown(run)}")
    return {
        "name": run.name,
        "identity": {"digest": identity.digest, **asdict(identity)},
        "events": events.hexdigest(),
        "states": {str(end.cursor.step): state_digest(folder, end) for end in ends.infos},
        "recorded_to": ends.recorded_to,
        "covered": ends.covered,
        "left_out": ends.left_out,
        "result": _result_of(run),
    }


def _why_unknown(run: RunFolder) -> str:
    return str((read_identity(run) or {}).get("unknown", "none was recorded"))


def _result_of(run: RunFolder) -> dict[str, Any] | None:
    """What a run that is done says of its state."""
    result = run.read_result() or {}
    return {name: result.get(name) for name in _OF_RESULT} if result.get("weights_digest") else None


def faults_of(about: dict[str, Any], ends: Ends, *, is_all: bool) -> list[str]:
    """Reasons to refuse a run before anything is trained: its result is not that of its last checkpoint or, with
    `is_all`, some of it lies in no segment."""
    result, manifest, faults = about["result"], ends.infos[-1].manifest, list[str]()
    if result is not None and result["steps"] == ends.covered:
        then = {"weights_digest": manifest.weights_digest, "final_metrics": manifest.metrics}
        faults += [
            f"the {name} of result.json is not that of {ends.infos[-1].path.name}"
            for name in then
            if _canonical(_finite(result[name])) != _canonical(_finite(then[name]))
        ]
    elif result is not None and is_all:
        faults.append(f"the run was done at step {result['steps']}, and its last checkpoint is of step {ends.covered}")
    if is_all:
        faults += [f"{name} {why}" for name, why in ends.left_out.items() if why not in (TWIN, EARLIER, UNENDED)]
    return faults


def drawn(about: dict[str, Any], challenge: str, count: int) -> list[int]:
    """The places of the segments to train again. They follow from the evidence and the challenge."""
    seed = _canonical([about, challenge])
    places = range(len(about["states"]))
    return sorted(sorted(places, key=lambda place: hashlib.sha256(seed + b"/%d" % place).digest())[:count])


def certify(trainer: Trainer, key: Path, count: int | None, challenge: str = "") -> tuple[dict[str, Any], list[Again]]:
    """Train so many segments of a run again, or all, until one differs. Returns the signed document, which is no
    certificate if one differs, and what was found in each segment."""
    private, run = read_key(key), trainer.run
    if run.holder() is not None:
        raise RunError(f"run {run.name} is running. Certify it when it has ended, or end it: quorate stop {run.name}")
    ends = ends_of(trainer)
    about, numbers, found = evidence(trainer, ends), _other_workers(trainer), list[Again]()
    if not re.fullmatch(NAME, run.name):
        raise RequestError(f"a folder is certified under a name such as digits-0001, and not as {run.name!a}")
    if faults := faults_of(about, ends, is_all=count is None):
        raise RunError(f"run {run.name} cannot be certified: {'; '.join(faults)}")
    machine, others = dict[str, Any](), set[str]()
    for turn, place in enumerate(range(len(ends.infos)) if count is None else drawn(about, challenge, count)):
        with scratch_folder() as scratch:
            start, end = ends.infos[place - 1] if place else None, ends.infos[place]
            folder, workers = scratch / run.name, numbers[turn % len(numbers)]
            again = trainer.to_step(start, end.cursor.step, folder, workers, end)
            values = _other_identity(about["identity"], again)
            others |= values.keys() & {"machine", "versions"}
            other = again.difference
            if other is None and (values := {name: values[name] for name in values.keys() - others}):
                other = Difference(again.from_step, values)
            found.append(replace(again, difference=other))
            machine = RunFolder(folder).read_environment() or {}
        if other is not None:
            break
    document: dict[str, Any] = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "quorate": version("quorate"),
        "run": about,
        "challenge": challenge,
        "all": count is None,
        "segments": [asdict(each) | {"recorded": about["states"][str(each.step)]} for each in found],
        "computed_by": machine,
        "others": sorted(others),
        "public_key": private.public_key().public_bytes_raw().hex(),
    }
    for segment in document["segments"]:
        del segment["folder"]
    return document | {"signature": private.sign(_canonical(document)).hex()}, found


def _other_identity(recorded: dict[str, Any], again: Again) -> dict[str, Pair]:
    """Facts of a run's identity that differ from those found when it was trained again. The length of the job is left
    out, since a run may have been made longer."""
    written = read_identity(again.run) or {}
    found = Identity.of_record(written.get("found", written))
    if found is None:
        return {"identity": (recorded["digest"], None)}
    then, now = recorded["facts"], found.facts
    jobs = (facts.get("job") for facts in (then, now))
    then, now = (
        {**facts, "job": job | dict.fromkeys(LENGTH) if isinstance(job, dict) else job}
        for facts, job in zip((then, now), jobs, strict=True)
    )
    then |= {"proven": recorded["data"].startswith(PROVEN), "any_length": recorded["any_length"]}
    return differing(then, now | {"proven": found.is_proven, "any_length": found.any_length})


def problems_of(
    file: Path, trainer: Trainer | None = None, signer: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """A certificate, and the problems of it and, with a trainer, of its run; nothing is trained. With `signer`,
    a public key, it must be signed with that one."""
    document, problems = read_certificate(file), list[str]()
    signed = _canonical({name: value for name, value in document.items() if name != "signature"})
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        public.verify(bytes.fromhex(document["signature"]), signed)
    except (InvalidSignature, ValueError):
        problems.append("the signature is wrong: the document was changed after it was signed")
    if signer is not None and signer != document["public_key"]:
        problems.append(f"it was signed with the key {document['public_key']}, and not with {signer}")
    about, segments = document["run"], document["segments"]
    known = {name: value for name, value in about["identity"].items() if name != "digest"}
    if about["identity"]["digest"] != Identity(**known).digest:
        problems.append("the digest of the identity is not of its facts")
    states, ends = about["states"], sorted(map(int, about["states"]))
    if any(each["state_digest"] != states.get(str(each["step"])) for each in segments):
        problems.append("a segment came to another state than the run recorded")
    places = range(len(ends)) if document["all"] else drawn(about, document["challenge"], len(segments))
    wanted = [(ends[place - 1] if place else 0, ends[place], states[str(ends[place])]) for place in places]
    if [(each["from_step"], each["step"], each["recorded"]) for each in segments] != wanted:
        problems.append("its segments are not those that are drawn for this run")
    if about["covered"] != ends[-1] or any(each["compared"] > each["step"] - each["from_step"] for each in segments):
        problems.append("it counts other steps than its segments have")
    if trainer is not None:
        found = ends_of(trainer)
        there = evidence(trainer, found)
        names = [name for name in there if name != "name" and there[name] != about[name]]
        problems += [f"the {name} of run {trainer.run.name} are not what was certified" for name in names]
        problems += faults_of(there, found, is_all=document["all"])
    return document, problems


def read_certificate(file: Path) -> dict[str, Any]:
    """The content of a certificate. It may come from anybody, so all that is printed of it has a pattern."""
    try:
        document = json.loads(file.read_text(), object_pairs_hook=_once)
        Certificate.model_validate(document)
        _canonical(document)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise RequestError(f"{file} is no certificate that can be read: {where!a} is wrong") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{file} is no certificate that can be read: {error}") from None
    assert isinstance(document, dict)
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is there twice, of which another reader may take the first."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _finite(value: Any) -> Any:
    """None for what is not finite, as result.json has it."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_certificate(document: dict[str, Any], file: Path) -> None:
    """Write a signed document into a file that is not there yet."""
    with explaining(f"cannot write {file}"):
        write_new_file(file, [json.dumps(document, indent=1).encode() + b"\n"])


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


def public_key(given: str) -> str:
    """A public key, from its 64 hexadecimal digits or a file that has them."""
    if not re.fullmatch("[0-9a-fA-F]{64}", given):
        try:
            given = Path(given).expanduser().read_text().strip()
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the public key {given}: {error}") from None
    if not re.fullmatch("[0-9a-fA-F]{64}", given):
        raise RequestError("a public key has 64 hexadecimal digits, as `quorate key new` prints it")
    return given.lower()


def _other_workers(trainer: Trainer) -> list[int]:
    """Numbers of workers that the run never had, if there are any that its lanes allow."""
    lanes, events = trainer.job.spec.lanes, EventTail(trainer.run.events_file)
    used = {len(event.workers) for event in events if isinstance(event, GenerationFormed)}
    usual = range(1, min(lanes, max(usable_cores(), FEWEST)) + 1)
    return [n for n in usual if n not in used] or [n for n in range(1, lanes + 1) if n not in used] or list(usual)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

"""What the identity of a run is made of, as a worker finds it and writes it into the run's folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError
from quorate.core.processes import ask_child
from quorate.data.fingerprint import Fingerprint, fingerprint
from quorate.data.samples import Samples
from quorate.data.whole_data import DataDigest, digest_of_all
from quorate.replica.device import canary
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.spec.meaning import LENGTH, meaning_of, params_of
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import read_identity, write_identity
from quorate.task.source import imported_versions, task_source
from quorate.task.task import HostedLoop, Task, configure, overrides, parameters_of
from quorate.worker.assembly import build_samples, device_for
from quorate.worker.assignment import Assignment

Content = dict[str, Any]
_VERSIONS = frozenset({"python", "torch", "numpy", "quorate", "cuda", "cudnn"})
_OF_THE_JOB = frozenset({"threads", "deterministic", "compiled"})


def whole_data(task: Task, samples: Samples) -> Callable[[], DataDigest]:
    """What takes the digest of every byte that the job reads."""
    return lambda: digest_of_all(samples, task.data_digest if overrides(task, "data_digest") else None)


def identity_of(workers: int, task: Task, replica: Replica, machine: Mapping[str, str], data: Fingerprint) -> Content:
    """What a run's `identity.json` holds, without paths and names; `machine` are facts of its device."""
    spec, source = replica.spec, task_source(type(task))
    known = {name: value for name, value in machine.items() if name not in _OF_THE_JOB}
    if spec.compile != "auto" and known["device"] != "cpu":
        known["compile"] = str(spec.compile)
    whole = data.whole or DataDigest("", "unproven: no digest was taken")
    read = {"digest": whole.digest} if whole.digest else {"samples": data.samples}
    # What decodes samples that the digest is not of.
    libraries = imported_versions(source) | ({} if whole.digest.startswith("sha-256") else data.libraries)
    # As a job would write them, whether it does or leaves them at their defaults.
    params = json.loads(json.dumps({name: getattr(task, name) for name in parameters_of(type(task))}, default=repr))
    # It may have read them from a file. Of a model in parts nobody has them all.
    given = {"params": params_of(params), "weights": replica.weights_digest() if replica.sharding is None else None}
    facts = {
        "job": meaning_of(spec, workers),
        "task": {"class": type(task).__name__, "source": source.digest, **given},
        "versions": {name: value for name, value in known.items() if name in _VERSIONS} | libraries,
        "machine": {name: value for name, value in known.items() if name not in _VERSIONS},
        "data": read | {"layout": data.layout.partition(" ")[0]},
    }
    knows_length = isinstance(task, HostedLoop) or Task.__dict__["total_steps"].was_asked
    any_length = not (knows_length or (spec.schedule is not None and spec.schedule.depends_on_length))
    seconds = round(whole.seconds, 3)
    return {"facts": facts, "data": whole.words, "data_seconds": seconds, "any_length": any_length}


def identity_in_child(task_type: type[Task], job: dict[str, Any], job_source: str) -> Content | None:
    """What a worker of a job would find, in a process of its own; None where that fails, which a worker explains."""

    def find() -> str:
        spec = JobSpec.model_validate(job)
        device = device_for(spec, 0)
        device.pin(spec.threads, spec.deterministic)
        try:
            task = configure(task_type, spec.params, job_source, spec.seed, spec)
            replica, samples = Replica(task, spec, device), build_samples(task, spec)
            data = replace(fingerprint(samples), whole=whole_data(task, samples)())
        except QuorateError:
            return ""
        machine = device.facts(spec.threads, spec.deterministic) | {"canary": canary(device)}
        return json.dumps(identity_of(1, task, replica, machine, data))

    answer = ask_child(find)
    return json.loads(answer.text) if answer.text else None


def identifies_run(assignment: Assignment, spec: JobSpec) -> bool:
    """Whether this worker writes the identity down: the first one, and who replaces it only if it has not done so."""
    if assignment.slot or not assignment.mode.is_training:
        return False
    known = (read_identity(assignment.stored) or {}).get("facts", {}) if assignment.is_replacement else {}
    return bool(known.get("job") != meaning_of(spec, assignment.workers))


def keep_identity(run: RunFolder, found: Content, checkpoint: str | None) -> None:
    """Write down what the bits of a run depend on, before its first step.

    What begins from a checkpoint has an identity only if all before it, in whichever run, was computed alike.
    """
    if checkpoint is not None:
        begun = RunFolder(Path(checkpoint).parent.parent)
        earlier = read_identity(begun) or {}
        length = dict.fromkeys(LENGTH if earlier.get("any_length") else ())
        now, then = found["facts"], earlier.get("facts", {"job": {}})
        then, now = ({**each, "job": each["job"] | length} for each in (then, now))
        if other := [group for group in now if now[group] != then.get(group)]:
            why = f"it goes on from {begun.name}, of which these were others: {', '.join(other)}"
            found = {"unknown": why, "found": found}
    write_identity(run, found)

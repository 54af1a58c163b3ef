"""What the identity of a run is made of, as a worker finds it and writes it into the run's folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError
from quorate.core.processes import ask_child
from quorate.data.fingerprint import Fingerprint, asked_of_child, fingerprint
from quorate.data.samples import Samples
from quorate.data.whole_data import DataDigest, digest_of_all
from quorate.replica.device import canary
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.spec.meaning import LENGTH, meaning_of, plain_params
from quorate.storage.identity_file import read_identity
from quorate.storage.run_folder import RunFolder
from quorate.task.source import imported_versions, package_digest, task_source
from quorate.task.task import HostedLoop, Task, configure, overrides, parameters_of
from quorate.worker.assembly import build_samples, device_for
from quorate.worker.assignment import Assignment
from quorate.worker.kept_content import kept_by

Content = dict[str, Any]
_VERSIONS = frozenset({"python", "torch", "numpy", "quorate", "cuda", "cudnn"})
_OF_THE_JOB = frozenset({"threads", "deterministic", "compiled"})


class Identification:
    """Finds out what the bits depend on: first what the task is, before a sample is read, which may import more."""

    def __init__(self, task: Task, replica: Replica, samples: Samples) -> None:
        self._task, self._replica, self._samples = task, replica, samples
        self._source = task_source(type(task))
        self._libraries = imported_versions(self._source)
        self._kept, self._why_not = kept_by(task, replica, samples)

    def _whole_data(self) -> DataDigest:
        """The digest of every byte that the job reads, by a process of its own where this one is none yet."""
        task, samples = self._task, self._samples
        declared = task.data_digest if overrides(task, "data_digest") else None
        if self._replica.device.is_host:
            return digest_of_all(samples, declared)
        told, ending = asked_of_child(lambda: asdict(digest_of_all(samples, declared)))
        return DataDigest(**told or {"digest": "", "words": f"unproven: the process that read the data {ending}"})

    def content(self, workers: int, machine: Mapping[str, str], data: Fingerprint) -> Content:
        """What a run's `identity.json` holds, without paths and names; `machine` are facts of its device."""
        task, replica, spec = self._task, self._replica, self._replica.spec
        known = {name: value for name, value in machine.items() if name not in _OF_THE_JOB}
        if spec.compile != "auto" and known["device"] != "cpu":
            known["compile"] = str(spec.compile)
        whole = self._whole_data()
        read = {"digest": whole.digest} if whole.digest else {"samples": data.samples}
        # As a job would write them, whether it does or leaves them at their defaults.
        params, why_not = plain_params({name: getattr(task, name) for name in parameters_of(type(task))})
        why_not = why_not or self._why_not
        # It may have read them from a file. Of a model in parts nobody has them all.
        weights = replica.weights_digest() if replica.sharding is None else None
        code = {"class": type(task).__name__, "source": self._source.digest, "package": package_digest(type(task))}
        facts = {
            "job": meaning_of(spec, workers),
            "task": {**code, "params": params, "weights": weights, "kept": self._kept},
            "versions": {name: value for name, value in known.items() if name in _VERSIONS}
            | self._libraries
            | data.libraries,  # collate() may decode what a digest of samples is of
            "machine": {name: value for name, value in known.items() if name not in _VERSIONS},
            "data": read | {"layout": data.layout.partition(" ")[0]},
        }
        knows_length = isinstance(task, HostedLoop) or Task.__dict__["total_steps"].was_asked
        any_length = not (knows_length or (spec.schedule is not None and spec.schedule.depends_on_length))
        words = f"unproven: {why_not}" if why_not and whole.digest else whole.words
        return {"facts": facts, "data": words, "data_seconds": round(whole.seconds, 3), "any_length": any_length}


def identity_in_child(task_type: type[Task], job: dict[str, Any], job_source: str) -> Content | None:
    """What a worker of a job would find, in a process of its own; None where that fails, which a worker explains."""

    def find() -> str:
        spec = JobSpec.model_validate(job)
        device = device_for(spec, 0)
        device.pin(spec.threads, spec.deterministic)
        try:
            task = configure(task_type, spec.params, job_source, spec.seed, spec)
            replica, samples = Replica(task, spec, device), build_samples(task, spec)
            found = Identification(task, replica, samples)
            data = fingerprint(samples)
            machine = device.facts(spec.threads, spec.deterministic) | {"canary": canary(device)}
            return json.dumps(found.content(1, machine, data))
        except QuorateError:
            return ""

    answer = ask_child(find)
    return json.loads(answer.text) if answer.text else None


def identifies_run(assignment: Assignment, spec: JobSpec) -> bool:
    """Whether the first worker writes the identity down; who replaces it does so only if it has not been done."""
    known = (read_identity(assignment.stored) or {}).get("facts", {}) if assignment.is_replacement else {}
    return bool(known.get("job") != meaning_of(spec, assignment.workers))


def identity_of_run(
    assignment: Assignment,
    task: Task,
    replica: Replica,
    samples: Samples,
    machine: Mapping[str, str],
    data: Fingerprint,
) -> Content:
    """What is written down of what the bits of a run depend on.

    What begins from a checkpoint has an identity only if all before it, in whichever run, was computed alike.
    """
    found = Identification(task, replica, samples).content(assignment.workers, machine, data)
    if assignment.checkpoint is not None:
        begun = RunFolder(Path(assignment.checkpoint).parent.parent)
        earlier = read_identity(begun) or {}
        length = dict.fromkeys(LENGTH if earlier.get("any_length") else ())
        now, then = found["facts"], earlier.get("facts", {"job": {}})
        then, now = ({**each, "job": each["job"] | length} for each in (then, now))
        if other := [group for group in now if now[group] != then.get(group)]:
            why = f"it goes on from {begun.name}, of which these were others: {', '.join(other)}"
            return {"unknown": why, "found": found}
    return found

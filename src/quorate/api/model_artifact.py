"""A run's model as a folder for MLflow: its weights, its job, its signature, and a graph that PyTorch opens by itself.

::

    MLmodel, requirements.txt, …    MLflow's own; with the signature
    data/model.pt2                  what `torch.export` makes of it: needs neither the task nor Quorate, nor pickle
    model.safetensors               the weights, by the names of the model's `state_dict`
    job.yaml                        the job, as resolved, without its secrets
    source/                         the task's own files, where copies of the run have them (`checkpoint.source`)

Not every model can be exported (control flow that depends on data, inputs that are no tensors). Such a one has no
graph: its weights are loaded into what the source builds, and `why_no_graph` says why.
"""

import contextlib
import hashlib
import inspect
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quorate.api.checkpoints import write_weights
from quorate.api.recorded_run import recorded_job
from quorate.api.result import LoadedModel, model_of
from quorate.core.errors import QuorateError, RunError
from quorate.core.masking import mask, register_secrets
from quorate.core.user_code import describe
from quorate.engines.engine import SOURCE
from quorate.spec.job import JobSpec, job_secrets
from quorate.spec.override import first_name
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import read_source
from quorate.tracking.provenance import parameters_of, recorded_git

WEIGHTS, JOB, SOURCE_FOLDER = "model.safetensors", "job.yaml", "source"
PULLED = (WEIGHTS, JOB)
"""The files whose digests are kept in the registry, and which are pulled from it."""
_TAG = "quorate."
_NOT_TEXT = ("step", "averaged", "seed", "total_steps", "digests")


@dataclass(frozen=True)
class Lineage:
    """Where a model comes from: its run, checkpoint and step; the job by a digest of what it means, its seed and how
    many steps it asks for (None: it counts in epochs); its data and its code by the digests that the run has recorded;
    the commit that the run was started from, where it was tracked.

    `weights_digest` is what the run has printed for that checkpoint. `digests` are the sha-256 of files.
    """

    run: str
    checkpoint: str
    step: int
    weights_digest: str
    averaged: bool
    job_digest: str
    seed: int
    total_steps: int | None
    data: str | None
    code: str | None
    git_commit: str | None
    digests: dict[str, str]

    def as_tags(self) -> dict[str, str]:
        """Text by name, for a registry."""
        told = {name: value for name, value in asdict(self).items() if value is not None}
        return {_TAG + name: value if isinstance(value, str) else json.dumps(value) for name, value in told.items()}

    @classmethod
    def of_tags(cls, tags: Mapping[str, str]) -> "Lineage | None":
        """None where these are not the tags of a model that Quorate has logged."""
        told: dict[str, Any] = {each.name: tags.get(_TAG + each.name) for each in fields(cls)}
        try:
            told |= {name: json.loads(told[name]) for name in _NOT_TEXT if told[name] is not None}
        except ValueError:
            return None
        digests = told["digests"]
        is_ours = isinstance(digests, dict) and set(digests) == set(PULLED) and isinstance(told["step"], int)
        return cls(**told) if is_ours and told["run"] and told["weights_digest"] else None


def build_artifact(run: RunFolder, which: str, task: str | None, folder: Path) -> tuple[Lineage, str]:
    """Make the folder of the model of a run's checkpoint (last, best, or that of a step); where it comes from, and why
    it has no graph, if it has none."""
    from quorate.data.fingerprint import SAMPLES

    loaded = model_of(run, which, task)
    manifest = loaded.checkpoint.manifest
    why_no_graph = _save_model(loaded, folder)
    write_weights(run, loaded, folder / WEIGHTS)
    register_secrets(job_secrets(loaded.spec))
    (folder / JOB).write_text(mask(dump_job(recorded_job(run))))
    environment, spec = manifest.environment, loaded.spec
    if spec.checkpoint.source and spec.checkpoint.sealing is None:
        for name, content in ({} if (kept := read_source(run.path)) is None else kept.source.files).items():
            (folder / SOURCE_FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / SOURCE_FOLDER / name).write_bytes(content)
    lineage = Lineage(
        run=run.name,
        checkpoint=loaded.checkpoint.path.name,
        step=manifest.step,
        weights_digest=manifest.weights_digest,
        averaged=bool(loaded.averaged),
        job_digest=job_digest(spec),
        seed=spec.seed,
        total_steps=spec.steps,
        data=environment.get(SAMPLES),
        code=environment.get(SOURCE),
        git_commit=recorded_git(run).commit or None,
        digests={name: sha256_of(folder / name) for name in PULLED},
    )
    return lineage, why_no_graph


def job_digest(spec: JobSpec) -> str:
    """Sha-256 of what a job means: of all keys that change the bits, however and wherever it runs. The task counts by
    its class; its code has a digest of its own."""
    meant = {**parameters_of(spec), "task": spec.task.rpartition(":")[2]}
    meant = {first_name(key): value for key, value in meant.items()}
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    """Of a file's content, as `sha256sum` prints it."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _save_model(loaded: LoadedModel, folder: Path) -> str:
    """MLflow's own files: with a graph where there can be one; why there is none."""
    import torch
    from mlflow.models import Model, infer_signature
    from mlflow.pytorch import save_model

    from quorate.training.measurement import evaluation_mode

    signature = None
    try:
        inputs, output = _first_call(loaded)
        if (given := _as_arrays(inputs)) is None:
            raise RunError("its inputs are not tensors only")
        signature = infer_signature(given, _as_arrays(output))
        with evaluation_mode(loaded.model):
            save_model(
                loaded.model,
                str(folder),
                signature=signature,
                input_example=_blank(given),
                serialization_format="pt2",
                pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "numpy"],
            )
        return ""
    except Exception as error:  # of the user's code; and torch.export says no in many ways
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        Model(signature=signature).save(str(folder / "MLmodel"))
        why = error.message if isinstance(error, QuorateError) else describe(error).splitlines()[0]
        return why if signature is None else f"torch.export cannot trace it ({why})"


def _first_call(loaded: LoadedModel) -> tuple[dict[str, Any], Any]:
    """What the task's own code calls the model with on the first batch of the validation set, or of the training set,
    by the names of its arguments; and what it gives."""
    from quorate.data.sampler import Request, Source
    from quorate.data.samples import batch_of
    from quorate.data.streams import preserved_generators
    from quorate.training.measurement import evaluation_mode
    from quorate.worker.assembly import build_samples, evaluation_plan

    calls: list[tuple[dict[str, Any], Any]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        signature = inspect.signature(loaded.model.forward)
        bound = signature.bind(*args, **kwargs).arguments
        if [*signature.parameters][: len(bound)] != [*bound]:  # a graph has inputs by position
            raise RunError("metrics() leaves out an argument before one that it gives")
        calls.append((dict(bound), output))

    with preserved_generators(), evaluation_mode(loaded.model), contextlib.ExitStack() as hooked:
        hooked.callback(loaded.model.register_forward_hook(note, with_kwargs=True).remove)
        samples = build_samples(loaded.task, loaded.spec)
        plan = evaluation_plan(loaded.spec, samples)
        few = range(min(plan.batch_size, len(samples.datasets[Source.TRAINING])))
        request = plan.request(0) if plan.samples else Request(Source.TRAINING, 0, few)
        loaded.task.metrics(loaded.model, batch_of(samples[request]).content)
    if not calls:
        raise RunError("metrics() does not call the model as a whole")
    return calls[0]


def _as_arrays(values: Any) -> Any:
    """As NumPy has them, by name where there are several; None where one is no tensor, or of a type that it lacks."""
    if not isinstance(values, Mapping):
        several = values if isinstance(values, tuple | list) else [values]
        values = {f"output_{number}": each for number, each in enumerate(several)}
    try:
        arrays = {name: value.detach().cpu().numpy() for name, value in values.items()}
    except (AttributeError, TypeError):
        return None
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays or None


def _blank(given: Any) -> Any:
    """Zeros of the same shapes, for two samples: the graph is the same, and nobody's data lie on a server."""
    import numpy

    arrays = list(given.values()) if isinstance(given, dict) else [given]
    samples = {each.shape[0] if each.ndim else None for each in arrays}
    cut = len(samples) == 1 and None not in samples
    blank = [numpy.zeros((2, *each.shape[1:]) if cut else each.shape, each.dtype) for each in arrays]
    return blank[0] if len(blank) == 1 else tuple(blank)

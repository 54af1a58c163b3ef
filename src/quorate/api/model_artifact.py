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

import hashlib
import inspect
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quorate.api.checkpoints import write_weights
from quorate.api.recorded_run import recorded_job
from quorate.api.result import LoadedModel, model_of
from quorate.core.errors import QuorateError
from quorate.core.masking import mask, register_secrets
from quorate.core.user_code import describe
from quorate.engines.engine import SOURCE
from quorate.spec.job import JobSpec
from quorate.spec.migration import first_name
from quorate.spec.resolved import dump_job
from quorate.spec.secrets import job_secrets
from quorate.storage.kept_source import read_source
from quorate.storage.run_folder import RunFolder
from quorate.tracking.provenance import parameters_of, recorded_git

log = logging.getLogger(__name__)

WEIGHTS, JOB, SOURCE_FOLDER = "model.safetensors", "job.yaml", "source"
PULLED = (WEIGHTS, JOB)
"""The files whose digests are kept in the registry, and which are pulled from it."""
_TAG = "quorate."
_NOT_TEXT = ("step", "averaged", "seed", "total_steps", "digests")
_PIECE = 2**20


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


@dataclass(frozen=True)
class ModelArtifact:
    """A folder to upload; `why_no_graph` is empty where it has a graph, `why_no_signature` where it has a signature."""

    folder: Path
    lineage: Lineage
    why_no_graph: str
    why_no_signature: str


def build_artifact(run: RunFolder, which: str, task: str | None, folder: Path) -> ModelArtifact:
    """Make the folder of the model of a run's checkpoint: last, best, or that of a step."""
    from quorate.worker.same_data import SAMPLES

    loaded = model_of(run, which, task)
    manifest = loaded.checkpoint.manifest
    why_no_graph, why_no_signature = _save_model(loaded, folder)
    write_weights(run, loaded, folder / WEIGHTS)
    register_secrets(job_secrets(loaded.spec))
    (folder / JOB).write_text(mask(dump_job(recorded_job(run))))
    environment, spec = manifest.environment, loaded.spec
    if spec.checkpoint.source and spec.checkpoint.sealing is None:
        _copy_source(run, folder / SOURCE_FOLDER)
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
    return ModelArtifact(folder, lineage, why_no_graph, why_no_signature)


def job_digest(spec: JobSpec) -> str:
    """Sha-256 of what a job means: of all keys that change the bits, however and wherever it runs. The task counts by
    its class; its code has a digest of its own."""
    meant = {**parameters_of(spec), "task": spec.task.rpartition(":")[2]}
    meant = {first_name(key): value for key, value in meant.items()}
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    """Of a file's content, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _copy_source(run: RunFolder, folder: Path) -> None:
    kept = read_source(run.path)
    if kept is None:
        return
    for name, content in kept.source.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


# --- the model as MLflow keeps it


def _save_model(loaded: LoadedModel, folder: Path) -> tuple[str, str]:
    """MLflow's own files: with a graph where there can be one; why there is none, and why there is no signature."""
    import torch
    from mlflow.models import Model
    from mlflow.pytorch import save_model

    from quorate.training.measurement import evaluation_mode

    call, why_no_signature = _called_with(loaded)
    signature = None if call is None else call.signature()
    why_no_graph = why_no_signature
    if call is not None and not (call.positional and signature is not None):
        why_no_graph = "its inputs are not tensors only"
    if call is not None and not why_no_graph:
        requirements = [f"torch=={torch.__version__.partition('+')[0]}", "numpy"]
        try:
            with evaluation_mode(loaded.model):
                save_model(
                    loaded.model,
                    str(folder),
                    signature=signature,
                    input_example=call.blank_inputs(),
                    serialization_format="pt2",
                    pip_requirements=requirements,
                )
        except Exception as error:  # of whatever kind: torch.export says no in many ways
            shutil.rmtree(folder, ignore_errors=True)
            why_no_graph = f"torch.export cannot trace it ({describe(error).splitlines()[0]})"
    if why_no_graph:
        folder.mkdir(parents=True, exist_ok=True)
        Model(signature=signature).save(str(folder / "MLmodel"))
    return why_no_graph, why_no_signature


@dataclass(frozen=True)
class ModelCall:
    """What a model was called with on one batch, by the names of its arguments, and what it gave."""

    inputs: dict[str, Any]
    output: Any
    positional: bool

    def signature(self) -> Any:
        """As MLflow describes it; None for what it has no words for."""
        from mlflow.models import infer_signature

        inputs, output = _as_arrays(list(self.inputs.values())), _as_arrays(_flat_output(self.output))
        if inputs is None or not inputs:
            return None
        named = dict(zip(self.inputs, inputs, strict=True))
        given = inputs[0] if len(inputs) == 1 else named
        if output is None:
            return infer_signature(given)
        return infer_signature(
            given, output[0] if len(output) == 1 else {f"output_{i}": each for i, each in enumerate(output)}
        )

    def blank_inputs(self) -> Any:
        """Zeros of the same shapes, for two samples: the graph is the same, and nobody's data lie on a server."""
        import numpy

        samples = {value.shape[0] if value.ndim else None for value in self.inputs.values()}
        cut = len(samples) == 1 and None not in samples
        arrays = _as_arrays(list(self.inputs.values())) or []
        blank = [numpy.zeros((2, *each.shape[1:]) if cut else each.shape, each.dtype) for each in arrays]
        return blank[0] if len(blank) == 1 else tuple(blank)


def _called_with(loaded: LoadedModel) -> tuple[ModelCall | None, str]:
    """How the task's own code calls the model on the first batch of the validation set, or of the training set; or why
    that is not known."""
    import torch

    from quorate.data.sampler import Request, Source
    from quorate.data.samples import batch_of
    from quorate.data.streams import preserved_generators
    from quorate.training.measurement import evaluation_mode
    from quorate.worker.assembly import build_samples, evaluation_plan

    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not calls:
            calls.append((args, kwargs, output))

    handle = loaded.model.register_forward_hook(note, with_kwargs=True)
    try:
        with preserved_generators(), evaluation_mode(loaded.model):
            samples = build_samples(loaded.task, loaded.spec)
            plan = evaluation_plan(loaded.spec, samples)
            few = range(min(plan.batch_size, len(samples.datasets[Source.TRAINING])))
            request = plan.request(0) if plan.samples else Request(Source.TRAINING, 0, few)
            loaded.task.metrics(loaded.model, batch_of(samples[request]).content)
    except QuorateError as error:
        return None, error.message
    except Exception as error:  # the user's code
        return None, f"metrics() raises on a batch: {describe(error)}"
    finally:
        handle.remove()
    if not calls:
        return None, "metrics() does not call the model as a whole"
    args, kwargs, output = calls[0]
    try:
        bound = inspect.signature(loaded.model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        return None, describe(error)
    names = list(inspect.signature(loaded.model.forward).parameters)
    positional = all(isinstance(value, torch.Tensor) for value in bound.values()) and names[: len(bound)] == list(bound)
    return ModelCall(dict(bound), output, positional), ""


def _flat_output(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]


def _as_arrays(values: list[Any]) -> list[Any] | None:
    """As NumPy has them; None where one is no tensor, or of a type that NumPy does not know."""
    try:
        return [value.detach().cpu().numpy() for value in values]
    except (AttributeError, TypeError):
        return None

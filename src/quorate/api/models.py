"""The registry of models, which is MLflow's: a run's model is a version of a name, and an alias points at one.

A model is logged once for a checkpoint (`log_model`) and belongs to the MLflow run of its run; a version of the
registry refers to it. Both carry where it comes from as tags (`Lineage`), with the sha-256 of its weights and its job,
which are compared whenever it is pulled.
"""

import contextlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from quorate.api.model_artifact import Lineage, build_artifact, sha256_of
from quorate.api.recorded_run import chosen_checkpoint, recorded_job, refuse_lost_checkpoints
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import LAST
from quorate.core.errors import JobError, QuorateError, RequestError, RunError
from quorate.core.installation import install_of
from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.atomic import explaining, move_into_place
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import place, tracking_uri
from quorate.tracking.mlflow_client import connect, database_of, find_or_make_run

log = logging.getLogger(__name__)

MODEL = "model"
"""The name of a logged model below its run."""
_REFERENCE = re.compile(r"(?P<name>[^/:@]+)(@(?P<alias>[^/:@]+)|/(?P<version>[0-9]+))")


class RegistryError(JobError):
    """MLflow does not answer, or cannot keep what it is given: it may later."""


@dataclass(frozen=True)
class ModelVersion:
    """A version in the registry; without a lineage where it was registered by other means."""

    name: str
    version: int
    aliases: tuple[str, ...]
    created: datetime
    lineage: Lineage | None

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def document(self) -> dict[str, Any]:
        """As `quorate models --json` prints it."""
        return {
            "name": self.name,
            "version": self.version,
            "aliases": list(self.aliases),
            "created": self.created.isoformat(timespec="milliseconds"),
            "lineage": None if self.lineage is None else asdict(self.lineage),
        }


def registry_uri(runs: Path, asked: str | None, run: RunFolder | None = None) -> str:
    """Where the registry is: as asked for, or where the job of a run is tracked, or in the folder of runs."""
    if asked is not None:
        return asked
    track = None if run is None else recorded_job(run).spec.track
    if run is None or track is None or not track.mlflow:
        return tracking_uri(TrackSpec(mlflow=True), runs)
    # Beside the run, from wherever it is named by its path.
    return tracking_uri(track, run.path.absolute().parent)


class ModelRegistry:
    """MLflow's registry of models at one place."""

    def __init__(self, uri: str, *, is_made: bool = False) -> None:
        """`is_made`: a file that is not there yet is made. Otherwise nothing has been registered in it."""
        if importlib.util.find_spec("mlflow") is None:
            raise RequestError(f"the registry of models is MLflow's, which is not installed: {install_of('mlflow')}")
        database = database_of(uri)
        if database is not None and not is_made and not database.exists():
            raise RequestError(
                f"there is no registry at {database}: nothing has been registered there yet. Register a run with "
                "`quorate models register RUN`, or name another place with --mlflow URI"
            )
        self.uri = uri
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # it tells of every table that it makes
        with self._asking():
            self._client = connect(uri)

    def versions(self) -> tuple[ModelVersion, ...]:
        """All versions of all models, by name, the newest first."""
        with self._asking():
            names = [model.name for model in self._pages(self._client.search_registered_models)]
            aliases = {name: self._client.get_registered_model(name).aliases for name in names}
            found = [_version_of(each, aliases[name]) for name in names for each in self._versions_of(name)]
        return tuple(sorted(found, key=lambda each: (each.name, -each.version)))

    def find(self, reference: str) -> ModelVersion:
        """The version that is meant by NAME@ALIAS or NAME/VERSION."""
        meant = _REFERENCE.fullmatch(reference)
        if meant is None:
            raise RequestError(
                f"'{reference}' names no model: write NAME@ALIAS or NAME/VERSION, such as digits@champion"
            )
        name, alias, version = meant["name"], meant["alias"], meant["version"]
        with self._asking():
            from mlflow.exceptions import MlflowException

            try:
                model = self._client.get_registered_model(name)
                number = version if alias is None else model.aliases.get(alias)
                if number is not None:
                    return _version_of(self._client.get_model_version(name, str(number)), model.aliases)
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
        raise RequestError(f"there is no model {reference} at {place(self.uri)}. {self._what_there_is(name)}")

    def log_model(
        self, run: RunFolder, ended_with: str, which: str = LAST, task: str | None = None, mlflow_run: Any = None
    ) -> Any:
        """Log the model of a checkpoint of a run that has ended with these weights, unless it is there already.

        Returns MLflow's `LoggedModel`, below the given MLflow run or that of the run folder. Called by the tracker at
        the end of a run, and before it is registered.
        """
        spec = recorded_job(run).spec
        info = _checkpoint(run, spec, which, ended_with)
        with self._asking():
            if mlflow_run is None:
                started = int(run.created.timestamp() * 1000)
                mlflow_run = find_or_make_run(self._client, self.uri, run, spec, started)
            info_there = mlflow_run.info
            for known in self._models_of(info_there.experiment_id, info_there.run_id):
                lineage = Lineage.of_tags(known.tags) if known.status.value == "READY" else None
                told = lineage and (lineage.checkpoint, lineage.weights_digest)
                if told == (info.path.name, info.manifest.weights_digest):
                    return known
        with tempfile.TemporaryDirectory(prefix="quorate-model-") as scratch:
            folder = Path(scratch) / MODEL
            lineage, why_no_graph = build_artifact(run, which, task, folder)
            if why_no_graph:
                log.warning(
                    "the model is logged without a graph: %s. Its weights and its source are there", why_no_graph
                )
            with self._asking():
                model = self._client.create_logged_model(
                    info_there.experiment_id, MODEL, info_there.run_id, tags=lineage.as_tags()
                )
                try:
                    self._client.log_model_artifacts(model.model_id, str(folder))
                    return self._client.finalize_logged_model(model.model_id, "READY")
                except BaseException:
                    with contextlib.suppress(Exception):  # half a model: another is made when this is tried again
                        self._client.delete_logged_model(model.model_id)
                    raise

    def register(self, name: str, model: Any) -> tuple[ModelVersion, bool]:
        """Make a logged model a version of a name; the version, and whether it is new: each is registered once."""
        with self._asking():
            from mlflow.exceptions import MlflowException

            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for each in self._versions_of(name):
                if each.source == model.artifact_location:
                    return _version_of(each, self._client.get_registered_model(name).aliases), False
            made = self._client.create_model_version(
                name,
                # Not models:/ID, which MLflow looks for where its global settings say, and not where we are.
                model.artifact_location,
                run_id=model.source_run_id,
                tags=model.tags,
                model_id=model.model_id,
            )
        return _version_of(made, {}), True

    def promote(self, name: str, version: int, alias: str) -> int | None:
        """Have an alias point at a version; the one that it pointed at before."""
        self.find(f"{name}/{version}")
        with self._asking():
            before = self._client.get_registered_model(name).aliases.get(alias)
            self._client.set_registered_model_alias(name, alias, str(version))
        return None if before is None else int(before)

    def pull(self, reference: str, folder: Path | None) -> tuple[ModelVersion, Path]:
        """Get the weights and the job of a version into a folder, by default one called after it. Nothing is there
        before all of it has the digest that was registered."""
        found = self.find(reference)
        if found.lineage is None:
            raise RequestError(
                f"{found} was not registered by Quorate: it has no digests that it could be compared with"
            )
        into = Path(f"{found.name}-{found.version}") if folder is None else folder
        wanted = {
            name: into / name for name, digest in found.lineage.digests.items() if not _is_there(into / name, digest)
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(explaining(f"cannot write into {into}"))
            into.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_if_empty, into)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".partial-", dir=into)))
            with self._asking():
                from mlflow.artifacts import download_artifacts

                source = self._client.get_model_version_download_uri(found.name, str(found.version))
                for name in wanted:
                    download_artifacts(f"{source}/{name}", dst_path=str(scratch), tracking_uri=self.uri)
            for name in wanted:
                told, digest = found.lineage.digests[name], sha256_of(scratch / name)
                if digest != told:
                    raise JobError(
                        f"{name} of {found} was changed since it was registered: its sha-256 is {digest}, and was "
                        f"{told}. Nothing was pulled: somebody has written to where MLflow keeps its artifacts"
                    )
            for name, file in wanted.items():
                move_into_place(scratch / name, file)
        return found, into

    def named(self) -> dict[str, list[str]]:
        """The versions of all models by the MLflow run that each belongs to, whoever has registered them."""
        found: dict[str, list[str]] = {}
        with self._asking():
            for each in self._pages(self._client.search_model_versions):
                found.setdefault(each.run_id, []).append(f"{each.name}/{each.version}")
        return found

    def folders(self, run_id: str) -> list[Path]:
        """Where an MLflow run and its models have their files, as far as that is on this machine."""
        with self._asking():
            known = self._client.get_run(run_id)
            models = [each.artifact_location for each in self._models_of(known.info.experiment_id, run_id)]
        places = [urlsplit(uri) for uri in (known.info.artifact_uri, *models)]
        folders = [Path(unquote(each.path)).parent for each in places if each.scheme in ("", "file")]
        return [folder for folder in folders if folder.is_dir()]

    def delete_run(self, run_id: str) -> None:
        """Have MLflow show a run no more; its files are for the caller to remove."""
        with self._asking():
            self._client.delete_run(run_id)

    def _versions_of(self, name: str) -> Iterator[Any]:
        quoted = name.replace("'", "\\'")
        return self._pages(self._client.search_model_versions, filter_string=f"name = '{quoted}'")

    def _models_of(self, experiment: str, run_id: str) -> Iterator[Any]:
        own = {"experiment_ids": [experiment], "filter_string": f"source_run_id = '{run_id}'"}
        return self._pages(self._client.search_logged_models, **own)

    @staticmethod
    def _pages(search: Any, **asked: Any) -> Iterator[Any]:
        """All that there is, however many pages it takes."""
        page = search(**asked)
        yield from page
        while page.token:
            page = search(**asked, page_token=page.token)
            yield from page

    def _what_there_is(self, name: str) -> str:
        versions = self.versions()
        if own := [" @".join([str(each.version), *each.aliases]) for each in versions if each.name == name]:
            return f"Versions of {name}: {', '.join(own)}"
        names = ", ".join(sorted({each.name for each in versions}))
        return f"Models that there are: {names}" if names else "No model is registered there"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """What MLflow says no to, or does not answer, is an error that names the place."""
        try:
            yield
        except QuorateError:
            raise
        except Exception as error:
            from mlflow.exceptions import MlflowException

            if isinstance(error, MlflowException) and error.get_http_status_code() < 500:
                raise RequestError(f"MLflow at {place(self.uri)} refuses: {error.message}") from error
            if not isinstance(error, MlflowException | OSError):
                raise
            said = str(error).partition("\n")[0]
            raise RegistryError(f"the registry at {place(self.uri)} cannot be used: {said}") from error


def register_model(
    run: RunFolder, uri: str, name: str | None, which: str, task: str | None = None
) -> tuple[ModelVersion, bool]:
    """Make the model of a complete run's checkpoint a version of a name, by default that of its job; the version, and
    whether it is new. Refused before anything is made where the run is not complete, or its checkpoint not whole."""
    spec, ended_with = recorded_job(run).spec, _weights_at_the_end(run)
    _checkpoint(run, spec, which, ended_with)
    registry = ModelRegistry(uri, is_made=True)
    return registry.register(spec.name if name is None else name, registry.log_model(run, ended_with, which, task))


def _checkpoint(run: RunFolder, spec: JobSpec, which: str, ended_with: str) -> CheckpointInfo:
    """The one that is meant. Raises RunError where it is the last, and not that of the end."""
    refuse_lost_checkpoints(run, spec, "register")
    _, info = chosen_checkpoint(run, spec, which, spec.checkpoint)
    if which == LAST and info.manifest.weights_digest != ended_with:
        raise RunError(
            f"the last checkpoint of run {run.name} is damaged or gone: {info.path.name} is the newest valid one, and "
            f"the run ended with other weights. `quorate checkpoints verify {run.name}` says what is wrong; "
            f"--checkpoint {info.manifest.step} takes this one"
        )
    return info


def _weights_at_the_end(run: RunFolder) -> str:
    """The digest that a complete run has ended with. Raises RunError for one that is not."""
    if run.holder() is not None:
        raise RunError(f"run {run.name} is still running: a model is registered when its run is complete")
    result = run.whole_result()
    if result is None or result.get("status") != "complete":
        how = "was killed" if result is None else f"is {result.get('status')}"
        raise RunError(
            f"run {run.name} is not complete: it {how}. Resume it with `quorate resume {run.name}`, and register it "
            f"then; `quorate checkpoints export {run.name} -o FILE` writes the weights that it has"
        )
    return str(result.get("weights_digest"))


def _version_of(told: Any, aliases: dict[str, Any]) -> ModelVersion:
    return ModelVersion(
        name=told.name,
        version=int(told.version),
        aliases=tuple(sorted(alias for alias, version in aliases.items() if str(version) == str(told.version))),
        created=datetime.fromtimestamp(told.creation_timestamp / 1000, UTC),
        lineage=Lineage.of_tags(told.tags),
    )


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_there(file: Path, digest: str) -> bool:
    """Whether a file was pulled before. Another in its place is not replaced."""
    if not file.exists():
        return False
    if sha256_of(file) != digest:
        raise RequestError(f"{file} already exists with other content. Choose another folder, or move it away")
    return True

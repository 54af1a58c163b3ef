"""What a job file says of Ray: the cluster, and what each worker gets on it. None of it changes the bits."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from quorate.core.addresses import has_secret, is_url
from quorate.core.errors import Problem, RequestError
from quorate.core.installation import install_of
from quorate.core.masking import is_secret
from quorate.spec.keys import AUTO_BATCH, Allowed, FilePath, Section
from quorate.spec.options import EngineSection, Option, PerWorkerSpec, Said, checked_address, checked_folder

_URL = re.compile(r"\w+://\S+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def checked_storage(place: str | None) -> str | None:
    """A folder or a prefix of an object store that several hosts reach; the same for `checked_folder`."""
    return place if place is not None and is_url(place) else checked_folder(place)


def _checked_variables(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a variable.")
    return variables


class RuntimeEnvSpec(Section):
    """What Ray installs and sets on a node before a worker starts there: packages, code and variables."""

    pip: Annotated[list[str], Allowed("a list of packages for pip, such as [scikit-learn]")] = []
    """Packages to install."""
    working_dir: Annotated[
        FilePath | None,
        Field(min_length=1),
        Allowed("the path of a folder, or null: the one that the task's file is in"),
    ] = None
    """The folder to send to the nodes."""
    excludes: Annotated[list[str], Allowed("a list of patterns of files that stay here, such as [data/, *.ckpt]")] = []
    """Files in that folder that are not sent."""
    py_modules: Annotated[list[FilePath], Allowed("a list of paths of packages to send along")] = []
    """Further packages to send."""
    env_vars: Annotated[
        dict[str, str], AfterValidator(_checked_variables), Allowed("a mapping from names of variables to text")
    ] = {}
    """Environment variables of the workers. Secrets are refused."""


class RaySpec(EngineSection):
    """Workers run on the nodes of a Ray cluster, each where there is room for it.

    `address: auto` is the cluster of RAY_ADDRESS or of this machine, `local` is a cluster that starts and ends with the
    job. `placement: pack` fills one node before the next, `spread` takes the emptiest node, and `strict_spread` puts at
    most one worker on a node.
    """

    kind: Literal["ray"]
    address: Annotated[
        str,
        AfterValidator(checked_address),
        Allowed("auto, local, the host:port of a cluster, or ray://host:port to submit to with --detach"),
    ] = "auto"
    """The address of the cluster."""
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    """How workers are placed on nodes."""
    per_worker: PerWorkerSpec = PerWorkerSpec()
    """What Ray reserves for each worker."""
    storage: Annotated[
        str | None,
        AfterValidator(checked_storage),
        Allowed("a folder (an absolute path) or an object store (s3://…) for all hosts, or null: the run's folder"),
    ] = None
    """A folder or an object store that all hosts can reach, for the runs."""
    runtime_env: RuntimeEnvSpec = RuntimeEnvSpec()
    """What Ray installs and sets on a node before a worker starts there."""

    opened_by: ClassVar[str] = "quorate.engines.ray.engine:open_engine"
    is_cluster: ClassVar[bool] = True

    def refuse_missing(self) -> None:
        # Looked for, not imported: what is wrong with the rest of the job is told without that second.
        if find_spec("ray") is None:
            raise RequestError(
                f"engine: ray needs the library ray, which is not installed here: {install_of('ray')}. "
                "The nodes of the cluster need the same version of it. Without a cluster: --set engine=local"
            )

    @property
    def shared_storage(self) -> str | None:
        return self.storage

    def gpus_each(self, device: str) -> float:
        return self.per_worker.gpu if self.per_worker.gpu is not None else float(device == "cuda")

    def resources_each(self, device: str, threads: int) -> dict[str, float]:
        """What Ray reserves for one worker, by the names that Ray has for it; what is zero is left out."""
        cpu = self.per_worker.cpu or float(threads)
        return {name: amount for name, amount in (("CPU", cpu), ("GPU", self.gpus_each(device))) if amount}


def _cluster_fits(job: Any, said: Said) -> Iterator[Problem]:
    engine, device = job.engine, job.device
    if not isinstance(engine, RaySpec):
        return
    if job.batch_size == AUTO_BATCH:
        yield Problem(
            "batch_size",
            f"auto{said('batch_size')} is looked for on this machine, and engine: ray{said('engine')} trains on others",
            "Write a number: `quorate plan` says what fits.",
        )
    for secret in _secret_keys(engine):
        path = f"engine.{secret}"
        yield Problem(
            path,
            f"there is a secret in it{said(path)}, and whoever sees the cluster or the run would read it",
            "Give it to the nodes by other means, in their own environment, pip.conf or netrc; Ray's own token is in "
            "RAY_AUTH_TOKEN.",
        )
    key, gpu = "engine.per_worker.gpu", engine.per_worker.gpu
    if device == "cuda" and gpu == 0:
        text = f"workers without a GPU{said(key)} cannot compute on device: cuda{said('device')}"
        yield Problem(key, text, "Write gpu: 1, or leave it out.")
    if gpu and device == "cpu":
        text = f"{gpu:g}{said(key)} would be held for each worker and not used: device: cpu{said('device')}"
        yield Problem(key, text, "Leave gpu out, or write device: cuda.")
    if gpu and device == "auto" and (what := job.strategy.cpu_only):
        text = f"{gpu:g}{said(key)} would be held for each worker and not used: {what} computes on the CPU"
        yield Problem(key, text, f"Leave gpu out, or {what.partition(':')[0]}.")


def _secret_keys(engine: RaySpec) -> Iterator[str]:
    """The keys with a secret in them. A rule asks for them, and no check of a key: what breaks a rule is not shown."""
    for key in ("address", "storage"):
        if has_secret(getattr(engine, key) or ""):
            yield key
    if any(has_secret(url) for package in engine.runtime_env.pip for url in _URL.findall(package)):
        yield "runtime_env.pip"
    for name, value in engine.runtime_env.env_vars.items():
        if is_secret(name, value) or name.startswith("RAY_AUTH"):
            yield f"runtime_env.env_vars.{name}"


OPTION = Option(
    kinds={"engine": (RaySpec,)},
    rules={_cluster_fits: frozenset({"engine", "strategy", "device", "batch_size"})},
)

"""What a job file says of Ray: the cluster, and what each worker gets on it. None of it changes the bits."""

import re
from importlib.util import find_spec
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from quorate.core.addresses import has_secret, is_url, shown_place, split_address
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.spec.keys import Allowed
from quorate.spec.kinds import EngineSection
from quorate.spec.options import Option
from quorate.spec.section import FilePath, Section

RAY_CLIENT = "ray://"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def checked_address(address: str) -> str:
    """The address of a cluster. Raises ValueError that says what to write instead."""
    if address in ("auto", "local"):
        return address
    if has_secret(address):
        return address  # which a rule refuses, without showing it
    protocol, separator, rest = address.rpartition("://")
    if separator and f"{protocol}{separator}" != RAY_CLIENT:
        raise ValueError(f"Ray's own protocol is {RAY_CLIENT}: write {RAY_CLIENT}{rest}, or {rest} alone.")
    host, colon, _ = rest.rpartition(":")
    if not colon:
        port = 10001 if separator else 6379
        raise ValueError(f"Add the port, {port} where nothing else was chosen: {address}:{port}.")
    if not 0 < split_address(rest)[1] < 65536:
        raise ValueError(f"A port is from 1 to 65535: {host}:6379.")
    return address


def checked_storage(place: str | None) -> str | None:
    """A folder or a prefix of an object store that several hosts reach; the same for `checked_folder`."""
    return place if place is not None and is_url(place) else checked_folder(place)


def checked_folder(folder: str | None) -> str | None:
    """A folder that several hosts reach. Raises ValueError that says what to write instead."""
    if folder is None:
        return None
    if is_url(folder):
        raise ValueError(f"It is a folder that all hosts have mounted, and {shown_place(folder)} is none.")
    if not PurePath(folder).is_absolute():
        raise ValueError("It has to be the same on all hosts: write an absolute path, such as /mnt/shared.")
    return folder


def _checked_variables(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a variable.")
    return variables


class PerWorkerSpec(Section):
    """What Ray reserves for each worker. Null: as many CPUs as a lane has threads, and a GPU if `device: cuda`."""

    cpu: Annotated[float | None, Field(gt=0), Allowed("a number above 0, or null: as many as `threads`")] = None
    """CPUs for each worker."""
    gpu: Annotated[
        float | None,
        Field(ge=0, le=1),
        Allowed("a number from 0 to 1 (several workers may share a GPU), or null: 1 with device: cuda, else 0"),
    ] = None
    """A GPU for each worker, or a fraction of one."""


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

    opened_by: ClassVar[str] = "quorate.engines.ray.launch:open_engine"
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


OPTION = Option(
    kinds={"engine": (RaySpec,)},
    rules="quorate.engines.ray.rules",
)

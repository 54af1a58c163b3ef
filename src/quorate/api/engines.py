"""Which engine a job runs on. Ray is imported here alone, and only for a job that asks for it: that takes a second."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quorate.core.errors import RequestError
from quorate.core.failure import Failure
from quorate.core.installation import install_of
from quorate.engines.engine import Engine
from quorate.engines.local import LocalEngine
from quorate.engines.ray.cluster import Cluster
from quorate.engines.ray.engine import ClusterEngine, ClusterSettings
from quorate.engines.ray.node_code import NodeCode, code_of, without_installed
from quorate.engines.ray.option import RaySpec
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch


def engine_of(
    launch: Launch, signals: Signals, code: NodeCode | None = None, fit: Callable[[Any], None] | None = None
) -> Engine:
    """The engine that the job of a launch names; `code` is what nodes are given, if not what follows from the job, and
    `fit` runs the trainer of a gang on Ray, if it is not the usual one."""
    spec = launch.spec
    if not isinstance(spec.engine, RaySpec):
        return LocalEngine(launch.run, launch.preparation)
    refuse_missing_engine(spec)
    demand = spec.engine.resources_each(spec.device, spec.threads)
    places = launch.first_workers + (spec.spares + spec.strategy.server_count if launch.mode.is_training else 0)
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import keep_in_store

        keep_in_store(launch.run, spec, spec.engine.object_store)
    storage = None if spec.engine.storage is None or launch.run.stored else Path(spec.engine.storage)
    settings = ClusterSettings(demand, spec.engine.placement, places, storage, is_gang=spec.strategy.is_gang)
    sent = code or node_code(spec, launch.preparation.task, launch.run.path.parent, launch.job_source)
    if settings.is_gang:
        cluster: Cluster = _gang_cluster(launch.run, spec.engine.address, settings, sent, fit)
    else:
        from quorate.engines.ray.ray_cluster import RayCluster

        cluster = RayCluster(spec.engine.address, launch.run.name, demand, sent)
    preparation = without_installed(launch.preparation)

    def stopped() -> Failure | None:
        told = f"{signals.reason} while it connected to the Ray cluster; nothing has begun."
        return None if signals.reason is None else signals.failure(told)

    return ClusterEngine(launch.run, preparation, cluster, settings, stopped)


def node_code(spec: JobSpec, task: str, runs: Path, job_source: str) -> NodeCode:
    """What the nodes are given of a job's code. Runs stay here, and so does the job file, which may have secrets."""
    assert isinstance(spec.engine, RaySpec)
    asked = spec.engine.runtime_env
    if spec.engine.address == "local":  # the only node is this machine, where all is
        return NodeCode(modules=tuple(asked.py_modules), pip=tuple(asked.pip), variables=asked.env_vars)
    stays = [runs, *_job_files(job_source)]
    is_folder = spec.engine.storage is not None and spec.engine.object_store is None
    return code_of(task, asked, [*stays, *([Path(spec.engine.storage or "")] if is_folder else [])])


def _job_files(source: str) -> list[Path]:
    """The job file by where a job was said, such as ``job.yaml with --set``: a path may have that word in it, too."""
    words = source.split(" with ")
    paths = [Path(" with ".join(words[:count])) for count in range(1, len(words) + 1)]
    return [path for path in paths if path.is_file()]


def _gang_cluster(
    run: RunFolder, address: str, settings: ClusterSettings, code: NodeCode, fit: Callable[[Any], None] | None
) -> Cluster:
    from quorate.engines.ray.train import GroupConfig, RayTrainCluster, group_trainer, run_config, scaling_config

    def fit_as_usual(config: GroupConfig) -> None:
        scaling = scaling_config(settings.workers, settings.demand, settings.placement)
        group_trainer(config, scaling, run_config()).fit()

    config = GroupConfig(str(run.path if settings.storage is None else settings.storage / run.name))
    return RayTrainCluster(address, settings.demand, code, settings.workers, config, fit or fit_as_usual)


def refuse_missing_engine(spec: JobSpec) -> None:
    """Before a run has its folder: what a job is to run on must be installed."""
    if not isinstance(spec.engine, RaySpec):
        return
    # Looked for, not imported: what is wrong with the rest of the job is told without that second.
    if find_spec("ray") is None:
        raise RequestError(
            f"engine: ray needs the library ray, which is not installed here: {install_of('ray')}. "
            "The nodes of the cluster need the same version of it. Without a cluster: --set engine=local"
        )
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import refuse_unusable_store

        refuse_unusable_store(spec, spec.engine.object_store)


def refuse_cluster(spec: JobSpec, what: str) -> None:
    """For what happens on this machine alone."""
    if isinstance(spec.engine, RaySpec):
        raise RequestError(
            f"{what} on this machine, and the job says engine: ray. Its bits are the same here: --set engine=local"
        )

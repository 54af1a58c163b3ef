"""From a job to its engine on a Ray cluster. Ray is imported here alone, which takes a second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.core.failure import Failure
from quorate.engines.engine import Engine, Preparation
from quorate.engines.ray.cluster import Cluster
from quorate.engines.ray.engine import ClusterEngine, ClusterSettings
from quorate.engines.ray.node_code import NodeCode, code_of, without_installed
from quorate.engines.ray.option import RaySpec
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder


def open_engine(
    run: RunFolder,
    preparation: Preparation,
    spec: JobSpec,
    places: int,
    stopped: Callable[[], Failure | None],
    code: NodeCode | None = None,
    fit: Callable[[Any], None] | None = None,
) -> Engine:
    """The engine of a job with so many processes at first. `code` is what nodes are given, if not what follows from the
    job, and `fit` runs the trainer of a gang, if it is not the usual one."""
    assert isinstance(spec.engine, RaySpec)
    demand = spec.engine.resources_each(spec.device, spec.threads)
    storage = None if spec.engine.storage is None or run.stored else Path(spec.engine.storage)
    settings = ClusterSettings(demand, spec.engine.placement, places, storage, is_gang=spec.strategy.is_gang)
    sent = code or node_code(spec, preparation.task, run.path.parent, preparation.job_source)
    if settings.is_gang:
        cluster: Cluster = _gang_cluster(run, spec.engine.address, settings, sent, fit)
    else:
        from quorate.engines.ray.ray_cluster import RayCluster

        cluster = RayCluster(spec.engine.address, run.name, demand, sent)
    return ClusterEngine(run, without_installed(preparation), cluster, settings, stopped)


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

"""A search on Ray: connect to it, or start it here, and give Ray Tune the trials."""

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError, RequestError
from quorate.core.machine import usable_cores
from quorate.engines.ray.node_code import NodeCode, code_of
from quorate.engines.ray.option import RuntimeEnvSpec
from quorate.tune.driver import Driver
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import ResolvedSearch
from quorate.tune.local_search import demand_of, refuse_too_large
from quorate.tune.spec import PbtSpec, SearchSpec
from quorate.tune.trial_run import run_name

KEY_OF_ADDRESS = "address"
OBJECT_STORE = 100 * 2**20
"""Bytes for what Ray shares: configurations and numbers."""
_TUNE = {
    # What a trial computes is in its run folder, and what is decided in the journal: Tune's own state is never read.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


@contextlib.contextmanager
def on_ray(search: ResolvedSearch, folder: SearchFolder) -> Iterator[Callable[[Driver, dict[str, Any]], None]]:
    """Connected to Ray: what has the trials of a search trained there."""
    code = _code_of(search, folder)
    with _settings(search.spec), _connected(search, code) as sent:
        yield partial(_train, search, sent)


def _train(search: ResolvedSearch, sent: Path | None, driver: Driver, manner: dict[str, Any]) -> None:
    from ray.air._internal import usage

    from quorate.engines.ray.connection import replaced
    from quorate.tune.ray_tune import Population, Pruned, RaySearcher

    spec = search.spec
    try:
        searcher = RaySearcher(driver.source, spec.concurrent)
        scheduler = (
            Population(spec, _interval_of(search), driver.journal, searcher)
            if isinstance(spec.scheduler, PbtSpec)
            else Pruned(spec, driver.journal)
        )
        actor = {"search": search, "manner": manner, "sent": sent}
        # By kind: for that Tune imports MLflow and others, which takes it seconds.
        with replaced(usage, "tag_callbacks", lambda _: False):
            _tuner(search, driver, actor, searcher, scheduler).fit()
    except Exception as error:
        if (own := own_error(error)) is error:
            raise
        raise own from None


def own_error(error: BaseException) -> BaseException:
    """What was raised in a callback of Tune's, which turns it into a text and an error of its own."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, QuorateError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def _interval_of(search: ResolvedSearch) -> int:
    """After how many steps a population looks at itself."""
    assert isinstance(search.spec.scheduler, PbtSpec)
    interval = search.spec.scheduler.interval or search.job.spec.evaluate.every
    if not isinstance(interval, int):
        raise RequestError(
            f"scheduler: pbt needs to know after how many steps it compares trials, and evaluate.every is {interval}. "
            "Write a number of steps for it in the job, or scheduler: {kind: pbt, interval: N}."
        )
    return interval


def _tuner(search: ResolvedSearch, driver: Driver, given: dict[str, Any], searcher: Any, scheduler: Any) -> Any:
    """`given` is what each actor is told at its start."""
    from ray import tune

    from quorate.tune.ray_tune import RayDriver, TrialActor

    hearing = RayDriver(driver, scheduler)
    demand = demand_of(search, search.job.spec.device == "cuda")
    actor = tune.with_parameters(TrialActor, **given)
    return tune.Tuner(
        tune.with_resources(actor, tune.PlacementGroupFactory([demand])),
        tune_config=tune.TuneConfig(
            num_samples=-1,
            search_alg=searcher,
            scheduler=scheduler,
            reuse_actors=True,
            trial_name_creator=lambda trial: run_name(trial.config["trial"]),
            trial_dirname_creator=lambda trial: run_name(trial.config["trial"]),
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(driver.journal.folder.trials.resolve().parent),
            stop=hearing,
            callbacks=[hearing],
            # An actor that dies has lost its node: a job that fails says so itself.
            failure_config=tune.FailureConfig(max_failures=-1),
            verbose=0,
        ),
    )


def import_ray() -> None:
    """What a search imports of Ray's, ahead of its need."""
    with _environment(_TUNE):
        import quorate.tune.ray_tune  # noqa: F401


def _settings(spec: SearchSpec) -> contextlib.AbstractContextManager[None]:
    """Tune is told by variables how to behave. Of a population all trials have to be known from the beginning; of
    others as many as run at a time, whose processes start side by side."""
    known = spec.trials if spec.scheduler.kind == "pbt" else spec.concurrent
    return _environment({**_TUNE, "TUNE_MAX_PENDING_TRIALS_PG": str(known or 1)})


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _code_of(search: ResolvedSearch, folder: SearchFolder) -> NodeCode:
    """What the nodes of a cluster are given: as for a job on it. On this machine all is there."""
    if search.spec.address == "local":
        return NodeCode()
    stays = [folder.path.parent, *(Path(each) for each in (search.spec.storage, search.source) if each)]
    return code_of(search.job.spec.task, RuntimeEnvSpec(), stays)


@contextlib.contextmanager
def _connected(search: ResolvedSearch, code: NodeCode) -> Iterator[Path | None]:
    """A cluster of its own on this machine, with room for as many trials as are asked for at once; or one that is. It
    tells which folder was sent to its nodes."""
    import ray

    from quorate.engines.ray.connection import connect, init, warn_without_token

    demand = demand_of(search, search.job.spec.device == "cuda")
    if ray.is_initialized():
        warn_without_token()
        _refuse_without_room(demand)
        yield None
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    # What becomes of an actor that died is in the journal; it would print the traceback of each.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    session = None
    if search.spec.address == "local":
        cpus = demand.get("CPU", 1.0)
        wanted = math.ceil((search.spec.concurrent or 1) * cpus)
        cores = wanted if search.spec.concurrent else max(wanted, usable_cores())
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        init("local", search.spec.name, KEY_OF_ADDRESS, num_cpus=cores, **options)
        session = ray._private.worker._global_node.get_session_dir_path()
    else:
        connect(search.spec.address, search.spec.name, code, KEY_OF_ADDRESS)
    try:
        _refuse_without_room(demand)
        yield code.root
    except BaseException:
        session = None  # what Ray has logged may tell why
        raise
    finally:
        ray.shutdown()
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def _refuse_without_room(demand: dict[str, float]) -> None:
    """A trial that fits on no node would wait for ever."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, amount in demand.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        refuse_too_large(name, amount, most, "one node", "the largest node of the cluster")

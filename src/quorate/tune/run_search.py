"""From a search to its end: connect to Ray, give Tune the trials, and go on where an earlier part was killed."""

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError, RequestError, RunError
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.engines.node_code import NodeCode, code_of
from quorate.history.search_record import SearchRecord
from quorate.spec.engine import RAY_CLIENT, RuntimeEnvSpec
from quorate.spec.search import HyperbandSpec, PbtSpec, SearchSpec
from quorate.spec.search_load import ResolvedSearch
from quorate.storage.search_folder import SearchFolder
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.tune.journal import Journal, Listener
from quorate.tune.mlflow_parent import MlflowParent

log = logging.getLogger(__name__)

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


def run_search(
    search: ResolvedSearch, folder: SearchFolder, listener: Listener | None, tick: Callable[[], None]
) -> MlflowParent:
    """Run a search, or what is left of it; why it has ended is in its log. Returns who is to be told what it has found.

    The listener hears each line of the log, and `tick` is called several times a second.
    """
    # From here on a signal only asks for the end: Ray, which takes seconds to start, would be left behind half-started.
    with listening_to_signals() as signals, folder.lock():
        refuse_without_ray()
        journal = Journal(folder, listener)
        _share(folder, search.spec.storage)
        parent = MlflowParent(search, folder)
        manner = {"name": "trial", "runs": str(folder.trials.resolve())}
        if parent.uri is not None:
            manner["track.mlflow"] = parent.uri
        try:
            code = _code_of(search, folder)
            # Again within: Ray takes SIGTERM for itself when it is connected.
            with _settings(search.spec), _connected(search, code) as sent, listening_to_signals():
                _run(search, journal, manner, sent, signals, tick)
        except BaseException:
            parent.end(SearchRecord.read(folder, with_runs=False))
            raise
        return parent


def _run(
    search: ResolvedSearch,
    journal: Journal,
    manner: dict[str, Any],
    sent: Path | None,
    signals: Signals,
    tick: Callable[[], None],
) -> None:
    from quorate.tune.ray_driver import COMPLETE, Driver

    journal.tell("search-began" if journal.log.began is None else "search-resumed", reason=search.source)
    reason = "it failed"
    try:
        source, scheduler = _parts(search, journal)
        driver = Driver(search, journal, source, scheduler, signals, tick)
        if not signals.reason:
            actor = {"search": search, "manner": manner, "sent": sent}
            with _uncounted_callbacks():
                _tuner(demand_of(search), journal.folder, actor, source, scheduler, driver).fit()
        reason = driver.reason or signals.reason or COMPLETE
    except Exception as error:
        if (own := own_error(error)) is error:
            raise
        raise own from None
    finally:
        journal.tell("search-ended", reason=reason)
    if driver.refusal is not None:
        raise driver.refusal


def own_error(error: BaseException) -> BaseException:
    """What was raised in a callback of Tune's, which turns it into a text and an error of its own."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, QuorateError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def refuse_without_ray() -> None:
    """Before a search has its folder: what runs its trials must be installed."""
    if find_spec("ray") is None:
        raise RequestError(f"quorate tune needs the library ray, which is not installed here: {install_of('tune')}.")


def demand_of(search: ResolvedSearch) -> dict[str, float]:
    """What a trial takes of the cluster: all of its workers, on one node."""
    spec, job = search.spec.trial, search.job.spec
    assert isinstance(job.workers, int)
    cpu = spec.cpu if spec.cpu is not None else float(job.threads)
    gpu = spec.gpu if spec.gpu is not None else float(job.device == "cuda")
    demand = {"CPU": job.workers * cpu, "GPU": job.workers * gpu}
    return {name: amount for name, amount in demand.items() if amount}


def _parts(search: ResolvedSearch, journal: Journal) -> tuple[Any, Any]:
    from quorate.tune.ray_schedulers import Asha, Hyperband, NoScheduler, Population
    from quorate.tune.ray_searcher import TrialSource

    spec = search.spec
    waits = isinstance(spec.scheduler, HyperbandSpec)
    # In brackets and in populations trials wait for each other: all are told anew, from what they have recorded.
    replays = isinstance(spec.scheduler, HyperbandSpec | PbtSpec)
    source = TrialSource(spec, journal, None if waits else spec.concurrent, replays)
    if isinstance(spec.scheduler, PbtSpec):
        return source, Population(spec, interval_of(search), journal, source)
    if isinstance(spec.scheduler, HyperbandSpec):
        return source, Hyperband(spec)
    return source, Asha(spec, journal) if spec.scheduler.kind == "asha" else NoScheduler()


def interval_of(search: ResolvedSearch) -> int:
    """After how many steps a population looks at itself."""
    assert isinstance(search.spec.scheduler, PbtSpec)
    interval = search.spec.scheduler.interval or search.job.spec.evaluate.every
    if not isinstance(interval, int):
        raise RequestError(
            f"scheduler: pbt needs to know after how many steps it compares trials, and evaluate.every is {interval}. "
            "Write a number of steps for it in the job, or scheduler: {kind: pbt, interval: N}."
        )
    return interval


def _tuner(
    demand: dict[str, float], folder: SearchFolder, given: dict[str, Any], source: Any, scheduler: Any, driver: Any
) -> Any:
    """`given` is what each actor is told at its start."""
    from ray import tune

    from quorate.tune.ray_trial import TrialActor, run_name

    actor = tune.with_parameters(TrialActor, **given)
    return tune.Tuner(
        tune.with_resources(actor, tune.PlacementGroupFactory([demand])),
        tune_config=tune.TuneConfig(
            num_samples=-1,
            search_alg=source,
            scheduler=scheduler,
            reuse_actors=True,
            trial_name_creator=lambda trial: run_name(trial.config["trial"]),
            trial_dirname_creator=lambda trial: run_name(trial.config["trial"]),
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder.trials.resolve().parent),
            stop=driver,
            callbacks=[driver],
            # An actor that dies has lost its node: a job that fails says so itself.
            failure_config=tune.FailureConfig(max_failures=-1),
            verbose=0,
        ),
    )


def import_ray() -> None:
    """What a search imports of Ray's, ahead of its need."""
    if find_spec("ray") is not None:
        with _environment(_TUNE):
            import quorate.tune.ray_driver  # noqa: F401


def _settings(spec: SearchSpec) -> contextlib.AbstractContextManager[None]:
    """Tune is told by variables how to behave. In brackets all trials have to be known from the beginning; of others as
    many as run at a time, whose processes start side by side."""
    known = spec.trials if spec.scheduler.kind in ("hyperband", "pbt") else spec.concurrent
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


@contextlib.contextmanager
def _uncounted_callbacks() -> Iterator[None]:
    """Have Tune not count its callbacks by kind: for that it imports MLflow and others, which takes it seconds."""
    from ray.air._internal import usage

    count = usage.tag_callbacks
    usage.tag_callbacks = lambda _: False
    try:
        yield
    finally:
        usage.tag_callbacks = count


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

    from quorate.engines.ray_connection import connect, init, warn_without_token

    if ray.is_initialized():
        warn_without_token()
        _refuse_without_room(demand_of(search))
        yield None
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    # What becomes of an actor that died is in the journal; it would print the traceback of each.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if search.spec.address.startswith(RAY_CLIENT):
        raise RequestError(
            f"address: {search.spec.address} is for programs outside of the cluster, and Ray Tune cannot be driven "
            "from there. Type the command on a machine of the cluster, with address: auto."
        )
    session = None
    if search.spec.address == "local":
        cpus = demand_of(search).get("CPU", 1.0)
        wanted = math.ceil((search.spec.concurrent or 1) * cpus)
        cores = wanted if search.spec.concurrent else max(wanted, usable_cores())
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        init("local", search.spec.name, KEY_OF_ADDRESS, num_cpus=cores, **options)
        session = ray._private.worker._global_node.get_session_dir_path()
    else:
        connect(search.spec.address, search.spec.name, code, KEY_OF_ADDRESS)
    try:
        warn_without_token()
        _refuse_without_room(demand_of(search))
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
        if amount > most:
            raise RequestError(
                f"trial: a trial takes {amount:g} {name} on one node (workers × {name.lower()}), and the largest node "
                f"of the cluster has {most:g}. Use fewer workers, or less for each."
            )


def _share(folder: SearchFolder, storage: str | None) -> None:
    """Have the runs of the trials in a folder that all nodes reach."""
    if storage is None or folder.trials.is_symlink():
        return
    shared = Path(storage) / folder.name / "trials"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        if any(shared.iterdir()):
            # Its runs would pass for the trials of this search.
            raise RunError(f"storage: {shared} has the trials of another search. Use another name or storage.")
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt was killed here
            folder.trials.rmdir()
        folder.trials.symlink_to(shared, target_is_directory=True)
    except OSError as error:
        raise RunError(f"storage: {shared} cannot be used ({error.strerror or error}).") from error

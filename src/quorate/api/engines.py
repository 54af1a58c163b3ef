"""Which engine a job runs on."""

from pkgutil import resolve_name
from typing import Any

from quorate.core.errors import RequestError
from quorate.core.failure import Failure
from quorate.engines.engine import Engine
from quorate.engines.local import LocalEngine
from quorate.spec.job import JobSpec
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch


def engine_of(launch: Launch, signals: Signals, **given: Any) -> Engine:
    """The engine that the job of a launch names; what is `given` besides is for an engine of that kind."""
    spec = launch.spec
    if not spec.engine.opened_by:
        return LocalEngine(launch.run, launch.preparation)
    refuse_missing_engine(spec)
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import keep_in_store

        keep_in_store(launch.run, spec, spec.engine.object_store)
    places = launch.first_workers + (spec.spares + spec.strategy.server_count if launch.mode.is_training else 0)

    def stopped() -> Failure | None:
        told = f"{signals.reason} while it connected to the cluster; nothing has begun."
        return None if signals.reason is None else signals.failure(told)

    engine: Engine = resolve_name(spec.engine.opened_by)(launch.run, launch.preparation, spec, places, stopped, **given)
    return engine


def refuse_missing_engine(spec: JobSpec) -> None:
    """Before a run has its folder: what a job is to run on must be installed."""
    spec.engine.refuse_missing()
    if spec.engine.object_store is not None:
        from quorate.stores.stored_run import refuse_unusable_store

        refuse_unusable_store(spec, spec.engine.object_store)


def refuse_cluster(spec: JobSpec, what: str) -> None:
    """For what happens on this machine alone."""
    if spec.engine.is_cluster:
        raise RequestError(
            f"{what} on this machine, and the job says engine: {spec.engine.kind}. Its bits are the same here: "
            "--set engine=local"
        )

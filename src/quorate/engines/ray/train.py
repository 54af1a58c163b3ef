"""Gangs on a Ray cluster: Ray Train starts their hosts together, and all anew when one of them is lost.

Each worker of a `TorchTrainer` has a host of its own (`RayHost`), which ends with it. To the launcher's engine it is a
host like any other: it is told to start a worker, and tells what becomes of it. A worker that dies alone is replaced
where it was, and Ray Train hears nothing of that. With a process of Ray Train, or with a node, the whole group is lost.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.core.gpus import VISIBLE
from quorate.engines.ray.connection import first_line
from quorate.engines.ray.host import Report
from quorate.engines.ray.hosts import ClusterFailed, GroupLost, HostLost, node_of
from quorate.engines.ray.node_code import NodeCode
from quorate.engines.ray.places import ClusterSettings
from quorate.engines.ray.ray_cluster import RayCluster, RayHostLink, host_class
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, StepCompleted
from quorate.observe.jsonl import EventTail, end_of_events
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

REPORT_EVERY = 2.0
"""Seconds between two reports to Ray Train, which takes no more."""
FIT_PATIENCE = 30.0
"""Seconds that Ray Train has to end a run whose workers are gone."""
END_PATIENCE = 10.0
"""Seconds that a host has to end its workers, when the job is over."""
NAME = "ray_train"
"""What a run of Ray Train is called, and so its folder in that of the job's run."""


@dataclass(frozen=True)
class GroupConfig:
    """What the function that Ray Train runs is told. `folder` is the run's, as all hosts reach it; `nonce` is the
    launcher's own: names of actors are seen by all jobs of a namespace."""

    folder: str
    # The folder that the nodes have copies of, if they were given one.
    sent: str | None = None
    nonce: str = field(default_factory=lambda: f"quorate-{secrets.token_hex(8)}")

    @property
    def run(self) -> RunFolder:
        return RunFolder(Path(self.folder))

    @property
    def over(self) -> Path:
        """The file that tells Ray Train's workers to end."""
        return self.run.path / NAME / "over"


class NoProcessGroup(TorchConfig):  # type: ignore[misc] # Ray has no types here
    """Workers make their own process group, and another one after a loss, over links that they have anyway."""

    @property
    def backend_cls(self) -> Any:
        """One that does nothing."""
        return Backend

    @property
    def train_func_context(self) -> Any:
        """One that does nothing: no device is touched in Ray Train's own process."""
        return contextlib.nullcontext


def scaling_config(workers: int, demand: Mapping[str, float], placement: str) -> Any:
    """How many workers, what each takes, and how they are placed, as Ray Train has it."""
    return ScalingConfig(
        num_workers=workers,
        use_gpu=demand.get("GPU", 0.0) > 0,
        resources_per_worker=dict(demand),
        placement_strategy=placement.upper(),
    )


def run_config() -> Any:
    """A lost group is started anew however often: when that is in vain is the coordinator's to say, which knows
    whether the job gets any further."""
    return RunConfig(name=NAME, failure_config=FailureConfig(max_failures=-1))


def group_trainer(config: GroupConfig, scaling: Any, run: Any) -> Any:
    """What starts the hosts of a gang. What Ray Train notes lies in the run's folder."""
    return TorchTrainer(
        hold_place,
        train_loop_config=asdict(config),
        torch_config=NoProcessGroup(),
        scaling_config=scaling,
        run_config=replace(run, name=NAME, storage_path=config.folder),
    )


# --- in Ray Train's workers


def hold_place(config: dict[str, Any]) -> dict[str, Any]:
    """Have a host for one worker of the gang, and report what the job tells of itself, until the job is over; the last
    of it is returned, since Ray Train's result has only metrics that came with a checkpoint of its own.

    Raises as soon as the host is lost: then Ray Train starts all anew.
    """
    told = GroupConfig(**config)
    rank = ray.train.get_context().get_world_rank()
    # What the first one sees holds for all: a folder may show its files to one later than to another.
    group = broadcast_from_rank_zero(secrets.token_hex(4) if rank == 0 and not told.over.exists() else None)
    if group is None:
        return {}
    node = ray.get_runtime_context().get_node_id()
    placed = host_class().options(
        name=f"{told.nonce}/{group}/{rank}/{node}",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    # Ray Train says to its workers by their environment which GPUs are theirs.
    host = placed.remote(told.run.name, told.sent and Path(told.sent), os.environ.get(VISIBLE))
    end = host.await_end.remote()
    metrics = Metrics(told.run.events_file)
    while True:
        if ray.wait([end], timeout=REPORT_EVERY)[0]:
            ray.get(end)
        # Reports and the end are common to all, too.
        is_over = bool(ray.wait([end], timeout=0)[0]) or told.over.exists()
        news, is_over = broadcast_from_rank_zero((metrics.news(), is_over) if rank == 0 else None)
        if news:
            ray.train.report(news)
        if is_over:
            ray.wait([end], timeout=END_PATIENCE)
            return metrics.newest


class Metrics:
    """The newest of what a run's events tell from now on, as Ray Train shows it: one flat mapping."""

    def __init__(self, events: Path) -> None:
        self._tail = EventTail(events)
        self._tail.offset = end_of_events(events)
        self.newest: dict[str, Any] = {}

    def news(self) -> dict[str, Any]:
        """All of it, if there is anything new."""
        before = dict(self.newest)
        for event in self._tail.read_new():
            self._take(event)
        return {} if self.newest == before else dict(self.newest)

    def _take(self, event: Event) -> None:
        match event:
            case StepCompleted():
                self.newest |= {
                    "step": event.step,
                    "epoch": event.epoch,
                    "samples_per_second": event.samples_per_second,
                }
                self.newest |= {f"loss/{name}" if name else "loss": loss for name, loss in event.losses.items()}
            case EvaluationDone():
                self.newest |= {f"evaluation/{name}": value for name, value in (event.metrics or {}).items()}


# --- in the launcher


@dataclass(eq=False)
class _Group:
    """The hosts that Ray Train has started together, by their places: ``NODE/GROUP-RANK``."""

    name: str
    actors: dict[str, Any]
    free: list[str] = field(default_factory=list)
    is_broken: bool = False


class RayTrainCluster(RayCluster):
    """A cluster on which the places of a gang are Ray Train's. The rest is as ever.

    `folder` is the run's, as all hosts reach it. `fit` has Ray Train start the hosts, and returns when it has ended its
    run.
    """

    def __init__(
        self,
        address: str,
        settings: ClusterSettings,
        code: NodeCode,
        folder: str,
        fit: Callable[[GroupConfig], None] | None = None,
    ) -> None:
        config = GroupConfig(folder)
        super().__init__(address, config.run.name, settings.demand, code)
        self._settings = settings
        self._config = config
        self._fit = fit or self._fit_as_usual
        self._turn = threading.RLock()
        self._group: _Group | None = None
        self._known: set[str] = set()
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._is_closed = False

    def _fit_as_usual(self, config: GroupConfig) -> None:
        settings = self._settings
        scaling = scaling_config(settings.workers, settings.demand, settings.placement)
        group_trainer(config, scaling, run_config()).fit()

    def ask_room(self, node: str | None, avoid: frozenset[str]) -> "TrainRoom":  # noqa: ARG002 (Ray Train decides)
        self._keep_trainer()
        return TrainRoom(self)

    def open_host(self, node: str) -> RayHostLink:
        with self._turn:
            group = self._group
            if "/" not in node:
                return super().open_host(node)
            if group is None or node not in group.actors:
                raise HostLost("its group is gone")
            return TrainHostLink(node, self, group)

    def take_place(self) -> tuple[_Group, str] | None:
        """A place in the group that there is, once all of its hosts are there."""
        self._keep_trainer()
        with self._turn:
            if self._group is None:
                self._group = self._find_group()
            if self._group is None or not self._group.free:
                return None
            if any(node_of(place) in self._draining for place in self._group.actors):
                if len(self._group.free) == len(self._group.actors):
                    self.break_up(self._group)  # all have left it: Ray Train starts the next one elsewhere
                return None
            return self._group, self._group.free.pop(0)

    def give_back(self, group: _Group, place: str) -> None:
        """Nobody is there any more; the first place is taken first again."""
        with self._turn:
            group.free = [one for one in group.actors if one == place or one in group.free]

    def break_up(self, group: _Group) -> None:
        """One host of a group is lost: end the others, so that nothing of it can write when the next one begins."""
        with self._turn:
            if group.is_broken:
                return
            group.is_broken = True
            if self._group is group:
                self._group = None
        for actor in group.actors.values():
            try:
                ray.kill(actor)
            except Exception as error:
                log.info("a host of a lost group could not be ended: %s", error)

    def close(self) -> None:
        with self._turn:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._config.over.parent.mkdir(parents=True, exist_ok=True)
            self._config.over.touch()
            thread.join(FIT_PATIENCE)
            if thread.is_alive():
                log.warning("Ray Train has not ended its run within %.0f s", FIT_PATIENCE)
            else:
                self._config.over.unlink()
        super().close()

    def _find_group(self) -> _Group | None:
        """The next group of which all hosts are there."""
        places: dict[str, dict[int, tuple[str, str]]] = {}
        for name in list_named_actors():
            nonce, _, rest = name.partition("/")
            if nonce == self._config.nonce:
                group, rank, node = rest.split("/")
                places.setdefault(group, {})[int(rank)] = f"{node}/{group}-{rank}", name
        for group, ranks in places.items():
            if group not in self._known and len(ranks) == self._settings.workers:
                try:
                    actors = {place: ray.get_actor(name) for _, (place, name) in sorted(ranks.items())}
                except ValueError:  # one of them has just ended
                    return None
                self._known.add(group)
                return _Group(group, actors, free=list(actors))
        return None

    def _keep_trainer(self) -> None:
        """Have Ray Train run. It starts lost groups anew by itself: where it has ended, it has given up."""
        with self._turn:
            if self._failure:
                raise ClusterFailed(f"Ray Train has given up the gang: {self._failure}.")
            if self._thread is None and not self._is_closed:
                self._config.over.unlink(missing_ok=True)  # of an earlier part of the run
                # Not in the main thread: there Ray would take Ctrl-C for itself.
                self._thread = threading.Thread(target=self._run_trainer, name="ray-train", daemon=True)
                self._thread.start()

    def _run_trainer(self) -> None:
        try:
            self._fit(replace(self._config, sent=None if self._sent is None else str(self._sent)))
            self._failure = "all of its workers have ended before the job was over"
        except Exception as error:
            if not self._is_closed:
                log.exception("Ray Train has given up the gang")
            self._failure = first_line(error)


class TrainRoom:
    """A place in the group that Ray Train has started, or will."""

    def __init__(self, cluster: RayTrainCluster) -> None:
        self._cluster = cluster
        self._place: tuple[_Group, str] | None = None
        # Its host has no others: Ray Train has seen to that.
        self.gpus = ""

    def node(self) -> str | None:
        if self._place is None:
            self._place = self._cluster.take_place()
        return None if self._place is None else self._place[1]

    def release(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._cluster.give_back(*place)


class TrainHostLink(RayHostLink):
    """Calls of the host that a worker of Ray Train has. Its loss is that of its group."""

    def __init__(self, place: str, cluster: RayTrainCluster, group: _Group) -> None:
        super().__init__(place, group.actors[place])
        self._cluster = cluster
        self._group = group
        self._is_ending = False

    def tell(self, command: str, *arguments: Any) -> None:
        self._is_ending = self._is_ending or command == "end_workers"
        super().tell(command, *arguments)

    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        try:
            return super().next(arrived, seconds)
        except HostLost as error:
            if self._group.is_broken:
                raise GroupLost(error.message) from None
            if not self._is_ending:
                self._cluster.break_up(self._group)
            raise

    def close(self) -> None:
        """Let it end by itself at the end of a job, as its worker of Ray Train expects; else end it with its group."""
        if not self._is_ending:
            self._cluster.break_up(self._group)
        super().close()

    def _end_process(self) -> None:
        """Its worker of Ray Train does, which waits for its end."""

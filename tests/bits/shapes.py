"""The same small job by several numbers of workers and servers, over several links."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gang
from quorate.task.task import Task


class Shape(NamedTuple):
    """Who trains: workers on the ring or, where there are servers, with these; and how they are linked."""

    workers: int
    servers: int = 0
    replicas: int = 1
    links: str = "auto"
    hosts: str = ""

    def __str__(self) -> str:
        return " ".join(map(str, tuple(self)))


def trained(
    task: type[Task],
    folder: Path,
    shape: Shape = Shape(1),  # noqa: B008 (it is frozen)
    *,
    stop_at: int | None = None,
    sabotage: Callable[[int, Any], None] | None = None,
    **keys: Any,
) -> gang.Ended:
    """Train in a folder, or go on from the checkpoint there. `strategy` adds to that of the shape."""
    folder.mkdir(exist_ok=True)
    workers, servers, replicas, links, hosts = shape
    served = {"kind": "parameter-server", "servers": servers, "replicas": replicas}
    keys["strategy"] = (served if servers else {"kind": "ring"}) | keys.get("strategy", {})
    spec = gang.job(task, links=links, **keys)
    return gang.train(task, spec, workers, folder, hosts=hosts, stop_at=stop_at, sabotage=sabotage)


def one_digest(task: type[Task], folder: Path, *shapes: Shape, **keys: Any) -> str:
    """The digest that all shapes come to."""
    found = {str(shape): trained(task, folder / str(shape), shape, **keys).digest for shape in shapes}
    assert len(set(found.values())) == 1, found
    return next(iter(found.values()))

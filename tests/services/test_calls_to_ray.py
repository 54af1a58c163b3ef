"""What Ray is told, and asked, in calls of which no cluster is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray


def test_ray_is_told_the_name_of_a_run_and_not_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils

    from quorate.engines.ray_cluster import RayCluster

    before, told = utils.get_entrypoint_name, []

    def init(**_: Any) -> None:
        told.append(utils.get_entrypoint_name())
        raise RuntimeError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match="no cluster"):
        RayCluster("auto", "digits-0001", {}).connect()
    assert told == ["quorate (digits-0001)"]
    assert utils.get_entrypoint_name is before


def test_gpus_are_known_where_ray_sets_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray_cluster import gpus_given

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["2", "3"], "TPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert gpus_given() == "2,3"

"""The keys `track` and `notify`: what they take, and what is said of anything else."""

from typing import Any

import pytest
from pydantic import ValidationError

from quorate.spec.tracking import NotifySpec, TrackSpec, address_of


def test_nothing_is_tracked_unless_it_is_switched_on() -> None:
    assert not TrackSpec().is_on
    assert not TrackSpec(every=10, system=1.0).is_on


@pytest.mark.parametrize(
    "keys",
    [{"mlflow": True}, {"mlflow": "http://a:5000"}, {"tensorboard": True}, {"wandb": "offline"}, {"prometheus": 0}],
)
def test_each_key_switches_on(keys: dict[str, Any]) -> None:
    assert TrackSpec(**keys).is_on


@pytest.mark.parametrize(
    ("listener", "address"),
    [(9400, ("127.0.0.1", 9400)), (0, ("127.0.0.1", 0)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:0", ("::1", 0))],
)
def test_where_prometheus_listens(listener: int | str, address: tuple[str, int]) -> None:
    assert address_of(listener) == address
    assert TrackSpec(prometheus=listener).prometheus == listener


@pytest.mark.parametrize("listener", [True, -1, 65536, "9400", "host", "host:", ":80", "host:99999", "host:x"])
def test_where_it_cannot(listener: Any) -> None:
    with pytest.raises(ValidationError):
        TrackSpec(prometheus=listener)


@pytest.mark.parametrize("uri", ["", "localhost:5000", "mlflow.db"])
def test_what_is_no_place_for_mlflow(uri: str) -> None:
    with pytest.raises(ValidationError, match=r"Write http://HOST:PORT"):
        TrackSpec(mlflow=uri)


@pytest.mark.parametrize("url", ["", "localhost:4317", "ftp://a", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValidationError):
        NotifySpec(webhook=url)


def test_whom_to_tell_when() -> None:
    assert NotifySpec(command="true").on == ["failed", "finished"]
    with pytest.raises(ValidationError):
        NotifySpec(command="true", on=[])
    with pytest.raises(ValidationError):
        NotifySpec(command="true", on=["began"])  # type: ignore[list-item]

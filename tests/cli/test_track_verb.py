"""`quorate track`, as far as it goes without the libraries of trackers, and jobs that need one which is missing."""

import importlib.util
import re

import pytest

from command import Workplace
from quorate.api import run_part
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.spec.tracking import TrackSpec


def test_a_run_that_nobody_tracks(used_workplace: Workplace) -> None:
    done = used_workplace.run("track", "last")
    assert done.code == 2
    assert "the job of run tiny-0001 is not tracked: say where to track it, such as --mlflow true" in done.error


def test_a_mode_that_there_is_not(used_workplace: Workplace) -> None:
    done = used_workplace.run("track", "last", "--wandb", "sometimes", "--json")
    assert (done.code, done.document["status"]) == (2, "refused")
    assert "track.wandb" in done.document["error"]


@pytest.mark.parametrize("key", ["mlflow", "tensorboard", "wandb"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_part, "find_spec", lambda name: None)
    track = TrackSpec.model_validate({key: "offline" if key == "wandb" else True})
    with pytest.raises(RequestError, match=rf"track.{key} needs .* {re.escape(install_of(key))}"):
        run_part.refuse_missing_libraries(track)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="MLflow is installed here")
def test_a_job_that_cannot_be_tracked_leaves_no_run(workplace: Workplace) -> None:
    workplace.write_job(track={"mlflow": True})
    done = workplace.train()
    assert done.code == 2
    assert install_of("mlflow") in done.error
    assert workplace.runs() == []


def test_nothing_is_needed_for_a_job_that_is_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_part, "find_spec", lambda name: None)
    run_part.refuse_missing_libraries(None)
    run_part.refuse_missing_libraries(TrackSpec())

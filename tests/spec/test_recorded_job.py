from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.core.errors import RunError
from quorate.spec.load import load_recorded, resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob, dump_job, glance_at_recorded

names = st.text(max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | finite | st.text(max_size=15)
params = st.dictionaries(names, scalars | st.lists(scalars, max_size=3) | st.dictionaries(names, scalars, max_size=2))
jobs = st.fixed_dictionaries(
    {"task": st.just("a.b:C"), "batch_size": st.integers(8, 99), "steps": st.integers(1, 9), "params": params},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "clip_norm": st.floats(1e-9, 1e9),
        "schedule": st.fixed_dictionaries({"kind": st.sampled_from(["linear", "cosine"]), "final": st.floats(0, 1)}),
        "evaluate": st.fixed_dictionaries({"every": st.integers(1, 9) | st.sampled_from(["end", "epoch"])}),
        "runs": st.text(min_size=1, max_size=10),
    },
)


def resolve(job: dict[str, Any], *overrides: Override) -> ResolvedJob:
    return resolve_mapping(job, "Job(…)", {}, overrides)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(jobs)
def test_what_is_recorded_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, job: dict[str, Any]) -> None:
    resolved = resolve(job)
    path: Path = tmp_path_factory.getbasetemp() / "recorded.yaml"
    path.write_text(dump_job(resolved), encoding="utf-8")
    recorded = load_recorded(path, {}, [])
    assert recorded.spec == resolved.spec
    assert dump_job(recorded) == dump_job(resolved)


def test_every_key_stands_with_its_origin() -> None:
    job = {"task": "a.b:C", "batch_size": 8, "steps": 1, "params": {"rate": 1e-5, "text": "1e3"}}
    text = dump_job(resolve(job, Override("workers", 2, "--workers")))
    lines = text.splitlines()
    assert "workers: 2  # --workers" in lines
    assert "  rate: 1.0e-05  # Job(…)" in lines
    assert "  text: '1e3'  # Job(…)" in lines
    assert "  kind: ring  # default" in lines
    assert "schedule: null  # default" in lines
    assert yaml.safe_load(text)["params"] == job["params"]


def test_layers_go_over_a_recorded_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_job(resolve({"task": "a.b:C", "batch_size": 8, "steps": 1})))
    resolved = load_recorded(path, {"QUORATE_WORKERS": "2"}, [Override("steps", 5, "--steps")])
    assert (resolved.spec.workers, resolved.spec.steps) == (2, 5)
    assert (resolved.origins["workers"], resolved.origins["steps"]) == ("environment QUORATE_WORKERS", "--steps")
    assert (resolved.origins["batch_size"], resolved.origins["lanes"]) == ("Job(…)", "default")
    assert resolved.source == str(path)


def test_an_origin_cannot_break_the_file() -> None:
    job = resolve_mapping({"task": "a.b:C", "batch_size": 8, "steps": 1}, "odd\nlanes: 3", {}, [])
    assert yaml.safe_load(dump_job(job))["lanes"] == 8


def test_a_glance_sees_what_a_careful_reading_does(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    params = {"rate": 1e-5, "text": "1e3", "no": "off", "day": "2024-01-01", "deep": {"list": [1, None, True]}}
    job = {"task": "a.b:C", "batch_size": 8, "steps": 1, "params": params}
    path.write_text(dump_job(resolve_mapping(job, "Job(…)", {}, [])), encoding="utf-8")
    assert glance_at_recorded(path) == load_recorded(path, {}, []).spec.model_dump()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"a: 2026-13-45", "is not YAML"),
        (b"a: !!python/name:os.system x", "is not YAML"),
        (b"[" * 100_000, "holds no keys"),
        (b"- " * 100_000, "holds no keys"),
        (b"", "holds no keys"),
        (b"- 1", "holds no keys"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_job_is_told_with_its_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(RunError, match=f"{path} {words}"):
        glance_at_recorded(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"job\.yaml is gone; quorate resume takes the job from the newest checkpoint"):
        glance_at_recorded(tmp_path / "job.yaml")

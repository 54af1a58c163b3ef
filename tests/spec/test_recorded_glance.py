from pathlib import Path

import pytest

from quorate.core.errors import RunError
from quorate.spec.load import load_recorded, resolve_mapping
from quorate.spec.resolved import dump_job, glance_at_recorded


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

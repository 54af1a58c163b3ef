"""Whatever stands in a search file, it is read or refused: nothing else happens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quorate.core.errors import RequestError
from quorate.spec.load import load_job
from quorate.spec.resolved import ResolvedJob
from quorate.tune.loading import read_mapping, read_search
from quorate.tune.spec import SearchSpec

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.sampled_from(
        ["", "asha", "pbt", "grid", "optuna", "accuracy", "params.rate", "batch_size", "min", "digits.yaml"]
    ),
)
KINDS = st.sampled_from(
    ["uniform", "loguniform", "randint", "choice", "grid", "step", "kind", "trials", "workers", "x"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KINDS, inner, max_size=3), max_leaves=6
)
DIMENSIONS = st.dictionaries(KINDS, st.lists(SCALARS, max_size=3) | SCALARS, min_size=1, max_size=2)
KEYS = st.sampled_from(
    [
        "params.rate",
        "params.width",
        "batch_size",
        "lanes",
        "steps",
        "schedule",
        "schedule.kind",
        "strategy.kind",
        "",
        "a..b",
        "workers",
    ]
)
SEARCHES = st.fixed_dictionaries(
    {"space": st.dictionaries(KEYS, DIMENSIONS | VALUES, max_size=3) | VALUES},
    optional={key: VALUES for key in SearchSpec.model_fields if key not in ("space", "job")},
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ResolvedJob:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "digits.py").touch()
    (folder / "digits.yaml").write_text("task: digits.py:Digits\nbatch_size: 64\nlanes: 4\nsteps: 200\n")
    return load_job(folder / "digits.yaml", {}, [])


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(SEARCHES)
def test_a_search_is_read_or_refused(job: ResolvedJob, keys: dict[str, Any]) -> None:
    try:
        search = read_mapping(keys, "Search(...)", {}, job).accepted()
    except RequestError as error:
        assert str(error)
        return
    for trial in (1, 2, 7) if search.spec.space else ():
        assert set(search.spec.params(trial)) == set(search.spec.space or {})


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.text(alphabet="ab:{}[]-.,#'\"\n 0123job space params choice", max_size=120))
def test_a_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "find.yaml"
    path.write_text(text)
    with pytest.raises(RequestError):
        read_search(path, {}).accepted()

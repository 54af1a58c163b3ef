from typing import Any

import pytest

from quorate.core.errors import RequestError
from quorate.spec.override import Override, environment_overrides, parse_set, parse_sets, variable_name


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("workers=3", "workers", 3),
        ("checkpoint.every=50", "checkpoint.every", 50),
        ("params.learning_rate=1e-3", "params.learning_rate", 0.001),
        ("params.layers=[1, 2]", "params.layers", [1, 2]),
        ("params={a: {b: 1}}", "params", {"a": {"b": 1}}),
        ("name='3'", "name", "3"),
        ("params.formula=a=b", "params.formula", "a=b"),
        (" seed = 7 ", "seed", 7),
        ("schedule=null", "schedule", None),
    ],
)
def test_set(text: str, key: str, value: Any) -> None:
    assert parse_set(text) == Override(key, value, f"--set {key}")


@pytest.mark.parametrize(
    "text", ["workers", "=3", "a..b=1", ".a=1", "a.=1", "a b=1", "workers=", "workers=[1", "a=!x y", ""]
)
def test_bad_syntax_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"such as --set checkpoint\.every=50"):
        parse_set(text)


def test_what_is_wrong_in_several_settings_is_told_at_once() -> None:
    with pytest.raises(RequestError) as refused:
        parse_sets(["lanes=2", "workers", "seed="])
    assert str(refused.value).count("such as --set") == 2
    assert [override.key for override in parse_sets(["lanes=2", "seed=3"])] == ["lanes", "seed"]


def test_variables_are_read_in_the_order_of_their_names() -> None:
    environment = {
        "QUORATE_WORKERS": "3",
        "QUORATE_CHECKPOINT__EVERY": "50",
        "QUORATE_PARAMS__RATE": "1e-3",
        "HOME": "/",
    }
    overrides, problems = environment_overrides(environment)
    assert not problems
    assert overrides == [
        Override("checkpoint.every", 50, "environment QUORATE_CHECKPOINT__EVERY"),
        Override("params.rate", 0.001, "environment QUORATE_PARAMS__RATE"),
        Override("workers", 3, "environment QUORATE_WORKERS"),
    ]


def test_a_key_and_its_variable() -> None:
    (override,), _ = environment_overrides({variable_name("checkpoint.every"): "1"})
    assert override.key == "checkpoint.every"


@pytest.mark.parametrize(("name", "value"), [("QUORATE_", "1"), ("QUORATE_A__", "1"), ("QUORATE_SEED", "[1")])
def test_variables_that_cannot_be_read(name: str, value: str) -> None:
    overrides, (problem,) = environment_overrides({name: value})
    assert not overrides
    assert problem.path == f"environment {name}"

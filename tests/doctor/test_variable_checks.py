import pytest

from quorate.doctor.report import Level
from quorate.doctor.software import check_job_variable, check_job_variables


def test_variables_of_others_are_none_of_ours() -> None:
    (found,) = check_job_variables({"PATH": "/bin", "_QUORATE_COMPLETE": "x"})
    assert found.level is Level.OK


def test_every_variable_has_its_line() -> None:
    found = check_job_variables({"QUORATE_SEED": "3", "HOME": "/", "QUORATE_CHECKPOINT__EVERY": "50"})
    assert [(each.name, each.level) for each in found] == [
        ("QUORATE_CHECKPOINT__EVERY", Level.NOTE),
        ("QUORATE_SEED", Level.NOTE),
    ]
    assert found[0].text == "sets `checkpoint.every` of every job to 50, over its job file"


@pytest.mark.parametrize(
    ("name", "value", "words", "remedy"),
    [
        ("QUORATE_WORKRS", "2", "there is no such key", "Did you mean QUORATE_WORKERS? Or: unset QUORATE_WORKRS"),
        ("QUORATE_PARMS__KEY", "s3cret", "there is no such key", "Did you mean params? Or: unset QUORATE_PARMS__KEY"),
        ("QUORATE_PARAMS", "s3cret", "no job takes its value", "unset QUORATE_PARAMS"),
        ("QUORATE_PARAMS__KEY", "[s3cret", "no job takes its value", "unset QUORATE_PARAMS__KEY"),
        ("QUORATE_LANES", "four", '"four" is not a whole number', "unset QUORATE_LANES"),
        ("QUORATE_RUNS", "[1", "cannot be read", "unset QUORATE_RUNS"),
        ("QUORATE_", "1", "no key can be meant", "unset QUORATE_"),
    ],
)
def test_a_variable_that_no_job_takes_is_a_warning(name: str, value: str, words: str, remedy: str) -> None:
    found = check_job_variable(name, value)
    assert found.level is Level.WARNING
    assert words in found.text
    assert "every job is refused while it is set" in found.text
    assert f"(environment {name})" not in found.text
    assert "s3cret" not in f"{found}"
    assert found.remedy.endswith(remedy)


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [("QUORATE_PARAMS__API_KEY", "s3cret", "params.api_key"), ("QUORATE_PARAMS", '{"key": "s3cret"}', "params")],
)
def test_what_a_parameter_of_a_task_is_set_to_is_nobodys_business(name: str, value: str, key: str) -> None:
    found = check_job_variable(name, value)
    assert (found.level, found.text) == (Level.NOTE, f"sets `{key}` of every job, over its job file")


@pytest.mark.parametrize(("name", "value"), [("QUORATE_WORKERS", "100"), ("QUORATE_LANES", "512")])
def test_what_may_suit_some_job_is_not_warned_of(name: str, value: str) -> None:
    assert check_job_variable(name, value).level is Level.NOTE

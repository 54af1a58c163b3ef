"""A search file with its job: layers, what it takes from the job, its form in the search's folder, trials' jobs."""

from pathlib import Path

import pytest

from quorate.core.errors import JobFileError
from quorate.spec.override import parse_set
from quorate.spec.resolved import dump_job
from quorate.tune.loading import ResolvedSearch, dump_search, load_recorded_search, read_mapping, read_search, trial_job

JOB = """\
task: digits.py:Digits
batch_size: 64
lanes: 4
steps: 200
evaluate: {every: 20, metric: accuracy, mode: max}
params: {rate: 0.1}
"""
SEARCH = """\
job: digits.yaml
space:
  params.rate: {loguniform: [1e-4, 1]}
  params.width: {choice: [16, 32]}
  batch_size: {randint: [32, 128], step: 32}
trial: {workers: 2}
budget: {trials: 5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").touch()
    (tmp_path / "digits.yaml").write_text(JOB)
    (tmp_path / "find.yaml").write_text(SEARCH)
    return tmp_path


def load(folder: Path, *settings: str, **environment: str) -> ResolvedSearch:
    return read_search(folder / "find.yaml", environment, [parse_set(setting) for setting in settings]).accepted()


def test_what_is_left_out_is_found_in_the_job(folder: Path) -> None:
    search = load(folder)
    assert (search.spec.name, search.spec.metrics, search.spec.modes) == ("find", ("accuracy",), ("max",))
    assert (search.spec.trials, search.spec.algorithm.kind, search.spec.scheduler.kind) == (5, "random", "none")
    assert (search.job.spec.workers, search.job.spec.engine.kind) == (2, "local")
    assert search.origins["mode"] == "evaluate of digits.yaml"
    assert search.origins["budget.trials"] == "find.yaml line 7"


def test_the_metric_of_the_search_is_watched_by_jobs_that_name_none(folder: Path) -> None:
    search = load(folder, "metric=valid_loss")
    assert (search.spec.modes, search.job.spec.evaluate.metric) == (("min",), "accuracy")
    search = load(folder, "metric=top_1", "job.evaluate.metric=null")
    watched = search.job.spec.evaluate
    assert (watched.metric, watched.mode, watched.every) == ("top_1", "max", 20)


def test_settings_go_over_the_search_and_over_its_job(folder: Path) -> None:
    search = load(folder, "space.params.width={choice: [8]}", "job.seed=5", "budget.trials=2", QUORATE_LANES="8")
    assert search.spec.space is not None and list(search.spec.space) == ["params.rate", "params.width", "batch_size"]
    assert search.spec.params(1)["params.width"] == 8
    assert (search.job.spec.seed, search.job.spec.lanes, search.spec.trials) == (5, 8, 2)
    assert search.job.origins["seed"] == "--set job.seed"


def test_settings_go_into_what_stands_there(folder: Path) -> None:
    settings = ("space.batch_size.step=16", "space.params.width.choice=[8]", "space.params.step={choice: [1]}")
    search = load(folder, *settings)
    assert search.spec.space is not None
    told = {key: each.model_dump(exclude_none=True) for key, each in search.spec.space.items()}
    assert told == {
        "params.rate": {"loguniform": [1e-4, 1]},
        "params.width": {"choice": [8]},
        "batch_size": {"randint": [32, 128], "step": 16},
        "params.step": {"choice": [1]},
    }


def test_sections_may_be_nested_in_the_space(folder: Path) -> None:
    text = SEARCH.replace("  params.rate: {loguniform: [1e-4, 1]}\n  params.width: {choice: [16, 32]}\n", "")
    nested = "space:\n  params:\n    rate: {loguniform: [1e-4, 1]}\n    width: {choice: [16, 32]}\n"
    (folder / "nested.yaml").write_text(text.replace("space:\n", nested))
    search = read_search(folder / "nested.yaml", {}).accepted()
    assert search.spec.space == load(folder).spec.space
    assert search.origins["space.params.width"] == "nested.yaml line 5"


def test_a_trial_s_job_tells_where_its_values_are_from(folder: Path) -> None:
    search = load(folder)
    params = search.spec.params(3)
    job = search.trial_job(params, 3, {"name": "trial"})
    assert (job.spec.params, job.spec.batch_size) == (
        {"rate": params["params.rate"], "width": params["params.width"]},
        params["batch_size"],
    )
    assert job.origins["params.rate"] == "find.yaml: space.params.rate, trial 3"
    assert (job.origins["lanes"], job.origins["seed"], job.spec.name) == ("digits.yaml line 3", "default", "trial")
    assert trial_job(search.job, params, 3).spec == search.trial_job(params, 3).spec


def test_values_that_do_not_go_together_are_refused(folder: Path) -> None:
    with pytest.raises(JobFileError, match=r"8 \(find.yaml: space.batch_size, trial 1\) cannot be shared by 9"):
        load(folder).trial_job({"batch_size": 8, "lanes": 9}, 1)


def test_the_search_is_read_back_equal_from_its_folder(folder: Path) -> None:
    search = load(folder, "scheduler={kind: asha, grace: 40}", "space.schedule={choice: [null, {kind: cosine}]}")
    own = folder / "own"
    own.mkdir()
    (own / "search.yaml").write_text(dump_search(search))
    (own / "job.yaml").write_text(dump_job(search.job))
    again = load_recorded_search(own)
    assert again.spec == search.spec.model_copy(update={"job": "job.yaml"})
    assert again.job.spec == search.job.spec
    assert dump_search(again) == dump_search(search)
    assert again.trial_job(again.spec.params(1), 1).spec == search.trial_job(search.spec.params(1), 1).spec


def test_a_job_file_alone_is_a_search_whose_space_is_open(folder: Path) -> None:
    search = read_search(folder / "digits.yaml", {}).accepted()
    assert (search.spec.space, search.spec.metrics, search.spec.name) == (None, ("accuracy",), "digits-search")
    assert search.spec.trials is not None


def test_a_job_may_stand_in_the_search(folder: Path) -> None:
    inline = "".join(f"  {line}\n" for line in JOB.splitlines())
    (folder / "inline.yaml").write_text(SEARCH.replace("job: digits.yaml\n", f"job:\n{inline}"))
    search = read_search(folder / "inline.yaml", {}).accepted()
    assert search.job.spec.task == f"{folder.resolve()}/digits.py:Digits"
    assert search.job.origins["lanes"] == "inline.yaml line 4"


def test_a_search_from_a_call(folder: Path) -> None:
    job = load(folder).job
    mapping = {"space": {"params.rate": {"uniform": (0.1, 1)}}, "budget": {"trials": 2}, "metric": "accuracy"}
    search = read_mapping({**mapping, "job": "digits.yaml"}, "Search(...)", {}, job).accepted()
    assert search.spec.space is not None and search.spec.space["params.rate"].uniform == [0.1, 1]

"""The exact words that typical mistakes in a search file are answered with."""

import pickle
from pathlib import Path

import pytest

from quorate.core.errors import JobFileError, RequestError
from quorate.spec.load import load_job
from quorate.tune.loading import read_mapping, read_search

JOB = """\
task: digits.py:Digits
batch_size: 64
lanes: 4
steps: 200
evaluate: {every: 20, metric: accuracy, mode: max}
"""
HEAD = "job: digits.yaml\nbudget: {trials: 8}\n"
ONE = HEAD + "space: {params.rate: {uniform: [0, 1]}}\n"


def of(dimension: str, key: str = "params.rate") -> str:
    return f"{HEAD}space:\n  {key}: {dimension}\n"


MISTAKES = {
    "a misspelt key": (
        ONE + "shceduler: asha\n",
        "shceduler: there is no such key (find.yaml line 4). Did you mean scheduler?",
    ),
    "a misspelt key inside a scheduler": (
        ONE + "scheduler: {kind: asha, garce: 5}\n",
        "scheduler.garce: there is no such key (find.yaml line 4). Did you mean scheduler.grace?",
    ),
    "an unknown algorithm": (
        ONE + "algorithm: radnom\n",
        'algorithm.kind: the text "radnom" is not random, grid or optuna (find.yaml line 4). Did you mean random?',
    ),
    "a key that the job does not have": (
        of("{randint: [1, 8]}", "batch_sise"),
        "space.batch_sise: there is no such key (find.yaml line 4). Did you mean batch_size?",
    ),
    "a key that a section of the job does not have": (
        of("{choice: [1, 8]}", "schedule.warm"),
        "space.schedule.warm: there is no such key (find.yaml line 4). Did you mean schedule.warmup?",
    ),
    "a key of a section that the job does not have": (
        of("{choice: [1, 8]}", "schedule.warmup"),
        "space.schedule.warmup: schedule (the default) has no kind. Write kind: constant, linear or cosine; or "
        "only per: epoch, for a schedule that the task returns.",
    ),
    "a range that crosses": (
        of("{uniform: [1, 0.5]}"),
        "space.params.rate.uniform: the lowest value is above the highest: 1 > 0.5 (find.yaml line 4). Write [0.5, 1].",
    ),
    "a range of one value": (
        of("{randint: [3, 3]}"),
        "space.params.rate.randint: the range has only one value: 3 = 3 (find.yaml line 4). "
        "Write choice: [3], or set it in the job.",
    ),
    "a logarithm of zero": (
        of("{loguniform: [0, 1]}"),
        "space.params.rate.loguniform: a logarithmic range begins above 0, and not at 0 (find.yaml line 4). "
        "Write [1e-5, 1e-1].",
    ),
    "three ends": (
        of("{uniform: [0, 1, 2]}"),
        "space.params.rate.uniform: the list [0, 1, 2] is not two numbers, [lowest, highest] (find.yaml line 4).",
    ),
    "an end that is not finite": (
        of("{uniform: [0, .inf]}"),
        "space.params.rate.uniform: inf is not two numbers, [lowest, highest] (find.yaml line 4).",
    ),
    "a step that does not fit": (
        of("{randint: [32, 250], step: 32}"),
        "space.params.rate.randint: steps of 32 from 32 do not meet 250 (find.yaml line 4). "
        "Write [32, 224], or another step.",
    ),
    "a step that is larger than the range": (
        of("{uniform: [0, 1], step: 2}"),
        "space.params.rate.uniform: steps of 2 from 0 do not meet 1 (find.yaml line 4). Use a step of at most 1.",
    ),
    "a step between whole numbers": (
        of("{randint: [0, 3], step: 0.5}"),
        "space.params.rate.randint: a step of 0.5 leads away from whole numbers (find.yaml line 4). "
        "Use a whole number for step.",
    ),
    "a choice with steps": (
        of("{choice: [1, 2], step: 1}"),
        "space.params.rate.step: a choice has its own values (find.yaml line 4). Leave step out.",
    ),
    "an empty choice": (
        of("{choice: []}"),
        "space.params.rate.choice: the list [] is not a list of one value at least (find.yaml line 4).",
    ),
    "a value twice": (
        of("{grid: [1, 2, 1]}"),
        "space.params.rate: 1 stands there twice (find.yaml line 4). Name every value once.",
    ),
    "two kinds of range": (
        of("{choice: [1], uniform: [0, 1]}"),
        "space.params.rate: uniform and choice are given (find.yaml line 4). "
        "Give one of uniform, loguniform, randint, choice, grid.",
    ),
    "no kind of range": (
        of("{step: 1}"),
        "space.params.rate: it does not say which values there are (find.yaml line 4). "
        "Give one of uniform, loguniform, randint, choice, grid.",
    ),
    "a misspelt kind of range": (
        of("{log_uniform: [1, 2]}"),
        "space.params.rate.log_uniform: there is no such key (find.yaml line 4). "
        "Did you mean space.params.rate.loguniform?",
    ),
    "a fixed value": (
        of("0.1"),
        "space.params.rate: it does not say which values there are (find.yaml line 4). Write {choice: [1, 2]}, or "
        "{uniform: [0, 1]}; a fixed value belongs into the job.",
    ),
    "an empty space": (
        HEAD + "space: {}\n",
        "space: it is empty (find.yaml line 3). Name keys of the job, or leave space out: one is proposed.",
    ),
    "choices that the job refuses": (
        of("{choice: [16, big, 0]}", "batch_size"),
        'space.batch_size: the text "big" is not a whole number of at least 1, or auto (find.yaml line 4).\n'
        "space.batch_size: 0 is not a whole number of at least 1, or auto (find.yaml line 4).",
    ),
    "an end that the job refuses": (
        of("{uniform: [-1, 1]}", "clip_norm"),
        "space.clip_norm: -1.0 is not a number above 0, or null (find.yaml line 4).",
    ),
    "an end that does not go with the rest of the job": (
        of("{randint: [2, 64]}", "batch_size"),
        "space.batch_size: a batch of 2 (find.yaml line 4) cannot be shared by 4 lanes (digits.yaml line 3): each "
        "gets at least one sample, and 2 < 4. Use a batch_size of at least 4, or fewer lanes (which changes what "
        "the job computes).",
    ),
    "values that do not go together": (
        of("{choice: [4]}", "batch_size") + "  lanes: {choice: [8]}\n",
        "space.batch_size: in trial 1, a batch of 4 (find.yaml line 4) cannot be shared by 8 lanes (find.yaml line "
        "5): each gets at least one sample, and 4 < 8. Use a batch_size of at least 8, or fewer lanes (which "
        "changes what the job computes).",
    ),
    "fractions for a key that takes whole numbers": (
        of("{uniform: [32, 256]}", "batch_size"),
        "space.batch_size: a uniform range has fractions in it, and this key takes whole numbers (find.yaml line "
        "4). Write randint: [32, 256].",
    ),
    "a key that makes no difference": (
        of("{choice: [1, 2]}", "workers"),
        "space.workers: it changes nothing in what a job produces (find.yaml line 4). Set it in the job; a trial's "
        "workers are trial.workers.",
    ),
    "a key by which trials are compared": (
        of("{choice: [1, 2]}", "evaluate.every"),
        "space.evaluate.every: trials that differ in it cannot be compared (find.yaml line 4). Set it in the job.",
    ),
    "all params at once": (
        of("{choice: [{a: 1}]}", "params"),
        "space.params: it is a mapping of all of the task's parameters (find.yaml line 4). "
        "Name one of them: params.learning_rate.",
    ),
    "no end": (
        "job: digits.yaml\nspace: {params.rate: {uniform: [0, 1]}}\n",
        "budget: nothing ends the search. Write budget: {trials: 20}, or minutes or steps of all trials together.",
    ),
    "a budget of no trial": (
        ONE.replace("trials: 8", "trials: 0"),
        "budget.trials: 0 is not a whole number of at least 1, or null (find.yaml line 2).",
    ),
    "a budget that is shorter than a trial": (
        ONE.replace("trials: 8", "steps: 100"),
        "budget.steps: it allows no trial: a trial takes 200 steps, and 100 (find.yaml line 2) < 200. "
        "Use at least 200, or shorter trials.",
    ),
    "a grid that is larger than the budget": (
        of("{grid: [1, 2, 3]}") + "  params.width: {grid: [1, 2, 3]}\n",
        "budget.trials: the grid has 9 combinations, and 8 (find.yaml line 2) < 9: those at its end would never be "
        "tried. Use trials: 9, a smaller grid, or algorithm: random with choice.",
    ),
    "a grid without an end": (
        ONE + "algorithm: grid\n",
        "space.params.rate: algorithm: grid (find.yaml line 4) needs a list of values, and a uniform (find.yaml "
        "line 3) has no end. Write grid: [0.1, 0.01], or give the range a step.",
    ),
    "a grid for Optuna": (
        of("{grid: [1, 2]}") + "algorithm: optuna\n",
        "space.params.rate: algorithm: optuna (find.yaml line 5) chooses values by itself, and goes through no "
        "grid (find.yaml line 4). Write choice instead of grid.",
    ),
    "fewer modes than metrics": (
        ONE + "metric: [accuracy, loss]\nmode: [max]\n",
        "mode: the list has 1 (find.yaml line 5), and there are 2 metrics (find.yaml line 4). "
        "Give one for each, in the same order.",
    ),
    "a metric of which nobody knows what is better": (
        ONE + "metric: zing\n",
        "mode: whether zing should be small or large is not known. Write mode: max, or mode: min.",
    ),
    "a scheduler for several metrics": (
        ONE + "metric: [accuracy, loss]\nscheduler: asha\n",
        "scheduler: asha (find.yaml line 5) stops trials by one metric, and 2 are given (find.yaml line 4). "
        "Use scheduler: none, or one metric.",
    ),
    "a grace that is longer than a trial": (
        ONE + "scheduler: {kind: asha, grace: 200}\n",
        "scheduler.grace: trials end after 200 steps (digits.yaml line 4), before they are judged: 200 (find.yaml "
        "line 4) >= 200. Use a grace below 200.",
    ),
    "trials of different lengths for a scheduler": (
        of("{choice: [100, 200]}", "steps") + "scheduler: asha\n",
        "space.steps: asha (find.yaml line 5) compares trials that are equally long (find.yaml line 4). "
        "Set steps in the job, or use scheduler: none.",
    ),
    "pbt over what cannot change": (
        of("{choice: [32, 64]}", "batch_size") + "scheduler: pbt\n",
        "space.batch_size: it cannot change while a trial continues from the checkpoint of another, as pbt does "
        "(find.yaml line 5) (find.yaml line 4). Search over params, clip_norm or schedule; or use another "
        "scheduler.",
    ),
    "too small a population": (
        ONE.replace("trials: 8", "trials: 3") + "scheduler: pbt\n",
        "budget.trials: of 3 trials (find.yaml line 2) a 0.25 part is less than one. "
        "Use at least 4 trials, or a larger quantile (0.5 at most).",
    ),
    "pbt between evaluations": (
        ONE + "scheduler: {kind: pbt, interval: 30}\n",
        "scheduler.interval: after 30 steps (find.yaml line 4) there is no evaluation to judge by: evaluate.every "
        "is 20 (digits.yaml line 5). Use a multiple of 20.",
    ),
    "more workers than lanes": (
        ONE + "trial: {workers: 12}\n",
        "trial.workers: 12 workers (find.yaml line 4) cannot share 4 lanes (digits.yaml line 3): each worker hosts "
        "at least one lane, and 12 > 4. Use at most 4 workers, or raise lanes (which changes what the job "
        "computes).",
    ),
    "no job": (
        ONE.replace("job: digits.yaml\n", ""),
        "job: there is no job to search for. "
        "Write job: job.yaml (the path of a job file), or the keys of the job under it.",
    ),
    "a secret in the address": (
        ONE + "address: 'ray://someone:hunter2@head:10001'\n",
        "address: there is a secret in it (find.yaml line 4), and whoever sees the search would read it. "
        "Ray's own token is in RAY_AUTH_TOKEN.",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").touch()
    (tmp_path / "digits.yaml").write_text(JOB)
    return tmp_path


def problems(folder: Path, text: str) -> list[str]:
    path = folder / "find.yaml"
    path.write_text(text)
    with pytest.raises(JobFileError) as caught:
        read_search(path, {}).accepted()
    assert caught.value.source == str(path)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(("text", "told"), MISTAKES.values(), ids=MISTAKES)
def test_the_words_for_a_mistake(text: str, told: str, folder: Path) -> None:
    assert "\n".join(problems(folder, text)) == told


def test_all_mistakes_are_told_at_once(folder: Path) -> None:
    (folder / "digits.yaml").write_text(JOB.replace("lanes: 4", "lanes: four"))
    text = (
        of("{uniform: [2, 1]}") + "  params.x: {choice: []}\nalgorithm: gird\nmetric: [a, b]\nmode: [max]\nseed: -1\n"
    )
    told = problems(folder, text)
    assert [line.partition(": ")[0] for line in told] == [
        "space.params.rate.uniform",
        "space.params.x.choice",
        "algorithm.kind",
        "seed",
        "digits.yaml",
    ]
    assert told[-1].startswith('digits.yaml: lanes: the text "four" is not a whole number')


def test_a_scheduler_without_evaluations_is_told_what_to_write(folder: Path) -> None:
    (folder / "digits.yaml").write_text(JOB.replace("every: 20", "every: end"))
    assert problems(folder, ONE + "scheduler: asha\n") == [
        "scheduler: asha (find.yaml line 4) judges trials by their evaluations during training, and with "
        "evaluate.every: end (digits.yaml line 5) there are none. Write evaluate: {every: 20} in the job."
    ]


def test_a_batch_size_that_each_trial_would_look_for_is_refused(folder: Path) -> None:
    (folder / "digits.yaml").write_text(JOB.replace("batch_size: 64", "batch_size: auto"))
    assert problems(folder, ONE) == [
        "batch_size: every trial would look for a batch size of its own (digits.yaml line 2). "
        "Write a number: `quorate plan` says what fits."
    ]


def test_a_job_file_that_is_not_there(folder: Path) -> None:
    (folder / "find.yaml").write_text(ONE.replace("digits.yaml", "digist.yaml"))
    with pytest.raises(RequestError, match=r"there is no job file .*digist.yaml. Did you mean .*digits.yaml"):
        read_search(folder / "find.yaml", {}).accepted()


def test_values_that_no_file_can_hold_are_refused_in_a_call(folder: Path) -> None:
    job = load_job(folder / "digits.yaml", {}, [])
    space = {"params.rate": {"choice": [object]}, "params.width": {"uniform": (0, float("nan"))}}
    with pytest.raises(JobFileError) as caught:
        read_mapping({"job": "digits.yaml", "space": space, "budget": {"trials": 2}}, "Search(...)", {}, job).accepted()
    assert [problem.path for problem in caught.value.problems] == [
        "space.params.rate.choice[0]",
        "space.params.width.uniform",
    ]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)

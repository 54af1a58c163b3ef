"""The exact words that typical mistakes are answered with: whoever changes one of them reads it once as a user."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from quorate.core.errors import JobFileError, Problem
from quorate.spec.keys import CALLED_ELSEWHERE
from quorate.spec.load import load_job, resolve_mapping
from quorate.spec.override import Override, parse_set
from quorate.spec.problems import describe_errors

GOOD = "task: digits.py:Digits\nbatch_size: 64\nepochs: 3\n"

MISTAKES = {
    "a required key that is missing": (
        "task: digits.py:Digits\nepochs: 3\n",
        "batch_size: it is missing, and it has no default: give a whole number of at least 1, or auto.",
    ),
    "a key of the job inside a section": (
        GOOD + "checkpoint: {keep: 2, workers: 2}\n",
        "checkpoint.workers: there is no such key (job.yaml line 4). Did you mean workers?",
    ),
    "an unknown key inside a section": (
        GOOD + "checkpoint: {zzz: 1}\n",
        "checkpoint.zzz: there is no such key (job.yaml line 4). The keys here: "
        "every, minutes, keep, keep_every, to, source, when_busy, digest, encrypt.",
    ),
    "a word for when to save that there is not": (
        GOOD + "checkpoint: {every: epochs}\n",
        'checkpoint.every: the text "epochs" is not a whole number of steps of at least 1, epoch, or null '
        "(job.yaml line 4). Did you mean epoch?",
    ),
    "minutes below zero": (
        GOOD + "checkpoint: {minutes: -1}\n",
        "checkpoint.minutes: -1 is not a number of minutes, 0 (never by the clock), or null "
        "(10 if `every` is not given) (job.yaml line 4).",
    ),
    "more lanes than can be": (
        GOOD + "lanes: 20000\n",
        "lanes: 20000 is not a whole number from 1 to 4096 (job.yaml line 4).",
    ),
    "no in place of false": (
        GOOD + "deterministic: no\n",
        'deterministic: the text "no" is not true or false (job.yaml line 4). Write false.',
    ),
    "a number in place of text": (
        GOOD + "runs: 24\n",
        'runs: 24 is not the path of a folder, as text (job.yaml line 4). If text is meant, write it in quotes: "24".',
    ),
    "values of quite another kind": (
        GOOD + "seed: true\nlanes: {a: 1}\nparams: [1]\n",
        "params: the list [1] is not a mapping of the task's own parameters (job.yaml line 6).\n"
        "lanes: the mapping {'a': 1} is not a whole number from 1 to 4096 (job.yaml line 5).\n"
        "seed: the boolean true is not a whole number of at least 0 and below 2**63 (job.yaml line 4).",
    ),
    "a word in place of a number or a word": (
        GOOD + "workers: three\n",
        'workers: the text "three" is not a whole number of at least 1, or auto (job.yaml line 4).',
    ),
    "a section that is empty": (
        GOOD + "checkpoint:\n",
        "checkpoint: null is not a mapping of every, minutes, keep, keep_every, to, source, when_busy, digest, "
        "encrypt (job.yaml line 4). Write a value behind the colon, or leave the key out.",
    ),
    "another version": (
        "version: 3\n" + GOOD,
        "version: 3 is not 1 or 2, the versions of the job file that this Quorate reads (job.yaml line 1). It was "
        "written for a newer Quorate; `quorate --version` shows yours.",
    ),
    "too small a batch": (
        "task: digits.py:Digits\nbatch_size: 4\nepochs: 3\n",
        "batch_size: a batch of 4 (job.yaml line 2) cannot be shared by 8 lanes (the default): each gets at least "
        "one sample, and 4 < 8. Use a batch_size of at least 8, or fewer lanes (which changes what the job "
        "computes).",
    ),
    "a number that is not finite": (
        GOOD + "clip_norm: .nan\nparams: {rate: .inf}\n",
        "clip_norm: nan is not a number above 0, or null (job.yaml line 4).\n"
        "params.rate: inf is not a finite number (job.yaml line 5).",
    ),
    "a tag": (
        GOOD + "params: {x: !!python/name:os.system }\n",
        "params.x: the tag !!python/name:os.system is not read in a job file (line 4). Write a plain value.",
    ),
    "a list": (
        "- task: digits.py:Digits\n",
        "file: it holds a list instead of a mapping of keys to values. "
        "A job needs at least task, batch_size, and epochs or steps.",
    ),
    "an open quote": (
        GOOD + 'runs: "here\n',
        "line 5, column 1: found unexpected end of stream while scanning a quoted scalar. "
        "A quote is opened on line 4 and not closed.",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").touch()
    return tmp_path


def refusal(folder: Path, text: str | bytes, environment: dict[str, str], *overrides: Override) -> JobFileError:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobFileError) as caught:
        load_job(path, environment, overrides)
    return caught.value


def mistakes(folder: Path, text: str | bytes) -> list[str]:
    error = refusal(folder, text, {})
    assert error.source == str(folder / "job.yaml")
    return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(("text", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_words_for(folder: Path, text: str, words: str) -> None:
    assert "\n".join(mistakes(folder, text)) == words


def test_all_mistakes_of_all_layers_are_told_at_once(folder: Path) -> None:
    text = "task: digit.py:Digits\nlanes: 0\nworkers: 4\nseeds: 7\nepoch: 3\nbatch_size: 4\nlog_level: warn\n"
    environment = {"QUORATE_THREADS": "none", "QUORATE_WORKRES": "3", "QUORATE_SEED": "[", "PATH": "/bin"}
    error = refusal(folder, text, environment, Override("lanes", 16, "--lanes"), parse_set("checkpoint.keep=0"))
    assert error.source == "the job", "some in the file, some over it"
    assert [str(problem) for problem in error.problems] == [
        "environment QUORATE_SEED: the value '[' cannot be read: expected the node content, but found '<stream end>' "
        "while parsing a flow node.",
        'threads: the text "none" is not a whole number of at least 1 (environment QUORATE_THREADS).',
        "checkpoint.keep: 0 is not a whole number of at least 1 (--set checkpoint.keep).",
        'log_level: the text "warn" is not debug, info, warning or error (job.yaml line 7). Did you mean warning?',
        "seeds: there is no such key (job.yaml line 4). Did you mean seed?",
        "epoch: there is no such key (job.yaml line 5). Did you mean epochs?",
        "workres: there is no such key (environment QUORATE_WORKRES). Did you mean QUORATE_WORKERS?",
        "batch_size: a batch of 4 (job.yaml line 6) cannot be shared by 16 lanes (--lanes): each gets at least one "
        "sample, and 4 < 16. Use a batch_size of at least 16, or fewer lanes (which changes what the job computes).",
        f"task: there is no file {folder.resolve()}/digit.py (job.yaml line 1). Did you mean digits.py?",
    ]


def test_a_rule_is_not_judged_by_a_key_that_is_wrong_itself(folder: Path) -> None:
    assert len(mistakes(folder, GOOD + "lanes: -1\nworkers: 4\n")) == 1


@pytest.mark.parametrize("name", CALLED_ELSEWHERE)
def test_what_other_libraries_call_otherwise_is_told_by_its_name_here(folder: Path, name: str) -> None:
    (words,) = mistakes(folder, f"task: digits.py:Digits\nbatch_size: 8\nepochs: 1\n{name}: 1\n")
    assert f"Did you mean {CALLED_ELSEWHERE[name]}?" in words


def test_a_job_in_the_words_of_another_library_lacks_nothing_else(folder: Path) -> None:
    told = mistakes(folder, "task: digits.py:Digits\nper_device_train_batch_size: 8\nmax_epochs: 3\nlr: 0.1\n")
    assert [each.partition(":")[0] for each in told] == ["per_device_train_batch_size", "max_epochs", "lr"]
    assert "counts the samples of all devices" in told[0] and "write it under params" in told[2]


@pytest.mark.parametrize(
    ("environment", "overrides", "source"),
    [
        ({}, [Override("workers", 9, "--workers")], "the command line"),
        ({}, [Override("lanes", 2, "--lanes")], "the command line"),
        ({}, [parse_set("checkpoint.evry=3")], "the command line"),
        ({}, [parse_set("checkpoint=3")], "the command line"),
        ({"QUORATE_LANES": "none"}, [], "the environment"),
        ({"QUORATE_LANES": "["}, [], "the environment"),
        ({"QUORATE_LANES": "none"}, [Override("workers", "x", "--workers")], "the job"),
        ({}, [Override("workers", 9, "Job.replace")], "Job.replace"),
    ],
)
def test_who_said_it_is_blamed_and_not_the_file(
    folder: Path, environment: dict[str, str], overrides: list[Override], source: str
) -> None:
    text = GOOD + "workers: 4\n"
    assert refusal(folder, text, environment, *overrides).source == source
    assert refusal(folder, text + "seed: -1\n", environment, *overrides).source == "the job"


def test_bytes_that_are_not_text(folder: Path) -> None:
    assert mistakes(folder, b"task: \xff") == [
        "file: it is not UTF-8 text: the byte at offset 6 is 0xff. Is it a job file? If so, save it as UTF-8."
    ]


def test_a_task_file_that_is_nowhere_near(folder: Path) -> None:
    (words,) = mistakes(folder, GOOD.replace("digits.py", "jobs/x.py"))
    assert words == (
        f"task: there is no file {folder.resolve()}/jobs/x.py (job.yaml line 1). "
        "The file is looked for relative to the job file."
    )


@pytest.mark.parametrize("name", ["nn.py", "utils.py", "di.py"])
def test_a_file_of_another_name_is_not_taken_for_the_one_that_was_meant(folder: Path, name: str) -> None:
    (folder / "run.py").touch()
    (words,) = mistakes(folder, GOOD.replace("digits.py", name))
    assert words.endswith("The file is looked for relative to the job file.")


def test_a_mapping_from_python_is_told_in_the_same_words() -> None:
    with pytest.raises(JobFileError) as caught:
        resolve_mapping({"task": "a.b:C", "batch_size": 8.0, "steps": 1, 7: 8}, "Job(…)", {}, [])  # type: ignore[dict-item]
    assert [problem.path for problem in caught.value.problems] == ["batch_size", "7", "job"]


class Parameters(BaseModel):
    """Stands for the typed parameters of a task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    learning_rate: float = 0.1
    layers: list[int] = [1]
    activation: str | None = None


def test_parameters_of_a_task_are_told_in_the_same_words() -> None:
    given = {"learning_rte": 0.1, "learning_rate": "0.5", "layers": [1, "x"], "activation": 3}
    with pytest.raises(ValidationError) as caught:
        Parameters.model_validate(given)
    assert describe_errors(caught.value, Parameters, prefix="params") == [
        Problem("params.learning_rate", 'the text "0.5" is not a number', "Write 0.5 without quotes."),
        Problem("params.layers[1]", 'the text "x" is refused: input should be a valid integer'),
        Problem("params.activation", "3 is not text or null", 'If text is meant, write it in quotes: "3".'),
        Problem("params.learning_rte", "there is no such key", "Did you mean params.learning_rate?"),
    ]

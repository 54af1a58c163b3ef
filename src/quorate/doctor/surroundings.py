"""Variables of the environment that change what a job does, or that look as if they did."""

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten

from quorate.core.errors import JobFileError, Problem
from quorate.doctor.finding import Finding, Level
from quorate.engines.local import ENVIRONMENT
from quorate.spec.load import resolve_mapping
from quorate.spec.override import PREFIX

# So big that nothing in the environment is too big for it.
_ANY_JOB = {"task": "task.py:Task", "batch_size": 2**40, "lanes": 2**20, "steps": 1}


def check_job_variables(environment: Mapping[str, str]) -> Sequence[Finding]:
    """Variables that stand over the keys of every job file."""
    ours = [name for name in sorted(environment) if name.startswith(PREFIX)]
    if not ours:
        return [Finding("job variables", Level.OK, f"no {PREFIX} variable stands over the keys of a job file")]
    return [check_job_variable(name, environment[name]) for name in ours]


def check_job_variable(name: str, value: str) -> Finding:
    """One of them: which key it sets, or why no job takes it."""
    origin = f"environment {name}"
    key = name.removeprefix(PREFIX).lower().replace("__", ".")
    # What another key of a job might clash with is that job's matter.
    wrong = [each for each in _problems(name, value) if origin in f"{each.path} {each.text}" or _is_unknown(key, each)]
    # Among a task's own parameters there may be secrets, and what is found here gets into reports.
    is_private = key.split(".")[0] == "params"
    if not wrong:
        said = "" if is_private else f" to {shorten(value, 40, placeholder='...') or 'nothing'}"
        return Finding(name, Level.NOTE, f"sets `{key}` of every job{said}, over its job file")
    reason = "no job takes its value" if is_private else re.sub(r" \((environment \w+|default)\)", "", wrong[0].text)
    text = f"{reason}; every job is refused while it is set"
    return Finding(name, Level.WARNING, text, f"{wrong[0].hint} Or: unset {name}".removeprefix(" Or: "))


def _is_unknown(key: str, problem: Problem) -> bool:
    """Whether it says that no job has the key's first part: what is written below that has no origin of its own."""
    return "." in key and problem.path == key.split(".")[0] and problem.text.startswith("there is no such key")


def _problems(name: str, value: str) -> Sequence[Problem]:
    try:
        resolve_mapping(_ANY_JOB, "the environment", {name: value}, [])
    except JobFileError as error:
        return error.problems
    return ()


def check_pinned_variables(environment: Mapping[str, str]) -> Finding:
    """Variables that change how many threads a library uses: workers have their own."""
    pinned = {"OMP_THREAD_LIMIT", *ENVIRONMENT}
    found = [f"{name}={environment[name]}" for name in sorted(pinned) if name in environment]
    if not found:
        return Finding("thread variables", Level.OK, "none is set, and workers set their own")
    return Finding("thread variables", Level.NOTE, f"{', '.join(found)}: harmless, workers set their own")

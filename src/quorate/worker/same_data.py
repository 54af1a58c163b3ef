"""Whether a run that goes on reads the data that it has read until then."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from quorate.core.errors import RunError
from quorate.data.fingerprint import Fingerprint

log = logging.getLogger(__name__)

LAYOUT, SAMPLES = "dataset layout", "dataset"
# A fingerprint of which a sample is missing says which, and cannot be compared with a whole one.
_WHOLE = re.compile(r"[0-9a-f]+")
# What else a worker tells that says nothing about the machine and its libraries.
_OF_THE_TASK = ("task source", "layout")


def data_facts(fingerprint: Fingerprint) -> dict[str, str]:
    """The facts by which the data of two workers, and of two parts of a run, are compared."""
    return {LAYOUT: fingerprint.layout, SAMPLES: fingerprint.samples}


def check_same_data(run: str, recorded: Mapping[str, Any], present: Mapping[str, str], *, is_branch: bool) -> None:
    """Refuse to go on with other data than those that a checkpoint was trained on. A branch may have others.

    What an earlier version has not recorded is not compared. Samples may be other numbers for another library or
    processor alone, which a run may go on with; how many there are and how shards lie in blocks may not.
    """
    has_other_layout = _differ(recorded, present, LAYOUT)
    if not has_other_layout and not _differ(recorded, present, SAMPLES):
        return
    fact = LAYOUT if has_other_layout else SAMPLES
    values = f"{fact} {recorded[fact]} then, {present[fact]} now"
    machine = [name for name in present if name not in (LAYOUT, SAMPLES, *_OF_THE_TASK)]
    other = next((name for name in machine if recorded.get(name, present[name]) != present[name]), None)
    if is_branch:
        log.warning("the data are others than those that the checkpoint was trained on (%s)", values)
    elif not has_other_layout and other is not None:
        then, now = recorded[other], present[other]
        log.warning("samples are others than before (%s), maybe for %s: %s then, %s now", values, other, then, now)
    else:
        raise RunError(
            f"the data have changed since run {run} was saved ({values}), so it would not produce what it promised. "
            "Restore them (the files, the index of shards, and what datasets() gives: its length, columns=, window=), "
            "or start a new run from its checkpoint with --branch."
        )


def _differ(recorded: Mapping[str, Any], present: Mapping[str, str], fact: str) -> bool:
    then, now = str(recorded.get(fact, "")), present[fact]
    return then != now and all(_WHOLE.fullmatch(value) for value in (then, now))

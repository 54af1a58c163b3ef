"""Whether a run that goes on reads the data that it has read until then, and is computed by the same device."""

import re
from collections.abc import Mapping
from typing import Any

from quorate.core.errors import RunError
from quorate.data.fingerprint import Fingerprint

LAYOUT, SAMPLES, LIBRARY = "dataset layout", "dataset", "library"
# A fingerprint of which a sample is missing says which, and cannot be compared with a whole one.
_WHOLE = re.compile(r"[0-9a-f]+")
# What else a worker tells that says nothing about the machine and its libraries.
_OF_THE_TASK = ("task source", "layout")


def data_facts(fingerprint: Fingerprint) -> dict[str, str]:
    """The facts by which the data of two workers, and of two parts of a run, are compared."""
    libraries = {f"{LIBRARY} {name}": version for name, version in fingerprint.libraries.items()}
    words = f" ({fingerprint.words})" if fingerprint.words else ""
    return {LAYOUT: f"{fingerprint.layout}{words}", SAMPLES: fingerprint.samples, **libraries}


def check_same_data(
    run: str, recorded: Mapping[str, Any], present: Mapping[str, str], *, of_shards: bool, is_branch: bool
) -> str | None:
    """Refuse to go on with other data than those that a checkpoint was trained on. Where it may go on with others, what
    is to be told of them; a branch always may.

    What an earlier version has not recorded is not compared. Samples may be other numbers for another library or
    processor alone, which a run may go on with; how many there are and how shards lie in blocks may not.
    """
    has_other_layout = _differ(recorded, present, LAYOUT)
    # Before there was a layout, the index of shards was in the digest of their samples.
    is_comparable = LAYOUT in recorded or not of_shards
    if not has_other_layout and not (is_comparable and _differ(recorded, present, SAMPLES)):
        return None
    fact = LAYOUT if has_other_layout else SAMPLES
    values = _then_and_now(fact, str(recorded[fact]), present[fact])
    if is_branch:
        return f"the data are others than those that the checkpoint was trained on ({values})"
    if not has_other_layout and (others := _other_machine(recorded, present)):
        return (
            f"samples are other numbers than when run {run} was saved ({values}), maybe for {others}. Training "
            "continues; with the old versions the results would be the same."
        )
    raise RunError(
        f"the data have changed since run {run} was saved ({values}), so the run would no longer give the same "
        "results. "
        "Restore them (the files, the index of shards, and what datasets() gives: its length, columns=, window=), "
        "or start a new run from its checkpoint with --branch, which takes the data as they are: also where only "
        "their place is another, and samples hold it, such as the path of a file."
    )


def _other_machine(recorded: Mapping[str, Any], present: Mapping[str, str]) -> str:
    """The libraries and properties of the machine that are others than they were."""
    machine = [name for name in present if name not in (LAYOUT, SAMPLES, *_OF_THE_TASK)]
    others = [name for name in machine if recorded.get(name, present[name]) != present[name]]
    return "; ".join(f"{name}: {recorded[name]} then, {present[name]} now" for name in others)


def _then_and_now(fact: str, then: str, now: str) -> str:
    """Both values; where they say the same of numbers, it is what the files hold."""
    words = now.partition(" ")[2]
    if words and words == then.partition(" ")[2]:
        digests = (value.partition(" ")[0] for value in (then, now))
        return "{} {} then, {} now: {} as before, but the files hold something else".format(
            fact, *digests, words.strip("()")
        )
    return f"{fact} {then} then, {now} now"


def _differ(recorded: Mapping[str, Any], present: Mapping[str, str], fact: str) -> bool:
    then, now = str(recorded.get(fact, "")), present[fact]
    if fact == LAYOUT:  # what it is in words is not compared: an earlier version had none
        then, now = (value.partition(" ")[0] for value in (then, now))
    return then != now and all(_WHOLE.fullmatch(value) for value in (then, now))


# The launcher compares the rest. It has not spoken to the GPU's driver, and has compiled nothing.
_KNOWN_BY_WORKERS = ("precision", "gpu", "gpu capability", "cuda", "cudnn", "attention", "compiled")


def device_changes(run: str, recorded: Mapping[str, Any], present: Mapping[str, str]) -> list[str]:
    """What is to be told of a device that computes otherwise than when a checkpoint was saved, such as one whose trial
    of compiling has come out otherwise. What an earlier version, or another kind of device, has not recorded is not
    compared."""
    both = [name for name in _KNOWN_BY_WORKERS if name in recorded and name in present]
    return [
        f"{name} was {recorded[name]} when run {run} was saved and is {present[name]} now: the bits may differ"
        for name in both
        if str(recorded[name]) != present[name]
    ]

"""What a job means: the values by which its results can differ, alike for two jobs that come to the same bits."""

import hashlib
from typing import Any

from quorate.core.masking import shown_value
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark

LENGTH = ("steps", "epochs")
"""Until when is trained: a job of more steps goes through the states of a shorter one."""
_NOT_HERE = frozenset({"task", "params", "device", "precision", "compile", "strategy"})
# Secrets have few guesses now and then: each costs as much as this takes.
_SCRYPT: dict[str, int] = {"n": 2**14, "r": 8, "p": 1}


def meaning_of(spec: JobSpec, workers: int) -> dict[str, Any]:
    """By key the values of a job that affect results, but for those that a worker knows better: the task with its
    params, and where and how precisely it computes."""
    dumped = spec.model_dump(mode="json")
    found = {key: value for key, value in dumped.items() if mark_of(key) is Mark.MEANING and key not in _NOT_HERE}
    strategy = spec.strategy
    if strategy.fixes_bits:  # whoever adds up what the lanes have: the sums are the same
        found["strategy"] = {key: dumped["strategy"].get(key, value) for key, value in strategy.arithmetic.items()}
        found["strategy"] |= {"kind": strategy.kind} if strategy.keeps_residuals else {}
    else:
        found |= {"strategy": dumped["strategy"], "workers": workers}
    return found


def params_of(params: Any, key: str = "params") -> Any:
    """The same for people to read: of what is secret there is a digest, which tells two values apart."""
    if isinstance(params, dict):
        return {name: params_of(value, f"{key}.{name}") for name, value in params.items()}
    if isinstance(params, list | tuple):
        return [params_of(value, key) for value in params]
    if shown_value(key, params) == params:
        return params
    return f"scrypt:{hashlib.scrypt(str(params).encode(), salt=key.encode(), dklen=16, **_SCRYPT).hex()}"

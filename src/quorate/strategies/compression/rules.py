"""What must hold between the keys of compressed gradients, and between them and others."""

from collections.abc import Iterator

from quorate.core.errors import Problem
from quorate.spec.job import JobSpec
from quorate.spec.options import Rules, Said
from quorate.strategies.compression.option import lane_compression


def _one_method(job: JobSpec, said: Said) -> Iterator[Problem]:
    compress = lane_compression(job.strategy)
    if compress is None:
        return
    there = said("strategy.compress")
    given = [key for key in ("top_k", "random_k", "bits") if getattr(compress, key) is not None]
    if len(given) != 1:
        named = " and ".join(given) + " are given" if given else "nothing of top_k, random_k and bits is given"
        yield Problem("strategy.compress", f"{named}{there}", "Give exactly one: {top_k: 0.01}, or {bits: 8}.")
    if compress.momentum is not None and (given == ["bits"] or not compress.feedback):
        yield Problem(
            "strategy.compress.momentum",
            f"it corrects what is held back{there}, and nothing is",
            "Use it with top_k or random_k, and with feedback.",
        )


def _scale_needs_whole_gradients(job: JobSpec, said: Said) -> Iterator[Problem]:
    if job.precision == "fp16" and job.strategy.kind == "ring" and lane_compression(job.strategy) is not None:
        yield Problem(
            "precision",
            f"fp16{said('precision')} is not possible with strategy.compress{said('strategy')}: no worker holds the "
            "sum of all gradients, by which its scale grows",
            "Leave compress out, or use precision: bf16 or fp32.",
        )


RULES: Rules = {
    _one_method: frozenset({"strategy"}),
    _scale_needs_whole_gradients: frozenset({"strategy", "precision"}),
}

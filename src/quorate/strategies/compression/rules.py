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
    if (compress.top_k is None) == (compress.bits is None):
        given = "neither top_k nor bits is given" if compress.bits is None else "top_k and bits are given"
        hint = "Give exactly one: {top_k: 0.01}, or {bits: 8}."
        yield Problem("strategy.compress", f"{given}{said('strategy.compress')}", hint)


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

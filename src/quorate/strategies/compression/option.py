"""What compressed gradients add to a job file: the key `compress` of the ring and of parameter servers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quorate.core.errors import Problem
from quorate.spec.keys import Allowed, Fraction
from quorate.spec.options import Option, Removed, Said, StrategySection, Treatment


class CompressSpec(Treatment):
    """What is sent of a gradient: its largest elements, or all in 8 bits. One of the two."""

    top_k: Annotated[Fraction | None, Allowed("a fraction above 0 and at most 1, or null")] = None
    """Send only this fraction of the elements: the largest."""
    bits: Annotated[Literal[8] | None, Allowed("8, or null")] = None
    """Send all elements in 8 bits."""
    feedback: bool = True
    """Add what was not sent to the next gradient (error feedback)."""

    @property
    def keeps_residuals(self) -> bool:
        return self.feedback

    cpu_only: ClassVar[bool] = True
    factories: ClassVar[Mapping[str, str]] = {"ring": "quorate.strategies.compression.ring:CompressedRingFactory"}


def lane_compression(strategy: StrategySection) -> CompressSpec | None:
    """How each lane's gradient is compressed; None where it travels whole, or only as the sum of some."""
    return next((each for each in strategy.treatments.values() if isinstance(each, CompressSpec)), None)


def _one_method(job: Any, said: Said) -> Iterator[Problem]:
    compress = lane_compression(job.strategy)
    if compress is None:
        return
    if (compress.top_k is None) == (compress.bits is None):
        given = "neither top_k nor bits is given" if compress.bits is None else "top_k and bits are given"
        hint = "Give exactly one: {top_k: 0.01}, or {bits: 8}."
        yield Problem("strategy.compress", f"{given}{said('strategy.compress')}", hint)


def _scale_needs_whole_gradients(job: Any, said: Said) -> Iterator[Problem]:
    if job.precision == "fp16" and job.strategy.kind == "ring" and lane_compression(job.strategy) is not None:
        yield Problem(
            "precision",
            f"fp16{said('precision')} is not possible with strategy.compress{said('strategy')}: no worker holds the "
            "sum of all gradients, by which its scale grows",
            "Leave compress out, or use precision: bf16 or fp32.",
        )


_COMPRESS = Annotated[
    CompressSpec | None,
    Field(description="Compress the gradients of the lanes. Set one of `top_k` and `bits`."),
]
OPTION = Option(
    keys={kind: {"compress": (_COMPRESS, None)} for kind in ("strategy.ring", "strategy.parameter-server")},
    rules={
        _one_method: frozenset({"strategy"}),
        _scale_needs_whole_gradients: frozenset({"strategy", "precision"}),
    },
    removed={
        "strategy.compress.random_k": Removed(
            None, "use top_k, which sends the largest elements.", with_it="strategy.compress"
        ),
        "strategy.compress.momentum": Removed(None, "use the momentum of the optimizer."),
    },
)

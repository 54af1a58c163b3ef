"""Which attention repeats, and how fast each is: ``python -m benchmarks.own.attention``.

Forward and backward of one layer at the shapes of the example models, by every implementation that this machine has.
What repeats gives the same bits in all of several runs while the device does other work in between: a kernel that adds
in the order in which its blocks happen to end differs sooner or later. Prints a line of JSON for each.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Of queries, keys and values alike."""

    name: str
    batch: int
    heads: int
    length: int
    width: int
    is_causal: bool


SHAPES = (
    Shape("GPT-2", 16, 12, 1024, 64, is_causal=True),
    Shape("ViT-B/16", 128, 12, 197, 64, is_causal=False),
    Shape("BERT-Large", 32, 16, 512, 64, is_causal=False),
)
TINY = (Shape("tiny", 2, 2, 32, 16, is_causal=True),)


def of_torch(backend: SDPBackend) -> Attention:
    """One of those that torch chooses from."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attend


def of_cudnn() -> Attention:
    """cuDNN's own, which can repeat, by NVIDIA's package: torch does not pass the wish on."""
    from cudnn.sdpa.fwd.torch_op import sdpa  # type: ignore[import-not-found]

    return lambda q, k, v, is_causal: _first(sdpa(q, k, v, is_causal=is_causal, return_lse=True))


def of_flex() -> Attention:
    """What torch compiles of a description. It needs a compiler."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, str], Any] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        if not is_causal:
            return _first(compiled(q, k, v))
        place = q.shape[2], str(q.device)
        if place not in masks:
            length = q.shape[2]
            masks[place] = create_block_mask(_is_before, None, None, length, length, device=str(q.device))
        return _first(compiled(q, k, v, block_mask=masks[place]))

    return attend


KINDS: dict[str, Callable[[], Attention]] = {
    "flash": lambda: of_torch(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: of_torch(SDPBackend.EFFICIENT_ATTENTION),
    "math": lambda: of_torch(SDPBackend.MATH),
    "cudnn by torch": lambda: of_torch(SDPBackend.CUDNN_ATTENTION),
    "cudnn": of_cudnn,
    "flex": of_flex,
}


def main() -> None:
    """Measure what there is; what there is not is told with its reason."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, on whatever device there is")
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in TINY if given.smoke else SHAPES:
        for kind in given.kinds.split(","):
            for strict in (True, False):
                print(json.dumps(measured(kind, shape, device, strict)), flush=True)


def measured(kind: str, shape: Shape, device: torch.device, strict: bool) -> dict[str, Any]:
    """How long forward and backward take, and whether they repeat; or why there is no such thing."""
    told: dict[str, Any] = {"shape": shape.name, "attention": kind, "deterministic": strict}
    with deterministic(strict):
        try:
            once = passes(KINDS[kind](), shape, device)
            bits = [[each.clone() for each in once()] for _ in range(5)]
            repeats = all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))
            # Inputs of their own: autograd remembers the stream on which those before were first used.
            recorded = replayed(passes(KINDS[kind](), shape, device), device)
            return told | {"repeats": repeats, "ms": round(milliseconds(recorded, device), 3)}
        except Exception as error:  # of whatever kind: it is about what is not there
            return told | {"absent": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def passes(attend: Attention, shape: Shape, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward, and what comes of them."""
    generator = torch.Generator().manual_seed(7)
    size = shape.batch, shape.heads, shape.length, shape.width
    inputs = [torch.randn(size, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(3)]
    gradient = torch.randn(size, generator=generator).to(device, torch.bfloat16)

    def once() -> list[torch.Tensor]:
        output = attend(inputs[0], inputs[1], inputs[2], shape.is_causal)
        return [output, *torch.autograd.grad(output, inputs, gradient)]

    return once


def replayed(once: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The kernels alone, as a job runs them: recorded in a graph, since some take longer to begin than to compute."""
    if device.type != "cuda":
        return once
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        once()
    return graph.replay


def milliseconds(once: Callable[[], Any], device: torch.device, rounds: int = 5, calls: int = 10) -> float:
    """The median of a call, of several rounds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seen = []
    for _ in range(rounds):
        wait()
        began = perf_counter()
        for _ in range(calls):
            once()
        wait()
        seen.append((perf_counter() - began) / calls * 1e3)
    return statistics.median(seen)


@contextmanager
def deterministic(strict: bool) -> Iterator[None]:
    """As a job is by default, or as one with `deterministic: false`."""
    torch.use_deterministic_algorithms(strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _first(given: Any) -> torch.Tensor:
    first: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return first


def _is_before(_: Any, __: Any, query: Any, key: Any) -> Any:
    return query >= key


if __name__ == "__main__":
    main()

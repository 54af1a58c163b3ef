"""The collectives of torch.distributed by size, over NCCL with a GPU for each process or over Gloo.

Beside an all-reduce stands a step of a model whose gradient has its size.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gang import Seat, run_gang
from benchmarks.size import ELEMENT, size_in_words
from benchmarks.spans import Span, durations_ms
from benchmarks.store import fresh_store
from benchmarks.told import answer, read_order, reading

WARM_UP = 3
BATCH = 256
WIDEST = 1024
STEPS = 5


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    with fresh_store(order["folder"]) as store:
        everyone = run_gang(order["processes"], lambda seat: _take_part(seat, order, store))
    answer(*_readings(order, everyone))


def _take_part(seat: Seat, order: dict[str, Any], store: Path) -> dict[str, Any]:
    is_nccl = order["backend"] == "nccl"
    device = torch.device("cuda", seat.position) if is_nccl else torch.device("cpu")
    if is_nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(
        order["backend"], init_method=f"file://{store}", rank=seat.position, world_size=order["processes"]
    )
    settle = functools.partial(torch.cuda.synchronize, device) if is_nccl else lambda: None
    spans = {
        _case(kind, size): _spans(_collective(kind, size, seat.position, order["processes"], device), repeats, settle)
        for size, repeats in zip(order["sizes"], order["repeats"], strict=True)
        for kind in order["collectives"]
    }
    steps = {size_in_words(size): _step_ms(size, device, settle) for size in order["sizes"]}
    dist.destroy_process_group()
    return {"spans": spans, "steps": steps}


def _collective(
    kind: str, size: int, process: int, processes: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], bool]]:
    """What is called, and whether its result is right after it. `size` is that of the whole tensor."""
    count = size // ELEMENT
    part = -(-count // processes)
    own, whole = torch.full((part,), 1.0, device=device), torch.ones(part * processes, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own), lambda: bool((whole == 1).all())
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(own, whole), lambda: bool((own == processes).all())
    values = torch.zeros(count, device=device)
    if kind == "broadcast":
        values.fill_(float(process == 0))
        return lambda: dist.broadcast(values, 0), lambda: bool((values == 1).all())

    # Zeros stay zeros however often they are summed; that sums are right is seen once.
    def is_sum() -> bool:
        ones = torch.ones(count, device=device)
        dist.all_reduce(ones)
        return bool((ones == processes).all())

    return lambda: dist.all_reduce(values), is_sum


def _spans(
    collective: tuple[Callable[[], Any], Callable[[], bool]], repeats: int, settle: Callable[[], None]
) -> list[Span]:
    call, is_right = collective
    spans = []
    for number in range(WARM_UP + repeats):
        settle()
        start = perf_counter()
        call()
        settle()
        if number >= WARM_UP:
            spans.append(Span(start, perf_counter()))
    if not is_right():
        raise RuntimeError("the result of a collective is wrong")
    return spans


def _step_ms(size: int, device: torch.device, settle: Callable[[], None]) -> float:
    """The forward and backward pass of linear layers with so many parameters, and a batch of BATCH rows."""
    count = size // ELEMENT
    width = max(1, min(WIDEST, int(count**0.5)))
    layers = max(1, count // width**2)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    rows, times = torch.randn(BATCH, width, device=device), []
    for _ in range(STEPS):
        settle()
        start = perf_counter()
        model(rows).square().mean().backward()
        settle()
        times.append((perf_counter() - start) * 1000)
    return sorted(times)[STEPS // 2]


def _readings(order: dict[str, Any], everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    readings = []
    for size in order["sizes"]:
        for kind in order["collectives"]:
            case = _case(kind, size)
            ms = durations_ms([[Span(*span) for span in process["spans"][case]] for process in everyone])
            details = {}
            if kind == "all_reduce":
                usual, step = sorted(ms)[len(ms) // 2], everyone[0]["steps"][size_in_words(size)]
                details = {"step_percent": 100 * usual / (usual + step)}
            readings.append(reading(case, order["processes"], ms, size=size, details=details))
    return readings


def _case(kind: str, size: int) -> str:
    return f"{kind}, {size_in_words(size)}"


if __name__ == "__main__":
    main()

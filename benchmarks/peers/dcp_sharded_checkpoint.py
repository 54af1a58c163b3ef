"""Two processes with FSDP2 that save with DCP's asynchronous stager: a thread copies while the next step computes, and
the update waits for it."""

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.cases import endless, loader_of, loss_of, optimizer_of, sized_case
from benchmarks.gang import Seat, run_gang
from benchmarks.peers.dcp_checkpoint import quiet
from benchmarks.saving import BATCHES
from benchmarks.sharded import WAITED
from benchmarks.store import fresh_store
from benchmarks.told import answer, read_order, reading

OPTIONS = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
)


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with fresh_store(order["folder"]) as store, tempfile.TemporaryDirectory(dir=order["folder"]) as folder:
        told = run_gang(order["processes"], lambda seat: _train(seat, order, store, Path(folder)))
    # The first takes memory that the others find.
    waited = [max(of_save) * 1000 for of_save in zip(*told, strict=True)][1:]
    answer(reading(WAITED, order["processes"], waited, size=order["size"]))


def _train(seat: Seat, order: dict[str, Any], store: Path, folder: Path) -> list[float]:
    quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=seat.position, world_size=order["processes"])
    mesh = init_device_mesh("cpu", (order["processes"],))
    case = sized_case(order["size"])
    model = case.build()
    for block in list(model.children())[:-2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, batches = optimizer_of(model), endless(loader_of(case, BATCHES * case.batch_size))
    # Its thread must not come between the collectives of a step.
    group, stager = dist.new_group(), DefaultStager(OPTIONS)
    waited: list[float] = []
    begun: Any = None
    staging: Any = None
    for step in range(1, order["every"] * (order["saves"] + 2)):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        began = perf_counter()
        if staging is not None:
            staging.result()
            staging = None
            waited[-1] += perf_counter() - began
        optimizer.step()
        if step % order["every"] == 0:
            if begun is not None:
                begun.upload_completion.result()
            began = perf_counter()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            begun = async_save(state, checkpoint_id=folder / f"step-{step}", process_group=group, async_stager=stager)
            staging = begun.staging_completion
            waited.append(perf_counter() - began)
    begun.upload_completion.result()
    stager.close()
    dist.destroy_process_group()
    return waited


if __name__ == "__main__":
    main()

"""A training that torchrun restarts: it saves after every step, and goes on from there."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import CASES, data_of, loss_of, optimizer_of
from quorate.core.processes import die_with_parent


def main() -> None:
    """Train until killed; write down when each step was complete."""
    die_with_parent()
    folder, pause = Path(sys.argv[1]), float(sys.argv[2])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (folder / f"pid-{start}-{dist.get_rank()}").write_text(str(os.getpid()))
    case = CASES["tiny-mlp"]
    model = DistributedDataParallel(case.build())
    optimizer = optimizer_of(model)
    saved = folder / "saved"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    batch = [column[: case.batch_size] for column in data_of(case, case.batch_size).tensors]
    while True:
        optimizer.zero_grad()
        time.sleep(pause)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saving")
            (folder / "saving").rename(saved)
            with (folder / "steps").open("a") as file:
                file.write(f"{start} {time.time()}\n")


if __name__ == "__main__":
    main()

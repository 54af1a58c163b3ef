"""Loops for one GPU, over the models, losses and samples of examples/models.

The hand-tuned ones have all that a careful person does: bfloat16, channels last, fused optimizers, TF32, kernels that
are timed, loader processes, pinned batches that are sent ahead, and `torch.compile` over model and loss; one of them
captures the whole step in a CUDA graph besides, one is a DistributedDataParallel of one process. None of them repeats
its bits. The others are what their libraries do
by themselves, once asked for bfloat16.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.blocks import Blocks
from benchmarks.laps import Laps
from benchmarks.models import MODELS
from benchmarks.told import answer, read_order, reading

WARM_UPS = 3
"""Steps before a capture: what is allocated or compiled once must not be within it."""

Batch = list[torch.Tensor]


class Bout:
    """A task, where it is trained, its samples, and the clock. What is not on a GPU is only a rehearsal."""

    def __init__(self, order: dict[str, Any]) -> None:
        from quorate.task.task import configure

        job = order["job"]
        self.is_gpu = job.get("device") != "cpu"
        self.device = torch.device("cuda" if self.is_gpu else "cpu")
        place, _, name = job["task"].rpartition(":")
        sys.path.insert(0, str(MODELS))
        module = import_module(Path(place).stem if place.endswith(".py") else place)
        self.task = configure(getattr(module, name), job["params"], "the job", job["seed"])
        self.blocks = Blocks(order["warm_up"], order["steps"])
        self.laps = Laps(self.blocks)
        self.batch_size, self.clip, self.loaders = job["batch_size"], job.get("clip_norm"), job["loader_workers"]
        self.folder = order["folder"]

    def samples(self) -> DataLoader[Any]:
        """Batches of the training set, shuffled, read by processes of their own."""
        return DataLoader(
            self.task.datasets()[0],
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.loaders,
            pin_memory=self.is_gpu,
            persistent_workers=False,
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_gpu, cache_enabled=False)

    def complete(self) -> None:
        """A step was queued; where the clock is read, it has to be over."""
        if self.is_gpu and self.laps.is_at_end:
            torch.cuda.synchronize()
        self.laps.complete()

    def clip_norms(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip, foreach=True)


def sent_ahead(bout: Bout) -> Iterator[Batch]:
    """Batches on the device: each is copied while the one before is computed with, and channels lie last."""

    def send(batch: Batch) -> Batch:
        sent = [tensor.to(bout.device, non_blocking=True) for tensor in batch]
        return [each.contiguous(memory_format=torch.channels_last) if each.ndim == 4 else each for each in sent]

    if not bout.is_gpu:
        yield from map(send, bout.samples())
        return
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ahead: Batch | None = None
    for batch in bout.samples():
        if ahead is not None:
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in ahead:
                tensor.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ahead, ready = send(batch), ahead
        if ready is not None:
            yield ready


def compiled(bout: Bout, model: torch.nn.Module) -> Callable[[Batch], torch.Tensor]:
    """The loss of a batch, model and all in one piece."""
    # On a CPU the compiler would take longer than the whole rehearsal.
    backend = "inductor" if bout.is_gpu else "eager"
    return torch.compile(lambda batch: bout.task.loss(model, batch), dynamic=False, backend=backend)


def tuned(
    bout: Bout, loss_by: Callable[[Bout, torch.nn.Module], Callable[[Batch], torch.Tensor]] = compiled
) -> tuple[Callable[[Batch], None], torch.optim.Optimizer]:
    """A step of the hand-tuned loop, without what clears the gradients."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = bout.task.model().to(bout.device)
    if any(isinstance(module, torch.nn.Conv2d) for module in model.modules()):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer: Any = bout.task.optimizer(model)
    for group in optimizer.param_groups:
        group["fused"] = True
        if "capturable" in group and bout.is_gpu:
            group["capturable"] = True
    loss_of = loss_by(bout, model)
    parameters = list(model.parameters())

    def step(batch: Batch) -> None:
        with bout.autocast():
            loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        bout.clip_norms(parameters)
        optimizer.step()

    return step, optimizer


def train_compiled(bout: Bout) -> None:
    """Compiled, queued kernel by kernel."""
    step, optimizer = tuned(bout)
    for batch in first(sent_ahead(bout), bout.blocks.total):
        optimizer.zero_grad(set_to_none=True)
        step(batch)
        bout.complete()


def train_by_ddp(bout: Bout) -> None:
    """Compiled, as the only process of a DistributedDataParallel."""
    with tempfile.NamedTemporaryFile(dir=bout.folder) as meeting:
        backend, address = "nccl" if bout.is_gpu else "gloo", f"file://{meeting.name}"
        torch.distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
        try:
            step, optimizer = tuned(bout, in_gang)
            for batch in first(sent_ahead(bout), bout.blocks.total):
                optimizer.zero_grad(set_to_none=True)
                step(batch)
                bout.complete()
        finally:
            torch.distributed.destroy_process_group()


def in_gang(bout: Bout, model: torch.nn.Module) -> Callable[[Batch], torch.Tensor]:
    """The loss by a compiled model whose gradients are parts of DDP's buckets, as one does by hand."""
    inner = torch.compile(model, dynamic=False, backend="inductor" if bout.is_gpu else "eager")
    gang = torch.nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True, static_graph=True)
    return lambda batch: bout.task.loss(gang, batch)


def train_captured(bout: Bout) -> None:
    """Compiled, and the whole step captured: forward, backward, clipping and update."""
    step, optimizer = tuned(bout)
    batches = sent_ahead(bout)
    static = [tensor.clone() for tensor in next(batches)]
    replay = capture(step, optimizer, static) if bout.is_gpu else lambda: rehearse(step, optimizer, static)
    for batch in first(batches, bout.blocks.total):
        for place, tensor in zip(static, batch, strict=True):
            place.copy_(tensor, non_blocking=True)
        replay()
        bout.complete()


def capture(step: Callable[[Batch], None], optimizer: torch.optim.Optimizer, static: Batch) -> Callable[[], None]:
    """A step over batches that are copied to one place. It is tried on the stream that captures it."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            rehearse(step, optimizer, static)
    torch.cuda.current_stream().wait_stream(stream)
    # Without gradients before it, so that those of the graph lie in its own memory and are written, not added to.
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    # Loaders pin memory on a thread of their own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step(static)
    return graph.replay


def rehearse(step: Callable[[Batch], None], optimizer: torch.optim.Optimizer, static: Batch) -> None:
    """A step as it is captured."""
    optimizer.zero_grad(set_to_none=True)
    step(static)


def train_by_defaults(bout: Bout) -> None:
    """What Lightning and accelerate do by themselves when they are asked for bfloat16, written by hand."""
    model = bout.task.model().to(bout.device)
    optimizer: Any = bout.task.optimizer(model)
    parameters = list(model.parameters())
    for batch in first(iter(bout.samples()), bout.blocks.total):
        optimizer.zero_grad()
        with torch.autocast(bout.device.type, torch.bfloat16, enabled=bout.is_gpu):
            loss: Any = bout.task.loss(model, [tensor.to(bout.device, non_blocking=True) for tensor in batch])
        loss.backward()
        bout.clip_norms(parameters)
        optimizer.step()
        bout.complete()


def train_by_accelerate(bout: Bout) -> None:
    """Prepared by accelerate."""
    accelerate: Any = import_module("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=not bout.is_gpu)
    built = bout.task.model()
    model, optimizer, loader = accelerator.prepare(built, bout.task.optimizer(built), bout.samples())
    for batch in first(iter(loader), bout.blocks.total):
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = bout.task.loss(model, batch)
        accelerator.backward(loss)
        if bout.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), bout.clip)
        optimizer.step()
        bout.complete()


def train_by_lightning(bout: Bout) -> None:
    """By Lightning's Trainer, without progress bar, log and checkpoints."""
    pl: Any = import_module("pytorch_lightning")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = bout.task.model()

        def training_step(self, batch: Batch, _: int) -> Any:
            return bout.task.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return bout.task.optimizer(self.model)

    class Clock(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: object) -> None:
            bout.complete()

    trainer = pl.Trainer(
        accelerator="gpu" if bout.is_gpu else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=bout.blocks.total,
        gradient_clip_val=bout.clip,
        logger=False,
        callbacks=[Clock()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=bout.folder,
    )
    trainer.fit(Module(), bout.samples())


def first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """So many of them, epoch or not: the sets are longer than that."""
    for _ in range(count):
        yield next(batches)


LOOPS: dict[str, Callable[[Bout], None]] = {
    "hand-compiled": train_compiled,
    "hand-captured": train_captured,
    "hand-ddp": train_by_ddp,
    "lightning-by-hand": train_by_defaults,
    "accelerate": train_by_accelerate,
    "lightning": train_by_lightning,
}


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.manual_seed(0)
    bout = Bout(order)
    LOOPS[order["loop"]](bout)
    mean = bout.blocks.mean_ms(bout.laps.seconds)
    details = {"mean_ms": mean, "samples_per_second": 1000 * bout.batch_size / mean}
    if bout.is_gpu:
        details["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    answer(reading(order["case"], 1, bout.blocks.ms(bout.laps.seconds), details=details))


if __name__ == "__main__":
    main()

"""What comparing replicas and checking frames costs a step: the calls alone, beside a plain step of the same model.

::

    python scripts/comparing.py

A step compares a slice of the state (training/divergence.py), and over TCP every byte that is sent and received is
checked (wire/frame.py): of two workers each sends and receives as many bytes as its gradient has.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.cases import CASES, CLASSES, Case
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.task.task import Task
from quorate.training.divergence import CYCLE, ReplicaDigests
from quorate.wire.link import checksum_of

ROUNDS = 9


def task_of(case: Case) -> Task:
    """A task that only has what a replica is built from."""

    class CaseTask(Task):
        def model(self) -> nn.Module:
            return case.build()

        def datasets(self) -> Any:
            return torch.zeros(4, 1)

        def optimizer(self, model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    return CaseTask()


def microseconds(call: Callable[[int], object], repeats: int) -> float:
    """The median over some rounds of what a call takes."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for number in range(repeats):
            call(number)
        rounds.append((time.perf_counter() - began) / repeats * 1e6)
    return statistics.median(rounds)


def measured(case: Case) -> tuple[float, float, float]:
    """A plain step, comparing a slice, and the checksums of two workers' gradients."""
    replica = Replica(task_of(case), JobSpec(task="cases.py:Case", batch_size=case.batch_size, steps=1))
    inputs, targets = torch.randn(case.batch_size, *case.shape), torch.randint(0, CLASSES, (case.batch_size,))
    (optimizer,) = replica.optimizers.by_name.values()

    def step(_: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica.model(inputs), targets).backward()
        optimizer.step()

    step(0)
    gradient = torch.cat([p.grad.reshape(-1) for _, p in replica.parameters if p.grad is not None])
    content = gradient.view(torch.uint8).numpy()
    return (
        microseconds(step, 20),
        microseconds(ReplicaDigests(replica).of_slice, 4 * CYCLE),
        microseconds(lambda _: (checksum_of(content), checksum_of(content)), 50),
    )


def main() -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    print(f"{'case':10} {'step µs':>9} {'slice µs':>9} {'of step':>8} {'checksums µs':>13} {'of step':>8}")
    for name, case in CASES.items():
        plain, compared, checked = measured(case)
        shares = f"{compared / plain:8.2%} {checked:13.1f} {checked / plain:8.2%}"
        print(f"{name:10} {plain:9.0f} {compared:9.1f} {shares}")


if __name__ == "__main__":
    main()

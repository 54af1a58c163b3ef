"""The loop that everybody writes first."""

from benchmarks.cases import loader_of, loss_of, optimizer_of
from benchmarks.laps import Training, measure_steps


def train(training: Training) -> None:
    """Nothing but PyTorch."""
    model = training.case.build()
    optimizer = optimizer_of(model)
    losses: list[float] = []
    for batch in loader_of(training.case, training.samples):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        training.laps.complete()


if __name__ == "__main__":
    measure_steps(train)

"""Mistakes in a training loop of one's own."""

from catalogue.case import Case

HEAD = """\
from sound import *

def main(run):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PREPARED = "    model, optimizer = run.prepare(model, optimizer)\n    samples = Sound().datasets()[0]\n"
LOOP = (
    "    for inputs, targets in run.batches(samples):\n        loss = nn.functional.mse_loss(model(inputs), targets)\n"
)


def looped(title: str, *lines: str) -> Case:
    """A mistake in what stands in `main`, after the model and the optimizer."""
    return Case(title, job="task: task.py:main", task=HEAD + "".join(lines), starts=True)


CASES = (
    looped("A loop without run.prepare()", "    for batch in run.batches(Sound().datasets()[0]):\n        pass\n"),
    looped("A batch without run.step()", PREPARED, LOOP),
    looped("backward() and step() as before", PREPARED, LOOP, "        loss.backward()\n        optimizer.step()\n"),
    looped("run.step() after backward()", PREPARED, LOOP, "        loss.backward()\n        run.step(loss)\n"),
    looped(
        "A step of the optimizer after run.step()", PREPARED, LOOP, "        run.step(loss)\n        optimizer.step()\n"
    ),
    looped(
        "A DataLoader in place of run.batches()",
        PREPARED,
        "    for batch in run.batches(torch.utils.data.DataLoader(samples, batch_size=8)):\n        pass\n",
    ),
    looped("A loop that is left early", PREPARED, LOOP, "        run.step(loss)\n        break\n"),
    looped("The loss as a number", PREPARED, LOOP, "        run.step(loss.item())\n"),
    Case("A loop that does not take run", job="task: task.py:main", task="def main():\n    pass\n", starts=True),
)

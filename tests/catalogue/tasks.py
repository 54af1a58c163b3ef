"""Mistakes in a task."""

from typing import Any

from catalogue.case import Case


def made(body: str) -> str:
    """A task of one's own, but for one method."""
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").split("\n"))
    return f"from sound import *\n\nclass Mine(Sound):\n{lines}"


def mistaken(title: str, body: str = "", **rest: Any) -> Case:
    """A case that shows when the task is used."""
    if body:
        rest["task"] = made(body)
    return Case(title, **rest, starts=True)


MISSING = """\
import quorate
from torch import nn

class Mine(quorate.Task):
    def model(self):
        return nn.Linear(3, 1)
"""
NOT_RETURNED = """
def loss(self, model, batch):
    inputs, targets = batch
    nn.functional.mse_loss(model(inputs), targets)
"""
NOT_A_NUMBER = """
def metrics(self, model, batch):
    inputs, targets = batch
    return {"error": (model(inputs) - targets).abs()}
"""
TYPO_IN_METRICS = """
def metrics(self, model, batch):
    images, labels = batch
    return {"accuracy": (model(image) == labels).mean()}
"""
LATER = """
calls = 0

def loss(self, model, batch):
    Mine.calls += 1
    if Mine.calls > 4:
        raise KeyError("labels")
    return super().loss(model, batch)
"""
NORMALIZED = """
def model(self):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
"""

CASES = (
    mistaken("A class that is not there", job="task: task.py:Mien"),
    mistaken("A task without all its methods", task=MISSING),
    mistaken("Parameters that the task does not have", job='params: {learning_rat: 0.1, learning_rate: "0.1"}'),
    mistaken("A library that is not installed", task="import sklaern\nfrom sound import *\n\nclass Mine(Sound): ...\n"),
    mistaken("A file that is not Python", task="from sound import *\n\nclass Mine(Sound)\n    pass\n"),
    mistaken("An exception while the model is built", "def model(self):\n    return nn.Linear(3, self.outputs)"),
    mistaken("A model that is not returned", "def model(self):\n    nn.Linear(3, 1)"),
    mistaken(
        "An optimizer that needs a closure",
        "def optimizer(self, model):\n    return torch.optim.LBFGS(model.parameters())",
    ),
    mistaken("A metric that is no number", NOT_A_NUMBER),
    mistaken("An exception in metrics()", TYPO_IN_METRICS),
    mistaken("A metric that is watched and never measured", job="evaluate: {metric: accuracy, mode: max}"),
    mistaken("A loss that is not returned", NOT_RETURNED),
    mistaken("A loss that is no number any more", job="params: {learning_rate: 1e30}"),
    mistaken("Shapes that do not fit", "def model(self):\n    return nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1))"),
    mistaken("Batch normalization of a single sample", NORMALIZED, job="batch_size: 4\nlanes: 4"),
    mistaken("An exception in a later step", LATER),
    mistaken("A process that is ended by the task", "def loss(self, model, batch):\n    import os\n    os._exit(3)"),
)

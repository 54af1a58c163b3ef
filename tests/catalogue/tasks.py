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
UNINITIALISED = """\
from sound import *

class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(3, 1)

class Mine(Sound):
    def model(self):
        return Net()
"""
SQUARES = """
def loss(self, model, batch):
    inputs, targets = batch
    return (model(inputs) - targets) ** 2
"""
ITEM = """
def loss(self, model, batch):
    return super().loss(model, batch).item()
"""
CUT_OFF = """
def loss(self, model, batch):
    with torch.no_grad():
        return super().loss(model, batch)
"""
TOO_FEW_CLASSES = """
def model(self):
    return nn.Linear(3, 10)

def datasets(self):
    return [(torch.ones(3), 10) for _ in range(24)]

def loss(self, model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""
FROZEN = """
def model(self):
    return super().model().requires_grad_(False)
"""
OTHER_PARAMETERS = """
def optimizer(self, model):
    return torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
"""
OWN_BACKWARD = """
def loss(self, model, batch):
    loss = super().loss(model, batch)
    loss.backward()
    return loss
"""
OWN_STEP = """
def optimizer(self, model):
    self.sgd = super().optimizer(model)
    return self.sgd

def loss(self, model, batch):
    loss = super().loss(model, batch)
    loss.backward(retain_graph=True)
    self.sgd.step()
    return loss
"""
IN_PLACE = """
def loss(self, model, batch):
    inputs, targets = batch
    outputs = torch.sigmoid(model(inputs))
    outputs += 1
    return nn.functional.mse_loss(outputs, targets)
"""
HISTORY = """
history = []

def loss(self, model, batch):
    self.history.append(1.0)
    return super().loss(model, batch)
"""
DICT = """
def model(self):
    return nn.ModuleDict({"net": nn.Linear(3, 1)})

def loss(self, model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss({"output": model["net"](inputs)}, targets)
"""
UNPACKED = """
def loss(self, model, batch):
    inputs, targets, weights = batch
    return nn.functional.mse_loss(model(inputs), targets)
"""
NO_TASK = """\
class Mine:
    def model(self): ...
"""

CASES = (
    mistaken("A class that is not there", job="task: task.py:Mien"),
    mistaken("A task without all its methods", task=MISSING),
    mistaken("Parameters that the task does not have", job='params: {learning_rat: 0.1, learning_rate: "0.1"}'),
    mistaken(
        "A parameter without a type",
        job="params: {width: 64}",
        task="from sound import *\n\nclass Mine(Sound):\n    width = 32\n",
    ),
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
    mistaken("A model that does not call super().__init__()", task=UNINITIALISED),
    mistaken("A loss of every sample", SQUARES),
    mistaken("A loss as a plain number", ITEM),
    mistaken("A loss without a gradient", CUT_OFF),
    mistaken("A label that is no class of the model", TOO_FEW_CLASSES),
    mistaken("A model with nothing to train", FROZEN),
    mistaken("An optimizer of the parameters of another model", OTHER_PARAMETERS),
    mistaken("backward() in loss()", OWN_BACKWARD),
    mistaken("A step of the optimizer in loss()", OWN_STEP),
    mistaken("A value that is changed in place", IN_PLACE),
    mistaken("A history that loss() keeps", HISTORY),
    mistaken("A dict in the place of a tensor", DICT),
    mistaken("A batch that has other parts", UNPACKED),
    mistaken(".cuda() without a GPU", "def model(self):\n    return super().model().cuda()"),
    mistaken("A tensor on the GPU without one", 'def model(self):\n    return nn.Linear(3, 1, device="cuda")'),
    mistaken("A class that is no task", task=NO_TASK),
)

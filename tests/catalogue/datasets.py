"""Mistakes in the data."""

from catalogue.data_verbs import WORDS, files
from catalogue.tasks import mistaken

TORN = """\
from sound import *

class Rows(list):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("page 5 is torn")
        return super().__getitem__(index)

class Mine(Sound):
    def datasets(self):
        return Rows(super().datasets()[0])
"""
NUMPY = """
def datasets(self):
    import numpy
    return [(numpy.ones(3), numpy.ones(1)) for _ in range(24)]
"""
UNNAMED = """
def datasets(self):
    return quorate.Shards("photos", decode=len, cache={"folder": "cache"})
"""
NO_LENGTH = """\
from sound import *

class Rows(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.ones(3), torch.ones(1)

class Mine(Sound):
    def datasets(self):
        return Rows()
"""
TOO_LONG = """\
from sound import *

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 2 * len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

class Mine(Sound):
    def datasets(self):
        return Rows(super().datasets()[0])
"""
NO_NUMBER = """
def datasets(self):
    return [(torch.tensor([float("nan")] * 3), torch.ones(1)) for _ in range(24)]
"""

CASES = (
    mistaken("A training set that is empty", "def datasets(self):\n    return []"),
    mistaken(
        "A DataLoader in place of a dataset",
        "def datasets(self):\n    return torch.utils.data.DataLoader(super().datasets()[0], batch_size=8)",
    ),
    mistaken("A training set that is smaller than a batch", job="batch_size: 64"),
    mistaken(
        "Samples of different shapes",
        "def datasets(self):\n    return [(torch.zeros(3 + i % 2), torch.zeros(1)) for i in range(24)]",
    ),
    mistaken("Numbers of NumPy", NUMPY),
    mistaken("A sample that cannot be read", job="loader_workers: 1", task=TORN),
    mistaken(
        "A cache of decoded samples without a key",
        UNNAMED,
        story="`photos` was indexed.",
        prepare=files(WORDS, indexed=True),
    ),
    mistaken("A dataset without a length", task=NO_LENGTH),
    mistaken("A dataset that is shorter than its len()", task=TOO_LONG),
    mistaken(
        "A file that is not there", "def datasets(self):\n    return torch.load('data/train.pt'), super().datasets()[1]"
    ),
    mistaken("Data with NaN in them", NO_NUMBER),
    mistaken(
        "An evaluation without a validation set",
        "def datasets(self):\n    return super().datasets()[0]",
        job="evaluate: {every: 2, metric: loss}",
    ),
    mistaken("Samples that are text", "def datasets(self):\n    return [('a', 'text') for _ in range(24)]"),
)

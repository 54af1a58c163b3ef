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
)

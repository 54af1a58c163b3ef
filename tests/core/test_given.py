from typing import Any

import numpy
import pytest
import torch

from quorate.core.user_code import given, likely_slip


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "nothing (None)"),
        (0.5, "the float 0.5"),
        (True, "the bool True"),
        ("x" * 50, f'the text "{"x" * 37}..."'),
        ([1, 2], "a list of 2 values"),
        ((1,), "a tuple of one value"),
        ({"a": 1}, "a dict"),
        (torch.optim.SGD, "the class SGD"),
        (torch.zeros(2, 3), "a Tensor of shape (2, 3)"),
        (numpy.zeros(4), "a ndarray of shape (4,)"),
        (OSError(), "an OSError"),
    ],
)
def test_a_value_in_words(value: Any, words: str) -> None:
    assert given(value) == words


@pytest.mark.parametrize(
    ("value", "slip"), [(None, " Is a `return` missing?"), (OSError, " Is `()` missing after OSError?"), (3, "")]
)
def test_what_was_probably_forgotten(value: Any, slip: str) -> None:
    assert likely_slip(value) == slip

import json
import math
import struct
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quorate.checkpoint.tensor_file import DTYPES, TensorFile, tensors_in
from quorate.checkpoint.tree import decode, encode
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import write_new_file

EXTRA = (torch.complex64, torch.complex128, torch.float8_e4m3fnuz)
ALL_DTYPES = (*DTYPES, *EXTRA)


def there_and_back(tree: Any, folder: Path | None = None) -> Any:
    """Through JSON text, and through a file where a folder is given."""
    encoded = encode(tree)
    skeleton = json.loads(json.dumps(encoded.skeleton, allow_nan=False))
    if folder is None:
        return decode(skeleton, {name: tensor.clone() for name, tensor in encoded.tensors.items()})
    file = TensorFile(encoded.tensors)
    path = folder / "state.safetensors"
    assert write_new_file(path, file.chunks()) == file.size
    return decode(skeleton, tensors_in(memoryview(bytearray(path.read_bytes()))))


def same(left: Any, right: Any) -> bool:
    """Equal in type and in every bit."""
    if isinstance(left, torch.Tensor):
        return same_tensor(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def same_tensor(left: torch.Tensor, right: Any) -> bool:
    return (
        isinstance(right, torch.Tensor)
        and (left.dtype, left.shape) == (right.dtype, right.shape)
        and bits(left) == bits(right)
    )


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy())


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    content = torch.arange(size, dtype=torch.uint8) * 37
    if dtype is torch.bool:
        content %= 2
    return content.view(dtype).reshape(shape)


tensors = st.builds(sample, st.sampled_from(ALL_DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(plain, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    assert same(tree, there_and_back(tree))


@settings(deadline=None, max_examples=30)
@given(trees)
def test_any_tree_comes_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert same(tree, there_and_back(tree, tmp_path_factory.mktemp("tree")))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)], ids=str)
def test_every_type_and_shape_of_tensor(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    assert same(tensor, there_and_back(tensor, tmp_path))


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2**63, -(2**63) - 1, 10**5000, True, "\ud800\0é"],
    ids=lambda value: repr(value)[:12] if not isinstance(value, int) else f"int of {value.bit_length()} bits",
)
def test_plain_values_keep_type_and_bits(value: Any) -> None:
    assert same(value, there_and_back(value))
    assert same({value: [value]}, there_and_back({value: [value]}))


def test_keys_keep_their_type() -> None:
    tree = {0: "int", "0": "str", 0.5: "float", None: "none", True: "bool"}
    assert same(tree, there_and_back(tree))


def test_nan_payloads_survive() -> None:
    value = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    assert same(value, there_and_back(value))


def test_a_tree_that_looks_like_a_skeleton_is_taken_as_it_is() -> None:
    tree = {"tensor": "model.weight", "dict": {"tuple": [1]}, "pairs": [], "float": "nan"}
    assert same(tree, there_and_back(tree))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(16.0).reshape(1, 2, 2, 4).permute(0, 3, 1, 2),
        torch.arange(24.0).reshape(4, 6)[:, 1:4],
        torch.arange(24.0)[::5],
        torch.arange(3.0).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 3, dtype=torch.complex128).t(),
    ],
    ids=["permuted", "channels-last", "sliced", "strided", "expanded", "conjugated", "complex-transposed"],
)
def test_tensors_that_are_not_contiguous(tmp_path: Path, tensor: torch.Tensor) -> None:
    assert same(tensor, there_and_back(tensor, tmp_path))


def test_dense_tensors_keep_their_strides(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = there_and_back({"t": tensor}, tmp_path)["t"]
    assert back.stride() == tensor.stride()
    assert back.is_contiguous(memory_format=torch.channels_last)


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    state = model.state_dict()
    assert state["head.weight"] is not state["embedding.weight"]
    assert list(encode(state).tensors) == ["embedding.weight"]
    back = there_and_back(state, tmp_path)
    assert back["head.weight"] is back["embedding.weight"]


def test_other_views_of_the_same_memory_are_not_tied() -> None:
    flat = torch.arange(6.0)
    tree = {"first": flat[:3], "second": flat[3:], "matrix": flat.view(2, 3), "transposed": flat.view(2, 3).t()}
    assert len(encode(tree).tensors) == 4
    assert same(tree, there_and_back(tree))
    square = torch.arange(4.0).view(2, 2)
    assert same([square, square.t()], there_and_back([square, square.t()]))


def test_empty_tensors_are_not_tied_to_each_other() -> None:
    first, second = torch.empty(0), torch.empty(0)
    back = there_and_back([first, second, first])
    assert back[0] is back[2]
    assert back[0] is not back[1]


def test_parameters_and_ordered_dicts_come_back_plain() -> None:
    back = there_and_back(OrderedDict(weight=torch.nn.Parameter(torch.ones(2))))
    assert type(back) is dict
    assert type(back["weight"]) is torch.Tensor
    assert not back["weight"].requires_grad


def test_names_tell_the_place_and_never_collide(tmp_path: Path) -> None:
    tree = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "l": [torch.tensor(3), {0: torch.tensor(4), "0": torch.tensor(5)}],
        "__metadata__": torch.tensor(6),
        "\ud800": torch.tensor(7),
        "": torch.tensor(8),
    }
    names = list(encode(tree).tensors)
    assert names[:5] == ["a.b", "a.b~2", "l.0", "l.1.0", "l.1.0~2"]
    assert same(tree, there_and_back(tree, tmp_path))


def test_the_file_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    tree = {
        "model": {"weight": torch.randn(3, 2), "half": torch.randn(3).to(torch.bfloat16), "mask": torch.tensor(True)}
    }
    there_and_back(tree, tmp_path)
    loaded = load_file(tmp_path / "state.safetensors")
    assert same(loaded["model.weight"], tree["model"]["weight"])
    assert same(loaded["model.half"], tree["model"]["half"])
    assert loaded.keys() == {"model.weight", "model.half", "model.mask"}


Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    pass


def hook() -> None:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (hook, r"a function \(hook\)"),
        (lambda: None, r"a function \(<lambda>\)"),
        (torch.nn.Linear(1, 1), r"a torch\.nn\.modules\.linear\.Linear"),
        ({1}, "a set"),
        (b"x", "a bytes"),
        (1j, "a complex"),
        (np.float64(1), r"a numpy float64; make it a plain number"),
        (np.zeros(2), "a numpy ndarray"),
        (Point(1, 2), "a .*Point"),
        (Colour.RED, "a .*Colour"),
        (torch.float32, "a torch.dtype"),
        (torch.Size([1]), "a torch.Size"),
        (torch.zeros(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), r"a tensor without content \(device meta\)"),
        (torch.zeros(2).as_subclass(Subclass), "a .*Subclass"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value,
)
def test_anything_else_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^optimizer\.state\.0\.thing: cannot save {words}"):
        encode({"optimizer": {"state": {0: {"thing": value}}}})


def test_other_keys_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"as a key"):
        encode({"a": {(1, 2): 3}})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(CheckpointError, match=r"self\.self.*contain itself"):
        encode(tree)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'set'"):
        decode({"set": [1]}, {})


def test_a_real_optimizer_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    state = there_and_back({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, other_optimizer = build()
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(model.state_dict(), other.state_dict())

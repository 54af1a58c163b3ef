"""A nested state as JSON and named tensors, and back. Nothing is pickled: a checkpoint cannot run code.

Plain JSON values stand for themselves and lists for lists. Everything else is an object with a single word as its first
key: ``dict`` (all keys are strings), ``pairs`` (a dictionary with other keys), ``tuple``, ``int`` (beyond 64 bits),
``float`` (not finite) or ``tensor``.
"""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quorate.checkpoint.tensor_file import DTYPES, METADATA
from quorate.core.errors import CheckpointError

DEEPEST = 100


@dataclass(frozen=True)
class Encoded:
    """A tree apart from its tensors; each tensor is named after the place where it was met first."""

    skeleton: Any
    tensors: dict[str, torch.Tensor]


def encode(tree: Any) -> Encoded:
    """Take a tree of dicts, lists, tuples, plain values and tensors apart.

    Tensors that show the same memory in the same way (tied weights) are stored once. Strides of dense tensors are kept:
    an optimizer takes other kernels, with other bits, for a state that lies in memory in another order.
    """
    encoder = _Encoder()
    return Encoded(encoder.encode(tree, ()), encoder.tensors)


def decode(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Put a tree together again; tied tensors are one tensor again, dicts of any kind are plain ones."""
    return _Decoder(tensors).decode(skeleton)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._references: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._forms: dict[type, Callable[[Any, tuple[str, ...]], Any]] = {
            type(None): _itself,
            bool: _itself,
            str: _itself,
            int: _encode_int,
            float: _encode_float,
            list: self._encode_list,
            tuple: self._encode_tuple,
            dict: self._encode_dict,
            OrderedDict: self._encode_dict,
            torch.Tensor: self._encode_tensor,
            torch.nn.Parameter: self._encode_tensor,
        }

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        # The exact type, not isinstance: a NumPy float64 is a float, an IntEnum an int, and neither would come back.
        form = self._forms.get(type(value))
        if form is None:
            raise CheckpointError(f"{_dotted(path)}: cannot save {_described(value)}")
        if len(path) > DEEPEST:
            raise CheckpointError(f"{_dotted(path[:5])}…: nested more than {DEEPEST} deep; does it contain itself?")
        return form(value, path)

    def _encode_list(self, value: list[Any], path: tuple[str, ...]) -> Any:
        return [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]

    def _encode_tuple(self, value: tuple[Any, ...], path: tuple[str, ...]) -> Any:
        return {"tuple": self._encode_list(list(value), path)}

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.encode(item, (*path, key)) for key, item in value.items()}}
        pairs = []
        for key, item in value.items():
            # Not str(): Python refuses to write an integer of more than 4300 digits in decimals.
            place = (*path, f"{key:#x}" if type(key) is int and key.bit_length() > 64 else str(key))
            if type(key) not in (type(None), bool, int, float, str):
                raise CheckpointError(f"{_dotted(place)}: cannot save {_described(key)} as a key")
            pairs.append([self.encode(key, place), self.encode(item, place)])
        return {"pairs": pairs}

    def _encode_tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        _refuse_exotic(value, path)
        tensor = value.detach()
        identity = _identity(tensor, value)
        if identity not in self._references:
            self._references[identity] = self._store(tensor, path)
        return self._references[identity]

    def _store(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        name = self._free_name(path)
        reference: dict[str, Any] = {"tensor": name}
        if not tensor.is_contiguous() and _is_dense(tensor):
            reference["strides"] = list(tensor.stride())
        if tensor.dtype not in DTYPES:
            reference |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            tensor = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        self.tensors[name] = tensor
        return reference

    def _free_name(self, path: tuple[str, ...]) -> str:
        # Half of a surrogate pair has no UTF-8; {"a.b": x} and {"a": {"b": y}} have one dotted path.
        plain = _dotted(path).encode(errors="backslashreplace").decode()
        name, count = plain, 1
        while name in self.tensors or name == METADATA:
            count += 1
            name = f"{plain}~{count}"
        return name


class _Decoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}
        self._forms: dict[str, Callable[[dict[str, Any]], Any]] = {
            "dict": lambda form: {key: self.decode(item) for key, item in form["dict"].items()},
            "pairs": lambda form: {self.decode(key): self.decode(item) for key, item in form["pairs"]},
            "tuple": lambda form: tuple(self.decode(item) for item in form["tuple"]),
            "int": lambda form: int(form["int"], 16),
            "float": lambda form: struct.unpack(">d", bytes.fromhex(form["float"]))[0],
            "tensor": self._tensor,
        }

    def decode(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.decode(item) for item in form]
        if not isinstance(form, dict):
            return form
        kind = next(iter(form), "nothing")
        if kind not in self._forms:
            raise CheckpointError(f"the checkpoint holds a {kind!r}, which this version of Quorate does not know")
        return self._forms[kind](form)

    def _tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        name = reference["tensor"]
        if name not in self._made:
            self._made[name] = _restored(self._tensors[name], reference)
        return self._made[name]


def _restored(tensor: torch.Tensor, reference: dict[str, Any]) -> torch.Tensor:
    if "dtype" in reference:
        tensor = tensor.view(getattr(torch, reference["dtype"])).reshape(reference["shape"])
    if "strides" in reference:
        tensor = torch.empty_strided(tensor.shape, reference["strides"], dtype=tensor.dtype).copy_(tensor)
    return tensor


def _itself(value: Any, path: tuple[str, ...]) -> Any:  # noqa: ARG001 (one shape for all forms)
    return value


def _encode_int(value: int, path: tuple[str, ...]) -> Any:  # noqa: ARG001
    # Many readers of JSON round what does not fit into 64 bits, and Python refuses more than 4300 digits.
    return value if -(2**63) <= value < 2**63 else {"int": hex(value)}


def _encode_float(value: float, path: tuple[str, ...]) -> Any:  # noqa: ARG001
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _identity(tensor: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common if, and only if, they show the same memory in the same way."""
    if tensor.numel() == 0:
        return ("empty", id(value))
    view = (
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    return (tensor.device, tensor.untyped_storage().data_ptr(), *view)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refuse_exotic(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    reasons = {
        f"a tensor of layout {tensor.layout}": tensor.layout is not torch.strided,
        "a quantized tensor": tensor.is_quantized,
        "a tensor without content (device meta)": tensor.is_meta,
    }
    for reason, applies in reasons.items():
        if applies:
            raise CheckpointError(f"{_dotted(path)}: cannot save {reason}; only dense tensors are supported")


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path) or "state"


def _described(value: Any) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"a {kind.__name__} ({value.__name__})"
    if kind.__module__ == "numpy":
        return f"a numpy {kind.__name__}; make it a plain number or a tensor first"
    return f"a {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"a {kind.__name__}"

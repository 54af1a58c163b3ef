"""A nested state as JSON and named tensors, and back. Nothing is pickled: a checkpoint cannot run code.

Plain JSON values stand for themselves and lists for lists. Everything else is an object with a single word as its first
key: ``dict`` (all keys are strings), ``pairs`` (a dictionary with other keys), ``tuple``, ``int`` (beyond 64 bits),
``float`` (not finite), ``tensor``, or ``pieces``: a tensor that lies in several, each with its name, its offset and
its size in the whole. Of a state that is spread over workers, each has some of them.
"""

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from quorate.checkpoint.pieces import (
    PIECE_NAME,
    Form,
    Piece,
    check_cover,
    dtype_name,
    form_of,
    pieces_of,
    storable,
    stored_piece,
)
from quorate.checkpoint.tensor_file import ALIGNMENT, DTYPES, METADATA, TensorFile, tensors_in
from quorate.core.digests import Buffer
from quorate.core.errors import CheckpointError

DEEPEST = 100
_PLAIN = (type(None), bool, int, float, str)
Place = tuple[Any, ...]
"""The keys that lead to a value in a tree."""


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


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a tree together again; tied tensors are one tensor again, dicts of any kind are plain ones. Of a tensor of
    which only a piece is there, it comes as that `Piece`; `reshard.collected` puts together what lies in several."""
    made: dict[str, torch.Tensor] = {}

    def build(form: Any) -> Any:
        if isinstance(form, list):
            return list(map(build, form))
        if not isinstance(form, dict):
            return form
        kind = next(iter(form), "nothing")
        match kind:
            case "dict":
                built: Any = {key: build(item) for key, item in form["dict"].items()}
            case "pairs":
                built = {build(key): build(item) for key, item in form["pairs"]}
            case "tuple":
                built = tuple(map(build, form["tuple"]))
            case "int":
                built = int(form["int"], 16)
            case "float":
                built = struct.unpack(">d", bytes.fromhex(form["float"]))[0]
            case "tensor" | "pieces":
                built = _whole(form, tensors, made) if kind == "tensor" else _piece(form, tensors)
            case _:
                raise CheckpointError(f"the checkpoint holds a {kind!r}, which this version of Quorate does not know")
        return built

    return build(skeleton)


def as_bytes(encoded: Encoded) -> tuple[Iterator[Buffer], int]:
    """A tree as pieces of bytes, of tensors from where they lie, and how many bytes these are."""
    file = TensorFile(encoded.tensors)
    text = json.dumps(encoded.skeleton).encode()
    skeleton = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)  # so that the tensors behind it are aligned
    return iter([len(skeleton).to_bytes(8), skeleton, *file.chunks()]), 8 + len(skeleton) + file.size


def encoded_in(content: memoryview) -> Encoded:
    """What `as_bytes` made bytes of; its tensors are views of that memory."""
    tensors = 8 + int.from_bytes(content[:8])
    return Encoded(json.loads(bytes(content[8:tensors])), tensors_in(content[tensors:]))


def is_in_pieces(skeleton: Any) -> bool:
    """Whether somebody has written it who held only a part of a tensor."""
    return any("pieces" in form for _, form in tensor_forms(skeleton))


def changed(form: Any, change: Callable[[Form, Place], Any], place: Place = ()) -> Any:
    """A skeleton with other forms in the place of its tensors, whole or in pieces; the rest is the same."""
    if isinstance(form, list):
        return [changed(item, change, (*place, index)) for index, item in enumerate(form)]
    new = form
    match next(iter(form), "nothing") if isinstance(form, dict) else "plain":
        case "dict":
            new = {"dict": {key: changed(item, change, (*place, key)) for key, item in form["dict"].items()}}
        case "pairs":
            keyed = [(key, decode(key, {}), item) for key, item in form["pairs"]]
            new = {"pairs": [[key, changed(item, change, (*place, known))] for key, known, item in keyed]}
        case "tuple":
            new = {"tuple": changed(form["tuple"], change, place)}
        case "tensor" | "pieces":
            new = change(form, place)
    return new


def tensor_forms(skeleton: Any) -> Iterator[tuple[Place, Form]]:
    """The tensors of a skeleton, whole or in pieces, by their places."""
    found: list[tuple[Place, Form]] = []
    changed(skeleton, lambda form, place: found.append((place, form)))
    return iter(found)


def check_written(skeleton: Any, written: Iterable[Iterable[str]]) -> None:
    """Raise `CheckpointError` unless each tensor of a skeleton was written, whole and each element once, by one of
    those who say what they have: a checkpoint that lacks one would be found out by whoever needs it."""
    counts = Counter(chain.from_iterable(written))
    for place, form in tensor_forms(skeleton):
        if "pieces" in form:
            check_cover(dotted(place), tuple(form["shape"]), list(pieces_of(form).values()))
        for name in [form["tensor"]] if "tensor" in form else pieces_of(form):
            if counts[name] != 1:
                raise CheckpointError(
                    f"'{dotted(place)}' was written by {counts[name]} workers as {name!r}, not by one"
                )


@dataclass
class _Encoder:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    references: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > DEEPEST:
            raise CheckpointError(f"{dotted(path[:5])}…: nested more than {DEEPEST} deep; does it contain itself?")
        # The exact type, not isinstance: a NumPy float64 is a float, an IntEnum an int, and neither would come back.
        kind = type(value)
        form = value
        if kind is int:
            # Many readers of JSON round what does not fit into 64 bits, and Python refuses more than 4300 digits.
            form = value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        elif kind is float:
            form = value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        elif kind is list or kind is tuple:
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            form = items if kind is list else {"tuple": items}
        elif kind is dict or kind is OrderedDict:
            form = self._encode_dict(value, path)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            form = self._encode_tensor(value, path)
        elif kind is Piece:
            form = self._encode_piece(value, path)
        elif kind not in _PLAIN:
            raise CheckpointError(f"{dotted(path)}: cannot save {_described(value)}")
        return form

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.encode(item, (*path, key)) for key, item in value.items()}}
        pairs = []
        for key, item in value.items():
            # Not str(): Python refuses to write an integer of more than 4300 digits in decimals.
            place = (*path, f"{key:#x}" if type(key) is int and key.bit_length() > 64 else str(key))
            if type(key) not in _PLAIN:
                raise CheckpointError(f"{dotted(place)}: cannot save {_described(key)} as a key")
            pairs.append([self.encode(key, place), self.encode(item, place)])
        return {"pairs": pairs}

    def _encode_tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        tensor = _dense(value, path)
        identity = _identity(tensor, value)
        if identity in self.references:
            return self.references[identity]
        name = self._name(path)
        reference: dict[str, Any] = {"tensor": name}
        if not tensor.is_contiguous() and _is_dense(tensor):
            reference["strides"] = list(tensor.stride())
        if tensor.dtype not in DTYPES:
            reference |= {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        self.tensors[name] = storable(tensor)
        self.references[identity] = reference
        return reference

    def _encode_piece(self, piece: Piece, path: tuple[str, ...]) -> Any:
        """Its name tells where it begins: whoever else has it gives it the same one, and other pieces have others."""
        tensor = _dense(piece.values, path)
        identity = (*_identity(tensor, piece.values), piece.shape, piece.offset)
        if identity in self.references:
            return self.references[identity]
        reference = form_of(self._name(path), piece)
        # What is empty is nowhere: a tensor has fewer pieces then than it has workers.
        for name, _, _ in reference["pieces"]:
            self.tensors[name] = storable(tensor)
        self.references[identity] = reference
        return reference

    def _name(self, path: tuple[str, ...]) -> str:
        """One that no other tensor has, in pieces or not; it does not depend on which pieces of them are here."""
        # Half of a surrogate pair has no UTF-8; {"a.b": x} and {"a": {"b": y}} have one dotted path.
        plain = (".".join(path) or "state").encode(errors="backslashreplace").decode()
        name, count = plain, 1
        while name in self.names or name == METADATA or PIECE_NAME.search(name):
            count += 1
            name = f"{plain}~{count}"
        self.names.add(name)
        return name


def _dense(value: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _refused(value, path)
    return value.detach()


def _whole(reference: Form, tensors: Mapping[str, torch.Tensor], made: dict[str, torch.Tensor]) -> torch.Tensor:
    name = reference["tensor"]
    if name not in made:
        if name not in tensors:
            raise CheckpointError(f"the checkpoint lacks the tensor {name!r}")
        tensor = tensors[name]
        if "dtype" in reference:
            tensor = tensor.view(getattr(torch, reference["dtype"])).reshape(reference["shape"])
        if "strides" in reference:
            tensor = torch.empty_strided(tensor.shape, reference["strides"], dtype=tensor.dtype).copy_(tensor)
        made[name] = tensor
    return made[name]


def _piece(form: Form, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | Piece:
    shape, dtype, pieces = tuple(form["shape"]), getattr(torch, form["dtype"]), pieces_of(form)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    if not pieces:
        return Piece(torch.empty(0, dtype=dtype), shape, (0,) * len(shape))
    ((name, box),) = pieces.items()
    return Piece(stored_piece(tensors, name, form["dtype"], box), shape, box.offset)


def _identity(tensor: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common if, and only if, they show the same memory in the same way."""
    if tensor.numel() == 0:
        return ("empty", id(value))
    view = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (tensor.device, tensor.untyped_storage().data_ptr(), *view, tensor.is_conj(), tensor.is_neg())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refused(tensor: torch.Tensor, path: tuple[str, ...]) -> CheckpointError:
    if tensor.layout is not torch.strided:
        what = f"a tensor of layout {tensor.layout}"
    else:
        what = "a quantized tensor" if tensor.is_quantized else "a tensor without content (device meta)"
    return CheckpointError(f"{dotted(path)}: cannot save {what}; only dense tensors are supported")


def dotted(path: Place) -> str:
    """A place as people read it."""
    return ".".join(map(str, path)) or "state"


def _described(value: Any) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"a {kind.__name__} ({value.__name__})"
    if kind.__module__ == "numpy":
        return f"a numpy {kind.__name__}; make it a plain number or a tensor first"
    return f"a {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"a {kind.__name__}"

"""What a function depends on, as a digest: two that are alike in it make the same of the same record.

Code of the task is followed wherever it leads: into the functions and classes that it calls, their defaults, closures,
global variables and attributes. Code of Python and of installed packages is known by its version. Whatever can change
without a trace in any of these leaves the function unidentified.
"""

import builtins
import collections.abc
import enum
import functools
import os
import pathlib
import platform
import random
import re
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash

from quorate.data.shards.caching.bytecode import Imported, Loaded, Stored, is_of_a_class_body, uses
from quorate.data.shards.caching.installed import file_of, home_of, version_of
from quorate.data.shards.caching.unidentified import (
    AT_THE_TOP,
    FROM_THE_RECORD,
    OUTSIDE_ATTRIBUTES,
    OUTSIDE_BUILTINS,
    PLAIN_VALUE,
    Unidentified,
    refuse_outside,
)

_ATOMS = (types.NoneType, bool, int, float, complex, str, bytes, types.EllipsisType, types.NotImplementedType, range)
_STATEFUL = (
    random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator, torch.Generator,
    collections.abc.Iterator, weakref.ref, types.CodeType, types.FrameType, numpy.memmap, type(os.environ),
)  # fmt: skip
_WRAPPED = (staticmethod, classmethod, functools.cached_property)
_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_NOT_OF_CLASSES = {"_abc_impl"}


@dataclass(frozen=True)
class Identity:
    """A digest of all that a function depends on, and one of each part."""

    digest: str
    parts: dict[str, str]

    def difference(self, other: "Identity") -> str:
        """The first part in which they differ, in words."""
        names = [*self.parts, *other.parts]
        return next((name for name in names if self.parts.get(name) != other.parts.get(name)), "nothing")


def identity(function: Callable[..., Any]) -> Identity:
    """All that a function depends on, but for its arguments."""
    followed = _Followed()
    followed.machine()
    try:
        followed.follow(function, "decode()")
    except RecursionError:
        raise Unidentified("something that is nested too deeply to be looked into") from None
    return followed.identity()


class _Followed:
    """What was found so far, in order; each thing is followed once."""

    def __init__(self) -> None:
        self._parts: dict[str, xxhash.xxh3_128] = {}
        # By their numbers, and kept: the number of one that is gone would become another's.
        self._seen: dict[int, tuple[int, Any]] = {}

    def identity(self) -> Identity:
        parts = {name: digest.hexdigest() for name, digest in self._parts.items()}
        return Identity(xxhash.xxh3_128_hexdigest(repr(parts).encode()), parts)

    def machine(self) -> None:
        """What all code depends on: kernels are chosen by the processor, and defaults may be set anywhere."""
        self._add("the machine", f"{sys.version} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}")
        self._add("a default of torch", f"{torch.get_default_dtype()} {torch.get_default_device()}")
        # Quorate makes the records, with those packages that it needs for them.
        for package in ("quorate", "torch", "numpy"):
            self._library(package, package, package)
        truncated = getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False)
        self._add("a setting of PIL", repr(truncated))

    def _add(self, where: str, *texts: str | bytes) -> None:
        digest = self._parts.setdefault(where, xxhash.xxh3_128())
        for text in texts:
            content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
            digest.update(f"{len(content)}:".encode() + content)

    # --- values

    def follow(self, value: Any, where: str) -> None:
        """Add a value of any kind; `where` says in words which it is."""
        kind = type(value)
        if kind in _ATOMS:
            self._add(where, kind.__name__, repr(value))
            return
        number, _ = self._seen.setdefault(id(value), (len(self._seen), value))
        if number != len(self._seen) - 1:
            self._add(where, "again", str(number))
            return
        if isinstance(value, _STATEFUL):
            raise Unidentified(f"{where} ({_named(value)}), which may change unseen")
        if kind in (list, tuple, dict, set, frozenset):
            self._container(value, where)
        elif isinstance(value, types.ModuleType):
            self._module(value, where)
        elif isinstance(value, type):
            self._class(value, where)
        elif not self._callable(value, where) and not self._data(value, where):
            self._instance(value, where)

    def _container(self, value: Any, where: str) -> None:
        self._add(where, type(value).__name__, str(len(value)))
        if isinstance(value, set | frozenset):
            if not all(type(item) in _ATOMS for item in value):
                raise Unidentified(f"{where} (a set of other things than numbers and texts)")
            # In an order of their own: that of a set differs from process to process.
            self._add(where, *sorted(f"{type(item).__name__} {item!r}" for item in value))
            return
        for item in value.items() if isinstance(value, dict) else value:
            if isinstance(value, dict):
                self.follow(item[0], where)
                self.follow(item[1], where)
            else:
                self.follow(item, where)

    def _data(self, value: Any, where: str) -> bool:
        """Values that are bytes and little else."""
        kind = type(value)
        if kind is numpy.ndarray and value.dtype.hasobject:
            self._add(where, "array", str(value.shape))
            self.follow(value.tolist(), where)
        elif kind is numpy.ndarray or isinstance(value, numpy.generic):
            self._add(where, "array", repr(value.dtype.descr), str(value.shape), value.tobytes())
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            self._tensor(value, where)
        elif isinstance(value, re.Pattern):
            self._add(where, "pattern", repr(value.pattern), str(value.flags))
        elif isinstance(value, torch.dtype | torch.device | torch.Size | numpy.dtype | slice | types.GenericAlias):
            self._add(where, kind.__name__, repr(value))
        elif isinstance(value, pathlib.PurePath):
            self._add(where, kind.__name__, str(value))
        elif isinstance(value, enum.Enum):
            self._add(where, value.name)
            self.follow(kind, where)
        else:
            return False
        return True

    def _tensor(self, value: torch.Tensor, where: str) -> None:
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise Unidentified(f"{where} (a tensor that is sparse or on a device)")
        dense = value.detach().contiguous().reshape(-1)
        self._add(where, "tensor", str(value.dtype), str(tuple(value.shape)), str(value.stride()))
        self._add(where, dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b"")

    def _instance(self, value: Any, where: str) -> None:
        """An object: its class, and all that a pickle of it would hold."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            raise Unidentified(f"{where} ({_named(value)}), which cannot be looked into") from None
        if isinstance(reduced, str):
            self._by_name(value, reduced, where)
            return
        self._add(where, "object")
        self.follow(type(value), where)
        state = reduced[2] if len(reduced) > 2 else None
        self.follow(reduced[:2], where)
        if type(state) is dict:
            for name, held in state.items():
                self.follow(name, where)
                self.follow(held, f"{name} of {_named(value)}" if isinstance(name, str) else where)
        else:
            self.follow(state, where)
        for items in reduced[3:5]:
            self.follow(None if items is None else list(items), where)

    def _by_name(self, value: Any, name: str, where: str) -> None:
        """An object that a pickle holds only the name of."""
        wrapped = getattr(value, "__wrapped__", None)
        module = getattr(value, "__module__", None) or type(value).__module__
        if wrapped is not None and home_of(type(value).__module__) != "task":
            self._add(where, name)
            self.follow(type(value), where)
            self.follow(wrapped, where)
        elif home_of(module) == "task":
            raise Unidentified(f"{where} ({_named(value)}), which cannot be looked into")
        else:
            refuse_outside(module, f"{module}.{name}")
            self._library(module, name, where)

    # --- code

    def _callable(self, value: Any, where: str) -> bool:
        if isinstance(value, functools.partial):
            self._add(where, "partial")
            for each in (value.func, value.args, value.keywords):
                self.follow(each, where)
        elif isinstance(value, types.MethodType):
            self.follow(value.__self__, f"what {value.__qualname__}() is a method of")
            self.follow(value.__func__, where)
        elif isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._builtin(value, where)
        elif isinstance(value, _DESCRIPTORS):
            self._add(where, value.__name__)
            self.follow(value.__objclass__, where)
        elif isinstance(value, _WRAPPED):
            self._add(where, type(value).__name__)
            self.follow(value.func if isinstance(value, functools.cached_property) else value.__func__, where)
        elif isinstance(value, property):
            self.follow((value.fget, value.fset, value.fdel), where)
        else:
            return False
        return True

    def _builtin(self, value: Any, where: str) -> None:
        owner = value.__self__
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self._add(where, value.__name__)
            self.follow(owner, where)
            return
        module = getattr(value, "__module__", None) or getattr(owner, "__module__", None) or "builtins"
        refuse_outside(module, f"{module}.{value.__name__}")
        self._library(module, value.__qualname__, where)

    def _function(self, function: types.FunctionType, where: str) -> None:
        module = function.__globals__.get("__name__", "")
        is_tasks = home_of(module) == "task"
        if is_tasks:
            self._add(where, function.__qualname__)
            self._file(module, where)
            self._code(function.__code__, function, where)
        else:
            refuse_outside(module, f"{module}.{function.__name__}")
            self._library(module, function.__qualname__, where)
            if function.__closure__ is None:
                return
        name = function.__name__ if function.__name__ != "<lambda>" else "a lambda"
        for each in (function.__defaults__, function.__kwdefaults__):
            self.follow(each, f"a default of {name}")
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                raise Unidentified(f"the variable {free} of {name}, which has no value yet") from None
            self._add(where, free)
            self.follow(content, f"the variable {free}")
        if is_tasks:
            self.follow(dict(function.__dict__), f"an attribute of {name}")

    def _code(self, code: types.CodeType, function: types.FunctionType, where: str) -> None:
        self._add(where, code.co_code, repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars))
        self._add(where, repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, function, where)
            else:
                self.follow(constant, where)
        for use in uses(code):
            if isinstance(use, Loaded):
                self._global(use.name, list(use.attributes), function)
            elif isinstance(use, Imported):
                self._import(use, function)
            elif isinstance(use, Stored):
                raise Unidentified(f"the variable {use.name}, which it changes itself", FROM_THE_RECORD)
            elif use.name in OUTSIDE_ATTRIBUTES:
                raise Unidentified(f".{use.name} in {function.__qualname__}", FROM_THE_RECORD)

    def _global(self, name: str, attributes: list[str], function: types.FunctionType) -> None:
        if name not in function.__globals__:
            if name in OUTSIDE_BUILTINS:
                raise Unidentified(f"{name}() in {function.__qualname__}", FROM_THE_RECORD)
            # The names of a class body are its own, and those of builtins are Python's.
            if hasattr(builtins, name) or name in ("__name__", "__qualname__", "__module__"):
                return
            if is_of_a_class_body(function.__code__, name):
                return
            raise Unidentified(f"the variable {name}, which is not there yet")
        value = function.__globals__[name]
        told = f"the variable {name}"
        path = name
        while isinstance(value, types.ModuleType):
            if home_of(value.__name__) != "task":
                refuse_outside(value.__name__, ".".join([value.__name__, *attributes[: 2 if value is os else 1]]))
                self._library(value.__name__, path, told)
                return
            if not attributes or attributes[0] not in vars(value):
                raise Unidentified(f"the module {path} as a whole", f"Use what is in it by name. {PLAIN_VALUE}")
            attribute, *attributes = attributes
            path = f"{path}.{attribute}"
            value, told = vars(value)[attribute], f"the variable {path}"
        self._add(told, path)
        self.follow(value, told)

    def _import(self, use: Imported, function: types.FunctionType) -> None:
        name = use.name
        if use.is_relative or home_of(name) == "task":
            raise Unidentified(f"the module {name}, which {function.__qualname__} imports as it runs", AT_THE_TOP)
        refuse_outside(name, name)
        self._library(name, name, f"the module {name}")

    def _module(self, module: types.ModuleType, where: str) -> None:
        if home_of(module.__name__) == "task":
            raise Unidentified(f"the module {module.__name__} as a whole")
        refuse_outside(module.__name__, module.__name__)
        self._library(module.__name__, module.__name__, where)

    def _library(self, module: str, name: str, where: str) -> None:
        """Something of Python or of an installed package, by its name and the version."""
        version = version_of(module)
        if version is None:
            raise Unidentified(f"{where} ({module}), which is installed without a version", "Install it with pip")
        self._add(where, module, name, version)

    def _class(self, kind: type, where: str) -> None:
        if home_of(kind.__module__) != "task":
            refuse_outside(kind.__module__, f"{kind.__module__}.{kind.__qualname__}")
            self._library(kind.__module__, kind.__qualname__, where)
            return
        self._add(where, kind.__qualname__)
        self._file(kind.__module__, where)
        self.follow(kind.__bases__, where)
        if type(kind) is not type:
            self.follow(type(kind), where)
        if issubclass(kind, enum.Enum):
            for name, member in kind.__members__.items():
                self._add(where, name)
                self.follow(member.value, f"{name} of {kind.__name__}")
        for name, value in vars(kind).items():
            if _is_of_class(kind, name, value):
                self._add(where, name)
                self.follow(value, f"{name} of {kind.__name__}")

    def _file(self, module: str, where: str) -> None:
        """The text of the file too: some of its code may be found in ways that cannot be followed."""
        text = file_of(module)
        if text is None:
            raise Unidentified(f"code of {module}, which is in no file", "Put it into a file of its own")
        self._add(where, text)


def _is_of_class(kind: type, name: str, value: Any) -> bool:
    if name in _NOT_OF_CLASSES or isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType):
        return False
    if name == "__new__" and hasattr(kind, "_fields") and kind.__bases__ == (tuple,):
        return False  # of a named tuple: made of its fields, which are there too
    if issubclass(kind, enum.Enum):
        return isinstance(value, types.FunctionType | property | staticmethod | classmethod)
    is_special = name.startswith("__") and name.endswith("__")
    return not is_special or isinstance(value, types.FunctionType | property | staticmethod | classmethod)


def _named(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOaeio' else 'a'} {kind}"

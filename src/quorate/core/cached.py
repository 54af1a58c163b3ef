"""`cached_property` as Python has it from 3.12 on. In 3.11 one lock per class is held while the value of any object is
computed; a process forked at that moment, such as a data loader's, keeps it locked and waits for ever."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 - as the one it stands for
    """A value computed at its first use, and kept in the object's `__dict__`."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, _: type) -> Self: ...
    @overload
    def __get__(self, owner: object, _: type) -> T: ...
    def __get__(self, owner: Any, _: type) -> Any:
        # Found in the object's own `__dict__` from the second time on: this is not called again.
        return self if owner is None else owner.__dict__.setdefault(self._name, self._make(owner))

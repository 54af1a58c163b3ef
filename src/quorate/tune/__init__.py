"""Hyperparameter search, here or on Ray Tune. The package can be called: ``quorate.tune(search)`` runs a search."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`quorate.tune` is a floor of this package and a verb of its interface: a module that is a function as well."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from quorate.tune.search import tune

        return tune(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

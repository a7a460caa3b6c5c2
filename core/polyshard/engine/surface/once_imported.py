"""Modules that take long to import, and are imported by those programs alone that use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def once_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call ``call`` with the module ``name``: now if it was imported, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _Awaited(name, call))


class _Awaited(MetaPathFinder):
    """Finds nothing by itself, and is gone once the module that it waits for comes."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            executes = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                executes(module)
                self._call(module)

            loader.exec_module = exec_module
        return spec

"""Makes ``Trainer(strategy="megascale")`` work after ``import lightning_megascale``, without importing Lightning for those who do not."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_MODULE = "lightning.pytorch.strategies"


def register_when_imported() -> None:
    """Registers now when Lightning's strategies are loaded, otherwise at the moment they are."""
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and hasattr(loaded, "StrategyRegistry"):
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(strategies: Any) -> None:
    if "megascale" not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register("megascale", _make, description="FSDP2 over all ranks, equal to one device")


def _make(**arguments: Any) -> Any:
    return import_module("lightning_megascale.strategies.trainer").MegascaleStrategy(**arguments)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets Python's own finders find the module, and registers after it has run. Steps aside for good afterwards."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

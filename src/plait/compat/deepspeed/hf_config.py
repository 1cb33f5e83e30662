"""Patch for Transformers' `HfDeepSpeedConfig`, which only works with DeepSpeed itself.

Without DeepSpeed, Transformers raises PackageNotFoundError, which suggests installing DeepSpeed.
Once `plait.compat.deepspeed` is imported, the error names `plait.from_pretrained` instead.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

from plait.errors import InputError

_MODULE = "transformers.integrations.deepspeed"


def patch_hf_deepspeed_config() -> None:
    """Patch Transformers' module, now if it is imported already, otherwise on its import."""
    if _MODULE in sys.modules:
        _patch(sys.modules[_MODULE])
    elif not any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(MetaPathFinder):
    """Finder that patches the module once, when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch(module: Any) -> None:
    construct = module.HfDeepSpeedConfig.__init__

    @functools.wraps(construct)
    def construct_or_refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except PackageNotFoundError as error:
            # `from_pretrained` would look for this object's ZeRO stage.
            module.unset_hf_deepspeed_config()
            raise InputError(
                "HfDeepSpeedConfig(...) makes Transformers split weights with DeepSpeed, which is"
                " not installed and which Plait replaces; delete the line, and build the model"
                " with plait.from_pretrained(name): every process then loads its shards in"
                " deepspeed.initialize"
            ) from error

    module.HfDeepSpeedConfig.__init__ = construct_or_refuse

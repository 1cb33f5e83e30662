"""Puts the simulated device into torch when a process imports it.

It is active in processes with SIMULATED_DEVICE set and this folder on PYTHONPATH. torch looks
for the hooks of CUDA while it is imported, so the device is loaded just before.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class _Loader(importlib.abc.Loader):
    def __init__(self, torchs):
        self._torchs = torchs

    def create_module(self, spec):
        return self._torchs.create_module(spec)

    def exec_module(self, module):
        # While it is imported, torch 2.14 replaces some CUDA kernels by Triton's, which no
        # simulated device can run.
        os.environ["TORCH_DISABLE_NATIVE_JIT"] = "1"
        library = _on_device("library")
        library.load()
        self._torchs.exec_module(module)
        _on_device("on_torch").put()

    def __getattr__(self, name):
        return getattr(self._torchs, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch once, and is removed then."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _on_device(name):
    """Import a module of the neighbouring folder, whatever the working folder is."""
    known = f"simulated_device.{name}"
    if known not in sys.modules:
        parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        file = os.path.join(parent, "python", f"{name}.py")
        spec = importlib.util.spec_from_file_location(known, file)
        assert spec is not None and spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


if os.environ.get("SIMULATED_DEVICE"):
    sys.meta_path.insert(0, _Finder())

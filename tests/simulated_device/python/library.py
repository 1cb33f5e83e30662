"""Loads the built library, which has to precede the import of torch."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_loaded: Any = None


def load():
    """Return the library of the folder in SIMULATED_DEVICE."""
    global _loaded
    if _loaded is None:
        _load_torchs()
        _loaded = ctypes.CDLL(
            os.path.join(os.environ["SIMULATED_DEVICE"], "simulated_device.so"),
            mode=ctypes.RTLD_GLOBAL,
        )
        index = ctypes.c_int
        int64 = ctypes.c_int64
        for name, result, arguments in (
            ("current_stream", int64, [index]),
            ("set_stream", None, [index, int64]),
            ("memory", int64, [index, index]),
            ("copies", ctypes.c_uint64, [index]),
            ("blocked", ctypes.c_uint64, [index]),
            ("race", ctypes.c_char_p, [index]),
            ("set_clock", None, [ctypes.c_double]),
            ("elapsed", ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p]),
            ("resize_storage", None, [ctypes.c_void_p, int64]),
        ):
            function = getattr(_loaded, f"simulated_{name}")
            function.restype = result
            function.argtypes = arguments
    return _loaded


def _load_torchs():
    """Load the libraries of this process's torch, whichever clone the device was built in."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)

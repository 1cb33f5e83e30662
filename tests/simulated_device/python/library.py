"""The built library, which must be loaded before torch is imported. Only in processes that simulate."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_loaded: Any = None


def load():
    """The library of the folder in SIMULATED_DEVICE."""
    global _loaded
    if _loaded is None:
        _load_torchs()
        _loaded = ctypes.CDLL(
            os.path.join(os.environ["SIMULATED_DEVICE"], "simulated_device.so"),
            mode=ctypes.RTLD_GLOBAL,
        )
        index, whole = ctypes.c_int, ctypes.c_int64
        for name, result, arguments in (
            ("current_stream", whole, [index]),
            ("set_stream", None, [index, whole]),
            ("memory", whole, [index, index]),
            ("copies", ctypes.c_uint64, [index]),
            ("blocked", ctypes.c_uint64, [index]),
            ("race", ctypes.c_char_p, [index]),
            ("set_clock", None, [ctypes.c_double]),
            ("elapsed", ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p]),
            ("resize_storage", None, [ctypes.c_void_p, whole]),
        ):
            function = getattr(_loaded, f"simulated_{name}")
            function.restype, function.argtypes = result, arguments
    return _loaded


def _load_torchs():
    """Load the libraries of the torch that is imported here: the one built takes these, whichever clone it was built in."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)

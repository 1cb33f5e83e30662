"""Reading what others have pickled, without calling what the file names: tensors, plain containers, and everything else as inert data.

A pickle is a program that calls any function it names. Here it may name only what is listed; classes of torch's
distributed checkpoints become empty classes that keep what they are given; whatever else is named ends the reading.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from plait.errors import CheckpointError

_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, _encoding: text.encode("latin-1"),
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, int, float, bool, str)},
}
_INERT = ("torch.distributed.checkpoint.", "torch.serialization.", "copyreg.", "pathlib.")


class Inert:
    """An object of a class that is not there: it keeps the arguments and the state that the file gives it."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        """Nothing is called."""
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, _: Any) -> None:
        """Dropped."""

    def extend(self, _: Any) -> None:
        """Dropped."""

    def get(self, name: str) -> Any:
        """An attribute; None where it has none of the name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Unpickler(pickle.Unpickler):
    """Finds only what is listed."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises CheckpointError for everything else."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.".startswith(_INERT):
            return type(name, (Inert,), {})
        raise CheckpointError(f"it names {module}.{name}, which is not read: only tensors and plain data are")


def read_pickle(path: Path) -> Any:
    """A plain pickle. Raises CheckpointError."""
    try:
        return Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error

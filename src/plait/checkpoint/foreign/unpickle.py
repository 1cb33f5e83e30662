"""Restricted unpickling: tensors, plain containers, and inert stand-ins for known classes.

A pickle is a program that calls any function it names. Here it may name only the functions and
classes that are listed. Classes of DeepSpeed and of torch's distributed checkpoints become inert
classes that store their arguments. Any other name raises an error.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from plait._torch.tensors import rebuilt_tensor, records_of
from plait.errors import CheckpointError

_BUILTINS = (set, frozenset, list, dict, tuple, int, float, bool, str)
_UNCALLED = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
"""Classes that pickles name as arguments without calling them."""
_RECORD = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.data/serialization_id|\.format_version"
    r"|\.storage_alignment"
)
"""Names of the records that torch.save writes."""
_INERT_MODULES = (
    "deepspeed.",
    "torch.distributed.checkpoint.",
    "argparse.",
    "torch.serialization.",
    "copyreg.",
    "pathlib.",
)
# Python 3.11.0 to 3.11.3 pickle an enum member as `getattr(EnumClass, "MEMBER")`; all other
# releases pickle `EnumClass(value)`. The members are listed because both forms must give the same
# object.
_ENUM_MEMBERS: dict[tuple[str, str], dict[str, int]] = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): {
        "TORCH_CONTIGUOUS_FORMAT": 0,
        "TORCH_CHANNELS_LAST": 1,
        "TORCH_PRESERVE_FORMAT": 2,
    },
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): {
        "disabled": 0,
        "optimizer_states": 1,
        "gradients": 2,
        "weights": 3,
    },
}


def _without_attributes(rebuild: Any, _kind: Any, arguments: tuple[Any, ...], _state: Any) -> Any:
    """Rebuild a pickled tensor, and drop the Python attributes that were saved with it."""
    if rebuild is not rebuilt_tensor:
        raise CheckpointError(
            "it contains a tensor subclass, which is not supported; save plain tensors"
        )
    return rebuild(*arguments)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuilt_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, _encoding: text.encode("latin-1"),
    **{("builtins", kind.__name__): kind for kind in _BUILTINS},
}
"""Functions and classes that a pickle may call, or what is called instead of them."""


class Inert:
    """Stand-in for an object of another library's class. It runs no code.

    Attributes:
        args: Arguments that the file passes to the class.
        state: State that the file gives to the object.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        # Pickle protocol 2 calls `__new__` and not `__init__`.
        instance = super().__new__(cls)
        instance.args = args
        instance.state = {}
        return instance

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, _: Any) -> None:
        """Ignore an element of a list."""

    def extend(self, _: Any) -> None:
        """Ignore elements of a list."""

    def get(self, name: str) -> Any:
        """Return an attribute, or None if it does not exist."""
        return self.state.get(name) if isinstance(self.state, dict) else None


_ENUM_CLASSES = {
    (module, name): type(name, (Inert,), {"__module__": module}) for module, name in _ENUM_MEMBERS
}
"""Classes of the members, which have their value as `args[0]`."""


def _enum_member(enum: Any, member: Any) -> Inert:
    """Replace `builtins.getattr` in a pickle. Only listed members of listed enums are returned.

    The real `getattr` would let a file reach any attribute of any object that it can name.

    Raises:
        CheckpointError: The arguments are not a listed enum class and one of its members.
    """
    for name, enum_class in _ENUM_CLASSES.items():
        members = _ENUM_MEMBERS[name]
        if enum is enum_class and isinstance(member, str) and member in members:
            return enum_class(members[member])

    raise CheckpointError(
        "it calls getattr on an object that is not a known enum, which could run code; save the"
        " checkpoint again with tensors and plain data only"
    )


class Unpickler(pickle.Unpickler):
    """Unpickler that finds only the listed functions and classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or class for a name, or raise CheckpointError if it is not listed."""
        if module == "__builtin__":
            # Pickle protocols 0 to 2, which torch.save uses, write the name of Python 2.
            module = "builtins"
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _ENUM_CLASSES:
            return _ENUM_CLASSES[module, name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _UNCALLED or f"{module}.".startswith(_INERT_MODULES):
            return type(name, (Inert,), {})
        raise CheckpointError(
            f"it references {module}.{name}, but only tensors and plain data are loaded; save"
            " the checkpoint again without it"
        )


class Module:
    """Interface that `torch.load` requires of a `pickle_module`."""

    Unpickler = Unpickler

    @staticmethod
    def load(stream: Any, **_: Any) -> Any:
        """Refuse the legacy format of torch before 1.6, which is not a zip file."""
        raise CheckpointError(
            "it has the format of torch before 1.6; load it with torch.load, and save it again"
        )


def read_torch(path: Path) -> Any:
    """Load a file of `torch.save`. Its tensors are memory-mapped. Raises CheckpointError."""
    try:
        if not path.is_file() or not zipfile.is_zipfile(path):
            raise CheckpointError(
                "it is missing, or not a zip file of torch.save; copy the checkpoint again, or"
                " save it again with torch 1.6 or later"
            )
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointError(
                    "it is compressed, which torch.save never does; copy the checkpoint again"
                )
        # torch.load hands an archive of TorchScript to torch.jit.load, which runs the code in it.
        unknown = [name for name in records_of(path) if not _RECORD.fullmatch(name)]
        if unknown:
            raise CheckpointError(
                f"it has the record {unknown[0]}, which torch.save never writes; copy the"
                " checkpoint again"
            )
        return torch.load(
            path, map_location="cpu", pickle_module=Module, weights_only=False, mmap=True
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_pickle(path: Path) -> Any:
    """Load a file with a plain pickle. Raises CheckpointError."""
    try:
        return Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error

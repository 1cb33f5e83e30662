"""Reading what others have pickled, without calling what the file names: tensors, plain containers,
and everything else as inert data.

A pickle is a program that calls any function it names. Here it may name only what is listed;
classes of DeepSpeed and of torch's distributed checkpoints become empty classes that keep what they
are given; whatever else is named ends the reading.
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

from plait._torch.pickles import rebuilt_tensor, records_of
from plait.errors import CheckpointError


def _without_attributes(rebuild: Any, _kind: Any, arguments: tuple[Any, ...], _state: Any) -> Any:
    """A tensor that has attributes, which are dropped."""
    if rebuild is not rebuilt_tensor:
        raise CheckpointError("it makes a tensor of another class")
    return rebuild(*arguments)


_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuilt_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, _encoding: text.encode("latin-1"),
    **{
        ("builtins", kind.__name__): kind
        for kind in (set, frozenset, list, dict, tuple, int, float, bool, str)
    },
}
_NAMED = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
"""Classes that are named and not called."""
_RECORD = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.data/serialization_id|\.format_version|\.storage_alignment"
)
"""Names of the records that torch.save writes."""
_INERT = (
    "deepspeed.",
    "torch.distributed.checkpoint.",
    "argparse.",
    "torch.serialization.",
    "copyreg.",
    "pathlib.",
)


class Inert:
    """An object of a class that is not there: it keeps the arguments and the state that the file
    gives it.
    """

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


class _InertEnum(Inert):
    """An enum of another library. Its members keep their value as `args[0]`."""


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
_ENUM_CLASSES = {
    (module, name): type(name, (_InertEnum,), {"__module__": module})
    for module, name in _ENUM_MEMBERS
}


def _enum_member(enum: Any, member: Any) -> Inert:
    """Stand in for `builtins.getattr` in a pickle: a listed member of a listed enum, nothing else.

    The real `getattr` would let a file reach any attribute of any object that it can name.

    Raises:
        CheckpointError: The arguments are not a listed enum class and one of its members.
    """
    for name, enum_class in _ENUM_CLASSES.items():
        members = _ENUM_MEMBERS[name]
        if enum is enum_class and isinstance(member, str) and member in members:
            return enum_class(members[member])

    raise CheckpointError(
        "it calls getattr on something other than a known enum, which is not read: only tensors and"
        " plain data are"
    )


class Unpickler(pickle.Unpickler):
    """Finds only what is listed."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises CheckpointError for everything else."""
        if module == "__builtin__":
            module = (  # pickle protocols 0 to 2, which torch.save uses, write the other name
                "builtins"
            )
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _ENUM_CLASSES:
            return _ENUM_CLASSES[module, name]
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _NAMED or f"{module}.".startswith(_INERT):
            return type(name, (Inert,), {})
        raise CheckpointError(
            f"it names {module}.{name}, which is not read: only tensors and plain data are"
        )


class Module:
    """What `torch.load` asks of a `pickle_module`."""

    Unpickler = Unpickler

    @staticmethod
    def load(stream: Any, **_: Any) -> Any:
        """torch's format of before 2020, which is not read."""
        raise CheckpointError("it is no zip file; save it again with a torch of 1.6 or later")


def read_torch(path: Path) -> Any:
    """A file of `torch.save`: its tensors are mapped, not read. Raises CheckpointError."""
    try:
        if not path.is_file() or not zipfile.is_zipfile(path):
            raise CheckpointError("it is missing, or no file of torch.save")
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointError("it is compressed, which torch.save never does")
        # torch.load hands an archive of TorchScript to torch.jit.load, which runs the code in it.
        unknown = [name for name in records_of(path) if not _RECORD.fullmatch(name)]
        if unknown:
            raise CheckpointError(f"it has the record {unknown[0]}, which torch.save never writes")
        return torch.load(
            path, map_location="cpu", pickle_module=Module, weights_only=False, mmap=True
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_pickle(path: Path) -> Any:
    """A plain pickle. Raises CheckpointError."""
    try:
        return Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error

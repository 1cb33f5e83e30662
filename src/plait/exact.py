"""Exact conversion of Python values to JSON and back.

Values that JSON cannot represent (tuples, integer keys, counters, tensors) are stored with their
type and decoded to the same type. Nothing is unpickled, so reading a file runs no code of its
author.

A function is code, not state. It is encoded as a marker, and `decode` inserts the function that
`reference` has at the same place.
"""

from __future__ import annotations

import base64
import functools
import math
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from plait.errors import CheckpointError
from plait.sizes import dtype_name

_MAX_ELEMENTS = 1 << 20
"""Largest number of elements of a tensor in JSON. Larger tensors belong in shard files."""
_MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "Size": torch.Size,
}
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)


def encode(value: Any, where: str = "value") -> Any:
    """Return a value as JSON types.

    Args:
        value: Plain data, small tensors and functions, nested in any way.
        where: Name of the value in error messages.

    Raises:
        CheckpointError: An entry has a type that is not supported. The message names the entry.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    # NumPy's float64 is a subclass of float, so it must be recognised before floats are.
    if isinstance(value, np.generic):
        return {"$": "numpy", "dtype": value.dtype.str, "bytes": _to_base64(value.tobytes())}
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$": "float", "value": repr(float(value))}
    if isinstance(value, int) and not isinstance(value, Enum):
        return int(value)
    if isinstance(value, str) and not isinstance(value, Enum):
        return str(value)
    if kind is list:
        return _encode_items(value, where)
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return _encode_marked(value, where)


def _encode_marked(value: Any, where: str) -> dict[str, Any]:
    """Return a dictionary that names the type of the value under the key `$`."""
    kind = type(value)
    if kind is _MAPPINGS.get(kind.__name__):
        items = [
            [encode(key, f"{where}: a key"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"$": kind.__name__, "items": items}
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        # The order of a set depends on the process, and equal states must give equal files.
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {"$": kind.__name__, "items": _encode_items(ordered, where)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "bytes": _to_base64(bytes(value))}
    if kind is complex:
        return {"$": "complex", "parts": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$": kind.__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, _CODE):
        return {"$": "own", "name": getattr(value, "__qualname__", kind.__qualname__)}
    raise CheckpointError(
        f"{where} is a {kind.__qualname__}, which a checkpoint cannot store; use numbers, text,"
        f" lists, dicts or tensors of at most {_MAX_ELEMENTS:,} elements there"
    )


def _encode_items(items: Iterable[Any], where: str) -> list[Any]:
    return [encode(item, f"{where}[{index}]") for index, item in enumerate(items)]


def decode(value: Any, reference: Any = None, where: str = "value") -> Any:
    """Return the value that `encode` has converted.

    Args:
        value: Result of `encode`.
        reference: Value of the same structure. Functions are taken from it, and tensors are moved
            to the device of its tensors.
        where: Name of the value in error messages.

    Raises:
        CheckpointError: `reference` lacks a function, or `value` is not a possible result of
            `encode`.
    """
    if isinstance(value, list):
        return _decode_items(value, reference if isinstance(reference, list) else [], where)
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        counterparts = reference if isinstance(reference, Mapping) else {}
        return {
            key: decode(item, counterparts.get(key), f"{where}.{key}")
            for key, item in value.items()
        }
    try:
        return _decode_marked(value, reference, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where} does not have a form that Plait writes: {str(value)[:200]} ({error!r}); load"
            " another checkpoint"
        ) from error


def refuse_other_kind(saved: Any, current: Any, where: str, *, is_strict: bool) -> None:
    """Refuse a decoded value that cannot take the place of this run's own value.

    Kinds are compared, not contents: numbers (also those in tensors of one element), booleans,
    text, lists or tuples, and mappings. A value that is None in this run may be anything.

    Args:
        saved: Decoded value.
        current: Value of this run.
        where: Folder and name of the value in error messages.
        is_strict: Whether sequences keep their lengths, mappings their public keys, numbers are
            finite, and None is not a substitute for a value. False suits states of unknown classes.

    Raises:
        CheckpointError: The value is of another kind. The message names the innermost one.
    """
    if current is None or (saved is None and not is_strict):
        return
    kind = _kind(current)
    if _kind(saved) != kind:
        raise CheckpointError(
            f"{where} is {str(saved)[:80]!r} in the checkpoint, but this run has a {kind} there"
            f" ({str(current)[:80]}); load another checkpoint"
        )
    if kind == "number" and is_strict and _is_finite(current) and not _is_finite(saved):
        raise CheckpointError(f"{where} is {saved} in the checkpoint; load another checkpoint")
    if kind == "sequence":
        if is_strict and len(saved) != len(current):
            raise CheckpointError(
                f"{where} has {len(saved)} entries in the checkpoint, but {len(current)} in this"
                " run; load another checkpoint, or use the settings that it was written with"
            )
        for index, (item, other) in enumerate(zip(saved, current, strict=False)):
            refuse_other_kind(item, other, f"{where}[{index}]", is_strict=is_strict)
    if kind == "mapping":
        for key, other in current.items():
            if key in saved:
                refuse_other_kind(saved[key], other, f"{where}.{key}", is_strict=is_strict)
                continue
            # Private flags come and go between versions of a library.
            is_flag = str(key).startswith("_") and _kind(other) != "sequence"
            if is_strict and isinstance(key, str) and not is_flag:
                raise CheckpointError(
                    f"{where}.{key} is missing in the checkpoint; load another checkpoint"
                )


def _kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "boolean"
    if isinstance(value, int | float | np.number):
        return "number"
    if isinstance(value, torch.Tensor):
        return "number" if value.numel() == 1 else "tensor"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "sequence"
    if isinstance(value, Mapping):
        return "mapping"
    return type(value).__name__


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        # An integer that no float can hold.
        return False


def _decode_marked(value: dict[str, Any], reference: Any, where: str) -> Any:
    kind = value["$"]
    if kind == "own":
        if not callable(reference):
            raise CheckpointError(
                f"{where} was the function {value['name']} when the checkpoint was written, and"
                f" in this run it is {reference!r}; use the same function as the run that wrote it"
            )
        return reference
    if kind in _MAPPINGS:
        counterparts = reference if isinstance(reference, Mapping) else {}
        items = {}
        for encoded_key, item in value["items"]:
            key = decode(encoded_key, None, where)
            items[key] = decode(item, counterparts.get(key), f"{where}[{key!r}]")
        return _MAPPINGS[kind](items)
    if kind in _SEQUENCES:
        elements = list(reference) if isinstance(reference, tuple | deque) else []
        return _SEQUENCES[kind](_decode_items(value["items"], elements, where))
    if kind == "tensor":
        return _decode_tensor(value, reference)
    return _decode_scalar(kind, value)


def _decode_scalar(kind: str, value: dict[str, Any]) -> Any:
    if kind == "float":
        return float(value["value"])
    if kind == "numpy":
        return np.frombuffer(_from_base64(value["bytes"]), dtype=np.dtype(value["dtype"]))[0]
    if kind == "bytes":
        return _from_base64(value["bytes"])
    if kind == "bytearray":
        return bytearray(_from_base64(value["bytes"]))
    if kind == "complex":
        return complex(*(decode(component) for component in value["parts"]))
    if kind == "dtype":
        return _dtype(value["name"])
    if kind == "device":
        return torch.device(value["name"])
    raise ValueError(f"unknown mark {kind!r}")


def _decode_items(items: list[Any], reference: list[Any], where: str) -> list[Any]:
    """Decode the items of a sequence. `reference` may be shorter than the sequence."""
    counterparts = reference + [None] * (len(items) - len(reference))
    return [
        decode(item, counterparts[index], f"{where}[{index}]") for index, item in enumerate(items)
    ]


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() > _MAX_ELEMENTS:
        form = f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        raise CheckpointError(
            f"{where} is a {form}, but a checkpoint stores only plain tensors of at most"
            f" {_MAX_ELEMENTS:,} elements there; register larger ones as buffers of the model"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = ""
    if flat.numel():
        content = _to_base64(bytes(flat.view(torch.uint8).tolist()))
    return {
        "$": "tensor",
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "bytes": content,
    }


def _decode_tensor(value: dict[str, Any], reference: Any) -> torch.Tensor:
    dtype = _dtype(value["dtype"])
    content = _from_base64(value["bytes"])
    # torch.frombuffer refuses an empty buffer.
    flat = (
        torch.frombuffer(bytearray(content), dtype=dtype)
        if content
        else torch.empty(0, dtype=dtype)
    )
    tensor = flat.clone().reshape(value["shape"])
    if isinstance(reference, torch.Tensor):
        return tensor.to(reference.device)
    return tensor


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)

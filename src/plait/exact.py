"""Python values as JSON and back, exactly: values that JSON cannot represent (tuples, integer keys,
counters, tensors) are marked and decoded with their type. Nothing is unpickled, so reading a file
runs no code of its author.

A function is code, not state: it is marked as the reader's own, and the reader puts in what it
holds at the same place.
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

_LARGEST = 1 << 20
"""Elements of a tensor in JSON; larger ones do not belong there."""
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
    """`value` in JSON's types. `where` names it in errors. Raises CheckpointError, naming the
    entry, for what is neither plain data, nor a small tensor, nor a function.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, np.generic):
        return {"$": "numpy", "dtype": value.dtype.str, "bytes": _text(value.tobytes())}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "value": repr(float(value))}
    if isinstance(value, int | str) and not isinstance(value, Enum):
        return int(value) if isinstance(value, int) else str(value)
    if kind is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
        items = [
            [encode(key, f"{where}: a key"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"$": kind.__name__, "items": items}
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {
            "$": kind.__name__,
            "items": [encode(item, f"{where}[{index}]") for index, item in enumerate(ordered)],
        }
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "bytes": _text(bytes(value))}
    if kind is complex:
        return {"$": "complex", "parts": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$": kind.__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, _CODE):
        return {"$": "own", "name": getattr(value, "__qualname__", kind.__qualname__)}
    raise CheckpointError(
        f"{where} is a {kind.__qualname__}, which a checkpoint does not keep; keep numbers, text,"
        f" lists, dicts or tensors of at most {_LARGEST:,} elements there"
    )


def decode(value: Any, own: Any = None, where: str = "value") -> Any:
    """The inverse. `own` is what the reader holds at the same place: functions are taken from
    there, and tensors go to its device. Raises CheckpointError for a function that the reader does
    not have, and for a form that `encode` never gives.
    """
    if isinstance(value, list):
        owned = own if isinstance(own, list) else []
        return [
            decode(item, _at(owned, index), f"{where}[{index}]") for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        inner = own if isinstance(own, Mapping) else {}
        return {key: decode(item, inner.get(key), f"{where}.{key}") for key, item in value.items()}
    try:
        return _decode_marked(value, own, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is of no form that Plait writes: {str(value)[:200]} ({error!r})"
        ) from error


def _decode_marked(value: dict[str, Any], own: Any, where: str) -> Any:
    kind = value["$"]
    if kind == "own":
        if not callable(own):
            raise CheckpointError(
                f"{where} was the function {value['name']} when the checkpoint was written, and"
                f" here it is {own!r}"
            )
        return own
    if kind == "float":
        return float(value["value"])
    if kind in _MAPPINGS:
        owned = own if isinstance(own, Mapping) else {}
        keys = [decode(key, None, where) for key, _ in value["items"]]
        return _MAPPINGS[kind](
            {
                key: decode(item, owned.get(key), f"{where}[{key!r}]")
                for key, (_, item) in zip(keys, value["items"], strict=True)
            }
        )
    if kind in _SEQUENCES:
        inner = list(own) if isinstance(own, tuple | deque) else []
        return _SEQUENCES[kind](
            [
                decode(item, _at(inner, index), f"{where}[{index}]")
                for index, item in enumerate(value["items"])
            ]
        )
    if kind == "tensor":
        return _decode_tensor(value, own)
    if kind == "numpy":
        return np.frombuffer(_bytes(value["bytes"]), dtype=np.dtype(value["dtype"]))[0]
    if kind in ("bytes", "bytearray"):
        return bytearray(_bytes(value["bytes"])) if kind == "bytearray" else _bytes(value["bytes"])
    if kind == "complex":
        return complex(*(decode(part) for part in value["parts"]))
    if kind == "dtype":
        return _dtype(value["name"])
    if kind == "device":
        return torch.device(value["name"])
    raise ValueError(f"unknown mark {kind!r}")


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() > _LARGEST:
        form = f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        raise CheckpointError(
            f"{where} is a {form}, and a checkpoint keeps plain tensors of at most {_LARGEST:,}"
            " elements there"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "$": "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": _text(bytes(flat.view(torch.uint8).tolist())) if flat.numel() else "",
    }


def _decode_tensor(value: dict[str, Any], own: Any) -> torch.Tensor:
    dtype = _dtype(value["dtype"])
    raw = _bytes(value["bytes"])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    found = flat.clone().reshape(value["shape"])
    return found.to(own.device) if isinstance(own, torch.Tensor) else found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _at(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)

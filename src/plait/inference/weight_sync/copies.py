"""Copies inside of a process, compared bit by bit, in blocks that a core still has in its cache when it compares them."""

from __future__ import annotations

import ctypes

import torch

from plait.inference.weight_sync.buffers import Buffers

BLOCK = 512 << 10
"""Bytes that are copied before they are compared: of these and their copy a core's cache has room for both."""
_memcmp, _memmove = ctypes.CDLL(None).memcmp, ctypes.CDLL(None).memmove
_memcmp.argtypes = _memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def copy(given: torch.Tensor, place: torch.Tensor, buffers: Buffers, *, compares: bool, is_own: bool) -> bool:
    """Copy the values of `given` into `place`, of its shape, in its dtype; at most PIECE bytes there. False if other bits than those of
    `given`, converted, lie in `place` in the end, which nobody looks at without `compares`. `is_own`: nobody else writes to `given`."""
    if not given.is_cpu or not place.is_cpu:
        place.copy_(given)
        return not compares or torch.equal(_bytes(given.to(place)), _bytes(place))
    if given.dtype == place.dtype and given.is_contiguous() and place.is_contiguous():
        return _copied(given, place, compares)
    if not compares:
        place.copy_(given)
        return True
    given, place = torch.atleast_1d(given), torch.atleast_1d(place)
    packed, back = buffers.take(place.device), buffers.take(place.device)
    step = max(1, BLOCK // max(1, place[:1].nbytes))
    same = True
    is_ready = is_own and given.dtype == place.dtype and given.is_contiguous()
    for values, there in zip(given.split(step), place.split(step), strict=True):
        same &= _compared(values if is_ready else _packed(values, there, packed), there, back)
    buffers.put_back(packed)
    buffers.put_back(back)
    return same


def _copied(given: torch.Tensor, place: torch.Tensor, compares: bool) -> bool:
    """Of memory that lies in one stretch on both sides."""
    one, other, size, same = given.data_ptr(), place.data_ptr(), given.nbytes, True
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        _memmove(other + start, one + start, count)
        if compares and _memcmp(one + start, other + start, count):
            same = False
    return same


def _packed(given: torch.Tensor, place: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """As `place` will have them, read from `given` once, as others may write there."""
    return packed[: place.nbytes].view(place.dtype).view(place.shape).copy_(given)


def _compared(values: torch.Tensor, place: torch.Tensor, back: torch.Tensor) -> bool:
    """Copy `values`, which lie in one stretch."""
    size = place.nbytes
    place.copy_(values)
    found = place if place.is_contiguous() else back[:size].view(place.dtype).view(place.shape).copy_(place)
    return not _memcmp(values.data_ptr(), found.data_ptr(), size)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)

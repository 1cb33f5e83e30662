"""Copies inside of a process, compared bit by bit, in blocks that a core still has in its cache when it compares them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from plait.inference.weight_sync.buffers import Buffers

BLOCK = 256 << 10
"""Bytes that are copied before they are compared: of these and their copy a core's cache has room for both."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def copy(given: torch.Tensor, place: torch.Tensor, buffers: Buffers, *, compares: bool) -> bool:
    """Copy the values of `given` into `place`, of its shape, in its dtype; at most PIECE bytes there. False if other bits than those of
    `given`, converted, lie in `place` in the end, which nobody looks at without `compares`."""
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
    for block in zip(given.split(step), place.split(step), strict=True):
        same &= _converted(*block, packed, back)
    buffers.put_back(packed)
    buffers.put_back(back)
    return same


def _copied(given: torch.Tensor, place: torch.Tensor, compares: bool) -> bool:
    """Of memory that lies in one stretch on both sides."""
    left, right = _bytes(given).numpy(), _bytes(place).numpy()
    one, other, same = given.data_ptr(), place.data_ptr(), True
    for start in range(0, len(left), BLOCK):
        block = left[start : start + BLOCK]
        np.copyto(right[start : start + BLOCK], block)
        if compares and _memcmp(one + start, other + start, len(block)):
            same = False
    return same


def _converted(given: torch.Tensor, place: torch.Tensor, packed: torch.Tensor, back: torch.Tensor) -> bool:
    """By way of `packed`: what is compared with `place` was read from `given` once, as others may write there."""
    size = place.nbytes
    values = packed[:size].view(place.dtype).view(place.shape).copy_(given)
    place.copy_(values)
    found = place if place.is_contiguous() else back[:size].view(place.dtype).view(place.shape).copy_(place)
    return not _memcmp(values.data_ptr(), found.data_ptr(), size)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)

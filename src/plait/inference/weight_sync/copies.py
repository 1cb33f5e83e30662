"""Copies inside of a process, all or some of it compared bit by bit, in blocks that a core still has in its cache when it compares them."""

from __future__ import annotations

import ctypes

import torch

from plait.inference.weight_sync.buffers import Buffers

BLOCK = 512 << 10
"""Bytes that are copied before they are compared: of these and their copy a core's cache has room for both."""
SOME = 8
"""One block of so many is compared where not all are: it finds what goes wrong everywhere, for a thirtieth of the copy's time."""
_memcmp, _memmove = ctypes.CDLL(None).memcmp, ctypes.CDLL(None).memmove
_memcmp.argtypes = _memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def copy(given: torch.Tensor, place: torch.Tensor, buffers: Buffers, *, one_in: int) -> bool:
    """Copy the values of `given` into `place`, of its shape, in its dtype; at most PIECE bytes there. False if other bits than those of
    `given`, converted, lie in `place` in the end, as far as is looked: at the first block of each `one_in`, at none where it is 0."""
    if not given.is_cpu or not place.is_cpu:
        place.copy_(given)
        return not one_in or _same(given, place, one_in)
    if given.dtype == place.dtype and given.is_contiguous() and place.is_contiguous():
        return _copied(given, place, one_in)
    if not one_in:
        place.copy_(given)
        return True
    given, place = torch.atleast_1d(given), torch.atleast_1d(place)
    packed, back = buffers.take(place.device), buffers.take(place.device)
    is_packed = given.dtype == place.dtype and given.is_contiguous()
    step = max(1, BLOCK // max(1, place[:1].nbytes))
    same = True
    for number, (values, there) in enumerate(zip(given.split(step), place.split(step), strict=True)):
        if number % one_in:
            there.copy_(values)
        else:
            same &= _compared(values if is_packed else _like(there, packed).copy_(values), there, back)
    buffers.put_back(packed)
    buffers.put_back(back)
    return same


def _same(given: torch.Tensor, place: torch.Tensor, one_in: int) -> bool:
    """Where one of them is on a device: the first of `one_in` parts."""
    given, place = torch.atleast_1d(given), torch.atleast_1d(place)
    first = -(-len(place) // one_in)
    return torch.equal(_bytes(given[:first].to(place)), _bytes(place[:first]))


def _copied(given: torch.Tensor, place: torch.Tensor, one_in: int) -> bool:
    """Of memory that lies in one stretch on both sides."""
    one, other, size, same = given.data_ptr(), place.data_ptr(), given.nbytes, True
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        _memmove(other + start, one + start, count)
        if one_in and not start // BLOCK % one_in and _memcmp(one + start, other + start, count):
            same = False
    return same


def _compared(values: torch.Tensor, place: torch.Tensor, back: torch.Tensor) -> bool:
    """Copy `values`, which lie in one stretch and have the dtype of `place`."""
    place.copy_(values)
    found = place if place.is_contiguous() else _like(place, back).copy_(place)
    return not _memcmp(values.data_ptr(), found.data_ptr(), values.nbytes)


def _like(place: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The beginning of a buffer, in the dtype and shape of `place`."""
    return buffer[: place.nbytes].view(place.dtype).view(place.shape)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)

"""Copies that are compared: the same bits in every form, and a byte that is another one is noticed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from plait.inference.weight_sync import copies
from plait.inference.weight_sync.buffers import Buffers

FORMS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "one value": lambda dtype: torch.ones((), dtype=dtype),
    "in one stretch": lambda dtype: torch.ones(600, 411, dtype=dtype),
    "columns": lambda dtype: torch.ones(600, 900, dtype=dtype)[:, 400:811],
    "turned": lambda dtype: torch.ones(411, 600, dtype=dtype).t(),
    "every second": lambda dtype: torch.ones(300_001, dtype=dtype)[::2],
    "one wide row": lambda dtype: torch.ones(1, 3, 200_000, dtype=dtype)[:, 1:, 7:],
}
PAIRS = [(one, other) for one in FORMS for other in FORMS if FORMS[one](torch.int8).shape == FORMS[other](torch.int8).shape]


def filled(form: str, dtype: torch.dtype) -> torch.Tensor:
    values = FORMS[form](dtype)
    return values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(1)) * 100)


@pytest.mark.parametrize("one_in", [0, 1, copies.SOME])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_the_same_bits_arrive(one: str, other: str, one_in: int) -> None:
    for source, target in ((torch.float32, torch.float32), (torch.float64, torch.bfloat16), (torch.int64, torch.int64)):
        given, place = filled(one, source), FORMS[other](target)
        wanted = given.clone().to(target)
        assert copies.copy(given, place, Buffers(), one_in=one_in)
        assert torch.equal(place, wanted)


def test_bits_that_are_no_number_are_the_same() -> None:
    given, place = torch.tensor([float("nan"), -0.0, float("inf")]), torch.zeros(3)
    assert copies.copy(given, place, Buffers(), one_in=1)
    assert torch.equal(given.view(torch.int32), place.view(torch.int32))
    assert copies.copy(torch.empty(0, 5), torch.empty(0, 5), Buffers(), one_in=1)


def test_buffers_are_used_again() -> None:
    buffers, given = Buffers(), filled("columns", torch.float32)
    for _ in range(3):
        copies.copy(given, FORMS["turned"](torch.float32).t().contiguous().t(), buffers, one_in=1)
    assert [len(free) for free in buffers._free.values()] == [2]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_byte_that_is_another_one_is_noticed(monkeypatch: pytest.MonkeyPatch, one: str, other: str) -> None:
    """In the last block, or in the first."""
    compared, given, place = copies._memcmp, filled(one, torch.float32), FORMS[other](torch.float32)
    blocks = list[int]()

    def spoils(which: int) -> Callable[[int, int, int], int]:
        blocks.clear()

        def spoiled(left: int, right: int, size: int) -> int:
            blocks.append(size)
            if len(blocks) == which:
                ctypes.memset(right, 1 ^ ctypes.string_at(right, 1)[0], 1)
            return int(compared(left, right, size))

        return spoiled

    monkeypatch.setattr(copies, "_memcmp", spoils(0))
    assert copies.copy(given, place, Buffers(), one_in=1)
    assert sum(blocks) == place.numel() * 4
    for which, one_in in ((1, 1), (len(blocks), 1), (1, copies.SOME)):
        monkeypatch.setattr(copies, "_memcmp", spoils(which))
        assert not copies.copy(given, place, Buffers(), one_in=one_in)


@pytest.mark.parametrize("given", [torch.ones(17 << 17), torch.ones(17 << 18)[::2]])
def test_one_block_in_eight(monkeypatch: pytest.MonkeyPatch, given: torch.Tensor) -> None:
    """Of 17 blocks the first, the ninth and the last are compared."""
    compared, sizes = copies._memcmp, list[int]()
    monkeypatch.setattr(copies, "_memcmp", lambda left, right, size: (sizes.append(size), compared(left, right, size))[1])
    place = torch.zeros(17 << 17)
    assert copies.copy(given, place, Buffers(), one_in=copies.SOME) and torch.equal(place, given)
    assert sizes == [copies.BLOCK] * 3


def test_a_source_that_changes_meanwhile_is_noticed() -> None:
    values = torch.arange(100_000)
    assert not copies.copy(values[:-1], values[1:], Buffers(), one_in=1)

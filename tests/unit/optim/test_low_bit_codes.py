"""Codes of 8 bits: torchao's, but for averages of squares, which do not become 0, and for the last bit of a level."""

from __future__ import annotations

import json

import pytest
import torch

from plait.optim.low_bit_adam import Codec, DynamicInt8, Float8, levels
from tests.unit.engine.torchao_numbers import BLOCK, FILE, numbers, unpacked

CPU = torch.device("cpu")
THEIRS = json.loads(FILE.read_text())


def codec(kind: str, *, signed: bool) -> Codec:
    return DynamicInt8(signed=signed, device=CPU) if kind == "int8" else Float8(signed=signed)


@pytest.mark.parametrize("signed", [True, False], ids=["average", "squares"])
def test_levels_are_torchaos(signed: bool) -> None:
    theirs = unpacked(THEIRS[f"levels {'average' if signed else 'squares'}"], torch.float32)
    torch.testing.assert_close(levels(signed=signed), theirs, rtol=1.5e-7, atol=0)


@pytest.mark.parametrize("signed", [True, False], ids=["average", "squares"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_codes_are_torchaos(kind: str, signed: bool) -> None:
    name = f"{kind} {'average' if signed else 'squares'}"
    codes, scales = codec(kind, signed=signed).encode(numbers(signed=signed), BLOCK)
    their_codes, their_scales = (
        unpacked(THEIRS[f"codes {name}"], torch.uint8),
        unpacked(THEIRS[f"scales {name}"], torch.float32),
    )
    assert len(set(their_codes.tolist())) > 60
    if not signed:
        assert (their_codes == 0).any() and (codes[their_codes == 0] == 1).all()
        codes, their_codes = codes[their_codes > 0], their_codes[their_codes > 0]
    apart = (codes.int() - their_codes.int()).abs()
    assert apart.max() <= 1 and apart.sum() <= 3
    assert torch.equal(scales, their_scales)


@pytest.mark.parametrize("signed", [True, False], ids=["average", "squares"])
def test_every_border_between_two_levels(signed: bool) -> None:
    """The look-up is a search: at every border, and one step of a float beside it."""
    table = levels(signed=signed)
    borders = (table[1:] + table[:-1]) / 2
    at = torch.cat(
        [
            torch.nextafter(borders, torch.tensor(-2.0)),
            borders,
            torch.nextafter(borders, torch.tensor(2.0)),
            table,
        ]
    )
    at = torch.cat([at, torch.ones(16 - at.numel() % 16)]).view(
        -1, 15 if at.numel() % 15 == 0 else 1
    )
    blocks = torch.cat(
        [torch.ones(at.shape[0], 1), at], dim=1
    )  # the largest of every block is 1, so that scales are 1
    codes, scales = DynamicInt8(signed=signed, device=CPU).encode(blocks.view(-1), blocks.shape[1])
    assert (scales == 1).all()
    wanted = torch.bucketize(blocks.view(-1), borders, right=True).clamp(min=0 if signed else 1)
    assert torch.equal(codes.long(), wanted)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_there_and_back(kind: str) -> None:
    """Half of the largest distance of two levels of its block's largest; what is tiny is not lost, what is 0 stays."""
    found = torch.cat([numbers(signed=True), numbers(signed=True) * 1e-30, torch.zeros(256)])
    signed = codec(kind, signed=True)
    codes, scales = signed.encode(found, 256)
    error = (signed.decode(codes, scales) - found).view(-1, 256).abs().amax(1)
    assert (error <= found.view(-1, 256).abs().amax(1) * 0.036).all()
    assert (signed.decode(codes, scales)[-256:] == 0).all()


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_squares_never_become_zero(kind: str) -> None:
    block = torch.zeros(256)
    block[0] = 1.0
    squares = codec(kind, signed=False)
    assert (squares.decode(*squares.encode(block, 256)) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_what_is_not_finite_is_seen(kind: str, bad: float) -> None:
    """In its own block and in no other."""
    found = torch.ones(512)
    found[3] = bad
    both = codec(kind, signed=True)
    back = both.decode(*both.encode(found, 256))
    assert not back[:256].isfinite().any()
    assert (back[256:] == 1).all()

"""An MLP in tiles: gradients, dropout, frozen parts, the sum of 16-bit gradients, and the bytes that exist at the same time."""

import copy

import pytest
import torch
from torch import nn

from plait.dryrun.recorder import LiveStorages
from plait.parallel.techniques.tiled_mlp import Tiles

HIDDEN, WIDE = 16, 64


class Gated(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(HIDDEN, WIDE),
            nn.Linear(HIDDEN, WIDE),
            nn.Linear(WIDE, HIDDEN, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x))))


def pair(tokens, dtype=torch.float64, **settings):
    torch.manual_seed(1)
    plain = Gated(**settings).to(dtype)
    tiled = copy.deepcopy(plain)
    tiled.forward = Tiles(tiled, tiled.forward, tokens)
    return plain, tiled


def results(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {
        "output": y.detach(),
        "input": x.grad,
        **{name: p.grad for name, p in module.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("shape", [(2, 13), (1, 1), (13,), (0,), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 4, 5, 1000])
@pytest.mark.parametrize("frozen", [(), ("gate", "up", "down"), ("down",), ("gate",)])
def test_gradients(shape, tokens, frozen):
    """A tile that divides, one that does not, one larger than the sequence, and one token."""
    plain, tiled = pair(tokens)
    for module in (plain, tiled):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    expected, found = results(plain, x), results(tiled, x)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_gradient_arrives_once():
    """What waits for it, to reduce it, is told once a backward."""
    _, tiled = pair(2)
    arrived = []
    for name, parameter in tiled.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    results(tiled, torch.randn(1, 9, HIDDEN, dtype=torch.float64))
    assert sorted(arrived) == sorted(name for name, _ in tiled.named_parameters())


def test_dropout_is_repeated():
    """The backward drops what the forward did: as where the tiles are computed one by one, and nothing is computed again."""
    plain, tiled = pair(6, dropout=0.5)
    x = torch.randn(2, 10, HIDDEN, dtype=torch.float64)
    tiled_forward = tiled.forward
    tiled.forward = lambda x: torch.cat([plain(piece) for piece in x.split(3, 1)], 1)
    torch.manual_seed(5)
    expected = {**results(tiled, x), **{name: p.grad for name, p in plain.named_parameters()}}
    tiled.forward = tiled_forward
    torch.manual_seed(5)
    found = results(tiled, x)
    assert 0 < int((found["output"] == 0).sum()) < found["output"].numel()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_without_gradients():
    plain, tiled = pair(3)
    x = torch.randn(2, 10, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), plain(x), rtol=1e-13, atol=1e-13)


def test_gradients_of_16_bits_add_up_in_float32():
    """Autograd's own sum over 1,024 tiles in bfloat16 would lose most: it swallows what is 1/256 of a partial sum."""
    plain, tiled = pair(1, torch.bfloat16)
    x = torch.randn(1, 1024, HIDDEN, dtype=torch.bfloat16).abs()
    exact = results(copy.deepcopy(plain).double(), x.double())
    whole, found = results(plain, x), results(tiled, x)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    for name, value in exact.items():
        if name in ("output", "input"):
            continue
        errors = [
            float((one[name].double() - value).norm() / value.norm()) for one in (whole, found)
        ]
        assert errors[1] < max(2 * errors[0], 0.01), (name, errors)


def peak(module, length):
    """Bytes of a forward and a backward, besides parameters, their gradients, the input, the output and their gradients."""
    x = torch.randn(1, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveStorages(
        known=[
            x,
            *module.parameters(),
            *(p.grad for p in module.parameters() if p.grad is not None),
        ]
    ) as live:
        module(x).sum().backward()
    return live.peak


def test_bytes():
    """Of all tokens, what is HIDDEN wide; what is WIDE, of a tile alone."""
    plain, tiled = pair(64)
    token = 8 * HIDDEN
    growth = peak(tiled, 4096) - peak(tiled, 2048)
    assert (
        growth <= 4 * token * 2048
    )  # the output, its gradient, the input's gradient, and the tiles that it is put together from
    assert peak(plain, 4096) - peak(plain, 2048) >= 4 * 8 * WIDE * 2048
    assert peak(tiled, 4096) < peak(plain, 4096) / 4

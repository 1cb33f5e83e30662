"""An MLP in tiles: its results, dropout, gradients in 16 bits, and peak memory."""

import copy

import pytest
import torch
from torch import nn

from plait.dryrun.recorder import LiveStorages
from plait.parallel.techniques.tiled_mlp import Tiles

HIDDEN = 16
INTERMEDIATE = 64


class GatedMLP(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        intermediate = self.dropout(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.dropout(self.down(intermediate))


def plain_and_tiled(tile_tokens, dtype=torch.float64, **settings):
    torch.manual_seed(1)
    plain = GatedMLP(**settings).to(dtype)
    tiled = copy.deepcopy(plain)
    tiled.forward = Tiles(tiled, tiled.forward, tile_tokens)
    return plain, tiled


def random_input(*shape, dtype=torch.float64):
    return torch.randn(*shape, HIDDEN, dtype=dtype)


def run(module, x):
    """Return the output and all gradients, by name."""
    x = x.clone().requires_grad_()
    output = module(x)
    output.square().sum().backward()
    results = {"output": output.detach(), "input": x.grad}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return results


@pytest.mark.parametrize("shape", [(2, 13), (1, 1), (13,), (0,), (3, 1)])
@pytest.mark.parametrize("tile_tokens", [1, 4, 5, 1000])
@pytest.mark.parametrize("frozen", [(), ("gate", "up", "down"), ("down",), ("gate",)])
def test_gradients(shape, tile_tokens, frozen):
    plain, tiled = plain_and_tiled(tile_tokens)
    for module in (plain, tiled):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
    x = random_input(*shape)
    torch.testing.assert_close(run(tiled, x), run(plain, x), rtol=1e-12, atol=1e-12)


def test_hooks_of_parameters_run_once_per_backward():
    """Otherwise the gradient of a single tile would be reduced."""
    _, tiled = plain_and_tiled(2)
    names = []
    for name, parameter in tiled.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    run(tiled, random_input(1, 9))
    assert sorted(names) == sorted(name for name, _ in tiled.named_parameters())


def test_dropout_is_repeated():
    """The backward drops the same values as the forward.

    The reference computes the tiles one after the other, without recomputation.
    """
    plain, tiled = plain_and_tiled(6, dropout=0.5)

    class Sequence(nn.Module):
        def forward(self, x):
            return torch.cat([plain(tile) for tile in x.split(3, 1)], 1)

    x = random_input(2, 10)
    torch.manual_seed(5)
    expected = run(Sequence(), x)
    expected.update({name: p.grad for name, p in plain.named_parameters()})
    torch.manual_seed(5)
    actual = run(tiled, x)
    zeros = (actual["output"] == 0).sum()
    assert 0 < zeros < actual["output"].numel()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_without_gradients():
    plain, tiled = plain_and_tiled(3)
    x = random_input(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), plain(x), rtol=1e-13, atol=1e-13)


def test_gradients_of_16_bits_are_added_up_in_float32():
    """Autograd's own sum over 1,024 tiles in bfloat16 would lose most of it.

    It drops every addend that is less than 1/256 of the sum.
    """
    plain, tiled = plain_and_tiled(1, torch.bfloat16)
    x = random_input(1, 1024, dtype=torch.bfloat16).abs()
    exact = run(copy.deepcopy(plain).double(), x.double())
    untiled = run(plain, x)
    actual = run(tiled, x)
    assert {value.dtype for value in actual.values()} == {torch.bfloat16}

    for name, _ in plain.named_parameters():
        expected = exact[name]
        untiled_error = (untiled[name].double() - expected).norm() / expected.norm()
        error = (actual[name].double() - expected).norm() / expected.norm()
        assert error < max(2 * untiled_error, 0.01), name


def peak_bytes(module, tokens):
    """Peak of a forward and a backward without parameters, their gradients and the input."""
    x = random_input(1, tokens).requires_grad_()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in module.parameters()]
    with LiveStorages(known=[x, *module.parameters(), *gradients]) as live:
        module(x).sum().backward()
    return live.peak


def test_peak_memory():
    """Only tensors of the hidden size exist for all tokens."""
    plain, tiled = plain_and_tiled(64)
    growth = peak_bytes(tiled, 4096) - peak_bytes(tiled, 2048)
    # The output, its gradient, the input's gradient, and the tiles that it is concatenated from.
    assert growth <= 4 * 8 * HIDDEN * 2048
    assert peak_bytes(plain, 4096) - peak_bytes(plain, 2048) >= 4 * 8 * INTERMEDIATE * 2048
    assert peak_bytes(tiled, 4096) < peak_bytes(plain, 4096) / 4

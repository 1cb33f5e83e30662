"""Parameters and optimizers that torch fails at with words of its own are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import InputError, ModelError
from plait.parallel.techniques.shard_units import refuse_complex, refuse_several_dtypes


class Waves(nn.Module):
    """A real and a complex parameter in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers:
            layer.register_parameter("phase", nn.Parameter(torch.ones(4, dtype=torch.complex64)))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = (torch.fft.fft(layer(x)) * layer.phase).abs()
        return x


BLOCKS = ("layers.0", "layers.1", "layers.2")


def test_what_is_sharded_together_is_of_one_dtype() -> None:
    """torch: `FSDP expects uniform original parameter dtype`."""
    with pytest.raises(
        ModelError,
        match=r"^layers.0.phase is complex64 and layers.0.weight float32, .*\(layers.0\).*ZeRO stage 0",
    ):
        refuse_several_dtypes(Waves(), BLOCKS)
    for layer in (model := Waves()).layers:
        layer.phase.requires_grad_(False)
    refuse_several_dtypes(model, BLOCKS)
    several = nn.ModuleDict(
        {
            "layers": nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2)]),
            "head": nn.Linear(2, 2).bfloat16(),
        }
    )
    refuse_several_dtypes(several, ("layers.0", "layers.1"))
    with pytest.raises(ModelError, match="all outside of the blocks"):
        refuse_several_dtypes(several, ("layers.0",))


def test_complex_parameters_are_never_computed_with_as_real_ones() -> None:
    with pytest.raises(ModelError, match="layers.0.phase is complex64, and bf16.*imaginary part"):
        plait.initialize(
            Waves(),
            {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
            loss_fn=plait.causal_lm_loss,
        )
    refuse_complex(nn.Linear(2, 2))
    frozen = Waves().requires_grad_(False)
    refuse_complex(frozen)


@pytest.mark.parametrize(
    "made", [lambda model: torch.optim.LBFGS(model.parameters()), lambda model: torch.optim.LBFGS]
)
def test_an_optimizer_of_several_passes_is_refused(made: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"LBFGS.step calls a function.*AdamW"):
        plait.initialize(
            model,
            {"train_micro_batch_size_per_gpu": 1},
            optimizer=made(model),
            loss_fn=plait.causal_lm_loss,
        )

"""Refusals of models, parameters and optimizers that cannot be sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait._torch.groups import FakeStore
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import InputError, ModelError
from plait.parallel.parts import Parts
from plait.parallel.techniques.shard_units import (
    refuse_complex,
    refuse_quantised,
    refuse_several_dtypes,
    shard_units,
)


@pytest.fixture
def two_ranks():
    """Rank 0 of a fake world of 2."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def shard(model):
    mesh = build_mesh(Layout(dp_shard=2))
    shard_units(Parts(model, ("0", "1")), mesh, free_after_forward=True)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (1, r"0\.weight and 1\.weight are one parameter in two units \(0 and 1\)"),
        (2, r"\(0 and the rest of the model\)"),
    ],
)
def test_a_parameter_of_two_units_is_refused(other, message):
    """torch before 2.13 would shard the parameter twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[other].weight = model[0].weight
    with pytest.raises(ModelError, match=message):
        shard(model)


class ComplexModel(nn.Module):
    """A real and a complex parameter in each block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers:
            layer.register_parameter("phase", nn.Parameter(torch.ones(4, dtype=torch.complex64)))

    def forward(self, x):
        for layer in self.layers:
            x = (torch.fft.fft(layer(x)) * layer.phase).abs()
        return x


BLOCKS = ("layers.0", "layers.1", "layers.2")


def test_several_dtypes_in_a_unit_are_refused():
    message = (
        r"^layers.0.phase is complex64 and layers.0.weight is float32, .*\(layers.0\).*ZeRO stage 0"
    )
    with pytest.raises(ModelError, match=message):
        refuse_several_dtypes(ComplexModel(), BLOCKS)
    # Frozen parameters are not sharded together with others.
    model = ComplexModel()
    for layer in model.layers:
        layer.phase.requires_grad_(False)
    refuse_several_dtypes(model, BLOCKS)

    layers = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    mixed = nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2).bfloat16()})
    refuse_several_dtypes(mixed, ("layers.0", "layers.1"))
    with pytest.raises(ModelError, match="all outside the blocks"):
        refuse_several_dtypes(mixed, ("layers.0",))


def test_complex_parameters_are_not_cast():
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    with pytest.raises(ModelError, match="layers.0.phase is complex64, and bf16.*imaginary part"):
        plait.initialize(ComplexModel(), config, loss_fn=plait.causal_lm_loss)
    refuse_complex(nn.Linear(2, 2))
    refuse_complex(ComplexModel().requires_grad_(False))


@pytest.mark.parametrize("is_built", [True, False])
def test_an_optimizer_of_several_passes_is_refused(is_built):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters()) if is_built else torch.optim.LBFGS
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(InputError, match=r"LBFGS.step requires a closure.*AdamW"):
        plait.initialize(model, config, optimizer=optimizer, loss_fn=plait.causal_lm_loss)


@pytest.mark.parametrize(
    ("library", "kind", "moved", "cast", "several", "message"),
    [
        ("bitsandbytes", "Params4bit", True, False, True, "bitsandbytes.*neither split nor moved"),
        ("bitsandbytes", "Params4bit", False, True, True, None),
        ("torchao", "Int8Tensor", False, True, False, "torchao"),
        ("torchao", "Int8Tensor", False, False, True, "torchao"),
        ("torchao", "Int8Tensor", False, False, False, None),
        ("torch", "Parameter", True, True, True, None),
    ],
)
def test_quantised_weights(library, kind, moved, cast, several, message):
    # The library is recognised by the module of the class, and need not be installed.
    quantised = type(kind, (nn.Parameter,), {"__module__": f"{library}.nn.modules"})
    model = nn.Linear(2, 2)
    model.weight = quantised(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    if message is None:
        refuse_quantised(model, moved=moved, cast=cast, several=several)
        return
    with pytest.raises(ModelError, match=f"weight has the type {kind} of {message}"):
        refuse_quantised(model, moved=moved, cast=cast, several=several)

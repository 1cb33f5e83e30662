"""Models that cannot be cut into units, and parameters and optimizers that cannot be sharded, are refused by name."""

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
    ("other", "words"),
    [
        (1, r"0\.weight and 1\.weight are one parameter in two units \(0 and 1\)"),
        (2, r"\(0 and the rest of the model\)"),
    ],
)
def test_a_parameter_of_two_units(other, words):
    """torch before 2.13 would shard the parameter twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[other].weight = model[0].weight
    with pytest.raises(ModelError, match=words):
        shard(model)


class Waves(nn.Module):
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


def test_what_is_sharded_together_is_of_one_dtype():
    words = (
        r"^layers.0.phase is complex64 and layers.0.weight float32, .*\(layers.0\).*ZeRO stage 0"
    )
    with pytest.raises(ModelError, match=words):
        refuse_several_dtypes(Waves(), BLOCKS)
    for layer in (model := Waves()).layers:
        layer.phase.requires_grad_(False)
    refuse_several_dtypes(model, BLOCKS)
    layers = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    several = nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2).bfloat16()})
    refuse_several_dtypes(several, ("layers.0", "layers.1"))
    with pytest.raises(ModelError, match="all outside the blocks"):
        refuse_several_dtypes(several, ("layers.0",))


def test_complex_parameters_are_never_computed_with_as_real_ones():
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    with pytest.raises(ModelError, match="layers.0.phase is complex64, and bf16.*imaginary part"):
        plait.initialize(Waves(), config, loss_fn=plait.causal_lm_loss)
    refuse_complex(nn.Linear(2, 2))
    frozen = Waves().requires_grad_(False)
    refuse_complex(frozen)


@pytest.mark.parametrize(
    "made", [lambda model: torch.optim.LBFGS(model.parameters()), lambda model: torch.optim.LBFGS]
)
def test_an_optimizer_of_several_passes_is_refused(made):
    model, config = nn.Linear(2, 2), {"train_micro_batch_size_per_gpu": 1}
    settings = {"optimizer": made(model), "loss_fn": plait.causal_lm_loss}
    with pytest.raises(InputError, match=r"LBFGS.step calls a function.*AdamW"):
        plait.initialize(model, config, **settings)


def model_with(library, kind):
    made = type(kind, (nn.Parameter,), {"__module__": f"{library}.nn.modules"})
    model = nn.Linear(2, 2)
    model.weight = made(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


def test_bitsandbytes():
    model = model_with("bitsandbytes", "Params4bit")
    words = "weight has the type Params4bit of bitsandbytes.*neither split nor moved"
    with pytest.raises(ModelError, match=words):
        refuse_quantised(model, moved=True, cast=False, several=True)
    refuse_quantised(model, moved=False, cast=True, several=True)


@pytest.mark.parametrize(("cast", "several"), [(True, False), (False, True)])
def test_torchao(cast, several):
    model = model_with("torchao", "Int8Tensor")
    with pytest.raises(ModelError, match="weight has the type Int8Tensor of torchao"):
        refuse_quantised(model, moved=False, cast=cast, several=several)
    refuse_quantised(model, moved=False, cast=False, several=False)


def test_others():
    refuse_quantised(nn.Linear(2, 2), moved=True, cast=True, several=True)

"""Inside a float64 model, casts to narrower dtypes are left out. Elsewhere they stay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait._torch.operators import function_modes
from plait.verify.keep_float64 import keeping_float64, roundings

DATA = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Casting(nn.Module):
    """Casts its hidden states in all ways that models use."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        dtype = x.dtype
        x = self.inner(x)
        x = x + x.to(torch.float32).pow(2).to(dtype) + x.float().to(dtype)
        x = x + x.to(dtype=torch.bfloat16).to(dtype)
        x = x + F.softmax(x, dim=-1, dtype=torch.float32).to(dtype)
        x = x + torch.softmax(x, -1, torch.float32)
        x = x + x.type(torch.float32) + x.to(torch.zeros((), dtype=torch.float32))
        return x + x.sum(-1, keepdim=True, dtype=torch.float32)


def test_a_model_stays_in_float64():
    model = Casting().double()
    assert roundings(lambda: model(DATA))
    with keeping_float64(model):
        assert not roundings(lambda: model(DATA))
        # Techniques copy models.
        assert not roundings(lambda: copy.deepcopy(model)(DATA))
        assert DATA.float().dtype == torch.float32, "a cast outside of the model's forward"
        model(DATA).sum().backward()
    assert roundings(lambda: model(DATA)), "the model is as before"


def test_nested_modules_share_one_mode():
    """Each mode costs time at every operator."""
    depths = []

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.casting = Casting()

        def forward(self, x):
            depths.append(len(function_modes()))
            x = self.casting(x)
            depths.append(len(function_modes()))
            return x.float()

    model = nn.Sequential(Outer(), Outer()).double()
    model[0].casting.register_forward_pre_hook(lambda *_: depths.append(len(function_modes())))
    with keeping_float64(model):
        assert not roundings(lambda: model(DATA))
    assert set(depths) == {1}


class ForwardOfBase(nn.Module):
    """A subclass keeps the forward that its base has at its creation, as in Transformers."""

    def __init_subclass__(cls):
        forward = cls.forward
        cls.forward = lambda self, x: forward(self, x)

    def forward(self, x):
        return x * x.float().mean()


class Layer(ForwardOfBase):
    pass


def test_a_class_that_is_created_inside():
    """`fully_shard` creates one. It keeps float64 inside of the context, and not afterwards."""
    model = Layer()
    with keeping_float64(model):
        model.__class__ = type("Sharded", (Layer,), {})
        assert not roundings(lambda: model(DATA))
    assert roundings(lambda: model(DATA))
    # The next context must not depend on the class of this one.
    with keeping_float64(Layer()):
        assert not roundings(lambda: model(DATA))
    assert roundings(lambda: model(DATA))


def test_float32_models_do_not_change():
    model = Casting()
    expected = model(DATA.float())
    with keeping_float64(model):
        assert torch.equal(model(DATA.float()), expected)


class Rotary(nn.Linear):
    """Computes angles in float32, like the rotary embeddings of Transformers."""

    def forward(self, x):
        angles = torch.arange(x.shape[-1], dtype=torch.float32) * 0.7
        return super().forward(x * angles.cos().to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cosines_of_float32_angles(dtype):
    """A float64 model gets float64 cosines, because float32 cosines differ between CPU and GPU."""
    model = Rotary(4, 4).to(dtype)
    data = DATA.to(dtype)
    angles = torch.arange(4, dtype=torch.float32) * 0.7
    with keeping_float64(model):
        actual = model(data)
    assert torch.equal(actual, nn.Linear.forward(model, data * angles.to(dtype).cos()))


def test_optimizers_that_narrow():
    model = nn.Linear(4, 4).double()
    model(DATA).sum().backward()
    optimizer = torch.optim.Muon([model.weight], lr=0.1)
    assert roundings(optimizer.step)
    with keeping_float64(model, torch.optim.Muon):
        assert not roundings(optimizer.step)
    assert roundings(optimizer.step)

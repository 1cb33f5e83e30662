"""Casts inside a float64 model are left out, elsewhere they stay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait._torch.operators import function_modes
from plait.verify.keep_float64 import keeping_float64, roundings


class Islands(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        kind = x.dtype
        x = self.inner(x)
        x = x + x.to(torch.float32).pow(2).to(kind) + x.float().to(kind)
        x = x + x.to(dtype=torch.bfloat16).to(kind)
        x = x + F.softmax(x, dim=-1, dtype=torch.float32).to(kind)
        x = x + torch.softmax(x, -1, torch.float32)
        x = x + x.type(torch.float32) + x.to(torch.zeros((), dtype=torch.float32))
        return x + x.sum(-1, keepdim=True, dtype=torch.float32)


def test_a_model_stays_in_float64():
    model, data = Islands().double(), torch.randn(3, 4, dtype=torch.float64)
    assert roundings(lambda: model(data))
    with keeping_float64(model):
        assert not roundings(lambda: model(data))
        # Copies, as techniques make them, stay in float64 too.
        assert not roundings(lambda: copy.deepcopy(model)(data))
        assert data.float().dtype == torch.float32, "outside the model's forward a cast is a cast"
        model(data).sum().backward()
    assert roundings(lambda: model(data)), "and afterwards it is as before"


def test_modules_inside_of_others():
    """One mode for the outermost module is enough, because each mode costs time at every operator."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.islands = Islands()

        def forward(self, x):
            depths.append(len(function_modes()))
            out = self.islands(x)
            depths.append(len(function_modes()))
            return out.float()

    depths = []
    model, data = nn.Sequential(Outer(), Outer()).double(), torch.randn(3, 4, dtype=torch.float64)
    model[0].islands.register_forward_pre_hook(lambda *_: depths.append(len(function_modes())))
    with keeping_float64(model):
        assert not roundings(lambda: model(data))
    assert set(depths) == {1}


class Kept(nn.Module):
    """A subclass keeps the forward that its base has when it is made, as Transformers' layers do."""

    def __init_subclass__(cls):
        before = cls.forward
        cls.forward = lambda self, x: before(self, x)

    def forward(self, x):
        return x * x.float().mean()


class Layer(Kept):
    pass


def test_a_class_that_was_made_meanwhile():
    """torch's, of a sharded module: wide inside, and not afterwards. It made tests of bits depend on the tests before them."""
    data = torch.randn(3, dtype=torch.float64)
    model = Layer()
    with keeping_float64(model):
        sharded = type("Sharded", (Layer,), {})
        model.__class__ = sharded
        assert not roundings(lambda: model(data))
    assert roundings(lambda: model(data))
    with keeping_float64(Layer()):
        assert not roundings(lambda: model(data))
    assert roundings(lambda: model(data))


def test_float32_models_are_left_alone():
    model, data = Islands(), torch.randn(3, 4)
    plain = model(data)
    with keeping_float64(model):
        assert torch.equal(model(data), plain)


class Rotary(nn.Linear):
    """Computes its angles in float32, as the rotary embeddings of Transformers do."""

    def forward(self, x):
        angles = torch.arange(x.shape[-1], dtype=torch.float32) * 0.7
        return super().forward(x * angles.cos().to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cosines_of_float32_angles(dtype):
    """A float64 model has float64 cosines, because those of a CPU and of a GPU differ in float32."""
    model, data = Rotary(4, 4).to(dtype), torch.randn(3, 4, dtype=dtype)
    angles = torch.arange(4, dtype=torch.float32) * 0.7
    with keeping_float64(model):
        result = model(data)
    assert torch.equal(result, nn.Linear.forward(model, data * angles.to(dtype).cos()))


def test_optimizers_that_narrow():
    model = nn.Linear(4, 4).double()
    model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    optimizer = torch.optim.Muon([model.weight], lr=0.1)
    assert roundings(optimizer.step)
    with keeping_float64(model, torch.optim.Muon):
        assert not roundings(optimizer.step)
    assert roundings(optimizer.step)

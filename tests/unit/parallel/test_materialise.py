"""Initial values of models on the meta device, and models that cannot be initialised."""

from functools import partial

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.parallel import materialise


class Computed(nn.Module):
    """Fills its tensors in the constructor only, which a `meta` model has already run."""

    def __init__(self, *, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("table", torch.arange(4))
        else:
            self.scale = nn.Parameter(torch.ones(4))


def initialise(model, seed=1):
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, (), seed=seed)
    return model


@pytest.mark.parametrize(("buffer", "name"), [(True, "1.table"), (False, "1.scale")])
def test_uninitialised_tensors_are_named(buffer, name):
    """Training would start from arbitrary memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Computed(buffer=buffer))
    message = rf"{name} was not initialised: Computed computes it only in its constructor"
    with pytest.raises(ModelError, match=message):
        initialise(model)


class SmallGPT(nn.Module):
    """Model that applies a method to all modules, as minGPT does, and may write to one later."""

    def __init__(self, *, scales_projection):
        super().__init__()
        self.config = {"width": 64}
        self.embed = nn.Embedding(200, 64)
        self.projection = nn.Linear(64, 64)
        self.apply(self._init_weights)
        if scales_projection:
            nn.init.normal_(self.projection.weight, std=0.001)

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding | nn.Linear):
            module.weight.data.normal_(std=0.02)


class TiedGPT(SmallGPT):
    """Model that ties its head before it initialises its weights, as nanoGPT does."""

    def __init__(self):
        super().__init__(scales_projection=False)
        self.head = nn.Linear(64, 200, bias=False)
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)


@pytest.mark.parametrize(
    "kind", [partial(SmallGPT, scales_projection=False), TiedGPT], ids=["plain", "tied"]
)
def test_the_models_own_initialisation_is_repeated(kind):
    with torch.device("meta"):
        model = kind()
    initialise(model)
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.projection.bias.abs().max() > 0


def test_writes_of_a_constructor_are_refused():
    with torch.device("meta"):
        model = SmallGPT(scales_projection=True)
    message = r"projection\.weight was written to 2 times while .*repeat only 1 of these"
    with pytest.raises(ModelError, match=message):
        initialise(model)


def test_a_lost_tie_is_named():
    """The second of two tied parameters has no initial values of its own."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    template = materialise.template_of(model)
    model[1].weight = nn.Parameter(torch.empty_like(model[0].weight))
    materialise.allocate(model, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"1\.weight received no values"):
        materialise.initialise(model, template, (), seed=1)


def test_weights_follow_from_seed_and_name():
    """Equal modules with other names get other weights. The global generator does not change."""

    def weights(seed):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return [layer.weight for layer in initialise(model, seed=seed)]

    before = torch.get_rng_state()
    first = weights(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[0], weights(seed=1)[0])
    assert not torch.equal(first[0], weights(seed=2)[0])
    assert not torch.equal(first[0], first[1])


def test_a_partly_meta_model_is_refused():
    with torch.device("meta"):
        inner = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"1\.weight is on meta and other parameters are not"):
        materialise.is_meta(nn.Sequential(nn.Linear(2, 2), inner))

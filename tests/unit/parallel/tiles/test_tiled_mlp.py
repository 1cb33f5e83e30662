"""What tiles are refused with, by name and before any process group; and how they leave a model."""

import pytest
from torch import nn

from plait.config.resolving.resolve import load, resolve
from plait.errors import PlaitError
from plait.model.blocks import find_blocks
from plait.parallel.mlps import TokenModules
from plait.parallel.order import check_all
from plait.parallel.techniques.tiled_mlp import TiledModules, Tiles
from tests.parity import cases


def check(model, **more):
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"mlp_tile_tokens": 4}, **more}
    return check_all(
        resolve(load(config), world_size=1).context(model=model, blocks=find_blocks(model))
    )


def test_found_before_the_model_is_split():
    """As a plan for what is done to it later."""
    assert check(cases.build("llama", tied=False)).tiled == TokenModules(
        ("model.layers.0.mlp", "model.layers.1.mlp"), ()
    )


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (cases.build("llama", tied=False), {"compile": {"enabled": True}}, "parallel.mlp_tile_tokens = 4: compile.enabled is true"),
        (nn.Linear(4, 4), {}, "parallel.mlp_tile_tokens = 4: the model has no repeated blocks; name some with parallel.blocks, or use 0"),
        (nn.Sequential(*(nn.Linear(4, 8) for _ in range(2))), {}, "parallel.mlp_tile_tokens = 4: 0 is not computed in tiles, .* the block computes it"),
    ],
    ids=["compile", "no blocks", "no MLP"],
)  # fmt: skip
def test_refused(model, more, message):
    with pytest.raises(PlaitError, match=message):
        check(model, **more)


def test_released():
    module = nn.Linear(4, 4)
    own = module.forward
    module.forward = Tiles(module, own, 2)
    TiledModules([module]).release()
    assert module.forward == own

"""Modules that are computed in tiles, and settings that are refused before any process group."""

import pytest
from torch import nn

from plait.config.resolving.resolve import load, resolve
from plait.errors import PlaitError
from plait.model.blocks import find_blocks
from plait.parallel.mlps import TokenModules
from plait.parallel.order import check_all
from plait.parallel.techniques.tiled_mlp import TiledModules, Tiles
from tests.parity import cases


def check(model, **sections):
    parallel = {"mlp_tile_tokens": 4}
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": parallel, **sections}
    context = resolve(load(config), world_size=1).context(model=model, blocks=find_blocks(model))
    return check_all(context)


def test_mlps_are_planned_before_the_model_is_split():
    mlps = ("model.layers.0.mlp", "model.layers.1.mlp")
    assert check(cases.build("llama", tied=False)).tiled == TokenModules(mlps, ())


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        (cases.build("llama", tied=False), {"compile": {"enabled": True}}, "compile.enabled is"),
        (nn.Linear(4, 4), {}, "no repeated blocks; name some with parallel.blocks, or use 0"),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8)), {}, "0 is not .*the block computes it"),
    ],
    ids=["compile", "no blocks", "no MLP"],
)
def test_refused(model, sections, message):
    with pytest.raises(PlaitError, match=f"parallel.mlp_tile_tokens = 4: .*{message}"):
        check(model, **sections)


def test_release_restores_the_forward():
    module = nn.Linear(4, 4)
    forward = module.forward
    module.forward = Tiles(module, forward, 2)
    TiledModules([module]).release()
    assert module.forward == forward

"""Under tensor parallelism the slices of a layer are quantised to what they are of the full one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import InputError
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.quantised_format import INT4, INT8, dequantise, quantise
from plait.inference.source import open_source
from tests.pool import Pool
from tests.unit.inference.models import saved

PROMPTS = [[5, 17, 33, 2, 90], [8, 3]]
COLUMNS, ROWS = ("q_proj", "v_proj", "up_proj"), ("o_proj", "down_proj")


def loaded(rank: int, world: int, folder: str, odd: str) -> tuple[dict[str, Any], str]:
    """Dense values of this rank's parts of the first layer, and tokens, of both forms; how a layer that cannot be cut so is refused. Runs
    in a worker."""
    found = {}
    for form in (INT8, INT4):
        sharded = load_model(open_source(Path(folder)), tp=world, quant=form)
        held = {
            name.rpartition(".")[2]: dequantise(module.weight_codes.data, module.weight_scales.data, torch.float32)
            for name, module in sharded.model.get_submodule("model.layers.0").named_modules()
            if hasattr(module, "weight_codes")
        }
        found[form] = held, [one.token_ids for one in generate(sharded, PROMPTS, max_new_tokens=4)]
        sharded.close()
    with pytest.raises(InputError) as heard:
        load_model(open_source(Path(odd)), tp=world, quant=INT4)
    return found, str(heard.value)


def test_slices(pool: Pool, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", layers=2)
    saved(tmp_path / "odd", layers=2, intermediate_size=96)
    (first, words), (second, _) = pool.run(2, loaded, str(tmp_path / "model"), str(tmp_path / "odd"))
    assert "--quant int4: model.layers.0.mlp.down_proj has 48 inputs of 96 on this rank, and groups are of 32" in words
    modules = {name.rpartition(".")[2]: module for name, module in model.get_submodule("model.layers.0").named_modules()}
    for form in (INT8, INT4):
        alone = load_model(open_source(tmp_path / "model"), quant=form)
        assert first[form][1] == second[form][1] == [one.token_ids for one in generate(alone, PROMPTS, max_new_tokens=4)]
        alone.close()
        for name in (*COLUMNS, *ROWS):
            full = dequantise(*quantise(modules[name].weight.data, form), torch.float32)
            parts = [first[form][0][name], second[form][0][name]]
            assert torch.equal(torch.cat(parts, dim=0 if name in COLUMNS else 1), full), (form, name)

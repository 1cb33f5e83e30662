"""What is foretold of the activations of a pipeline's ranks."""

from __future__ import annotations

from typing import Any

import torch

from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.model.blocks import find_blocks
from plait.parallel.accounting.activations import RankActivations
from plait.parallel.parts import Parts, Plans
from tests.parity import cases

LENGTH, LAYERS = 16, 4


def foretold(
    config: dict[str, Any], world: int, dtype: torch.dtype = torch.float32
) -> tuple[RankActivations, ...]:
    """Of every rank of the pipeline."""
    resolved = resolve(load(config), world_size=world)
    model = cases.build("llama", tied=True, dtype=dtype, layers=LAYERS)
    pipeline = resolved.pipeline.plan(resolved.context(model=model, blocks=find_blocks(model)))
    assert pipeline is not None
    return rank_activations(
        Parts(model, find_blocks(model), Plans(pipeline=pipeline)),
        mesh=build_mesh(resolved.layout),
        batch=token_batch(2, LENGTH),
        techniques=ActivationTechniques.of(resolved),
    )

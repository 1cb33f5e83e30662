"""Predicted activations of the ranks of a fake world."""

from __future__ import annotations

from typing import Any

import torch

from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.model.blocks import find_blocks
from plait.parallel.micro_batches import default_forward
from plait.parallel.parts import Parts, Plans
from tests.parity import cases

LENGTH = 16
LAYERS = 4


def predicted_activations(model, resolved, *, samples=2, length=LENGTH):
    """Return the prediction for every rank of the pipeline, on the unchanged model."""
    blocks = find_blocks(model)
    chunk = resolved.loss_chunk_tokens
    compute = resolved.precision.compute
    loss: dict[str, Any] = {}
    if chunk:
        loss = {
            "loss_fn": ChunkedCausalLMLoss(chunk_tokens=chunk),
            "forward": deferred(default_forward, model),
        }
    pipeline = resolved.pipeline.plan(resolved.context(model=model, blocks=blocks))
    return rank_activations(
        Parts(model, blocks, Plans(pipeline=pipeline)),
        mesh=build_mesh(resolved.layout),
        batch=token_batch(samples, length),
        techniques=ActivationTechniques.of(resolved),
        compute_dtype=getattr(torch, compute) if compute else None,
        **loss,
    )


def foretold(config, world, dtype=torch.float32):
    """Return the prediction for a Llama with four layers."""
    model = cases.build("llama", tied=True, dtype=dtype, layers=LAYERS)
    return predicted_activations(model, resolve(load(config), world_size=world))

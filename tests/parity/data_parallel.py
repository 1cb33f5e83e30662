"""Training runs with data parallelism, and the same in one process."""

import os
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch

import plait
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import compare, engine_trace, reference_trace, worst
from tests.parity import cases

CLIPPING = 0.5
SEED = 3
LAYOUTS = [
    (1, 0, 1),
    (1, 3, 1),
    *((world, stage, 1) for world in (2, 3, 4) for stage in range(4)),
    *((4, stage, 2) for stage in (1, 2, 3)),
]
"""(ranks, ZeRO stage, dp_replicate)."""


def training_config(parallel, *, stage=0, accumulation=2, **sections):
    """Return a configuration file as a user would write it."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
        "run": {"seed": SEED},
        **sections,
    }


def settings(world, stage, replicas, accumulation, **sections):
    """Return a configuration with data parallelism only, unless `sections` has "parallel"."""
    parallel = {"dp_replicate": world, "dp_shard": 1}
    if stage:
        parallel = {"dp_replicate": replicas, "dp_shard": world // replicas}
    sections = {"parallel": parallel, **sections}
    return training_config(stage=stage, accumulation=accumulation, **sections)


def train(rank, world, kind, tied, config, layers=None):
    """Return the trace of a run on rank 0. Runs on every rank."""
    model = cases.build(kind, tied=tied, layers=layers)
    # A difference of 1e-16 from the order of a sum becomes 1e-7 in norms that compute in float32.
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        micro_batches = engine.dp_size * config["gradient_accumulation_steps"]
        trace = engine_trace(engine, cases.steps_for(kind, micro_batches))
    return trace if rank == 0 else None


def materialised(kind, *, tied):
    """Return a model with the weights that a run with these settings gives it.

    They come from Plait's own initialisation. Its independence of the layout is tested in
    test_weights.py.
    """
    return materialise_model(cases.build(kind, tied=tied))


def materialise_model(model):
    """Give a model on `meta` the weights that a run with these settings gives it."""
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    return model


@contextmanager
def as_two_machines(rank, world):
    """Set a launcher's variables of two machines with half of the ranks each."""
    per_machine = world // 2
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % per_machine,
        "LOCAL_WORLD_SIZE": per_machine,
        "GROUP_RANK": rank // per_machine,
    }
    with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


@cache
def reference(kind, tied, micro_batches, steps=2):
    """Return the trace of one plain process on the whole batch."""
    batches = cases.steps_for(kind, micro_batches, steps=steps)
    return plain_trace(materialised(kind, tied=tied), batches)


def plain_trace(model, steps, *, optimizer=cases.adamw):
    """Return the trace of a language model in one plain process."""
    with keeping_float64(model):
        return reference_trace(
            model, steps, loss_fn=plait.causal_lm_loss, optimizer=optimizer, clipping=CLIPPING
        )


def assert_same(expected, actual, *, bar=1e-10, where=""):
    """Compare losses, gradients, norms and weights.

    Returns the largest difference, which the message of a failure names.
    """
    assert actual is not None
    difference = worst(compare(expected, actual))
    assert difference.ok(bar), f"{where} {difference.name}: {difference.error}"
    return difference.error

"""Training runs with data parallelism, and the same in one process, for the tests that compare the two."""

from functools import cache

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
    (2, 0, 1),
    (2, 1, 1),
    (2, 2, 1),
    (2, 3, 1),
    (3, 0, 1),
    (3, 1, 1),
    (3, 2, 1),
    (3, 3, 1),
    (4, 0, 1),
    (4, 1, 1),
    (4, 2, 1),
]

LAYOUTS += [(4, 3, 1), (4, 1, 2), (4, 2, 2), (4, 3, 2)]
"""(ranks, ZeRO stage, dp_replicate)."""


def settings(world, stage, replicas, accumulation, **more):
    """A configuration file as a user would write it."""
    shard = world // replicas if stage else 1
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": {"dp_replicate": replicas if stage else world, "dp_shard": shard},
        "run": {"seed": SEED},
        **more,
    }


def train(rank, world, kind, tied, config):
    """Runs in a worker."""
    model = cases.build(kind, tied=tied)
    # Norms that compute in float32 would turn a difference of 1e-16, which the order of a sum makes, into one of 1e-7.
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(
            engine, cases.steps_for(kind, world * config["gradient_accumulation_steps"])
        )
    return trace if rank == 0 else None


def materialised(kind, *, tied):
    """The same weights in one process, by the library's own initialisation (its independence of the layout is tested in
    test_weights.py)."""
    return materialise_model(cases.build(kind, tied=tied))


def materialise_model(model):
    """Give a model on `meta` the weights that a run with these settings gives it."""
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    return model


@cache
def reference(kind, tied, micro_batches, steps=2):
    """One plain process on the whole batch."""
    return plain_trace(
        materialised(kind, tied=tied), cases.steps_for(kind, micro_batches, steps=steps)
    )


def plain_trace(model, steps, *, optimizer=cases.adamw):
    """A language model in one plain process."""
    with keeping_float64(model):
        return reference_trace(
            model, steps, loss_fn=plait.causal_lm_loss, optimizer=optimizer, clipping=CLIPPING
        )


def assert_same(wanted, found, *, bar=1e-10, where=""):
    """Losses, gradients, norms and weights agree, and the first that do not are named."""
    assert found is not None
    difference = worst(compare(wanted, found))
    assert difference.ok(bar), f"{where} {difference.name}: {difference.error}"

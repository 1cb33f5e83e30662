"""Training runs in a pipeline, and the same in one process, for the tests that compare the two."""

from functools import cache

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import compare, engine_trace, reference_trace, worst
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zbv",
    "dualpipev",
]

LAYERS, STEPS = 8, 2
"""The most that a test needs: four stages of two ranks' halves."""

IN_PARALLEL = (
    "pp",
    "tp",
    "dp_replicate",
    "dp_shard",
    "sequence_parallel",
    "recompute",
    "activation_offload",
    "loss_chunk_tokens",
)


def settings(stage, accumulation, schedule="1f1b", /, **more):
    """A configuration file; `more` are settings of `parallel`, and whole sections."""
    degrees = {name: more.pop(name) for name in IN_PARALLEL if name in more}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": {**degrees, "pipeline": {"schedule": schedule}},
        "run": {"seed": SEED},
        **more,
    }


def dp_of(config):
    """Number of slices of the batch."""
    return int(config["parallel"].get("dp_replicate", 1) * config["parallel"].get("dp_shard", 1))


def layers_of(config):
    """Two on every stage of a rank that has one, one where it has two."""
    return LAYERS if config["parallel"].get("pp", 1) > 2 else LAYERS // 2


def train(rank, world, kind, tied, config):
    """Runs in a worker."""
    model = cases.build(kind, tied=tied, layers=layers_of(config))
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(
            engine,
            cases.steps_for(
                kind, dp_of(config) * config["gradient_accumulation_steps"], steps=STEPS
            ),
        )
    return trace if rank == 0 else None


@cache
def reference(kind, tied, micro_batches, layers=LAYERS // 2):
    """One plain process on the whole batch."""
    model = cases.build(kind, tied=tied, layers=layers)
    engine = plait.initialize(
        model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}}
    )  # only for its initial weights
    engine.close()
    with keeping_float64(model):
        return reference_trace(
            model,
            cases.steps_for(kind, micro_batches, steps=STEPS),
            loss_fn=plait.causal_lm_loss,
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )


def check(pool, world, kind, tied, config):
    """Train and compare; the bar is 1e-10. Returns the largest difference."""
    found = pool.run(world, train, kind, tied, config)[0]
    difference = worst(
        compare(
            reference(
                kind, tied, dp_of(config) * config["gradient_accumulation_steps"], layers_of(config)
            ),
            found,
        )
    )
    assert difference.ok(1e-10), f"{difference.name}: {difference.error}"
    return difference.error


def named(config):
    """Of a combined layout."""
    degrees = [
        f"{name}{value if isinstance(value, int) else ''}"
        for name, value in config["parallel"].items()
        if name != "pipeline"
    ]
    degrees += [str(value) for value in config["parallel"].get("recompute", {}).values()][:1]
    return "-".join(
        [
            config["parallel"]["pipeline"]["schedule"],
            *degrees,
            f"zero{config['zero_optimization']['stage']}",
        ]
    )

"""Training runs in a pipeline, and the same in one process."""

from functools import cache

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import compare, engine_trace, worst
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED, plain_trace

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zbv",
    "dualpipev",
]

LAYERS = 8
"""The most that a test needs: two stages on each of four ranks."""
STEPS = 2

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


def settings(stage, accumulation, schedule="1f1b", /, **overrides):
    """Return a configuration file. `overrides` are settings of `parallel`, and whole sections."""
    parallel = {name: overrides.pop(name) for name in IN_PARALLEL if name in overrides}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": {**parallel, "pipeline": {"schedule": schedule}},
        "run": {"seed": SEED},
        **overrides,
    }


def dp_of(config):
    """Return the number of data-parallel ranks."""
    return int(config["parallel"].get("dp_replicate", 1) * config["parallel"].get("dp_shard", 1))


def layers_of(config):
    """Return the number of layers: two per stage, or one where a rank has two stages."""
    return LAYERS if config["parallel"].get("pp", 1) > 2 else LAYERS // 2


def _micro_batches(config):
    """Return the number of micro-batches in a step over all data-parallel ranks."""
    return dp_of(config) * config["gradient_accumulation_steps"]


def train(rank, world, kind, tied, config):
    """Return the trace of a run on rank 0. Runs on every rank."""
    model = cases.build(kind, tied=tied, layers=layers_of(config))
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        steps = cases.steps_for(kind, _micro_batches(config), steps=STEPS)
        trace = engine_trace(engine, steps)
    return trace if rank == 0 else None


@cache
def reference(kind, tied, micro_batches, layers=LAYERS // 2):
    """Return the trace of one plain process on the whole batch."""
    model = cases.build(kind, tied=tied, layers=layers)
    # The engine only gives the model the initial weights of the run.
    config = {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}}
    plait.initialize(model, config).close()
    return plain_trace(model, cases.steps_for(kind, micro_batches, steps=STEPS))


def check(pool, world, kind, tied, config):
    """Train, compare with one process to 1e-10, and return the largest difference."""
    trace = pool.run(world, train, kind, tied, config)[0]
    expected = reference(kind, tied, _micro_batches(config), layers_of(config))
    difference = worst(compare(expected, trace))
    assert difference.ok(1e-10), f"{difference.name}: {difference.error}"
    return difference.error


def named(config):
    """Return the name of a layout for a test's id."""
    words = [config["parallel"]["pipeline"]["schedule"]]
    for name, value in config["parallel"].items():
        if name != "pipeline":
            words.append(f"{name}{value}" if isinstance(value, int) else name)
    recompute = config["parallel"].get("recompute", {})
    words += [str(value) for value in recompute.values()][:1]
    words.append(f"zero{config['zero_optimization']['stage']}")
    return "-".join(words)

"""Training runs in a pipeline, and the same in one process."""

from functools import cache

from tests.parity import cases, data_parallel
from tests.parity.data_parallel import SEED as SEED
from tests.parity.data_parallel import assert_same, materialise_model, plain_trace, training_config

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
    parallel["pipeline"] = {"schedule": schedule}
    return training_config(parallel, stage=stage, accumulation=accumulation, **overrides)


def dp_of(config):
    """Return the number of data-parallel ranks."""
    return int(config["parallel"].get("dp_replicate", 1) * config["parallel"].get("dp_shard", 1))


def layers_of(config):
    """Return the number of layers: two per stage, or one where a rank has two stages."""
    return LAYERS if config["parallel"].get("pp", 1) > 2 else LAYERS // 2


def train(rank, world, kind, tied, config):
    """Return the trace of a run on rank 0. Runs on every rank."""
    return data_parallel.train(rank, world, kind, tied, config, layers_of(config))


@cache
def reference(kind, tied, micro_batches, layers=LAYERS // 2):
    """Return the trace of one plain process on the whole batch."""
    model = materialise_model(cases.build(kind, tied=tied, layers=layers))
    return plain_trace(model, cases.steps_for(kind, micro_batches, steps=STEPS))


def check(pool, world, kind, tied, config):
    """Train, compare with one process to 1e-10, and return the largest difference."""
    trace = pool.run(world, train, kind, tied, config)[0]
    micro_batches = dp_of(config) * config["gradient_accumulation_steps"]
    return assert_same(reference(kind, tied, micro_batches, layers_of(config)), trace)


def named(config):
    """Return the name of a layout for a test's id."""
    terms = [config["parallel"]["pipeline"]["schedule"]]
    for name, value in config["parallel"].items():
        if name != "pipeline":
            terms.append(f"{name}{value}" if isinstance(value, int) else name)
    recompute = config["parallel"].get("recompute", {})
    terms += [str(value) for value in recompute.values()][:1]
    terms.append(f"zero{config['zero_optimization']['stage']}")
    return "-".join(terms)

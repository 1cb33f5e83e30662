"""Training runs with tensor parallelism, and the same in one process."""

from functools import cache

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import compare, engine_trace, worst
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED, plain_trace
from tests.parity.data_parallel import materialised as one_process_model

FAMILIES = [
    "llama",
    "qwen3",
    "gemma",
    "gemma2",
    "mistral",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "gptj",
    "bloom",
    "falcon",
    "stablelm",
]


def settings(world, tp, stage, replicas, accumulation, sequence=False, **overrides):
    """Return a configuration file. `overrides` are settings of its section `parallel`."""
    dp = world // tp
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": {
            "tp": tp,
            "dp_replicate": replicas if stage else dp,
            "dp_shard": dp // replicas if stage else 1,
            "sequence_parallel": sequence,
            **overrides,
        },
        "run": {"seed": SEED},
    }


def train(rank, world, kind, tied, config):
    """Return the trace of a run on rank 0. Runs on every rank."""
    model = cases.build(kind, tied=tied)
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, cases.steps_for(kind, _micro_batches(world, config)))
    return trace if rank == 0 else None


@cache
def reference(kind, tied, micro_batches):
    """Return the trace of one plain process on the whole batch."""
    return plain_trace(one_process_model(kind, tied=tied), cases.steps_for(kind, micro_batches))


def check(pool, world, kind, tied, config, *, bar=1e-10):
    """Train, compare with one process, and return the largest difference."""
    trace = pool.run(world, train, kind, tied, config)[0]
    expected = reference(kind, tied, _micro_batches(world, config))
    difference = worst(compare(expected, trace))
    assert difference.ok(bar), f"{difference.name}: {difference.error}"
    return difference.error


def _micro_batches(world, config):
    """Return the number of micro-batches in a step over all data-parallel ranks."""
    return world // config["parallel"]["tp"] * config["gradient_accumulation_steps"]


def plan(kind):
    """Return the `parallel` setting that a plain model needs because its plan is not known."""
    if kind not in ("plain", "frozen"):
        return {}
    return {
        "plan": {
            "embed": "embedding_rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "vocab_head",
        }
    }

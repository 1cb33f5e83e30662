"""Training runs with tensor parallelism, and the same in one process."""

from tests.parity.data_parallel import assert_same, reference, train, training_config

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
    parallel = {
        "tp": tp,
        "dp_replicate": replicas if stage else dp,
        "dp_shard": dp // replicas if stage else 1,
        "sequence_parallel": sequence,
        **overrides,
    }
    return training_config(parallel, stage=stage, accumulation=accumulation)


def check(pool, world, kind, tied, config, *, bar=1e-10):
    """Train, compare with one process, and return the largest difference."""
    trace = pool.run(world, train, kind, tied, config)[0]
    dp = world // config["parallel"]["tp"]
    expected = reference(kind, tied, dp * config["gradient_accumulation_steps"])
    return assert_same(expected, trace, bar=bar)


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

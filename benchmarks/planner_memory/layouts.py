"""Layouts whose predicted peak is compared with a dry run: three families, and each technique."""

from dataclasses import dataclass
from typing import Any

from plait.cli.planning.dry_run import DryRun, dry_run
from plait.planner.hardware import cluster
from plait.planner.models import Model, from_config
from plait.planner.request import Request

LENGTH = 320
"""Tokens per sample. It equals no size of the models, so that no two tensors have equal bytes."""
_LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096, "hidden_size": 512}
_QWEN = {**_LLAMA, "intermediate_size": 1536, "num_key_value_heads": 4}
_GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "n_inner": 2048}
_GPT2 |= {"vocab_size": 4096, "n_positions": 512}
_OPT = {"model_type": "opt", **_LLAMA, "ffn_dim": 2048, "word_embed_proj_dim": 512}
_OPT |= {"max_position_embeddings": 512, "pad_token_id": 1}
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA, "intermediate_size": 1792, "num_key_value_heads": 8},
    "qwen3": {"model_type": "qwen3", **_QWEN, "head_dim": 128},
    "qwen2": {"model_type": "qwen2", **_QWEN, "tie_word_embeddings": True},
    "gpt2": _GPT2 | dict.fromkeys(_DROPOUTS, 0.0),
    "gpt2 with dropout": _GPT2 | dict.fromkeys(_DROPOUTS, 0.1),
    "opt": {**_OPT, "dropout": 0.0},
    "opt with dropout": {**_OPT, "dropout": 0.1},
}
"""The last three are not in CASES: families with dropout, or with another activation function."""
_ZERO_BUBBLE = "interleaved-zero-bubble"
Case = tuple[str, dict[str, Any], bool]
CASES: list[Case] = [
    # Model, differences to one process without accumulation, and whether its vocabulary is small,
    # so that blocks determine the peak and not the loss.
    ("llama", {"micro": 2}, False),
    ("llama", {"micro": 2}, True),
    ("llama", {"micro": 2, "steps": 3}, False),
    ("llama", {"micro": 2, "chunk": 128}, False),
    ("llama", {"micro": 2, "tp": 4, "sp": True, "steps": 2, "chunk": 64}, False),
    ("llama", {"micro": 4, "pp": 2, "steps": 4, "schedule": "gpipe", "chunk": 128}, False),
    ("llama", {"micro": 4, "pp": 2, "steps": 6, "schedule": _ZERO_BUBBLE, "chunk": 128}, False),
    ("qwen2", {"micro": 4, "shard": 4, "stage": 3, "chunk": 512}, False),
    ("llama", {"micro": 2, "tp": 2}, False),
    ("llama", {"micro": 2, "tp": 4, "sp": True}, False),
    ("llama", {"micro": 2, "shard": 4, "stage": 1}, False),
    ("llama", {"micro": 2, "shard": 4, "stage": 1, "steps": 2}, True),
    ("llama", {"micro": 2, "shard": 4, "stage": 2, "steps": 3}, True),
    ("llama", {"micro": 2, "shard": 4, "stage": 3}, True),
    ("llama", {"micro": 2, "shard": 8, "replicate": 2, "stage": 3, "steps": 2}, False),
    ("llama", {"micro": 8, "tp": 2, "recompute": "full"}, True),
    ("llama", {"micro": 8, "recompute": "selective"}, True),
    ("llama", {"micro": 8, "tp": 2, "sp": True, "recompute": "selective"}, True),
    ("llama", {"micro": 8, "recompute": "full", "every": 2}, True),
    ("llama", {"micro": 8, "tp": 2, "recompute": "full", "every": 3}, True),
    ("llama", {"micro": 4, "pp": 2, "steps": 4, "recompute": "selective", "every": 2}, True),
    ("llama", {"micro": 4, "pp": 2, "steps": 4}, True),
    ("llama", {"micro": 4, "pp": 2, "steps": 4, "recompute": "selective"}, True),
    ("llama", {"micro": 2, "pp": 4, "steps": 8}, False),
    ("llama", {"micro": 2, "pp": 4, "steps": 4, "shard": 2, "stage": 1}, False),
    ("llama", {"micro": 2, "pp": 2, "steps": 4, "shard": 2, "stage": 2}, False),
    (
        "llama",
        {"micro": 2, "pp": 2, "steps": 4, "shard": 4, "stage": 3, "tp": 2, "sp": True},
        False,
    ),
    ("llama", {"micro": 2, "pp": 2, "steps": 4, "schedule": "gpipe"}, False),
    ("llama", {"micro": 2, "pp": 2, "steps": 4, "schedule": "interleaved-1f1b"}, False),
    ("llama", {"micro": 4, "pp": 2, "steps": 6, "schedule": _ZERO_BUBBLE}, True),
    ("llama", {"micro": 4, "pp": 2, "steps": 6, "schedule": "dualpipev"}, True),
    ("llama", {"micro": 4, "pp": 2, "steps": 4, "schedule": "zbv"}, True),
    ("qwen3", {"micro": 2, "tp": 2}, False),
    ("qwen3", {"micro": 4, "tp": 8, "sp": True, "shard": 2, "stage": 1}, False),
    ("qwen3", {"micro": 8, "tp": 4, "recompute": "selective"}, True),
    ("qwen3", {"micro": 2, "pp": 2, "steps": 4, "tp": 2, "shard": 2, "stage": 1}, False),
    ("qwen2", {"micro": 4, "tp": 8, "sp": True}, False),
    (
        "qwen2",
        {"micro": 1, "pp": 4, "steps": 8, "tp": 2, "sp": True, "stage": 1, "shard": 16},
        False,
    ),
    ("qwen2", {"micro": 2, "shard": 4, "stage": 3, "recompute": "full"}, False),
    ("llama", {"micro": 1, "cp": 4, "length": 8192}, True),
    ("llama", {"micro": 1, "cp": 4, "length": 8192, "context": "ring"}, True),
    ("llama", {"micro": 1, "cp": 4, "length": 8192, "context": "ulysses"}, True),
    ("qwen3", {"micro": 1, "cp": 8, "length": 16384, "recompute": "full"}, True),
    ("gpt2", {"micro": 2}, False),
    ("gpt2", {"micro": 4, "tp": 2}, False),
    ("gpt2", {"micro": 8, "tp": 4}, True),
    ("gpt2", {"micro": 8, "tp": 2, "recompute": "selective"}, True),
    ("gpt2", {"micro": 2, "shard": 8, "stage": 2, "steps": 2}, False),
    ("gpt2", {"micro": 2, "shard": 8, "stage": 3}, True),
    ("gpt2", {"micro": 4, "pp": 2, "steps": 4, "tp": 2}, False),
    ("gpt2", {"micro": 4, "pp": 4, "steps": 8, "shard": 2, "stage": 1, "recompute": "full"}, False),
]


@dataclass(frozen=True)
class Compared:
    """A rank of a case."""

    case: Case
    run: DryRun

    @property
    def ratio(self) -> float:
        """Predicted peak divided by that of the dry run."""
        return self.run.predicted["peak"] / self.run.measured.peak


def compare(case: Case) -> list[Compared]:
    """Compare the only rank, or the first and the last of a pipeline."""
    name, changes, is_small = case
    fields = dict(MODELS[name])
    if is_small:
        fields["vocab_size"] = 512
    usual = {"pp": 1, "tp": 1, "shard": 1, "replicate": 1, "cp": 1, "steps": 1, "stage": 0}
    settings = usual | {"length": LENGTH, "sp": False, "chunk": 0} | changes
    pp = settings["pp"]
    dp = settings["shard"] * settings["replicate"]
    world = pp * settings["tp"] * settings["cp"] * dp
    parallel: dict[str, Any] = {
        "pp": pp,
        "tp": settings["tp"],
        "cp": settings["cp"],
        "dp_shard": settings["shard"],
        "dp_replicate": settings["replicate"],
        "context": settings.get("context", "all-gather-kv"),
        "sequence_parallel": settings["sp"],
        "loss_chunk_tokens": settings["chunk"],
    }
    if pp > 1:
        parallel["pipeline"] = {"schedule": settings.get("schedule", "1f1b")}
    if "recompute" in settings:
        every = settings.get("every", 1)
        parallel["recompute"] = {"mode": settings["recompute"], "every": every}
    tree = {
        "train_micro_batch_size_per_gpu": settings["micro"],
        "gradient_accumulation_steps": settings["steps"],
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": settings["stage"]},
        "optimizer": {"type": "AdamW"},
        "parallel": parallel,
        "model": {"config": fields},
        "data": {"sequence_length": settings["length"]},
    }
    batch = settings["micro"] * settings["steps"] * dp
    model = Model(from_config(fields), {"config": fields})
    request = Request(model, cluster("cpu", world), batch, settings["length"])
    ranks = sorted({0, world // pp * (pp - 1)})
    return [
        Compared(case, dry_run(request, tree, rank=rank, full_step=True, quiet=True))
        for rank in ranks
    ]


def describe(case: Case) -> str:
    name, changes, is_small = case
    model = name
    if is_small:
        model = f"{name}, vocabulary 512"
    texts = (key if value is True else f"{key} {value}" for key, value in changes.items())
    return f"{model}: {', '.join(texts)}"

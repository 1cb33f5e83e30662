"""A rank of published layouts: 7 to 530 billion parameters on 1,024 to 4,480 ranks.

A step runs on fake tensors, and the bytes of all states equal the ledger's.
"""

import pytest

from tests.fake.worlds import check_states, single_rank

GPT2 = {
    "vocab_size": 51200,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def llama(width, intermediate, layers, heads, **others):
    """Return a model type and its sizes, as `MODELS` has them."""
    sizes = {
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }
    return "llama", sizes


MODELS = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1
    "GPT-3 175B": ("gpt2", {**GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96}),
    # Smith et al. 2022, arXiv:2201.11990, section 2
    "Turing-NLG 530B": ("gpt2", {**GPT2, "n_embd": 20480, "n_layer": 105, "n_head": 128}),
    # Touvron et al. 2023, arXiv:2307.09288, table 1 and the released configurations
    "LLaMA-2 7B": llama(4096, 11008, 32, 32),
    "LLaMA-2 13B": llama(5120, 13824, 40, 40),
    "LLaMA-2 70B": llama(8192, 28672, 80, 64, num_key_value_heads=8),
}
CASES = [
    # (model, degrees, ZeRO stage, micro-batches, rank)
    # Megatron-LM on 1,024 GPUs (arXiv:2104.04473)
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 1, 8, 0),
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 3, 8, 1023),
    # Megatron-Turing on 4,480 GPUs (arXiv:2201.11990, section 2.3)
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 1, 36, 0),
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 2, 36, 2240),
    ("LLaMA-2 7B", {"dp_shard": 1024}, 3, 1, 0),
    ("LLaMA-2 13B", {"dp_replicate": 128, "dp_shard": 8, "tp": 1}, 3, 1, 0),
    ("LLaMA-2 70B", {"pp": 4, "dp_shard": 32, "tp": 8, "sequence_parallel": True}, 1, 8, 992),
    ("LLaMA-2 70B", {"dp_replicate": 2, "dp_shard": 128, "tp": 8}, 3, 1, 2047),
]


def named(case):
    return f"{case[0]}-zero{case[2]}-rank{case[4]}"


@pytest.mark.proof
@pytest.mark.parametrize("case", CASES, ids=named)
def test_published_layouts(case):
    """The states of a rank equal the ledger's, whatever the number of micro-batches."""
    name, degrees, stage, accumulation, rank = case
    for micro_batches in {1, accumulation}:
        config = {
            "gradient_accumulation_steps": micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "parallel": degrees,
        }
        check_states(*single_rank(*MODELS[name], config, rank=rank, length=2048))

"""MISSION M4: published shapes of 7 to 530 billion parameters, built and stepped as one rank of layouts of 1,024 to 4,480 ranks; the bytes
of their states equal the ledger's."""

import pytest

from tests.fake.worlds import check_states, single_rank

GPT2 = {"vocab_size": 51200, "n_positions": 2048, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096}
MODELS = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1
    "GPT-3 175B": ("gpt2", {**GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96}),
    # Smith et al. 2022, arXiv:2201.11990, section 2
    "Turing-NLG 530B": ("gpt2", {**GPT2, "n_embd": 20480, "n_layer": 105, "n_head": 128}),
    # Touvron et al. 2023, arXiv:2307.09288, table 1 and the released configurations
    "LLaMA-2 7B": ("llama", {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}),
    "LLaMA-2 13B": ("llama", {**LLAMA, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}),
    "LLaMA-2 70B": ("llama", {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}),
}  # fmt: skip
CASES = [
    # (model, degrees, ZeRO stage, micro-batches, rank). Megatron-LM's for 175B: tp 8, pp 8 on 1,024 GPUs (arXiv:2104.04473)
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 1, 8, 0),
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 3, 8, 1023),
    # Megatron-Turing's: tp 8, pp 35, dp 16 on 4,480 GPUs (arXiv:2201.11990, section 2.3)
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 1, 36, 0),
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 2, 36, 2240),
    ("LLaMA-2 7B", {"dp_shard": 1024}, 3, 1, 0),
    ("LLaMA-2 13B", {"dp_replicate": 128, "dp_shard": 8, "tp": 1}, 3, 1, 0),
    ("LLaMA-2 70B", {"pp": 4, "dp_shard": 32, "tp": 8, "sequence_parallel": True}, 1, 8, 992),
    ("LLaMA-2 70B", {"dp_replicate": 2, "dp_shard": 128, "tp": 8}, 3, 1, 2047),
]


def named(case):
    return f"{case[0]}-zero{case[2]}-rank{case[4]}"


def check(case, micro_batches):
    """Exact, parameters, gradients and optimizer states, which do not depend on how many micro-batches there are."""
    name, degrees, stage, _, rank = case
    config = {
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "parallel": degrees,
    }
    check_states(*single_rank(*MODELS[name], config, rank=rank, length=2048))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=named(case), marks=() if case[0] == "LLaMA-2 7B" else pytest.mark.proof
        )
        for case in CASES
    ],
)
def test_published_layouts(case):
    check(case, 1)


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for case in CASES if case[3] > 1], ids=named)
def test_with_all_micro_batches(case):
    check(case, case[3])

"""Models whose layers keep a state that every token changes, or a cache of their own, get the tokens of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.inference.serving import scheduler as scheduler_module
from plait.inference.serving.scheduler import Scheduler
from plait.inference.settings import Settings
from plait.sharded.cache import has_recurrent_state, takes_cache
from tests.unit.inference.serving.test_rows import Client
from tests.unit.inference.words import Words

PROMPTS = [[5, 17, 33, 2, 90, 41, 7, 11, 64], [8, 3], [71, 12, 12, 12, 93]]
NEW = 8
FIELDS: dict[str, dict[str, Any]] = {
    "jamba": {
        "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8, "head_dim": 16, "num_attention_heads": 4},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 4, "head_dim": 16,
    },
}  # fmt: skip


def built(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    shape = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **FIELDS[kind]})).eval()


def by_transformers(model: Any) -> list[list[int]]:
    """One prompt at a time."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kind", list(FIELDS))
def test_tokens(kind: str) -> None:
    """Of prompts of several lengths together, in pieces and without a cache, also twice and after one of them has ended."""
    model = built(kind)
    expected = by_transformers(model)
    assert takes_cache(model) == has_recurrent_state(model) == (kind in ("jamba", "falcon_h1"))
    sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})
    for ways in ({}, {"prefill_tokens": 3}, {"use_cache": False}, {"batch_size": 2}):
        made = plait.generate(sharded, PROMPTS, max_new_tokens=NEW, temperature=0, **ways)
        assert [one.token_ids for one in made] == expected, ways
    end = next(token for token in expected[1][:3] if all(token not in expected[at][:4] for at in (0, 2)))
    made = plait.generate(sharded, PROMPTS, max_new_tokens=NEW, temperature=0, eos_token_id=end)
    for one, row in zip(made, expected, strict=True):
        assert one.token_ids == (row[: row.index(end) + 1] if end in row else row)
    sharded.close()


def test_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is longer than what a forward reads of one."""
    monkeypatch.setattr(scheduler_module, "PREFILL", 2)
    model = built("jamba")
    sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})
    scheduler = Scheduler(sharded, Words(), at_once=3, waiting=3)
    clients = [Client(index, settings=Settings(), new=4) for index in range(3)]
    scheduler.start()
    scheduler.submit(*(client.job for client in clients))
    for client in clients:
        assert client.ended.wait(30)
    scheduler.stop()
    made = plait.generate(sharded, [list(client.prompt) for client in clients], max_new_tokens=4, use_cache=False)
    assert [one.token_ids for one in made] == [client.tokens for client in clients]
    sharded.close()

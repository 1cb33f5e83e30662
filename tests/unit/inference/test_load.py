"""A model for inference lies where its products read it fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plait.cluster.host_memory import HUGE_PAGE
from plait.inference.deployment import load_model
from plait.inference.source import open_source


@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_on_huge_pages(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 4096,
    }
    saved = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **shape))
    saved.save_pretrained(tmp_path)
    sharded = load_model(open_source(tmp_path))
    try:
        large = [p for p in sharded.model.parameters() if p.nbytes >= HUGE_PAGE]
        assert len(large) == 2 - tied and all(p.data_ptr() % HUGE_PAGE == 0 for p in large)
        for name, wanted in saved.state_dict().items():
            assert torch.equal(sharded.model.state_dict()[name], wanted), name
    finally:
        sharded.close()

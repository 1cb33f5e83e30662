"""Which kernel computes attention on which device, and what is said where none of the fused ones does."""

import torch
from transformers import AutoConfig

from plait._torch import attention
from plait.parallel.context import kernel
from plait.parallel.context.families import why_in_tiles
from plait.parallel.context.kernel import AttentionRule, kernel_for
from tests.fused_attention import registered

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def test_the_kernel_of_each_case(monkeypatch):
    """With all kernels of CUDA and with Triton, which this machine may lack."""
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    rows = [
        (CUDA, BF16, (128, 128), AttentionRule(1.0), False, "flash"),
        (CUDA, BF16, (192, 128), AttentionRule(1.0), False, "flash"),
        (CUDA, BF16, (128, 128), AttentionRule(1.0, window=64), False, "flash"),
        (CUDA, BF16, (288, 288), AttentionRule(1.0), False, "efficient"),
        (CUDA, BF16, (288, 288), AttentionRule(1.0, window=64), False, "flex"),
        (CUDA, FP32, (128, 128), AttentionRule(1.0), False, "efficient"),
        (CUDA, FP32, (128, 128), AttentionRule(1.0, window=64), False, "flex"),
        (CUDA, BF16, (128, 128), AttentionRule(1.0), True, "flex"),
        (CUDA, BF16, (128, 128), AttentionRule(1.0, softcap=30.0), False, "flex"),
        (CUDA, BF16, (8, 8), AttentionRule(1.0), True, "products"),
        (CUDA, FP64, (128, 128), AttentionRule(1.0), False, "products"),
        (CUDA, BF16, (128, 128), AttentionRule(1.0, kernel="products"), False, "products"),
        (CPU, FP64, (5, 5), AttentionRule(1.0), False, "cpu"),
        (CPU, FP64, (5, 4), AttentionRule(1.0), False, "products"),
        (CPU, FP64, (5, 5), AttentionRule(1.0), True, "products"),
        (torch.device("xpu", 0), BF16, (128, 128), AttentionRule(1.0), False, "products"),
    ]
    with registered("CUDA"):
        found = [
            kernel_for(device, dtype, widths, rule, documents=packed)
            for device, dtype, widths, rule, packed, _ in rows
        ]
    assert [name for name, _ in found] == [row[-1] for row in rows]
    assert all(
        bool(reason) == (name == "products" and row[0] != CPU)
        for (name, reason), row in zip(found, rows, strict=True)
    ), found


def test_why_a_model_is_computed_in_tiles(monkeypatch):
    """The reason follows from the model's configuration, the dtype and the documents of a batch."""
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama, gemma = (
        AutoConfig.for_model("llama", **sizes),
        AutoConfig.for_model("gemma2", head_dim=16, **sizes),
    )
    latent = AutoConfig.for_model(
        "deepseek_v3", qk_nope_head_dim=400, qk_rope_head_dim=64, v_head_dim=128
    )
    with registered("CUDA"):
        assert why_in_tiles(llama, "sdpa", CUDA, BF16, documents=False) == ""
        assert why_in_tiles(llama, "eager", CPU, FP64, documents=True) == ""
        assert why_in_tiles(llama, "flash_attention_2", CUDA, BF16, documents=True) == ""
        assert "eager" in why_in_tiles(llama, "eager", CUDA, BF16, documents=False)
        assert "float64" in why_in_tiles(llama, "sdpa", CUDA, FP64, documents=False)
        assert "Triton" in why_in_tiles(llama, "sdpa", CUDA, BF16, documents=True)
        assert "Triton" in why_in_tiles(gemma, "sdpa", CUDA, BF16, documents=False)
        monkeypatch.setattr(attention, "EFFICIENT_DTYPES", ())
        assert "up to 256, not 464" in why_in_tiles(latent, "sdpa", CUDA, BF16, documents=False)


def test_windows_on_rocm(monkeypatch):
    """ROCm's FlashAttention aligns masks at the first key, so it computes squares only."""
    monkeypatch.setattr(
        kernel,
        "FLASH",
        attention.FusedAttention(
            *(attention.FLASH.forward, attention.FLASH.backward), True, bands=False
        ),
    )
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with registered("CUDA"):
        assert kernel_for(CUDA, BF16, (128, 128), AttentionRule(1.0), documents=False)[0] == "flash"
        name, reason = kernel_for(
            CUDA, BF16, (128, 128), AttentionRule(1.0, window=64), documents=False
        )
    assert name == "products" and "ROCm" in reason and "Triton" in reason

"""Choice of the attention kernel, and the reason that is given if no fused one can compute."""

import torch
from transformers import AutoConfig

from plait._torch import attention
from plait.parallel.context import kernel
from plait.parallel.context.families import why_in_tiles
from plait.parallel.context.kernel import AttentionRule, kernel_for
from tests.fused_attention import registered

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
BF16 = torch.bfloat16
FP32 = torch.float32
FP64 = torch.float64


def test_the_kernel_of_each_case(monkeypatch):
    """All kernels of CUDA and Triton exist, although this machine may have neither."""
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    cases = [
        # Device, dtype, widths of keys and values, rule, packed documents, name of the kernel.
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
        for device, dtype, widths, rule, packed, expected in cases:
            name, reason = kernel_for(device, dtype, widths, rule, documents=packed)
            case = (device, dtype, widths, rule, packed)
            assert name == expected, case
            assert bool(reason) == (name == "products" and device != CPU), (case, reason)


def test_why_a_model_is_computed_in_tiles(monkeypatch):
    """The reason follows from the model's configuration, the dtype and the documents of a batch."""
    # This machine may have Triton.
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = AutoConfig.for_model("llama", **sizes)
    gemma = AutoConfig.for_model("gemma2", head_dim=16, **sizes)
    latent = AutoConfig.for_model(
        "deepseek_v3", qk_nope_head_dim=400, qk_rope_head_dim=64, v_head_dim=128
    )
    with registered("CUDA"):
        for config, implementation, device, dtype, packed, expected in (
            (llama, "sdpa", CUDA, BF16, False, ""),
            (llama, "eager", CPU, FP64, True, ""),
            (llama, "flash_attention_2", CUDA, BF16, True, ""),
            (llama, "eager", CUDA, BF16, False, "eager"),
            (llama, "sdpa", CUDA, FP64, False, "float64"),
            (llama, "sdpa", CUDA, BF16, True, "Triton"),
            (gemma, "sdpa", CUDA, BF16, False, "Triton"),
        ):
            reason = why_in_tiles(config, implementation, device, dtype, documents=packed)
            assert expected in reason
            assert bool(reason) == bool(expected), reason
        # A release of torch without the efficient kernel.
        monkeypatch.setattr(attention, "EFFICIENT_DTYPES", ())
        assert "up to 256, not 464" in why_in_tiles(latent, "sdpa", CUDA, BF16, documents=False)


def test_windows_on_rocm(monkeypatch):
    """ROCm's FlashAttention aligns masks at the first key, so it computes squares only."""
    flash = attention.FLASH
    of_rocm = attention.FusedAttention(flash.forward, flash.backward, True, bands=False)
    monkeypatch.setattr(kernel, "FLASH", of_rocm)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    windowed = AttentionRule(1.0, window=64)
    with registered("CUDA"):
        assert kernel_for(CUDA, BF16, (128, 128), AttentionRule(1.0), documents=False)[0] == "flash"
        name, reason = kernel_for(CUDA, BF16, (128, 128), windowed, documents=False)
    assert name == "products"
    assert "ROCm" in reason
    assert "Triton" in reason

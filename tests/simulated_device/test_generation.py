"""Weights that are streamed to a simulated GPU: from pinned host memory, from files, and from both; the tokens are those of the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.inference import streamed_model, weight_files, weight_stream
from plait.inference.capacity import LAYERS_ON_DEVICE, CacheDemand, cache_bytes, cache_layout_of
from plait.inference.source import open_source
from plait.inference.streamed_model import (
    load_streamed,
    plan_streaming,
    tensors_of,
)

PROMPTS = [[5, 6, 7], [11, 3, 9, 4, 8]]
NEW = 4
OTHER = 1 << 20


def save(folder):
    """A Llama of random weights, float64 and in two files, and what Transformers makes of the prompts on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    model.save_pretrained(folder, max_shard_size="7MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    made = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        for ids in PROMPTS
    ]
    return [found[0, len(ids) :].tolist() for found, ids in zip(made, PROMPTS, strict=True)]


def generated(rank, world, folder, budget, host, times):
    """Tokens of several calls, and how the model was kept. Runs in a worker."""
    device: Any = sys.modules["simulated_device.on_torch"]
    before = device.pinned_bytes()
    read = weight_files.read_into

    def seen_by_the_device(file, view, *args, **options):
        """A read writes to memory behind torch's back; the device looks for races in what torch does."""
        own = memoryview(bytearray(len(view)))
        read(file, own, *args, **options)
        torch.frombuffer(view, dtype=torch.uint8).copy_(torch.frombuffer(own, dtype=torch.uint8))

    class Busy(weight_stream.WeightStream):
        """Made while the device computes: the memory of its places may be in use until then."""

        def __init__(self, *args, **options):
            torch.zeros(8, device="cuda").add_(1)
            super().__init__(*args, **options)

    weight_files.read_into, streamed_model.WeightStream = seen_by_the_device, Busy
    sharded, planned = load_streamed(
        open_source(Path(folder)), budget_bytes=budget + OTHER, other_bytes=OTHER, host_bytes=host
    )
    held = torch.accelerator.memory_allocated()
    streaming = sharded.hooks.find(weight_stream.WeightStream)
    assert streaming is not None
    copied = device.copies()
    tokens = [
        [
            one.token_ids
            for one in plait.generate(sharded, PROMPTS, max_new_tokens=NEW, do_sample=False)
        ]
        for _ in range(times)
    ]
    seen = {
        "copies": {way: count - copied[way] for way, count in device.copies().items()},
        "streamed": len(planned.streamed), "on host": len(planned.on_host), "pinned": streaming.host_bytes,
        "held": held, "peak": torch.accelerator.max_memory_allocated(), "read": streaming.bytes_read,
    }  # fmt: skip
    sharded.close()
    weight_files.read_into, streamed_model.WeightStream = read, weight_stream.WeightStream
    del sharded, streaming
    torch.cuda.synchronize()
    seen["left"] = device.pinned_bytes() - before
    return tokens, seen


@pytest.mark.parametrize("source", ["host memory", "files", "both"])
def test_streamed_weights(source, simulated, tmp_path, row):
    expected = save(tmp_path)
    found = open_source(tmp_path)
    stored = tensors_of(found, found.model())
    whole = sum(one.size for one in stored.values())
    block = sum(one.size for name, one in stored.items() if ".layers.0." in name)
    budget = whole - 2 * block  # two layers stay beside two places
    host = {"host memory": 1 << 30, "files": 0, "both": 3 * (-(-block // (1 << 20)) << 20)}[source]
    planned = plan_streaming(
        found.model(), stored, budget_bytes=budget + OTHER, other_bytes=OTHER, host_bytes=host
    )
    assert len(planned.streamed) >= 3
    ((tokens, seen),) = simulated.run(1, generated, str(tmp_path), budget, host, 2)
    assert tokens == [expected, expected]
    assert (
        seen["on host"]
        == len(planned.on_host)
        == {"host memory": seen["streamed"], "files": 0, "both": 1}[source]
    )
    assert seen["pinned"] <= host or source == "files"
    rounding = 512 * (len(stored) + 2)  # torch's allocator gives each tensor a multiple of it
    assert seen["held"] <= budget + rounding and seen["peak"] <= budget + OTHER
    if source == "host memory":
        assert seen["read"] == planned.streamed_bytes  # once
    assert seen["left"] <= 1 << 16
    passes = 2 * NEW  # the prompts, then each token
    assert seen["copies"]["deferred"] >= passes * seen["streamed"], seen
    row(
        f"generation, {seen['streamed']} of 6 layers streamed from {source}",
        "Transformers on the CPU",
        0.0,
    )


LAYERS, LENGTHS, ADDED = 12, (48, 24, 16, 48, 24, 16, 48, 24), 12


def cached(rank, world, config):
    """Tokens and the peak of the device's memory, with keys and values on the device and on the host. Runs in a worker."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None, max_position_embeddings=64)
    ).double()
    engine = plait.initialize(
        model, {"train_micro_batch_size_per_gpu": 1, **config}, loss_fn=plait.causal_lm_loss
    )
    prompts = [
        [(7 * at + index) % 60 + 2 for at in range(length)] for index, length in enumerate(LENGTHS)
    ]
    asked = CacheDemand(requests=8, tokens=48 + ADDED, itemsize=8)
    found: dict[str, Any] = {
        "bytes": cache_bytes(cache_layout_of(model), asked, tp=engine.sharded.mesh.layout.tp)
    }
    for offload_cache in (False, True):
        settings = {"max_new_tokens": ADDED, "eos_token_id": [25], "offload_cache": offload_cache}
        engine.generate(prompts, **settings)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = engine.generate(prompts, **settings)
        found[f"peak {offload_cache}"] = torch.cuda.max_memory_allocated() - before
        found[f"tokens {offload_cache}"] = [one.token_ids for one in made]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"parallel": {"tp": 2, "sequence_parallel": False}}, id="tp"),
        pytest.param(2, {"zero_optimization": {"stage": 3}}, id="zero3"),
    ],
)
def test_keys_and_values_on_the_host(world, config, simulated, row):
    """The same tokens, also of requests that go on when others have ended, and the device has a few layers' keys and values."""
    for found in simulated.run(world, cached, config):
        lengths = [len(tokens) for tokens in found["tokens True"]]
        assert (
            found["tokens True"] == found["tokens False"] and min(lengths) < max(lengths) == ADDED
        )
        saved = found["peak False"] - found["peak True"]
        assert saved >= 0.8 * found["bytes"] * (1 - LAYERS_ON_DEVICE / LAYERS)
    row(f"keys and values on the host, {world} devices", "keys and values on the device", 0.0)

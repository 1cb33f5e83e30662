"""Generation on a simulated GPU with streamed weights or with a KV cache on the host."""

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
"""Bytes that plans reserve besides weights."""


def save(folder):
    """Save a float64 Llama in two files, and return the tokens of Transformers on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).double()
    model.save_pretrained(folder, max_shard_size="7MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    answers = []
    for ids in PROMPTS:
        prompt = torch.tensor([ids])
        tokens = model.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        answers.append(tokens[0, len(ids) :].tolist())
    return answers


def generated(rank, world, folder, budget, host, times):
    """Return the tokens of several calls and observations of memory. Runs on every rank."""
    device: Any = sys.modules["simulated_device.on_torch"]
    before = device.pinned_bytes()
    read = weight_files.read_into

    def seen_by_the_device(file, view, *args, **options):
        # The device records races of torch's operators only, so one writes the bytes.
        buffer = memoryview(bytearray(len(view)))
        read(file, buffer, *args, **options)
        torch.frombuffer(view, dtype=torch.uint8).copy_(torch.frombuffer(buffer, dtype=torch.uint8))

    class Busy(weight_stream.WeightStream):
        """A stream that is created while the device computes, and may still use its memory."""

        def __init__(self, *args, **options):
            torch.zeros(8, device="cuda").add_(1)
            super().__init__(*args, **options)

    weight_files.read_into = seen_by_the_device
    streamed_model.WeightStream = Busy
    sharded, planned = load_streamed(
        open_source(Path(folder)), budget_bytes=budget + OTHER, other_bytes=OTHER, host_bytes=host
    )
    allocated = torch.accelerator.memory_allocated()
    streaming = sharded.hooks.find(weight_stream.WeightStream)
    assert streaming is not None
    copied = device.copies()
    tokens = []
    for _ in range(times):
        generations = plait.generate(sharded, PROMPTS, max_new_tokens=NEW, do_sample=False)
        tokens.append([generation.token_ids for generation in generations])
    report = {
        "copies": {kind: count - copied[kind] for kind, count in device.copies().items()},
        "streamed": len(planned.streamed),
        "on host": len(planned.on_host),
        "pinned": streaming.host_bytes,
        "allocated": allocated,
        "peak": torch.accelerator.max_memory_allocated(),
        "read": streaming.bytes_read,
    }
    sharded.close()
    weight_files.read_into = read
    streamed_model.WeightStream = weight_stream.WeightStream
    del sharded, streaming
    torch.cuda.synchronize()
    report["left"] = device.pinned_bytes() - before
    return tokens, report


@pytest.mark.parametrize("source", ["host memory", "files", "both"])
def test_streamed_weights(source, simulated, tmp_path, row):
    expected = save(tmp_path)
    files = open_source(tmp_path)
    stored = tensors_of(files, files.model())
    total_bytes = sum(tensor.size for tensor in stored.values())
    block = sum(tensor.size for name, tensor in stored.items() if ".layers.0." in name)
    # The device has room for all layers but two, and needs two buffers for streamed ones.
    budget = total_bytes - 2 * block
    host = {"host memory": 1 << 30, "files": 0, "both": 3 * (-(-block // (1 << 20)) << 20)}[source]
    planned = plan_streaming(
        files.model(), stored, budget_bytes=budget + OTHER, other_bytes=OTHER, host_bytes=host
    )
    assert len(planned.streamed) >= 3
    ((tokens, report),) = simulated.run(1, generated, str(tmp_path), budget, host, 2)
    assert tokens == [expected, expected]
    on_host = {"host memory": report["streamed"], "files": 0, "both": 1}[source]
    assert report["on host"] == len(planned.on_host) == on_host
    assert report["pinned"] <= host or source == "files"
    rounding = 512 * (len(stored) + 2)  # torch allocates multiples of 512 bytes
    assert report["allocated"] <= budget + rounding and report["peak"] <= budget + OTHER
    if source == "host memory":
        assert report["read"] == planned.streamed_bytes, "files are read once"
    assert report["left"] <= 1 << 16
    passes = 2 * NEW  # the prompts, then each token
    assert report["copies"]["deferred"] >= passes * report["streamed"], report
    row(
        f"generation, {report['streamed']} of 6 layers streamed from {source}",
        "Transformers on the CPU",
        0.0,
    )


LAYERS = 12
LENGTHS = (48, 24, 16, 48, 24, 16, 48, 24)
ADDED = 12


def cached(rank, world, config):
    """Return tokens and peaks with the KV cache on the device and on the host.

    Runs on every rank.
    """
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
    demand = CacheDemand(requests=8, tokens=48 + ADDED, itemsize=8)
    report: dict[str, Any] = {
        "bytes": cache_bytes(cache_layout_of(model), demand, tp=engine.sharded.mesh.layout.tp)
    }
    for offload_cache in (False, True):
        settings = {"max_new_tokens": ADDED, "eos_token_id": [25], "offload_cache": offload_cache}
        engine.generate(prompts, **settings)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        generations = engine.generate(prompts, **settings)
        report[f"peak {offload_cache}"] = torch.cuda.max_memory_allocated() - before
        report[f"tokens {offload_cache}"] = [generation.token_ids for generation in generations]
    engine.close()
    return report


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"parallel": {"tp": 2, "sequence_parallel": False}}, id="tp"),
        pytest.param(2, {"zero_optimization": {"stage": 3}}, id="zero3"),
    ],
)
def test_keys_and_values_on_the_host(world, config, simulated, row):
    """The tokens are the same, and the device has the keys and values of a few layers."""
    for report in simulated.run(world, cached, config):
        lengths = [len(tokens) for tokens in report["tokens True"]]
        assert (
            report["tokens True"] == report["tokens False"] and min(lengths) < max(lengths) == ADDED
        )
        saved = report["peak False"] - report["peak True"]
        assert saved >= 0.8 * report["bytes"] * (1 - LAYERS_ON_DEVICE / LAYERS)
    row(f"keys and values on the host, {world} devices", "keys and values on the device", 0.0)

"""A model is placed on a layout that holds it, or streamed within budgets."""

import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plait.cluster.host_memory import HUGE_PAGE
from plait.errors import InputError
from plait.inference import deployment
from plait.inference.capacity import CacheLayout, cache_layout_of
from plait.inference.deployment import (
    Devices,
    DoesNotFit,
    InferenceWork,
    deploy,
    deploy_in_budget,
    deploy_streamed,
    load_model,
)
from plait.inference.source import open_source
from plait.inference.streamed_model import plan_streaming
from plait.inference.weight_files import StoredTensor
from plait.inference.weight_stream import HostMemory, pinned_bytes
from plait.sizes import parse_bytes

MIB = 1 << 20
AUTOMATIC = {"tp": None, "pp": None, "devices": None}
ONE_DEVICE = {"tp": 1, "pp": 1, "devices": None}


def save_llama(folder, **sizes):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=128, num_attention_heads=4, **sizes))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 64, "intermediate_size": 512, "num_hidden_layers": 6}
    save_llama(folder, num_key_value_heads=2, **sizes)
    source = open_source(folder)
    return InferenceWork(source, source.model(), 32, 1)


def test_a_model_that_no_layout_holds_is_streamed(work, monkeypatch):
    assert deploy(work, **AUTOMATIC).budget_bytes is None

    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    streamed = deploy(work, **AUTOMATIC)
    assert streamed.why.startswith("no layout of these devices holds it: ")
    assert streamed.budget_bytes == int(0.92 * 5 * MIB)
    assert streamed.tp == streamed.pp == 1 and streamed.host_bytes == 0
    assert 0 < streamed.other_bytes < streamed.budget_bytes

    message = "the model does not fit: at tp = 1, pp = 1 a device would hold"
    for requested in ({"tp": 1}, {"pp": 1}, {"devices": 1}):
        with pytest.raises(DoesNotFit, match=message):
            deploy(work, **AUTOMATIC | requested)


def test_a_guessed_cache_is_reported(work, monkeypatch):
    """The note is in the line that `plait generate` and `plait plan infer` print."""
    by_heads = replace(cache_layout_of(work.model), guessed="ValueError: no")
    for layout, reason in (
        (by_heads, "is computed from the heads in the configuration, and may take more"),
        (
            CacheLayout(guessed="ValueError: no"),
            "is not counted, because the configuration defines no heads",
        ),
    ):
        monkeypatch.setattr(deployment, "cache_layout_of", lambda *_, layout=layout: layout)
        failure = "the model could not be run without weights (ValueError: no)"
        for placement in (deploy(work, **AUTOMATIC), deploy_streamed(work, cpu_budget=1 << 30)):
            assert placement.why.endswith(f"; the KV cache {reason}: {failure}")


def test_budgets_decide_what_is_streamed(work, monkeypatch):
    resident = "5.7 MiB of weights stay in memory, all of them fit; "
    assert deploy_streamed(work, cpu_budget=1 << 30).why.startswith(resident)

    # From here on, a machine with a GPU.
    monkeypatch.setattr(deployment, "device_count", lambda: 1)
    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    placement = deploy_streamed(work, gpu_budget=4 * MIB, cpu_budget=3 * MIB)
    assert (placement.budget_bytes, placement.host_bytes) == (4 * MIB, 3 * MIB)
    assert "on the GPU, 5 layers" in placement.why and "of them from files" in placement.why
    assert deploy_streamed(work, cpu_budget=9 * MIB).budget_bytes == int(0.92 * 5 * MIB)

    monkeypatch.setattr(deployment, "free_host_bytes", lambda: 100 * MIB)
    placement = deploy_streamed(work, gpu_budget=4 * MIB)
    assert placement.host_bytes == 80 * MIB
    assert "are copied to it for every token, 0 B of them from files" in placement.why


def test_the_least_budget_suffices(work):
    """Fewer simultaneous requests are tried first, and one request fits the advised budget."""
    requests = replace(work, requests=3)
    with pytest.raises(InputError) as error:
        deploy_in_budget(requests, cpu_budget=MIB)
    pattern = r"a budget of 1.0 MiB is too small: .*; pass at least (\S+ MiB)"
    least = parse_bytes(re.search(pattern, str(error.value))[1], "--cpu-budget")
    with pytest.raises(InputError, match="too small"):
        deploy_in_budget(requests, cpu_budget=least - MIB // 5)
    assert deploy_in_budget(requests, cpu_budget=least)[1] == 1
    with pytest.raises(InputError, match="too small"):
        deploy_streamed(requests, cpu_budget=least)
    assert deploy_in_budget(requests, cpu_budget=1 << 30)[1] == 3


def test_a_kv_cache_on_the_host(work):
    machine = Devices(on_gpu=True, count=2, memory_bytes=7 * MIB, host_bytes=1 << 30)
    # 6 layers x 2 x 2 heads x 32 x 4 bytes for each of 2,048 tokens are 6 MiB.
    requests = replace(work, requests=64)
    with pytest.raises(InputError, match="does not fit"):
        deploy(requests, **ONE_DEVICE, machine=machine)

    offloaded = replace(requests, offload_cache=True)
    larger = replace(machine, memory_bytes=10 * MIB)
    estimate = deploy(offloaded, **ONE_DEVICE, machine=larger).estimate
    cache = (estimate.cache, estimate.cache_copied, estimate.cache_on_host)
    assert cache == (3 * MIB, 6 * MIB, 7 * MIB)

    streamed = partial(deploy_streamed, offloaded, gpu_budget=24 * MIB, machine=machine)
    placement = streamed(cpu_budget=20 * MIB)
    assert placement.estimate.cache == 3 * MIB and placement.host_bytes == 13 * MIB
    note = "for the KV cache and activations; 7.0 MiB of KV cache in host memory"
    assert placement.why.endswith(note)

    message = "the KV cache takes 7.0 MiB of pinned host memory, but 6.0 MiB may be"
    with pytest.raises(InputError, match=message):
        streamed(cpu_budget=6 * MIB)
    message = "--offload-cache: on the CPU the KV cache is in host memory"
    with pytest.raises(InputError, match=message):
        deploy_streamed(offloaded, cpu_budget=1 << 30)
    with pytest.raises(InputError, match="needs 2 pipeline stages, which cannot prefetch"):
        deploy(offloaded, **ONE_DEVICE | {"pp": 2}, machine=replace(machine, memory_bytes=20 * MIB))


def test_the_host_budget_decides_what_is_read_from_files(work):
    stored = {
        name: StoredTensor(Path(), 0, p.numel() * 4, torch.float32, tuple(p.shape))
        for name, p in work.model.named_parameters()
    }
    plan = partial(plan_streaming, work.model, stored, budget_bytes=2 * MIB, other_bytes=0)
    unlimited = plan(host_bytes=1 << 30)
    assert len(unlimited.streamed) == 6
    assert unlimited.on_host == unlimited.streamed and unlimited.read_bytes == 0

    layer = pinned_bytes(unlimited.slot_bytes // 2)
    assert layer == MIB
    assert plan(host_bytes=6 * layer).on_host == unlimited.streamed
    # Two slots are for reading the other layers.
    limited = plan(host_bytes=6 * layer - 1)
    assert len(limited.on_host) == 3 and set(limited.on_host) < set(unlimited.streamed)
    assert limited.read_bytes == unlimited.streamed_bytes // 2
    assert plan(host_bytes=2 * layer).on_host == ()
    message = "1.0 MiB of host memory are too little: 2 layers that are read from files take 2.0"
    with pytest.raises(InputError, match=message):
        plan(host_bytes=layer)


def test_host_memory_of_several_allocations():
    values = torch.arange(12, dtype=torch.uint8)
    memory = HostMemory([values[:4], values[4:]])
    assert memory.size == 12
    for start, size, expected in (
        (2, 5, [(2, [2, 3]), (4, [4, 5, 6])]),
        (5, 2, [(5, [5, 6])]),
        (4, 0, []),
    ):
        overlaps = memory.overlaps(start, size)
        assert [(offset, part.tolist()) for offset, part in overlaps] == expected


@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_on_huge_pages(tmp_path, tied):
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 4096}
    model = save_llama(tmp_path, tie_word_embeddings=tied, **sizes)
    with closing(load_model(open_source(tmp_path))) as sharded:
        large = [p for p in sharded.model.parameters() if p.nbytes >= HUGE_PAGE]
        assert len(large) == 2 - tied and all(p.data_ptr() % HUGE_PAGE == 0 for p in large)
        loaded = sharded.model.state_dict()
        for name, expected in model.state_dict().items():
            assert torch.equal(loaded[name], expected), name

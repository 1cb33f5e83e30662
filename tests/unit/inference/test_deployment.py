"""Where a model is put: a layout that holds it, or streamed within budgets."""

import re
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


def llama(**sizes):
    shape = {"hidden_size": 128, "num_attention_heads": 4, **sizes}
    return LlamaForCausalLM(LlamaConfig(**shape))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 64, "intermediate_size": 512, "num_hidden_layers": 6}
    llama(num_key_value_heads=2, **sizes).save_pretrained(folder)
    source = open_source(folder)
    return InferenceWork(source, source.model(), 32, 1)


OPEN = {"tp": None, "pp": None, "devices": None}
ONE = {"tp": 1, "pp": 1, "devices": None}


def test_what_no_layout_holds_is_streamed(work, monkeypatch):
    assert deploy(work, **OPEN).budget_bytes is None
    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    found = deploy(work, **OPEN)
    assert found.why.startswith("no layout of these devices holds it: ")
    assert found.budget_bytes == int(0.92 * 5 * MIB)
    assert found.tp == found.pp == 1 and found.host_bytes == 0
    assert 0 < found.other_bytes < found.budget_bytes
    words = "the model does not fit: at tp = 1, pp = 1 a device would hold"
    for chosen in ({"tp": 1}, {"pp": 1}, {"devices": 1}):
        with pytest.raises(DoesNotFit, match=words):
            deploy(work, **OPEN | chosen)


def test_a_cache_that_is_guessed_is_told(work, monkeypatch):
    """The note is in the line that `plait generate` and `plait plan infer` print."""
    by_heads = replace(cache_layout_of(work.model), guessed="ValueError: no")
    for guess, words in (
        (by_heads, "is computed from the heads in the configuration, and may take more"),
        (
            CacheLayout(guessed="ValueError: no"),
            "is not counted, because the configuration defines no heads",
        ),
    ):
        monkeypatch.setattr(deployment, "cache_layout_of", lambda *_, guess=guess: guess)
        note = (
            f"; the KV cache {words}: the model could not be run without weights (ValueError: no)"
        )
        for found in (deploy(work, **OPEN), deploy_streamed(work, cpu_budget=1 << 30)):
            assert found.why.endswith(note)


def test_budgets(work, monkeypatch):
    with pytest.raises(InputError, match="--gpu-budget: this machine has no visible GPU"):
        deploy_streamed(work, gpu_budget=4 * MIB)
    resident = "5.7 MiB of weights stay in memory, all of them fit; "
    assert deploy_streamed(work, cpu_budget=1 << 30).why.startswith(resident)
    monkeypatch.setattr(deployment, "device_count", lambda: 1)
    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    found = deploy_streamed(work, gpu_budget=4 * MIB, cpu_budget=3 * MIB)
    assert (found.budget_bytes, found.host_bytes) == (4 * MIB, 3 * MIB)
    assert "on the GPU, 5 layers" in found.why and "of them from files" in found.why
    assert deploy_streamed(work, cpu_budget=9 * MIB).budget_bytes == int(0.92 * 5 * MIB)
    monkeypatch.setattr(deployment, "free_host_bytes", lambda: 100 * MIB)
    found = deploy_streamed(work, gpu_budget=4 * MIB)
    assert found.host_bytes == 80 * MIB
    assert "are copied to it for every token, 0 B of them from files" in found.why


def test_the_least_budget_suffices(work):
    """The number in the message is enough for one request. Fewer simultaneous requests are tried before the refusal."""
    several = replace(work, requests=3)
    with pytest.raises(InputError) as raised:
        deploy_in_budget(several, cpu_budget=MIB)
    pattern = r"a budget of 1.0 MiB is too small: .*; pass at least (\S+ MiB)"
    least = parse_bytes(re.search(pattern, str(raised.value))[1], "--cpu-budget")
    with pytest.raises(InputError, match="too small"):
        deploy_in_budget(several, cpu_budget=least - MIB // 5)
    assert deploy_in_budget(several, cpu_budget=least)[1] == 1
    with pytest.raises(InputError, match="too small"):
        deploy_streamed(several, cpu_budget=least)
    assert deploy_in_budget(several, cpu_budget=1 << 30)[1] == 3


def test_keys_and_values_on_the_host(work):
    machine = Devices(on_gpu=True, count=2, memory_bytes=7 * MIB, host_bytes=1 << 30)
    # 6 layers x 2 x 2 heads x 32 x 4 bytes for each of 2,048 tokens are 6 MiB.
    many = replace(work, requests=64)
    kept = replace(many, offload_cache=True)
    with pytest.raises(InputError, match="does not fit"):
        deploy(many, **ONE, machine=machine)
    found = deploy(kept, **ONE, machine=replace(machine, memory_bytes=10 * MIB)).estimate
    assert (found.cache, found.cache_copied, found.cache_on_host) == (3 * MIB, 6 * MIB, 7 * MIB)
    streamed = deploy_streamed(kept, gpu_budget=24 * MIB, cpu_budget=20 * MIB, machine=machine)
    assert streamed.estimate.cache == 3 * MIB and streamed.host_bytes == 13 * MIB
    words = "for the KV cache and activations; 7.0 MiB of KV cache in host memory"
    assert streamed.why.endswith(words)
    small = {"gpu_budget": 24 * MIB, "cpu_budget": 6 * MIB, "machine": machine}
    for wrong, words in (
        (small, "the KV cache takes 7.0 MiB of pinned host memory, but 6.0 MiB may be"),
        ({"cpu_budget": 1 << 30}, "--offload-cache: on the CPU the KV cache is in host memory"),
    ):
        with pytest.raises(InputError, match=words):
            deploy_streamed(kept, **wrong)
    with pytest.raises(InputError, match="needs 2 pipeline stages, which cannot prefetch"):
        deploy(kept, **ONE | {"pp": 2}, machine=replace(machine, memory_bytes=20 * MIB))


def test_how_much_is_kept_on_the_host(work):
    stored = {
        name: StoredTensor(Path(), 0, p.numel() * 4, torch.float32, tuple(p.shape))
        for name, p in work.model.named_parameters()
    }
    planned = partial(plan_streaming, work.model, stored, budget_bytes=2 * MIB, other_bytes=0)
    every = planned(host_bytes=1 << 30)
    assert every.on_host == every.streamed and every.read_bytes == 0 and len(every.streamed) == 6
    one = pinned_bytes(every.slot_bytes // 2)
    assert one == MIB
    assert planned(host_bytes=6 * one).on_host == every.streamed
    # Two places are for reading the other layers.
    some = planned(host_bytes=6 * one - 1)
    assert len(some.on_host) == 3 and set(some.on_host) < set(every.streamed)
    assert some.read_bytes == every.streamed_bytes // 2
    assert planned(host_bytes=2 * one).on_host == ()
    words = "1.0 MiB of host memory are too little: 2 layers that are read from files take 2.0 MiB"
    with pytest.raises(InputError, match=words):
        planned(host_bytes=one)


def test_memory_in_stretches():
    numbers = torch.arange(12, dtype=torch.uint8)
    memory = HostMemory([numbers[:4], numbers[4:]])
    assert memory.size == 12
    for start, size, expected in (
        (2, 5, [(2, [2, 3]), (4, [4, 5, 6])]),
        (5, 2, [(5, [5, 6])]),
        (4, 0, []),
    ):
        pieces = [(at, piece.tolist()) for at, piece in memory.overlaps(start, size)]
        assert pieces == expected


@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_on_huge_pages(tmp_path, tied):
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 4096}
    saved = llama(tie_word_embeddings=tied, **sizes)
    saved.save_pretrained(tmp_path)
    sharded = load_model(open_source(tmp_path))
    try:
        large = [p for p in sharded.model.parameters() if p.nbytes >= HUGE_PAGE]
        assert len(large) == 2 - tied and all(p.data_ptr() % HUGE_PAGE == 0 for p in large)
        for name, wanted in saved.state_dict().items():
            assert torch.equal(sharded.model.state_dict()[name], wanted), name
    finally:
        sharded.close()

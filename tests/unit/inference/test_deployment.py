"""Where a model is put: a layout that holds it, or streamed within budgets."""

import re
from dataclasses import replace
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


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    source = open_source(folder)
    return InferenceWork(source, source.model(), 32, 1)


def test_what_no_layout_holds_is_streamed(work, monkeypatch):
    assert deploy(work, tp=None, pp=None, devices=None).budget_bytes is None
    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    found = deploy(work, tp=None, pp=None, devices=None)
    assert found.why.startswith(
        "no layout of these devices holds it: "
    ) and found.budget_bytes == int(0.92 * 5 * MIB)
    assert (
        found.tp == found.pp == 1
        and 0 < found.other_bytes < found.budget_bytes
        and found.host_bytes == 0
    )
    for chosen in ({"tp": 1}, {"pp": 1}, {"devices": 1}):
        with pytest.raises(
            DoesNotFit, match="the model does not fit: at tp = 1, pp = 1 a device would hold"
        ):
            deploy(work, **{"tp": None, "pp": None, "devices": None, **chosen})


def test_a_cache_that_is_guessed_is_told(work, monkeypatch):
    """In the line that `plait generate` and `plait plan infer` print."""
    kept = cache_layout_of(work.model)
    for guess, words in (
        (
            replace(kept, guessed="ValueError: no"),
            "is computed from the heads in the configuration, and may take more",
        ),
        (
            CacheLayout(guessed="ValueError: no"),
            "is not counted, because the configuration defines no heads",
        ),
    ):
        monkeypatch.setattr(deployment, "cache_layout_of", lambda *_, guess=guess: guess)
        for found in (
            deploy(work, tp=None, pp=None, devices=None),
            deploy_streamed(work, cpu_budget=1 << 30),
        ):
            told = f"; the KV cache {words}: the model could not be run without weights (ValueError: no)"
            assert found.why.endswith(told)


def test_budgets(work, monkeypatch):
    with pytest.raises(InputError, match="--gpu-budget: this machine has no visible GPU"):
        deploy_streamed(work, gpu_budget=4 * MIB)
    assert deploy_streamed(work, cpu_budget=1 << 30).why.startswith(
        "5.7 MiB of weights stay in memory, all of them fit; "
    )
    monkeypatch.setattr(deployment, "device_count", lambda: 1)
    monkeypatch.setattr(deployment, "free_bytes", lambda *_: 5 * MIB)
    found = deploy_streamed(work, gpu_budget=4 * MIB, cpu_budget=3 * MIB)
    assert (found.budget_bytes, found.host_bytes) == (4 * MIB, 3 * MIB)
    assert "on the GPU, 5 layers" in found.why and "of them from files" in found.why
    assert deploy_streamed(work, cpu_budget=9 * MIB).budget_bytes == int(0.92 * 5 * MIB)
    monkeypatch.setattr(deployment, "free_host_bytes", lambda: 100 * MIB)
    assert deploy_streamed(work, gpu_budget=4 * MIB).host_bytes == 80 * MIB
    assert (
        "are copied to it for every token, 0 B of them from files"
        in deploy_streamed(work, gpu_budget=4 * MIB).why
    )


def test_the_least_budget_suffices(work):
    """The number of the message is enough for one request, and fewer requests at once are tried before it is told."""
    several = replace(work, requests=3)
    with pytest.raises(InputError) as raised:
        deploy_in_budget(several, cpu_budget=MIB)
    told = re.search(
        r"a budget of 1.0 MiB is too small: .*; pass at least (\S+ MiB)", str(raised.value)
    )
    assert told is not None
    least = parse_bytes(told[1], "--cpu-budget")
    with pytest.raises(InputError, match="too small"):
        deploy_in_budget(several, cpu_budget=least - MIB // 5)
    assert deploy_in_budget(several, cpu_budget=least)[1] == 1
    with pytest.raises(InputError, match="too small"):
        deploy_streamed(several, cpu_budget=least)
    assert deploy_in_budget(several, cpu_budget=1 << 30)[1] == 3


def test_keys_and_values_on_the_host(work):
    from dataclasses import replace

    machine = Devices(on_gpu=True, count=2, memory_bytes=7 * MIB, host_bytes=1 << 30)
    many = replace(
        work, requests=64
    )  # 6 layers x 2 x 2 heads x 32 x 4 bytes for each of 2,048 tokens: 6 MiB
    kept = replace(many, offload_cache=True)
    with pytest.raises(InputError, match="does not fit"):
        deploy(many, tp=1, pp=1, devices=None, machine=machine)
    found = deploy(
        kept, tp=1, pp=1, devices=None, machine=replace(machine, memory_bytes=10 * MIB)
    ).estimate
    assert (found.cache, found.cache_copied, found.cache_on_host) == (3 * MIB, 6 * MIB, 7 * MIB)
    streamed = deploy_streamed(kept, gpu_budget=24 * MIB, cpu_budget=20 * MIB, machine=machine)
    assert streamed.estimate.cache == 3 * MIB and streamed.host_bytes == 13 * MIB
    assert streamed.why.endswith(
        "for the KV cache and activations; 7.0 MiB of KV cache in host memory"
    )
    for wrong, words in (
        (
            {"gpu_budget": 24 * MIB, "cpu_budget": 6 * MIB, "machine": machine},
            "the KV cache takes 7.0 MiB of pinned host memory, but 6.0 MiB may be",
        ),
        (
            {"cpu_budget": 1 << 30},
            "--offload-cache: on the CPU the KV cache is in host memory already",
        ),
    ):
        with pytest.raises(InputError, match=words):
            deploy_streamed(kept, **wrong)
    with pytest.raises(InputError, match="needs 2 pipeline stages, which cannot prefetch"):
        deploy(kept, tp=1, pp=2, devices=None, machine=replace(machine, memory_bytes=20 * MIB))


def test_how_much_is_kept_on_the_host(work):
    stored = {
        name: StoredTensor(Path(), 0, p.numel() * 4, torch.float32, tuple(p.shape))
        for name, p in work.model.named_parameters()
    }
    numbers = {"budget_bytes": 2 * MIB, "other_bytes": 0}
    every = plan_streaming(work.model, stored, **numbers, host_bytes=1 << 30)
    assert every.on_host == every.streamed and every.read_bytes == 0 and len(every.streamed) == 6
    one = pinned_bytes(every.slot_bytes // 2)
    assert one == MIB
    assert (
        plan_streaming(work.model, stored, **numbers, host_bytes=6 * one).on_host == every.streamed
    )
    some = plan_streaming(
        work.model, stored, **numbers, host_bytes=6 * one - 1
    )  # two are for reading the others
    assert (
        len(some.on_host) == 3
        and set(some.on_host) < set(every.streamed)
        and some.read_bytes == every.streamed_bytes // 2
    )
    assert plan_streaming(work.model, stored, **numbers, host_bytes=2 * one).on_host == ()
    with pytest.raises(
        InputError,
        match="1.0 MiB of host memory are too little: 2 layers that are read from files take 2.0 MiB",
    ):
        plan_streaming(work.model, stored, **numbers, host_bytes=one)


def test_memory_in_stretches():
    memory = HostMemory(
        [torch.arange(4, dtype=torch.uint8), torch.arange(4, 12, dtype=torch.uint8)]
    )
    assert memory.size == 12
    assert [(start, piece.tolist()) for start, piece in memory.overlaps(2, 5)] == [
        (2, [2, 3]),
        (4, [4, 5, 6]),
    ]
    assert [(start, piece.tolist()) for start, piece in memory.overlaps(5, 2)] == [(5, [5, 6])]
    assert list(memory.overlaps(4, 0)) == []


@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_on_huge_pages(tmp_path, tied):
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

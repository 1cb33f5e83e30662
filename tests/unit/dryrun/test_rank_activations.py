"""Saved bytes of a dry run equal those of torch's hooks, and of a block counted by hand."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import plait
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.dryrun.dry_model import rank_activations, token_batch
from plait.errors import ModelError
from plait.losses.loss import causal_lm_loss, per_sample
from plait.model.blocks import find_blocks
from plait.parallel.parts import Parts
from plait.parallel.techniques.recompute import Recompute
from tests.measured.memory import measure_activations
from tests.parity import cases
from tests.parity.experts import Case, build

SINGLE = Mesh(Layout(), torch.device("cpu"), 0, None, None)


def stage(model, *, blocks, **settings):
    """Return the facts of a model's only stage."""
    return rank_activations(Parts(model, blocks), mesh=SINGLE, **settings)[0].stages[0]


def saved_bytes_of_hooks(model, batch):
    """Return the bytes that autograd saves for backward, without parameters and batch."""
    tensors = (*model.parameters(), *model.buffers(), *batch.values())
    excluded = {tensor.untyped_storage()._cdata for tensor in tensors}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total, _ = causal_lm_loss(model(input_ids=batch["input_ids"]), batch)
    assert total.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def zeros(samples, length):
    batch = token_batch(samples, length)
    return {name: torch.zeros_like(ids, device="cpu") for name, ids in batch.items()}


@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma2", "gpt_neox"])
def test_equals_torchs_saved_tensor_hooks(kind, recompute, cache):
    """Under full recompute the hooks save the inputs of the blocks."""
    model = cases.build(kind, tied=False, dtype=torch.float32, device="cpu")
    model.config.use_cache = cache
    blocks = find_blocks(model)
    batch = zeros(2, 12)
    mode = stage(model, blocks=blocks, batch=batch).modes[recompute]
    if recompute == "full":
        Recompute(mode="full").apply(Parts(model=model, blocks=blocks), SINGLE)
    total_bytes = sum(mode.saved) + mode.outside + mode.head
    # The loss (4 bytes) and the count of its targets (8) exist, too, but may not be saved.
    assert total_bytes - saved_bytes_of_hooks(model, batch) in (0, 4, 8, 12)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return cases.Output(self.head(hidden))


def test_by_hand():
    """A block saves its input and the rectified product, or its input alone with recompute.

    The head saves its input and the loss the log-probabilities.
    """
    with torch.device("meta"):
        model = Model()
    tokens = 3 * 5
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    modes = stage(model, blocks=blocks, batch=token_batch(3, 5)).modes
    none = modes["none"]
    full = modes["full"]
    assert none.saved == (4 * tokens * (6 + 10),) * 3
    assert full.saved == (4 * tokens * 6,) * 3
    # Selective recompute keeps the first product of two.
    assert modes["selective"].saved == (4 * tokens * (6 + 10),) * 3
    assert none.outside == 0
    # The labels, shifted or not, and a few scalars.
    labels_bytes = 8 * tokens
    other_bytes = none.head - 4 * tokens * (6 + 7)
    assert labels_bytes <= other_bytes < 2 * labels_bytes + 32
    forward = 2 * tokens * (3 * 2 * 6 * 10 + 6 * 7)
    assert none.flops == 3 * forward
    # The second product is not needed again.
    assert full.flops - 3 * forward == 2 * tokens * 3 * 6 * 10
    assert all(p.is_meta for p in model.parameters())


def test_a_model_that_reads_values_is_refused():
    class ReadingModel(Model):
        def forward(self, input_ids):
            return super().forward(input_ids + int(input_ids.max()))

    with pytest.raises(ModelError, match="cannot be run on fake tensors"):
        stage(ReadingModel(), blocks=("blocks.0",), batch=token_batch(1, 2))


def test_other_losses_and_batches():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    loss = per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    modes = stage(model, blocks=("0", "1", "2"), batch=batch, loss_fn=loss).modes
    # The input of the first block is the batch, which does not count.
    assert modes["none"].saved == (0, 32, 32)


def test_a_budget_in_the_engine():
    """The budget needs some recompute. The measured bytes are the predicted ones."""
    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    (rank,) = rank_activations(
        Parts(model, find_blocks(model)), mesh=SINGLE, batch=token_batch(2, 12)
    )
    (facts,) = rank.stages
    budget = rank.peak_bytes(("none", "none")) - 1
    section = {"budget_gib": budget / 2**30, "sequence_length": 12}
    config = {"train_micro_batch_size_per_gpu": 2, "parallel": {"recompute": section}}
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    try:
        modes = engine.parts.recompute_modes
        assert set(modes) != {"none"}
        assert rank.peak_bytes(modes) <= budget
        measured = measure_activations(engine, zeros(2, 12))
        assert measured["activations"] == facts.saved(modes)
        assert measured["activations"] + measured["logits"] + facts.restored(modes) <= budget
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ("grouped_mm", "experts in float32 by torch's grouped_mm.*batched_mm.*recompute.mode"),
        ("eager", "reads values of tensors .DynamicOutputShapeException.*recompute.mode instead"),
    ],
)
def test_a_budget_needs_experts_that_run_on_fake_tensors(experts, message):
    section = {"budget_gib": 1, "sequence_length": 8}
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"recompute": section}}
    model = build(Case("mixtral", kind=experts), dtype=torch.float32)
    with pytest.raises(ModelError, match=message):
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)

    model.set_experts_implementation("batched_mm")
    plait.initialize(model, config, loss_fn=plait.causal_lm_loss).close()


def test_the_published_formulas_of_llama():
    """Selective recompute saves 8h + 2gh + 2f + 4a bytes per token and block in bfloat16.

    It keeps attention and every second product, as torchtitan does. Full recompute saves 2h. Here h
    is the width, g the share of key-value heads, f the width of the MLP, and a the number of heads
    (arXiv:2205.05198, section 5, for a block without biases, dropout or an unfused softmax).
    """
    h = 512
    f = 1792
    a = 8
    key_value_heads = 2
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=h,
        intermediate_size=f,
        num_hidden_layers=2,
        num_attention_heads=a,
        num_key_value_heads=key_value_heads,
    )
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tokens = 256
    settings = {"batch": token_batch(1, tokens), "compute_dtype": torch.bfloat16}
    modes = stage(model, blocks=find_blocks(model), **settings).modes
    selective = 8 * h + 2 * h * key_value_heads // a + 2 * f + 4 * a
    assert modes["selective"].saved == (tokens * selective,) * 2
    assert modes["full"].saved == (tokens * 2 * h,) * 2


class JITFunction:
    """Stand-in for Triton's class, which is not installed with torch for CPUs."""

    __name__ = "norm_kernel"

    def run(self, x, *, grid):
        x.mul_(grid[0])


class TritonModel(nn.Module):
    """Language model that launches a Triton kernel."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(cases.VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, cases.VOCABULARY)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        JITFunction().run(x, grid=(2,))
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(x))


def test_triton_kernels_are_refused(monkeypatch):
    """A kernel would write to address 0, after which the process cannot use the device."""
    module = ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    launch = JITFunction.run
    model = TritonModel()
    message = "TritonModel cannot be run on fake tensors: the Triton kernel norm_kernel"
    with pytest.raises(ModelError, match=message):
        stage(model, blocks=("layers.0", "layers.1"), batch=token_batch(2, 12))
    assert JITFunction.run is launch
    # Real tensors have memory.
    model(torch.zeros(2, 12, dtype=torch.int64))

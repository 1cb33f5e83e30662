"""All stages of a pipeline, run one after the other in this process, compute the uncut model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.dataflow import Skeleton, Untraceable
from plait.model.stages import UnavailableTensor, cut_model, output_fields, with_unavailable_entries
from plait.parallel.pipeline.stage import stage_model
from tests.unit.model.families import TOKENS, family


def stage_of(model, cut, indices):
    """Return the model of a rank that has these stages."""
    cpu = torch.device("cpu")
    return stage_model(copy.deepcopy(model), cut, indices, region=None, device=cpu)


def run_stage(part, stage, value):
    return part.run(part.stages[stage], lambda model: model(input_ids=TOKENS), value)


def loss_of(output):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def summed_gradient(stages, names, parameter):
    """Return the sum of a parameter's gradients on all stages, which may use any of its names."""
    total = torch.zeros_like(parameter)
    for part in stages:
        # A parameter with two names in a stage counts once.
        counted = set()
        for name, candidate in part.model.named_parameters(remove_duplicate=False):
            if name in names and candidate.grad is not None and id(candidate) not in counted:
                counted.add(id(candidate))
                total += candidate.grad
    return total


def check(model, bounds=None):
    """Compare the loss and all gradients of the stages with those of the uncut model."""
    blocks = find_blocks(model)
    cut = cut_model(model, blocks, bounds or range(len(blocks) + 1))
    uncut = copy.deepcopy(model)
    expected_loss = loss_of(uncut(input_ids=TOKENS))
    expected_loss.backward()

    stages = [stage_of(model, cut, [index]) for index in range(cut.stages)]
    value = None
    for index, part in enumerate(stages):
        value = run_stage(part, index, value)
    loss = loss_of(value)
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-8, atol=1e-8)
    for name, parameter in uncut.named_parameters():
        names = {name} | {other for other, first in cut.first_names.items() if first == name}
        actual = summed_gradient(stages, names, parameter)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    return cut


DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 32, "decoder_ffn_dim": 52}
POSITIONS = {
    "blenderbot": DECODER,
    "marian": DECODER,
    "pegasus": DECODER,
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 53},
    "roformer": {"is_decoder": True, "embedding_size": 32},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "prophetnet": {
        "num_hidden_layers": None,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 53,
    },
}
MAMBA = {"num_hidden_layers": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
MIXED_LAYERS = {
    "jamba": {**MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "zamba": {
        **MAMBA,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "olmo_hybrid": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("kind", ["bart", "mbart", "mvp", "plbart"])
def test_a_norm_that_is_registered_after_the_blocks(kind):
    """`layernorm_embedding` runs before them, so its weight must be on the first stage."""
    cut = check(family(kind, **DECODER))
    assert cut.owners["model.decoder.layernorm_embedding.weight"] == {0}


@pytest.mark.parametrize("kind", POSITIONS)
def test_tables_of_positions(kind):
    """The tables take a shape instead of token ids.

    Every block reads roformer's, and ctrl writes to its embeddings.
    """
    check(family(kind, **POSITIONS[kind]))


@pytest.mark.parametrize("kind", MIXED_LAYERS)
def test_layers_of_several_classes(kind):
    """Attention and state space layers are blocks of one list.

    Those of Zamba read the embedding again and share one transformer.
    """
    model = family(kind, **MIXED_LAYERS[kind])
    if hasattr(model, "set_experts_implementation"):
        # torch's grouped product does not support float64.
        model.set_experts_implementation("eager")
    assert len(find_blocks(model)) == 4
    check(model, (0, 2, 4))


class Output:
    def __init__(self, logits):
        self.logits = logits


class Chain(nn.Module):
    """A model with parameters between its blocks."""

    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(101, 8)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.between = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 101)

    def forward(self, input_ids):
        hidden = self.drop(self.embed(input_ids))
        for block, offset in zip(self.blocks, self.between, strict=True):
            hidden = block(hidden + offset)
        return Output(self.end(hidden, input_ids))

    def end(self, hidden, input_ids):
        return self.head(self.norm(hidden))


class EmbeddingReadTwice(Chain):
    """The embedding is called again after the blocks."""

    def end(self, hidden, input_ids):
        return self.head(self.norm(hidden) + self.drop(self.embed.forward(input_ids)) ** 2)


class EmbeddingWeightRead(Chain):
    """The weight of the embedding is read after the blocks."""

    def end(self, hidden, input_ids):
        return F.linear(self.norm(hidden), self.embed.weight)


class SkipConnection(Chain):
    """The output of the embedding is read after the blocks."""

    def forward(self, input_ids):
        first = hidden = self.drop(self.embed(input_ids))
        for block in self.blocks:
            hidden = block(hidden)
        return Output(self.head(hidden * first))


class DataDependent(Chain):
    """A decision of the model depends on hidden states."""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index == 1 and hidden.mean() > 0:
                hidden = hidden * 2
            hidden = block(hidden)
        return Output(self.end(hidden, input_ids))


class Layer(nn.Module):
    """A block with a setting, a property and a buffer."""

    kind = "full"

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_buffer("table", torch.ones(8))
        self.mode = self.inner.mode = "slow"

    @property
    def width(self):
        return self.inner.out_features

    def set_mode(self, mode):
        self.mode = self.inner.mode = mode

    def forward(self, hidden):
        return self.inner(hidden) * (1 if self.inner.mode == "fast" else 2)


class AttributeReading(Chain):
    """Reads attributes, properties, inner modules and shapes of its blocks, and calls a method."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Layer(), Layer(), Layer(), Layer()])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            if block.mode != "fast":
                block.set_mode("fast")
        for block in self.blocks:
            assert isinstance(block, Layer) and block.training == self.training
            assert block.kind == "full" and block.mode == "fast" and block.inner.bias.shape == (8,)
            hidden = block(hidden) * block.width
        return Output(self.end(hidden, input_ids))


def test_attributes_of_blocks_on_other_ranks():
    """big_bird calls a method of each block, inkling2_text reads a class attribute.

    Tensors of another rank's block are refused by name.
    """
    for bounds in ((0, 2, 4), (0, 1, 2, 4)):
        check(AttributeReading().double(), bounds)

    model = AttributeReading().double()
    part = stage_of(model, cut_model(model, find_blocks(model), (0, 1, 2, 3, 4)), [0, 3])
    received = torch.ones(2, 7, 8, dtype=torch.float64)
    run_stage(part, 0, None)
    run_stage(part, 3, received)
    assert [block.mode for block in part.model.blocks] == ["fast"] * 4

    state = part.model.state_dict()
    names = (*state, *dict(part.model.named_modules()))
    assert not [name for name in names if name.startswith(("blocks.1.", "blocks.2."))]
    assert {"blocks.0.inner.weight", "blocks.3.inner.table"} <= set(state)
    absent = part.model.eval().blocks[1]
    assert absent.training is False
    message = r"reads blocks\.1\.inner\.weight outside that block, which belongs to stage 1 on an"
    with pytest.raises(ModelError, match=message):
        absent.inner(received)
    with pytest.raises(ModelError, match=r"blocks\.1\.inner\.table"):
        absent.inner.table + 1
    assert copy.deepcopy(part.model).blocks[1].inner.out_features == 8


@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 2, 4), (0, 1, 2, 3, 4)])
def test_parameters_between_blocks_and_read_twice(bounds):
    """Each parameter is on the stages that use it."""
    torch.manual_seed(1)
    last = len(bounds) - 2
    cut = check(Chain().double(), bounds)
    assert cut.owners["between.0"] == {0} and cut.owners["between.3"] == {last}
    assert cut.owners["norm.weight"] == {last}
    assert check(EmbeddingReadTwice().double(), bounds).owners["embed.weight"] == {0, last}
    cut = check(EmbeddingWeightRead().double(), bounds)
    assert cut.owners["embed.weight"] == {0, last} and not cut.recomputed
    assert check(SkipConnection().double(), bounds).recomputed == {"embed.weight": {last}}


def test_models_that_cannot_be_cut_are_refused():
    """The message names the stage, the block and the rule."""
    model = DataDependent()
    decision = r"a decision of DataDependent uses a value computed inside blocks\.1"
    with pytest.raises(ModelError, match=rf"on stage 1, which begins with blocks\.2, {decision}"):
        cut_model(model, find_blocks(model), (0, 2, 4))

    model = SkipConnection(dropout=0.1)
    message = "on stage 1, the output `logits` of SkipConnection depends on random numbers"
    with pytest.raises(ModelError, match=message):
        cut_model(model, find_blocks(model), (0, 2, 4))
    cut_model(model.eval(), find_blocks(model), (0, 2, 4))


def test_a_parameter_of_another_stage_cannot_be_used():
    """It is never None, because torch's layers take None for a layer without the parameter."""
    model = Chain()
    first = stage_of(model, cut_model(model, find_blocks(model), (0, 2, 4)), [0]).model
    norm = first.norm
    assert isinstance(norm, nn.LayerNorm) and norm.weight.shape == (8,) and norm.weight is not None
    for use in (
        lambda: norm(torch.ones(2, 8)),
        lambda: norm.weight + 1,
        lambda: bool(norm.weight),
        lambda: torch.ones(8) * norm.weight,
    ):
        with pytest.raises(
            ModelError, match=r"uses norm\.weight on stage 0, .* belongs to stage 1"
        ):
            use()
    assert "norm.weight" not in dict(first.named_parameters())


@pytest.mark.parametrize(
    ("output", "entry"),
    [
        ({"a": torch.ones(2), "b": (torch.ones(1),)}, lambda output: output["a"]),
        (Output(torch.ones(3)), lambda output: output.logits),
        ((torch.ones(1), None), lambda output: output[0]),
        (torch.ones(2), lambda output: output),
    ],
)
def test_an_unavailable_entry_of_an_output_cannot_be_used(output, entry):
    first = next(iter(output_fields(output)))
    unavailable = entry(with_unavailable_entries(output, {first: "it is elsewhere"}))
    assert isinstance(unavailable, UnavailableTensor)
    with pytest.raises(ModelError, match="it is elsewhere"):
        torch.sum(unavailable)
    assert with_unavailable_entries(output, {}) is output


class Kernel(nn.Module):
    """A module that needs values, like kernels of other libraries."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden):
        if hidden.device.type == "meta":
            raise RuntimeError("no kernel")
        return hidden * self.weight


def test_kernels_that_need_values_are_opaque():
    """They may be inside blocks and after them, but a model cannot consist of one."""
    model = Chain()
    model.norm = Kernel()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Kernel()) for _ in range(4))
    cut = check(model.double(), (0, 2, 4))
    assert cut.owners["norm.weight"] == {1}
    with pytest.raises(Untraceable, match="no kernel"):
        Skeleton.of(Kernel(), ()).trace(lambda model, _: model(model.weight), training=True)

"""Cutting a model into pipeline stages: all stages run in this process, one after the other, against the uncut model."""

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


def staged(model, cut):
    """A copy of the model for each stage."""
    return [
        stage_model(copy.deepcopy(model), cut, [index], region=None, device=torch.device("cpu"))
        for index in range(cut.stages)
    ]


def loss_of(output):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def check(model, bounds=None):
    """The loss and every gradient of the stages, summed over those that share a parameter, are the uncut model's."""
    blocks = find_blocks(model)
    cut = cut_model(model, blocks, bounds or range(len(blocks) + 1))
    uncut = copy.deepcopy(model)
    expected_loss = loss_of(uncut(input_ids=TOKENS))
    expected_loss.backward()
    stages, value = staged(model, cut), None
    for index, one in enumerate(stages):
        value = one.run(one.stages[index], lambda model: model(input_ids=TOKENS), value)
    loss = loss_of(value)
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-8, atol=1e-8)
    gradients, expected = {}, {}
    for name, parameter in uncut.named_parameters():
        gradients[name] = torch.zeros_like(parameter)
        names = {name} | {other for other, first in cut.first_names.items() if first == name}
        for one in stages:
            named = one.model.named_parameters(remove_duplicate=False)
            shared = {id(p): p.grad for other, p in named if other in names}
            gradients[name] += sum(grad for grad in shared.values() if grad is not None)
        has_gradient = parameter.grad is not None
        expected[name] = parameter.grad if has_gradient else torch.zeros_like(parameter)
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-7)
    return cut


@pytest.mark.parametrize("kind", ["bart", "mbart", "mvp", "plbart"])
def test_a_norm_that_is_registered_after_the_blocks(kind):
    """A3: `layernorm_embedding` runs before the blocks. If it is on the last stage, the first trains without its weight."""
    small = {"decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 32}
    cut = check(family(kind, decoder_ffn_dim=53, **small))
    assert cut.owners["model.decoder.layernorm_embedding.weight"] == {0}


DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 32, "decoder_ffn_dim": 52}
POSITIONS = {
    "blenderbot": DECODER, "marian": DECODER, "pegasus": DECODER,
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 53},
    "roformer": {"is_decoder": True, "embedding_size": 32},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 53},
}  # fmt: skip
MAMBA = {"num_hidden_layers": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
SEVERAL_CLASSES = {
    "jamba": {**MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "zamba": {**MAMBA, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "olmo_hybrid": {"num_hidden_layers": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", POSITIONS)
def test_tables_of_positions(kind):
    """B7: the tables take a shape and not token ids. Every block reads roformer's; ctrl writes to its embeddings."""
    check(family(kind, **POSITIONS[kind]))


@pytest.mark.parametrize("kind", SEVERAL_CLASSES)
def test_layers_of_several_classes(kind):
    """B9: lists of attention layers and state space layers are blocks. Zamba's read the embedding again and share one transformer."""
    model = family(kind, **SEVERAL_CLASSES[kind])
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    assert len(find_blocks(model)) == 4
    check(model, (0, 2, 4))


class Net(nn.Module):
    """A chain whose variants break rules. Not Transformers'."""

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
        for block, add in zip(self.blocks, self.between, strict=True):
            hidden = block(hidden + add)
        return Result(self.end(hidden, input_ids))

    def end(self, hidden, input_ids):
        return self.head(self.norm(hidden))


class Result:
    def __init__(self, logits):
        self.logits = logits


class Reads(Net):
    """The embedding is read again after the blocks, as a module or by its weight alone."""

    by_weight = False

    def end(self, hidden, input_ids):
        if self.by_weight:
            return F.linear(self.norm(hidden), self.embed.weight)
        return self.head(self.norm(hidden) + self.drop(self.embed.forward(input_ids)) ** 2)


class Skips(Net):
    """As `Reads`, of what was computed before the blocks."""

    def forward(self, input_ids):
        first = hidden = self.drop(self.embed(input_ids))
        for block in self.blocks:
            hidden = block(hidden)
        return Result(self.head(hidden * first))


class Looks(Net):
    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index == 1 and hidden.mean() > 0:
                hidden = hidden * 2
            hidden = block(hidden)
        return Result(self.end(hidden, input_ids))


class Layer(nn.Module):
    """A block of which more is read than its output."""

    kind = "full"

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_buffer("table", torch.ones(8))
        self.way = self.inner.way = "slow"

    @property
    def width(self):
        return self.inner.out_features

    def set_way(self, way):
        self.way = way
        self.inner.way = way

    def forward(self, hidden):
        return self.inner(hidden) * (1 if self.inner.way == "fast" else 2)


class Asks(Net):
    """Reads attributes, properties, inner modules and shapes of its blocks, and changes a setting by a method."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            if block.way != "fast":
                block.set_way("fast")
        for block in self.blocks:
            assert isinstance(block, Layer) and block.training == self.training
            hidden = (
                block(hidden) * block.width
                if block.kind == "full" and block.way == "fast" and block.inner.bias.shape == (8,)
                else 0
            )
        return Result(self.end(hidden, input_ids))


def test_a_model_reads_more_of_its_blocks_than_their_output():
    """big_bird calls a method of each block, inkling2_text reads a class's attribute. Tensors of another rank's block are refused by name."""
    for bounds in ((0, 2, 4), (0, 1, 2, 4)):
        check(Asks().double(), bounds)
    model = Asks().double()
    cut = cut_model(model, find_blocks(model), (0, 1, 2, 3, 4))
    one = stage_model(copy.deepcopy(model), cut, [0, 3], region=None, device=torch.device("cpu"))
    arrived = torch.ones(2, 7, 8, dtype=torch.float64)
    for stage, value in ((0, None), (3, arrived)):
        one.run(one.stages[stage], lambda model: model(input_ids=TOKENS), value)
    assert [block.way for block in one.model.blocks] == ["fast"] * 4
    state = one.model.state_dict()
    names = (*state, *dict(one.model.named_modules()))
    assert not [name for name in names if name.startswith(("blocks.1.", "blocks.2."))]
    assert {"blocks.0.inner.weight", "blocks.3.inner.table"} <= set(state)
    absent = one.model.eval().blocks[1]
    assert absent.training is False
    words = r"reads blocks\.1\.inner\.weight outside that block, which belongs to stage 1 on another rank"
    with pytest.raises(ModelError, match=words):
        absent.inner(arrived)
    with pytest.raises(ModelError, match=r"blocks\.1\.inner\.table"):
        absent.inner.table + 1
    assert copy.deepcopy(one.model).blocks[1].inner.out_features == 8


@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 2, 4), (0, 1, 2, 3, 4)])
def test_parameters_between_blocks_and_read_twice(bounds):
    """Each parameter is on the stages that use it. Others raise an error."""
    torch.manual_seed(1)
    last = len(bounds) - 2
    cut = check(Net().double(), bounds)
    assert [cut.owners[f"between.{index}"] for index in (0, 3)] == [{0}, {last}]
    assert cut.owners["norm.weight"] == {last}
    assert check(Reads().double(), bounds).owners["embed.weight"] == {0, last}
    by_weight = Reads().double()
    by_weight.by_weight = True
    cut = check(by_weight, bounds)
    assert cut.owners["embed.weight"] == {0, last} and not cut.recomputed
    cut = check(Skips().double(), bounds)
    assert cut.recomputed == {"embed.weight": {last}}


def test_what_is_refused():
    """The message names the stage, the block and the rule."""
    model = Looks()
    words = r"on stage 1, which begins with blocks\.2, a decision of Looks uses a value computed inside blocks\.1"
    with pytest.raises(ModelError, match=words):
        cut_model(model, find_blocks(model), (0, 2, 4))
    model = Skips(dropout=0.1)
    words = "on stage 1, the output `logits` of Skips depends on random numbers"
    with pytest.raises(ModelError, match=words):
        cut_model(model, find_blocks(model), (0, 2, 4))
    cut_model(model.eval(), find_blocks(model), (0, 2, 4))


def test_a_parameter_of_another_stage_cannot_be_used():
    """A3: the parameter is never None, which torch's layers and a model's code take for a layer without it."""
    model = Net()
    first = staged(model, cut_model(model, find_blocks(model), (0, 2, 4)))[0].model
    norm = first.norm
    assert isinstance(norm, nn.LayerNorm) and norm.weight.shape == (8,) and norm.weight is not None
    words = r"uses norm\.weight on stage 0, and it belongs to stage 1"
    for use in (
        lambda: norm(torch.ones(2, 8)),
        lambda: norm.weight + 1,
        lambda: bool(norm.weight),
        lambda: torch.ones(8) * norm.weight,
    ):
        with pytest.raises(ModelError, match=words):
            use()
    assert "norm.weight" not in dict(first.named_parameters())


@pytest.mark.parametrize(
    ("output", "entry"),
    [
        ({"a": torch.ones(2), "b": (torch.ones(1),)}, lambda output: output["a"]),
        (Result(torch.ones(3)), lambda output: output.logits),
        ((torch.ones(1), None), lambda output: output[0]),
        (torch.ones(2), lambda output: output),
    ],
)
def test_entries_of_an_output(output, entry):
    """Outputs have the classes that models return. A missing entry raises an error when it is used."""
    first = next(iter(output_fields(output)))
    missing = entry(with_unavailable_entries(output, {first: "it is elsewhere"}))
    assert isinstance(missing, UnavailableTensor)
    with pytest.raises(ModelError, match="it is elsewhere"):
        torch.sum(missing)
    assert with_unavailable_entries(output, {}) is output


class Kernel(nn.Module):
    """Runs where there are values only, as another library's kernels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden):
        if hidden.device.type == "meta":
            raise RuntimeError("no kernel")
        return hidden * self.weight


def test_kernels_that_run_with_values_only():
    """Such kernels count as opaque, inside blocks and after them. A whole model that is one cannot be traced."""
    model = Net()
    model.norm = Kernel()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Kernel()) for _ in range(4))
    cut = check(model.double(), (0, 2, 4))
    assert cut.owners["norm.weight"] == {1}
    with pytest.raises(Untraceable, match="no kernel"):
        Skeleton.of(Kernel(), ()).trace(lambda model, _: model(model.weight), training=True)

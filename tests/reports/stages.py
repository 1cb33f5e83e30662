"""Models of reports about pipelines and tensor parallelism, trained by full steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, reference_trace
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING

WIDTH = 12
LAYERS = 8
STEPS = 2


class Chunks(cases.Block):
    """A block that splits one tensor into two of equal shapes and uses them differently."""

    def __init__(self, width):
        super().__init__(width)
        self.pair = nn.Linear(width, 2 * width)

    def forward(self, hidden, use_side):
        gate, value = self.pair(hidden).chunk(2, -1)
        return hidden + self.side(torch.sigmoid(gate) * value)


class TwoOutputs(torch.autograd.Function):
    """A function with two outputs, whose gradients differ."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden * weight, hidden - weight

    @staticmethod
    def backward(ctx, first, second):
        hidden, weight = ctx.saved_tensors
        slope = (first * hidden - second).flatten(0, -2).sum(0)
        return first * weight + second, slope


class CustomFunction(cases.Block):
    """A block with a function of two outputs that reads a parameter."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, hidden, use_side):
        product, difference = TwoOutputs.apply(self.norm(hidden), self.scale)
        return hidden + self.side(torch.tanh(product) + difference.square())


class HookedInput(cases.Block):
    """A block with a hook on the gradient of its input and of its output."""

    def forward(self, hidden, use_side):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        output: torch.Tensor = super().forward(hidden, use_side)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1.5)
        return output


class IgnoresInput(cases.Block):
    """A block that some batches ask to return a function of its parameters alone."""

    def forward(self, hidden, use_side):
        if use_side:
            return self.norm.weight.expand_as(hidden) + self.up.bias[: hidden.shape[-1]]
        return super().forward(hidden, False)


class Parametrized(cases.Block):
    """A block whose weights follow from other parameters."""

    def __init__(self, width):
        super().__init__(width)
        self.up = parametrizations.weight_norm(self.up)
        self.side = parametrizations.orthogonal(self.side)

    def forward(self, hidden, use_side):
        return super().forward(hidden, True)


class Recurrent(cases.Block):
    """A block around an LSTM."""

    def __init__(self, width):
        super().__init__(width)
        self.cell = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden, use_side):
        return super().forward(hidden + self.cell(hidden)[0], use_side)


class InPlace(cases.Block):
    """A block that adds to its input in place."""

    def forward(self, hidden, use_side):
        hidden = hidden.view(hidden.shape)
        hidden += self.side.bias
        return super().forward(hidden, use_side)


class Gated(cases.Block):
    """A block with a gate of one element and one without dimensions."""

    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Parameter(torch.full((1,), 0.5))
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, hidden, use_side):
        inner = super().forward(hidden, use_side)
        return hidden + inner * self.gate * self.temperature.exp()


class Routed(cases.Block):
    """A block of top-1 experts, of which a micro-batch leaves some without tokens."""

    def __init__(self, width):
        super().__init__(width)
        self.router = nn.Linear(width, 8)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, hidden, use_side):
        flat = hidden.flatten(0, 1)
        gates = (self.router(flat) * 3).softmax(-1)
        choice = gates.argmax(-1)
        output = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if len(rows):
                values = expert(flat[rows]) * gates[rows, index].unsqueeze(-1)
                output = output.index_add(0, rows, values)
        return hidden + output.view_as(hidden)


class Attention(cases.Block):
    """A block with torch's attention module, which returns its weights too."""

    def __init__(self, width):
        super().__init__(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, hidden, use_side):
        inner = self.norm(hidden)
        mixed, weights = self.attention(inner, inner, inner, need_weights=True)
        return super().forward(hidden + mixed * (1 + weights.square().mean()), use_side)


class Model(cases.PlainModel):
    """A language model of one kind of blocks."""

    def __init__(self, kind=cases.Block, *, tied=False):
        super().__init__(tied=tied, layers=LAYERS)
        self.blocks = nn.ModuleList(kind(WIDTH) for _ in range(LAYERS))


class ThreeTensors(Model):
    """A model whose blocks hand on hidden states, a boolean mask and complex rotations."""

    def __init__(self):
        super().__init__(Rotated)

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        keep = input_ids % 3 != 0
        angles = torch.arange(input_ids.shape[1], dtype=hidden.dtype)[:, None] * 0.1
        turns = torch.polar(torch.ones_like(angles), angles).expand(-1, WIDTH // 2)
        state = hidden, keep, turns
        for block in self.blocks:
            state = block(state, side)
        return cases.Output(self.head(state[0]))


class Rotated(cases.Block):
    """A block of three tensors."""

    def forward(self, state, use_side):
        hidden, keep, turns = state
        pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        output = super().forward(turned, use_side)
        return torch.where(keep.unsqueeze(-1), output, hidden), keep, turns


class PerLayerEmbedding(cases.Block):
    """A block that looks its tokens up in an embedding of its own."""

    def __init__(self, width):
        super().__init__(width)
        self.lookup = nn.Embedding(cases.VOCABULARY, width)

    def forward(self, hidden, ids):
        return super().forward(hidden + self.lookup(ids), False)


class IdsForAll(Model):
    """A model that gives the token ids to every block."""

    def __init__(self):
        super().__init__(PerLayerEmbedding)

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, input_ids)
        return cases.Output(self.head(hidden))


class SharedAcrossStages(Model):
    """A model whose first and last block share a layer."""

    def __init__(self):
        super().__init__()
        self.blocks[-1].side = self.blocks[0].side

    def forward(self, input_ids, side=False):
        return super().forward(input_ids, True)


class SecondLoss(Model):
    """A model that returns a second head's logits too."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(WIDTH, cases.VOCABULARY)

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, side)
        return cases.Output(self.head(hidden) + 0.1 * self.second(torch.tanh(hidden)).detach())


class RowwiseBias(cases.Block):
    """A block whose second layer has a bias, which all ranks hold."""

    def __init__(self, width):
        super().__init__(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


MODELS: dict[str, Any] = {
    "chunks": lambda: Model(Chunks),
    "custom function": lambda: Model(CustomFunction),
    "hooks on inputs": lambda: Model(HookedInput),
    "ignored inputs": lambda: Model(IgnoresInput),
    "parametrized": lambda: Model(Parametrized),
    "recurrent": lambda: Model(Recurrent),
    "in place": lambda: Model(InPlace),
    "gates": lambda: Model(Gated),
    "experts": lambda: Model(Routed),
    "attention": lambda: Model(Attention),
    "three tensors": ThreeTensors,
    "ids for all blocks": IdsForAll,
    "shared across stages": SharedAcrossStages,
    "unused head": SecondLoss,
    "tied": lambda: Model(tied=True),
    "plain": lambda: Model(),
    "rowwise bias": lambda: Model(RowwiseBias),
}


def model_of(kind):
    """The model with the same float64 weights on every call."""
    torch.manual_seed(7)
    return MODELS[kind]().double()


def steps_of(kind, micro_batches):
    """Micro-batches of all ranks, by step."""
    plan = cases.steps_for("plain", micro_batches, steps=STEPS)
    if kind != "ignored inputs":
        return plan
    return [
        [{**micro_batch, "side": (at + s) % 2 == 1} for at, micro_batch in enumerate(step)]
        for s, step in enumerate(plan)
    ]


def micro_batches(config):
    """Micro-batches of a step, of all data-parallel ranks."""
    parallel = config["parallel"]
    dp = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    return int(dp * config["gradient_accumulation_steps"])


def train(rank, world, kind, config, evaluate):
    """Train on a layout. Runs on every rank.

    Returns:
        The trace on rank 0, or the message of an error of Plait's.
    """
    model = model_of(kind)
    try:
        engine = plait.initialize(
            model, config, loss_fn=plait.causal_lm_loss, optimizer=cases.adamw
        )
        steps = steps_of(kind, micro_batches(config))
        if evaluate:
            engine.eval_batch(steps[0][0])
        trace = engine_trace(engine, steps)
    except plait.PlaitError as error:
        return f"{type(error).__name__}: {error}"
    return trace if rank == 0 else None


def plainly(kind, count):
    """Train in this process alone."""
    return reference_trace(
        model_of(kind),
        steps_of(kind, count),
        loss_fn=plait.causal_lm_loss,
        optimizer=cases.adamw,
        clipping=CLIPPING,
    )


def frozen_llama(frozen, *, tied=False):
    """A Llama with some parts frozen, in float64."""
    model = cases.build("qwen3", tied=tied, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def train_family(rank, world, frozen, tied, config):
    """Train a model of Transformers on a layout. Runs on every rank."""
    model = frozen_llama(frozen, tied=tied)
    with keeping_float64(model):
        try:
            engine = plait.initialize(
                model, config, loss_fn=plait.causal_lm_loss, optimizer=cases.adamw
            )
            trace = engine_trace(engine, family_steps(micro_batches(config)))
        except plait.PlaitError as error:
            return f"{type(error).__name__}: {error}"
    return trace if rank == 0 else None


def family_steps(count):
    """Micro-batches of a language model."""
    return cases.ragged_steps(count, steps=STEPS, keys=("attention_mask",))


def family_plainly(frozen, tied, count):
    """Train it in this process alone."""
    model = frozen_llama(frozen, tied=tied)
    with keeping_float64(model):
        return reference_trace(
            model,
            family_steps(count),
            loss_fn=plait.causal_lm_loss,
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )

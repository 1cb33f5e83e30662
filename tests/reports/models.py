"""Small models and inputs of the reports, in float64. Imported by workers."""

import torch
from torch import nn

FEATURES = 4
WIDTH = 6
CLASSES = 3


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Net(nn.Module):
    """A stem, residual blocks and a head. `kind` is the class of the blocks."""

    def __init__(self, kind=Layer, layers=3, features=FEATURES):
        super().__init__()
        self.stem = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, inputs):
        """The hidden state before the head."""
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs):
        return self.head(self.body(inputs))


def build(kind, *args, **fields):
    """A model with the same float64 weights on every call."""
    torch.manual_seed(7)
    # Constructors that compute, such as `spectral_norm`, differ in float32 from call to call.
    torch.set_default_dtype(torch.float64)
    try:
        return kind(*args, **fields).to(torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def inputs(step, rank, micro=0, rows=4, width=FEATURES):
    """Samples of a rank's micro-batch."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(rows, width, generator=draw, dtype=torch.float64)


def tokens(step, rank, vocabulary, micro=0, length=5):
    """Token ids of a rank's micro-batch, [4, length]."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, vocabulary, (4, length), generator=draw)

"""Reports about parameters and modules: shapes, dtypes, sharing, parametrizations, buffers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.reports.models import CLASSES, FEATURES, WIDTH, Layer, Net, build, inputs, tokens
from tests.reports.runs import plain, sgd, train

STEPS = 3


class TiedNet(nn.Module):
    """A language model with tied embeddings and a vocabulary that no number of ranks divides."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tied_weights_of_uneven_shards(run):
    """Every row of a tied weight moves, also those of the last rank."""
    call = run.start(build(TiedNet))
    before = plain(run.module.head.weight).detach().clone()
    for step in range(STEPS):
        for rank in run.each_rank():
            ids = tokens(step, rank, 11)
            logits = call(ids)[:, :-1].flatten(0, 1)
            run.backward(F.cross_entropy(logits, ids[:, 1:].flatten()))
        run.step()
    moved = (plain(run.module.head.weight).detach() - before).abs().amax(1)
    assert bool((moved > 1e-4).all()), moved
    assert run.module.head.weight is run.module.embed.weight


class SharedEndsNet(nn.Module):
    """A chain of layers whose first and last share weight and bias."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
        self.layers[3].bias = self.layers[0].bias

    def forward(self, sample):
        return self.layers(sample)


def first_and_last_layer_shared(run):
    """The first and the last layer share their parameters."""
    train(run, build(SharedEndsNet))


class RepeatedNet(Net):
    """A model that runs each block twice, and whose list has one module twice."""

    def body(self, sample):
        hidden = self.stem(sample)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden)
        return hidden


def blocks_used_twice(run):
    """Each block runs twice per forward."""
    train(run, build(RepeatedNet))


class ScaledNet(Net):
    """A model with a scalar parameter, as CLIP has, and one of a single element in each block."""

    def __init__(self, kind=Layer):
        super().__init__(kind)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, sample):
        return super().forward(sample) * self.temperature.exp()


class GatedLayer(Layer):
    """A layer with a gate of one element."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden):
        return super().forward(hidden) * self.gate


def scalar_parameter(run):
    """A 0-dimensional parameter trains."""
    train(run, build(ScaledNet))


def parameter_of_one_element(run):
    """Parameters of shape [1] train on both ranks."""
    train(run, build(Net, GatedLayer))


class EmptyLayer(Layer):
    """A layer with a parameter without elements and one of fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, hidden):
        return super().forward(hidden) + self.prompt.sum()


def parameter_without_elements(run):
    """A prompt of length 0 in every block."""
    train(run, build(Net, EmptyLayer))


class QuantisedLayer(Layer):
    """A layer with a frozen weight of 8-bit integers and its scale."""

    def __init__(self):
        super().__init__()
        codes = torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01))

    def forward(self, hidden):
        weight = (self.codes.to(hidden.dtype) - 128) * self.scale
        return super().forward(hidden) + F.linear(hidden, weight)


def integer_parameters(run):
    """Frozen parameters of uint8 beside trained ones."""
    train(run, build(Net, QuantisedLayer))


class MixedLayer(Layer):
    """A layer whose norm stays in float32."""

    def forward(self, hidden):
        normed = self.norm(hidden.float()).to(hidden.dtype)
        return hidden + torch.tanh(self.linear(normed))


def two_dtypes_in_a_block(run):
    """Trained parameters of float32 and float64 in one block."""
    model = build(Net, MixedLayer)
    for block in model.blocks:
        block.norm.float()
    train(run, model)


class RenormedNet(nn.Module):
    """A model whose embedding rescales rows in its forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, max_norm=1.0)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def embedding_with_max_norm(run):
    """`nn.Embedding(max_norm=...)` writes to its weight in the forward."""
    call = run.start(build(RenormedNet))
    run.train(lambda step, rank: call(tokens(step, rank, 11)).square().mean())


class SparseNet(RenormedNet):
    """A model whose embedding has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, sparse=True)


def embedding_with_sparse_gradients(run):
    """`nn.Embedding(sparse=True)` beside dense layers."""

    def plain_sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    call = run.start(build(SparseNet), plain_sgd)
    run.train(lambda step, rank: call(tokens(step, rank, 11)).square().mean())


class RecurrentLayer(nn.Module):
    """A layer around a GRU and an LSTM of two directions, which keep lists of their weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.GRU(WIDTH, WIDTH, batch_first=True)
        half = WIDTH // 2
        self.second = nn.LSTM(WIDTH, half, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, hidden):
        inner = self.second(self.first(hidden.unsqueeze(0))[0])[0]
        return hidden + inner.squeeze(0)


def recurrent_blocks(run):
    """Recurrent blocks train on all ranks."""
    train(run, build(Net, RecurrentLayer))


class NormedLayer(nn.Module):
    """A layer with a parametrized weight."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.third = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden):
        return hidden + torch.tanh(self.third(self.second(self.linear(hidden))))


def parametrized_weights(run):
    """`weight_norm`, `spectral_norm` and `orthogonal` in a block."""
    model = build(Net, NormedLayer)
    model.eval()  # without the power iteration, which each rank would do on its own
    train(run, model, optimizer=sgd)


class ConvLayer(nn.Module):
    """A convolution with group normalisation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, image):
        return image + F.relu(self.norm(self.conv(image)), inplace=True)


class ConvNet(nn.Module):
    """A small network for images."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(ConvLayer() for _ in range(2))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image):
        image = self.stem(image)
        for block in self.blocks:
            image = block(image)
        return self.head(image)


def convolutions_in_channels_last(run):
    """Weights with strides of channels_last, which are not contiguous."""
    call = run.start(build(ConvNet).to(memory_format=torch.channels_last))
    for step in range(STEPS):
        for rank in run.each_rank():
            image = inputs(step, rank, width=16).view(4, 1, 4, 4)
            run.backward(call(image).square().mean())
        run.step()


class TransposedLayer(Layer):
    """A layer whose weight is stored transposed."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, hidden):
        return super().forward(hidden) @ self.mixing


def transposed_parameters(run):
    """A parameter that is a transposed view."""
    train(run, build(Net, TransposedLayer))


class AliasedNet(Net):
    """A model that registers modules of its blocks a second time, under other names."""

    def __init__(self):
        super().__init__()
        self.first_linear = self.blocks[0].linear
        self.blocks[2].neighbour_norm = self.blocks[2].norm
        self.last_block = self.blocks[2]

    def forward(self, sample):
        return super().forward(sample) + self.head(self.last_block(self.stem(sample)))


def modules_with_two_names(run):
    """Modules of a block are attributes of the model too."""
    train(run, build(AliasedNet))
    run.note(len(run.module.state_dict()), everywhere=True)


class Experts(nn.Module):
    """Top-1 experts, of which a batch leaves some without tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        gates = self.router(hidden).softmax(-1)
        choice = gates.argmax(-1)
        output = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if len(rows):
                values = expert(hidden[rows]) * gates[rows, index].unsqueeze(-1)
                output = output.index_add(0, rows, values)
        return hidden + output


def experts_without_tokens(run):
    """Each rank runs other experts, and some experts run on no rank."""
    train(run, build(Net, Experts), rows=2)


class BufferedLayer(Layer):
    """A layer with buffers of other dtypes, one of which counts forwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH * 1.0)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden):
        self.count += 1
        turned = (hidden * self.angles.to(torch.complex128)).real
        return super().forward(turned) * (1 + 0.1 * self.count.to(hidden.dtype))


def buffers_of_other_dtypes(run):
    """Complex and integer buffers, one of which the forward changes."""
    torch.manual_seed(7)
    model = Net(BufferedLayer)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    call = run.start(model)
    for step in range(STEPS):
        for index, rank in enumerate(run.each_rank()):
            if index:  # each rank counts its own forwards
                for block in run.module.blocks:
                    block.count -= 1
            run.backward(call(inputs(step, rank)).square().mean())
        run.step()
    run.note(run.module.blocks[0].count, everywhere=True)
    assert run.module.blocks[0].angles.is_complex()


class MethodNet(Net):
    """A model with methods that are no `forward`."""

    def features(self, sample):
        return self.body(sample)

    def loss_of(self, sample):
        return self.head(self.features(sample)).square().mean()


def methods_other_than_forward(run):
    """The loop calls the model's own methods, not `forward`."""
    call = run.start(build(MethodNet))
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).mean())
        run.step()
        for rank in run.each_rank():
            with torch.no_grad():
                run.note(run.module.features(inputs(step, rank, micro=1)))
    run.train(lambda step, rank: run.module.loss_of(inputs(step, rank)))


class AttentionLayer(nn.TransformerEncoderLayer):
    """Torch's encoder layer, whose attention reads weights of its submodules."""

    def __init__(self):
        super().__init__(WIDTH, 2, 8, dropout=0.0, batch_first=True)


class EncoderNet(Net):
    """A model of torch's encoder layers."""

    def body(self, sample):
        return super().body(sample.unsqueeze(0)).squeeze(0)


def encoder_layers_of_torch(run):
    """`nn.TransformerEncoderLayer` in training, and its fused path in evaluation."""
    call = run.start(build(EncoderNet, AttentionLayer), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).square().mean())
        run.step()
        call.eval()
        for rank in run.each_rank():
            with torch.no_grad():
                run.note(call(inputs(step, rank, micro=1)))
        call.train()


class PrunedNet(Net):
    """A model whose linear weights are masked before every forward."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_buffer("mask", torch.eye(WIDTH))
            block.linear.register_forward_pre_hook(block_mask(block))


def block_mask(block):
    """A forward pre-hook that masks the weight in place."""

    def hook(module, args):
        with torch.no_grad():
            module.weight.data.mul_(block.mask)

    return hook


class Mask(nn.Module):
    """A parametrization that masks a weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(WIDTH))

    def forward(self, weight):
        return weight * self.mask


class ParametrizedNet(Net):
    """`PrunedNet` as the error advises to write it."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrize.register_parametrization(block.linear, "weight", Mask())


def weights_masked_by_parametrize(run):
    """The weights are masked by `torch.nn.utils.parametrize`."""
    train(run, build(ParametrizedNet))


def weights_masked_before_the_forward(run):
    """A forward pre-hook writes to a block's weight."""
    train(run, build(PrunedNet))


class SpectralLayer(Layer):
    """A layer with a complex weight for each frequency, besides its real ones."""

    def __init__(self):
        super().__init__()
        count = WIDTH // 2 + 1
        self.spectrum = nn.Parameter(torch.randn(3, count, dtype=torch.complex128) * 0.3)

    def forward(self, hidden):
        frequencies = torch.fft.rfft(hidden)
        turned = torch.fft.irfft((frequencies.unsqueeze(1) * self.spectrum).sum(1), n=WIDTH)
        return super().forward(hidden + turned)


class ComplexLayer(nn.Module):
    """A layer of complex weights alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


class ComplexNet(Net):
    """A complex model of a real output."""

    def __init__(self, classes):
        super().__init__(ComplexLayer)
        self.stem = nn.Linear(FEATURES, WIDTH, dtype=torch.complex128)
        self.head = nn.Linear(WIDTH, classes, dtype=torch.complex128)

    def forward(self, sample):
        return torch.view_as_real(super().forward(torch.complex(sample, sample.flip(1))))


def complex_parameters(run):
    """A complex model, clipped."""
    torch.manual_seed(7)
    train(run, ComplexNet(4), clipping=0.3)


def complex_vector_of_uneven_shards(run):
    """A complex bias whose length the ranks do not divide."""
    torch.manual_seed(7)
    train(run, ComplexNet(3))


def complex_and_real_parameters(run):
    """Complex weights of a Fourier layer next to real ones, clipped."""
    torch.manual_seed(7)
    # `to(torch.float64)` would drop the imaginary parts.
    train(run, Net(SpectralLayer).double(), clipping=0.3)


def statistics_of_weights(run):
    """Statistics of weights and gradients, of which ranks have other numbers of rows."""
    call = run.start(build(Net, features=5), sgd)
    for step in range(2):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank, width=5)).square().mean())
        for parameter in run.module.parameters():
            for tensor in (parameter.detach(), parameter.grad.detach()):
                statistics = [tensor.mean(), tensor.std(), tensor.abs().max(), tensor.min()]
                statistics += [tensor.norm(), tensor.norm(1), (tensor > 0).sum(), tensor.var()]
                run.note([float(plain(number)) for number in statistics], everywhere=True)
        run.step()


def averaged_model(run):
    """`AveragedModel` follows the weights, and its output is compared."""
    call = run.start(build(Net))
    average = torch.optim.swa_utils.AveragedModel(run.module)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).square().mean())
        run.step()
        average.update_parameters(run.module)
    for rank in run.each_rank():
        with torch.no_grad():
            run.note(average(inputs(9, rank)))


def weights_assigned(run):
    """`load_state_dict(assign=True)` replaces the parameters after the first step."""
    call = run.start(build(Net), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).square().mean())
        run.step()
        if step == 0:
            saved = {name: t.clone() * 0.5 for name, t in run.module.state_dict().items()}
            run.module.load_state_dict(saved, assign=True)
            run.record()

"""Reports about what a loop asks of autograd: several graphs, forwards and backwards per step."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.reports.models import WIDTH, Layer, Net, build, inputs
from tests.reports.runs import plain, sgd, train

STEPS = 3


def gradient_penalty(run):
    """The loss contains the norm of the gradient of the inputs."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            sample = inputs(step, rank).requires_grad_()
            output = call(sample)
            (slope,) = torch.autograd.grad(output.sum(), sample, create_graph=True)
            run.backward(output.square().mean() + slope.square().mean())
        run.step()


def two_losses_on_one_graph(run):
    """Two backwards through one retained graph, whose gradients add up."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            output = call(inputs(step, rank))
            run.backward(output.square().mean(), retain_graph=True)
            run.backward(output[:, 0].mean())
        run.step()


def forwards_then_backwards(run):
    """Two forwards before the first of two backwards."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            first = call(inputs(step, rank)).square().mean()
            second = call(inputs(step, rank, micro=1)).abs().mean()
            run.backward(first)
            run.backward(second)
        run.step()


class CheckpointedLayer(Layer):
    """A layer that is recomputed in the backward."""

    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=False)


class ReentrantLayer(Layer):
    """A layer with reentrant recomputation, of two arguments."""

    def _two(self, hidden, scale):
        return hidden + torch.tanh(self.linear(self.norm(hidden)) * scale), scale

    def forward(self, hidden):
        scale = torch.full((), 0.5, dtype=hidden.dtype)
        return checkpoint(self._two, hidden, scale, use_reentrant=True)[0]


class PartlyCheckpointedLayer(Layer):
    """A layer of which only the linear part is recomputed."""

    def forward(self, hidden):
        inner = checkpoint(self.linear, self.norm(hidden), use_reentrant=False)
        return hidden + torch.tanh(inner)


def two_forwards_of_checkpointed_layers(run):
    """A product of two outputs of one recomputed model."""
    call = run.start(build(Net, CheckpointedLayer))
    for step in range(STEPS):
        for rank in run.each_rank():
            sample = inputs(step, rank)
            run.backward((call(sample) * call(sample)).mean())
        run.step()


def two_resolutions_through_checkpoints(run):
    """Two views of other shapes through partly recomputed layers, and one loss of both."""
    call = run.start(build(Net, PartlyCheckpointedLayer), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            large = call(inputs(step, rank, rows=6))
            small = call(inputs(step, rank, micro=1, rows=2))
            run.backward((large.mean(0) - small.mean(0)).square().sum())
        run.step()


def reentrant_checkpoints(run):
    """Reentrant recomputation with two arguments."""
    train(run, build(Net, ReentrantLayer))


class SequentialNet(Net):
    """A model whose blocks are run by `checkpoint_sequential`."""

    def forward(self, sample):
        blocks = list(self.blocks)
        return self.head(checkpoint_sequential(blocks, 2, self.stem(sample), use_reentrant=False))


def checkpoint_sequential_with_a_penalty(run):
    """`checkpoint_sequential` and the gradient of the inputs in one loss."""
    call = run.start(build(SequentialNet))
    for step in range(STEPS):
        for rank in run.each_rank():
            sample = inputs(step, rank).requires_grad_()
            output = call(sample)
            (slope,) = torch.autograd.grad(output.sum(), sample, create_graph=True)
            run.backward(output.square().mean() + slope.square().mean())
        run.step()


Three = namedtuple("Three", ["first", "second", "third"])


@dataclass
class Outputs:
    """An output of a user's own class."""

    logits: torch.Tensor
    extras: dict[str, list[torch.Tensor]]


class TupleNet(Net):
    """A model with three outputs."""

    def forward(self, sample):
        hidden = self.body(sample)
        return Three(self.head(hidden), hidden.mean(), (hidden, [hidden.abs()]))


class DataclassNet(Net):
    """A model with nested outputs."""

    def forward(self, sample):
        hidden = self.body(sample)
        return Outputs(self.head(hidden), {"hidden": [hidden, hidden.tanh()]})


def three_outputs(run):
    """The loss uses all of a nested tuple."""
    call = run.start(build(TupleNet))
    for step in range(STEPS):
        for rank in run.each_rank():
            first, second, (third, [fourth]) = call(inputs(step, rank))
            run.backward(first.square().mean() + second + third.mean() + fourth.mean())
        run.step()


def nested_outputs(run):
    """Outputs in a dataclass, other ones in every step, never all of them."""
    call = run.start(build(DataclassNet))
    for step in range(STEPS):
        for rank in run.each_rank():
            output = call(inputs(step, rank))
            parts = [output.logits, *output.extras["hidden"]]
            run.backward(parts[step % 3].square().mean())
        run.step()


class CachingLayer(Layer):
    """A layer that keeps its output."""

    def forward(self, hidden):
        self.kept = super().forward(hidden)
        return self.kept


def loss_of_a_cached_intermediate(run):
    """The loss is of what a block kept, not of the output."""
    call = run.start(build(Net, CachingLayer), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            call(inputs(step, rank))
            run.backward(run.module.blocks[1].kept.square().mean())
        run.step()


class SecondHeadNet(Net):
    """Multi-token prediction: norm and head run again at the end of the forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.predictor = Layer()

    def forward(self, sample):
        hidden = self.body(sample)
        logits = self.head(self.norm(hidden))
        self.auxiliary = self.head(self.norm(self.predictor(hidden)))
        return logits


def head_used_again(run):
    """Shared head and norm, and an auxiliary output kept as an attribute."""
    call = run.start(build(SecondHeadNet))
    for step in range(STEPS):
        for rank in run.each_rank():
            output = call(inputs(step, rank))
            run.backward(output.square().mean() + run.module.auxiliary.abs().mean())
        run.step()


class TwoEncoders(nn.Module):
    """Two encoders of which a step runs one."""

    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleList(Net() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, sample, which):
        if which is None:
            return sample[:, :3] * self.scale
        return self.encoders[which](sample) * self.scale


def encoders_take_turns(run):
    """Each step runs another encoder, and one step none."""
    call = run.start(build(TwoEncoders))
    for step, which in enumerate([0, 1, None, 0]):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank), which).square().mean())
        run.step()


def evaluation_before_the_backward(run):
    """A forward in eval mode without gradients stands between forward and backward."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            output = call(inputs(step, rank))
            call.eval()
            with torch.no_grad():
                run.note(call(inputs(step, rank, micro=1)))
            call.train()
            call(inputs(step, rank, micro=2))  # a forward without a backward
            run.backward(output.square().mean())
        run.step()


def inference_mode_between(run):
    """Forwards in inference mode, before the first step too."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            with torch.inference_mode():
                run.note(call(inputs(step, rank, micro=1)))
            run.backward(call(inputs(step, rank)).square().mean())
            with torch.inference_mode():
                run.note(call(inputs(step, rank, micro=2)))
        run.step()


class BranchNet(Net):
    """A model with a branch that a micro-batch may leave out."""

    def __init__(self):
        super().__init__()
        self.branch = Layer()

    def forward(self, sample, use_branch=False):
        hidden = self.body(sample)
        return self.head(self.branch(hidden) if use_branch else hidden)


def branch_unused_in_the_last_micro_batch(run):
    """Only the first of two micro-batches uses the branch."""
    call = run.start(build(BranchNet), accumulation=2)
    for step in range(STEPS):
        for rank in run.each_rank():
            with run.accumulating():
                run.backward(call(inputs(step, rank), use_branch=step != 1).square().mean())
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank, micro=1)).square().mean())
        run.step()


class HalfUsedNet(Net):
    """A model that computes an output which no loss uses."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, sample):
        hidden = self.body(sample)
        return self.head(hidden), self.other(hidden)


def output_that_no_loss_uses(run):
    """The loss uses one of two outputs."""
    call = run.start(build(HalfUsedNet))
    run.train(lambda step, rank: call(inputs(step, rank))[0].square().mean())


def backward_of_some_parameters(run):
    """`backward(inputs=...)` computes the gradients of the head alone."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            loss = call(inputs(step, rank)).square().mean()
            run.backward(loss, inputs=list(run.module.head.parameters()))
        run.step()


def gradients_of_outputs_cached(run):
    """Gradients of representations first, the model's backward in micro-batches afterwards."""
    call = run.start(build(Net), sgd, accumulation=1)
    for step in range(STEPS):
        caches = {}
        for rank in run.each_rank():
            with torch.no_grad():
                parts = [call(inputs(step, rank, micro)) for micro in range(2)]
            leaves = [part.detach().requires_grad_() for part in parts]
            similarity = leaves[0] @ leaves[1].T
            loss = F.cross_entropy(similarity, torch.arange(len(similarity)))
            caches[rank] = torch.autograd.grad(loss, leaves)
            run.note(loss)
        for rank in run.each_rank():
            with run.accumulating():
                call(inputs(step, rank)).backward(run.share(caches[rank][0]))
        for rank in run.each_rank():
            call(inputs(step, rank, 1)).backward(run.share(caches[rank][1]))
        run.step()


def per_sample_gradients_in_the_loss(run):
    """The loss maps a function over samples with `vmap`."""
    call = run.start(build(Net))

    def sample_loss(logits):
        return torch.logsumexp(logits, -1) - logits[0]

    run.train(lambda step, rank: torch.func.vmap(sample_loss)(call(inputs(step, rank))).mean())


def loss_reads_weights(run):
    """The loss sums squares of all weights."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            loss = call(inputs(step, rank)).square().mean()
            penalty = sum(p.square().sum() for p in run.module.parameters())
            run.backward(loss + 0.01 * penalty)
        run.step()


def inner_step_by_functional_call(run):
    """MAML: a differentiated inner step, and the outer loss of the changed parameters."""
    call = run.start(build(Net))
    for step in range(2):
        for rank in run.each_rank():
            names, parameters = zip(*run.module.named_parameters(), strict=True)
            loss = call(inputs(step, rank)).square().mean()
            slopes = torch.autograd.grad(loss, parameters, create_graph=True)
            changed = {n: p - 0.1 * g for n, p, g in zip(names, parameters, slopes, strict=True)}
            sample = inputs(step, rank, micro=1)
            output = torch.func.functional_call(run.module, changed, (sample,))
            run.backward(output.square().mean())
        run.step()


class ViewLayer(Layer):
    """A layer whose output is a view."""

    def forward(self, hidden):
        return super().forward(hidden).unsqueeze(0).squeeze(0)


class InPlaceNet(Net):
    """A model that adds to the outputs of its blocks in place."""

    def body(self, sample):
        hidden = self.stem(sample)
        for block in self.blocks:
            shortcut = hidden
            hidden = block(hidden)
            hidden += shortcut
        return hidden


def views_changed_in_place(run):
    """An in-place addition to a view that a block returned."""
    train(run, build(InPlaceNet, ViewLayer))


class InPlaceLayer(Layer):
    """A layer that adds to its input in place."""

    def forward(self, hidden):
        hidden = hidden.view(hidden.shape)
        hidden += self.linear.bias
        return super().forward(hidden)


def inputs_changed_in_place(run):
    """A block adds to a view of its input in place."""
    train(run, build(Net, InPlaceLayer))


class HookedLayer(Layer):
    """A layer with a hook on the gradient of its output."""

    def forward(self, hidden):
        output = super().forward(hidden)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.5)
        return output


def hooks_on_activations(run):
    """Hooks on outputs of blocks, and full backward hooks on the blocks."""
    model = build(Net, HookedLayer)
    model.blocks[1].register_full_backward_hook(lambda m, incoming, outgoing: (incoming[0] * 2,))
    train(run, model)


def gradients_of_parameters_asked_for(run):
    """`torch.autograd.grad` of the parameters, as for a Hessian-vector product."""
    call = run.start(build(Net))
    parameters = list(run.module.parameters())
    for step in range(2):
        for rank in run.each_rank():
            loss = call(inputs(step, rank)).square().mean()
            slopes = torch.autograd.grad(loss, parameters, create_graph=True)
            run.backward(loss + sum(slope.square().sum() for slope in slopes))
        run.step()


def weights_perturbed_between_two_backwards(run):
    """Sharpness-aware minimisation in the user's loop."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).square().mean())
        parameters = list(run.module.parameters())
        norm = sum(plain(p.grad).square().sum() for p in parameters).sqrt()
        run.note(norm, everywhere=True)
        moves = [p.grad * (0.05 / float(norm)) for p in parameters]
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        run.optimizer.zero_grad()
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank)).square().mean())
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        run.step()


def tangents_of_the_forward(run):
    """The loss contains a derivative of the forward along the inputs, as MeanFlow has."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            sample = inputs(step, rank)
            direction = inputs(step, rank, micro=1)
            output, slope = torch.func.jvp(call, (sample,), (direction,))
            run.backward((output - slope.detach()).square().mean() + slope.square().mean())
        run.step()


def hooks_on_gradients_of_modules(run):
    """Full backward hooks see each module's gradients, and one changes them."""
    model = build(Net)

    def keep(module, incoming, outgoing):
        for gradient in (incoming[0], outgoing[0]):
            if gradient is not None:
                run.note(gradient / gradient.abs().max())  # without the scale of the loss

    def halve(module, incoming, outgoing):
        return tuple(None if gradient is None else gradient / 2 for gradient in incoming)

    for module in (model.blocks[0], model.blocks[1].linear, model.head):
        module.register_full_backward_hook(keep)
    model.blocks[2].register_full_backward_hook(halve)
    model.blocks[1].register_full_backward_pre_hook(lambda module, outgoing: (outgoing[0] * 2,))
    call = run.start(model)
    run.train(lambda step, rank: call(inputs(step, rank)).square().mean())


class Wrapped:
    """A tensor with a label, which is no pytree."""

    def __init__(self, tensor, label):
        self.tensor = tensor
        self.label = label


class WrappingLayer(Layer):
    """A layer that takes and returns an object around its tensor."""

    def forward(self, hidden):
        return Wrapped(super().forward(hidden.tensor), hidden.label + 1)


class WrappingNet(Net):
    """A model whose blocks hand on objects."""

    def body(self, inputs):
        hidden = Wrapped(self.stem(inputs), 0)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.tensor


def objects_between_blocks(run):
    """Blocks hand on objects that are no pytrees."""
    train(run, build(WrappingNet, WrappingLayer))


class CarryingNet(Net):
    """A recurrent model that gets its last state."""

    def forward(self, inputs, state=None):
        hidden = self.stem(inputs)
        if state is not None:
            hidden = hidden + state
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden), hidden


def backward_through_the_last_call(run):
    """A second backward goes on into the retained graph of the call before."""
    call = run.start(build(CarryingNet), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            output, state = call(inputs(step, rank))
            run.backward(output.square().mean(), retain_graph=True)
            output, _ = call(inputs(step, rank, micro=1), state)
            run.backward(output.square().mean())
        run.step()

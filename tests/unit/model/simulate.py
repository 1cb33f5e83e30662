"""Tensor parallel plans computed by threads in one process: a slow reference implementation to judge plans with.

Every rank is a thread with its own copy of the model. Collectives are sums and concatenations of the threads' tensors. The reference
shares no code with Plait's implementation and needs no process group. `check` compares with the unsplit model: outputs, and every
parameter's gradient.
"""

import copy
import threading
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from plait.model.layers import embedding_scale, is_conv1d, out_features


class Ranks:
    """Meeting place for `size` threads."""

    def __init__(self, size):
        self.size, self.slots = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank, value):
        self.slots[rank] = value.detach()
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


def bounds(length, ranks, rank):
    """Start and size of torch.chunk's part `rank`."""
    parts = torch.arange(length).chunk(ranks)
    return (int(parts[rank][0]), len(parts[rank])) if rank < len(parts) else (length, 0)


def summed(ranks, rank, x):
    return torch.stack(ranks.exchange(rank, x)).sum(0)


def joined(ranks, rank, x, dim):
    return torch.cat(ranks.exchange(rank, x), dim)


def own(ranks, rank, x, dim):
    return x.narrow(dim, *bounds(x.shape[dim], ranks.size, rank)).clone()


def function(forward, backward):
    """Create an autograd function from two plain ones."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Made.apply


class Rank:
    """Differentiable collectives of one thread."""

    def __init__(self, ranks, rank):
        self.rank, self.size = rank, ranks.size
        add = lambda x: summed(ranks, rank, x)  # noqa: E731
        take = lambda dim: lambda x: own(ranks, rank, x, dim)  # noqa: E731
        join = lambda dim: lambda x: joined(ranks, rank, x, dim)  # noqa: E731
        self.enter = function(lambda x: x.clone(), add)
        self.leave = function(add, lambda g: g)
        self.gather = lambda x, dim: function(join(dim), take(dim))(x)
        self.split = lambda x, dim: function(take(dim), join(dim))(x)
        self.gather_sum = lambda x, dim: function(join(dim), lambda g: take(dim)(add(g)))(x)
        self.leave_scatter = lambda x, dim: function(lambda y: take(dim)(add(y)), join(dim))(x)


def split_model(model, plan, rank, *, sequence, blocks):
    """Return a copy of `model` that computes this rank's part of `plan`."""
    made = copy.deepcopy(model)
    parameters = dict(made.named_parameters(remove_duplicate=False))
    local = {}
    for name, parameter in parameters.items():
        dim = plan.dims[name]
        if dim is None:
            continue
        if id(parameter) not in local:
            part = bounds(parameter.shape[dim], rank.size, rank.rank)
            local[id(parameter)] = nn.Parameter(parameter.detach().narrow(dim, *part).clone())
        owner, _, leaf = name.rpartition(".")
        made.get_submodule(owner)._parameters[leaf] = local[id(parameter)]
    for entry in plan.modules:
        inside = sequence and any(entry.name.startswith(f"{block}.") for block in blocks)
        gathers = inside and not any(entry.name.startswith(f"{region}.") for region in plan.regions)
        module, full = made.get_submodule(entry.name), model.get_submodule(entry.name)
        options = {"kv_heads": plan.kv_heads.get(entry.name), "inside": inside, "gathers": gathers}
        module.forward = styled_forward(module, full, entry.style, rank, **options)
    for name, attribute, value in plan.attributes:
        setattr(made.get_submodule(name), attribute, value)
    if sequence:
        shard_sequence(made, plan, rank, blocks)
    return made


def styled_forward(module, full, style, rank, *, kv_heads, inside, gathers):
    """Return the forward of a split module.

    `inside`: the module is in a block whose hidden states are sequence shards. `gathers`: it is also outside of regions, which gather
    for their layers.
    """

    def enter(x):
        if inside:
            return rank.gather_sum(x, 1) if gathers else x
        return rank.enter(x)

    def linear(x, weight, bias):
        return F.linear(x, weight.t() if is_conv1d(module) else weight, bias)

    def columns(x):
        return linear(enter(x), module.weight, module.bias)

    def gathered(x):
        return rank.gather(columns(x), -1)

    def rows(x):
        y = linear(x, module.weight, None)
        y = rank.leave_scatter(y, 1) if inside else rank.leave(y)
        return y if module.bias is None else y + module.bias

    def split_rows(x):
        return rows(rank.split(x, -1))

    def embedding(ids):
        start, size = bounds(full.weight.shape[0], rank.size, rank.rank)
        mine = (ids >= start) & (ids < start + size)
        padding = full.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < start + size else None
        local_ids = (ids - start).masked_fill(~mine, 0)
        rows = F.embedding(local_ids, module.weight, padding) * mine.unsqueeze(-1)
        scale = embedding_scale(module)
        return rank.leave(rows if scale is None else rows * scale)

    def keys(x):
        width, head = out_features(full) // kv_heads, rank.rank * kv_heads // rank.size
        rows = slice(head * width, (head + 1) * width)
        bias = None if module.bias is None else module.bias[rows]
        return linear(enter(x), module.weight[rows], bias)

    forwards = {
        "colwise": columns,
        "colwise_gather_output": gathered,
        "vocab_head": gathered,
        "rowwise": rows,
        "rowwise_split_input": split_rows,
        "embedding_rowwise": embedding,
        "kv_replicated": keys,
    }
    return forwards.get(style, module.forward)


def shard_sequence(model, plan, rank, blocks):
    def replace(function):
        def hook(_module, args, kwargs):
            if args:
                return (function(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}

        return hook

    def gather_output(_module, _args, output):
        if isinstance(output, tuple):
            return (rank.gather(output[0], 1), *output[1:])
        return rank.gather(output, 1)

    split = replace(lambda x: rank.split(x, 1))
    model.get_submodule(blocks[0]).register_forward_pre_hook(split, with_kwargs=True)
    for region in plan.regions:
        gather = replace(lambda x: rank.gather_sum(x, 1))
        model.get_submodule(region).register_forward_pre_hook(gather, with_kwargs=True)
    model.get_submodule(plan.final_norm or blocks[-1]).register_forward_hook(gather_output)


def partial_gradients(model, plan, *, sequence, blocks):
    """Names of unsplit parameters whose gradients the ranks must sum."""
    styles = plan.styles
    names = set()
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = styles.get(owner)
        in_block = any(owner.startswith(f"{block}.") for block in blocks)
        row_bias = in_block and leaf == "bias" and style in ("rowwise", "rowwise_split_input")
        if style in ("replicated_with_grad_allreduce", "kv_replicated"):
            names.add(name)
        if sequence and (owner in plan.norms or row_bias):
            names.add(name)
    return names


@contextmanager
def threads_fail_together(ranks, failures):
    try:
        yield
    except BaseException as failure:
        failures.append(failure)
        ranks.barrier.abort()


def check(model, plan, call, *, blocks, sequence=False, tolerance=1e-6):
    """Assert that `call(model)`, and gradients of a fixed weighting of it, are the same under `plan` on threads as without."""
    expected, gradients = run(model, call)
    ranks = Ranks(plan.tp)
    results, failures = [None] * plan.tp, []

    def work(index):
        with threads_fail_together(ranks, failures):
            made = split_model(model, plan, Rank(ranks, index), sequence=sequence, blocks=blocks)
            results[index] = run(made, call)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(plan.tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
    if failures:
        raise failures[0]
    partial = partial_gradients(model, plan, sequence=sequence, blocks=blocks)
    for index, (output, found) in enumerate(results):
        close(output, expected, "the output", tolerance)
        for name, gradient in gradients.items():
            dim = plan.dims[name]
            mine = found[name]
            if name in partial:
                parts = [other[name] for _, other in results if other[name] is not None]
                mine = torch.stack(parts).sum(0) if parts else None
            if dim is not None and gradient is not None:
                gradient = gradient.narrow(dim, *bounds(gradient.shape[dim], plan.tp, index))
            assert (mine is None) == (gradient is None), f"{name} has a gradient on one side only"
            if gradient is not None:
                close(mine, gradient, name, tolerance)


def run(model, call):
    model.zero_grad()
    output = call(model)
    generator = torch.Generator().manual_seed(3)
    weighting = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    (output * weighting).sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def close(found, expected, name, tolerance):
    shapes = f"{name}: {tuple(found.shape)} for {tuple(expected.shape)}"
    assert found.shape == expected.shape, shapes
    difference, size = (found - expected).abs().max(), expected.abs().max()
    assert difference <= tolerance * (1 + size), f"{name} differs by {difference:.3g} of {size:.3g}"


def randomise(model):
    """Make every parameter random in place, so that no gradient vanishes and no bias is zero, and switch dropout off."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 if parameter.ndim < 2 else min(parameter.shape) ** -0.5
            parameter.normal_(generator=generator).mul_(scale)
    return model.eval()

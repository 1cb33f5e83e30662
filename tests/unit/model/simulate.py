"""Tensor parallel plans computed by threads of one process: a slow reference to judge plans with.

Every rank is a thread with its own copy of the model. Collectives are sums and concatenations of
the threads' tensors. The reference shares no code with Plait's implementation and needs no process
group. `check` compares outputs and gradients of all parameters with those of the unsplit model.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

from plait.model.layers import embedding_scale, is_conv1d, out_features


class Threads:
    """Meeting place for `size` threads."""

    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank, value):
        self.slots[rank] = value.detach()
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


def bounds(length, ranks, rank):
    """Return start and size of the chunk that `torch.chunk` gives to a rank."""
    chunks = torch.arange(length).chunk(ranks)
    if rank >= len(chunks):
        return length, 0
    return int(chunks[rank][0]), len(chunks[rank])


def differentiable(forward, backward):
    """Create an autograd function from two plain ones."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    return Function.apply


class Rank:
    """Differentiable collectives of one thread."""

    def __init__(self, threads, rank):
        self.rank = rank
        self.size = threads.size

        def add(x):
            return torch.stack(threads.exchange(rank, x)).sum(0)

        def take(x, dim):
            return x.narrow(dim, *bounds(x.shape[dim], threads.size, rank)).clone()

        def join(x, dim):
            return torch.cat(threads.exchange(rank, x), dim)

        def along(forward, backward):
            def call(x, dim):
                function = differentiable(lambda x: forward(x, dim), lambda g: backward(g, dim))
                return function(x)

            return call

        def add_and_take(x, dim):
            return take(add(x), dim)

        self.enter = differentiable(lambda x: x.clone(), add)
        self.leave = differentiable(add, lambda gradient: gradient)
        self.gather = along(join, take)
        self.split = along(take, join)
        self.gather_sum = along(join, add_and_take)
        self.leave_scatter = along(add_and_take, join)


def split_model(model, plan, rank, *, sequence, blocks):
    """Return a copy of `model` that computes this rank's share of `plan`."""
    local_model = copy.deepcopy(model)
    shards = {}
    for name, parameter in dict(local_model.named_parameters(remove_duplicate=False)).items():
        dim = plan.dims[name]
        if dim is None:
            continue
        # Tied parameters have one shard.
        if id(parameter) not in shards:
            start, size = bounds(parameter.shape[dim], rank.size, rank.rank)
            shard = parameter.detach().narrow(dim, start, size)
            shards[id(parameter)] = nn.Parameter(shard.clone())
        owner, _, leaf = name.rpartition(".")
        local_model.get_submodule(owner)._parameters[leaf] = shards[id(parameter)]

    for entry in plan.modules:
        inside = sequence and any(entry.name.startswith(f"{block}.") for block in blocks)
        gathers = inside and not any(entry.name.startswith(f"{region}.") for region in plan.regions)
        module = local_model.get_submodule(entry.name)
        module.forward = styled_forward(
            module,
            model.get_submodule(entry.name),
            entry.style,
            rank,
            kv_heads=plan.kv_heads.get(entry.name),
            inside=inside,
            gathers=gathers,
        )
    for name, attribute, value in plan.attributes:
        setattr(local_model.get_submodule(name), attribute, value)
    if sequence:
        shard_sequence(local_model, plan, rank, blocks)
    return local_model


def styled_forward(module, full, style, rank, *, kv_heads, inside, gathers):
    """Return the forward of a split module.

    Args:
        inside: Whether the module is in a block whose hidden states are sequence shards.
        gathers: Whether it is also outside of regions, which gather for their layers.
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
        is_local = (ids >= start) & (ids < start + size)
        local_ids = (ids - start).masked_fill(~is_local, 0)
        padding = None
        if full.padding_idx is not None and start <= full.padding_idx < start + size:
            padding = full.padding_idx - start
        vectors = F.embedding(local_ids, module.weight, padding) * is_local.unsqueeze(-1)
        scale = embedding_scale(module)
        return rank.leave(vectors if scale is None else vectors * scale)

    def replicated_keys(x):
        # Ranks that share a head all compute it, from the full weight.
        width = out_features(full) // kv_heads
        head = rank.rank * kv_heads // rank.size
        channels = slice(head * width, (head + 1) * width)
        bias = None if module.bias is None else module.bias[channels]
        return linear(enter(x), module.weight[channels], bias)

    forwards = {
        "colwise": columns,
        "colwise_gather_output": gathered,
        "vocab_head": gathered,
        "rowwise": rows,
        "rowwise_split_input": split_rows,
        "embedding_rowwise": embedding,
        "kv_replicated": replicated_keys,
    }
    return forwards.get(style, module.forward)


def shard_sequence(model, plan, rank, blocks):
    """Split hidden states before the first block, and gather them after the last one."""

    def change_input(function):
        def hook(_module, args, kwargs):
            if args:
                return (function(args[0], 1), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"], 1)}

        return hook

    def gather_output(_module, _args, output):
        if isinstance(output, tuple):
            return (rank.gather(output[0], 1), *output[1:])
        return rank.gather(output, 1)

    first = model.get_submodule(blocks[0])
    first.register_forward_pre_hook(change_input(rank.split), with_kwargs=True)
    for region in plan.regions:
        gather = change_input(rank.gather_sum)
        model.get_submodule(region).register_forward_pre_hook(gather, with_kwargs=True)
    model.get_submodule(plan.final_norm or blocks[-1]).register_forward_hook(gather_output)


def partial_gradients(model, plan, *, sequence, blocks):
    """Return the names of unsplit parameters whose gradients the ranks must sum."""
    names = set()
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = plan.styles.get(owner)
        in_block = any(owner.startswith(f"{block}.") for block in blocks)
        is_row_bias = in_block and leaf == "bias" and style in ("rowwise", "rowwise_split_input")
        if style in ("replicated_with_grad_allreduce", "kv_replicated"):
            names.add(name)
        if sequence and (owner in plan.norms or is_row_bias):
            names.add(name)
    return names


def run_ranks(model, plan, call, *, sequence, blocks):
    """Return output and gradients of every rank."""
    threads = Threads(plan.tp)

    def work(index):
        try:
            rank = Rank(threads, index)
            local_model = split_model(model, plan, rank, sequence=sequence, blocks=blocks)
            return run(local_model, call)
        except BaseException:
            threads.barrier.abort()
            raise

    with ThreadPoolExecutor(plan.tp) as pool:
        futures = [pool.submit(work, index) for index in range(plan.tp)]
    for future in futures:
        # The first failure breaks the barrier, which fails in the other threads.
        if not isinstance(future.exception(), threading.BrokenBarrierError):
            future.result()
    return [future.result() for future in futures]


def check(model, plan, call, *, blocks, sequence=False, tolerance=1e-6):
    """Assert that `plan` on threads gives the output of `call(model)`, and its gradients.

    Gradients are those of a sum of the outputs with random weights.
    """
    expected_output, expected_gradients = run(model, call)
    results = run_ranks(model, plan, call, sequence=sequence, blocks=blocks)
    partial = partial_gradients(model, plan, sequence=sequence, blocks=blocks)
    for rank, (output, gradients) in enumerate(results):
        close(output, expected_output, "the output", tolerance)
        for name, expected in expected_gradients.items():
            actual = gradients[name]
            if name in partial:
                all_ranks = [rank_gradients[name] for _, rank_gradients in results]
                terms = [gradient for gradient in all_ranks if gradient is not None]
                actual = torch.stack(terms).sum(0) if terms else None
            assert (actual is None) == (expected is None), f"{name} has a gradient on one side only"
            if expected is None:
                continue
            dim = plan.dims[name]
            if dim is not None:
                expected = expected.narrow(dim, *bounds(expected.shape[dim], plan.tp, rank))
            close(actual, expected, name, tolerance)


def run(model, call):
    """Return the output of `call(model)`, and the gradients of a random weighting of it."""
    model.zero_grad()
    output = call(model)
    generator = torch.Generator().manual_seed(3)
    weighting = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    (output * weighting).sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def close(actual, expected, name, tolerance):
    assert actual.shape == expected.shape, name
    difference = (actual - expected).abs().max()
    size = expected.abs().max()
    assert difference <= tolerance * (1 + size), f"{name} differs by {difference:.3g} of {size:.3g}"


def randomise(model):
    """Make every parameter random, and switch dropout off.

    With random biases and norms, no gradient vanishes.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 if parameter.ndim < 2 else min(parameter.shape) ** -0.5
            parameter.normal_(generator=generator).mul_(scale)
    return model.eval()

"""What Plait's own blocks, those of Transformers without compilation, hold on a rank: what they
keep for the backward, and what the backward of a block needs besides, by recomputation, tp and sp.

Derived from `dryrun.dry_model` and the single-rank dry run, which run the model on fake tensors;
tests compare them. Eager RMS norms keep their input in float32 and the normalised in 16 bits (6 a
norm), layer norms are a kernel of torch (2), and sequence parallelism keeps the gathered inputs of
products (4 a hidden element).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from plait.planner.counted import Kept
from plait.planner.hardware import FAMILIES, Numbers
from plait.planner.job import Job, Layouts
from plait.planner.products import kept_columns, products_of, turns_fused

_LAYER_NORMS = (
    *(
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gptj",
        "gpt_neox",
        "opt",
        "bloom",
        "mpt",
        "phi",
        "codegen",
        "biogpt",
        "falcon",
        "starcoder2",
    ),
    *("persimmon", "stablelm", "nemotron", "jais2"),
)
"""Families whose norms are torch's kernel."""
_ONE_KERNEL = {"relu": 2, "relu2": 4, "gelu": 4, "gelu_pytorch_tanh": 4, "gelu_python_tanh": 4}
"""Activation functions that are a kernel or two: bytes an element of 16 bits that they and the
product behind them keep. GPT-2's GELU, written out in five steps, keeps 10.
"""


@dataclass(frozen=True)
class Working:
    """A point of a block's backward: bytes per token of activations and their gradients, and
    gradients of so many elements of its weights.
    """

    token_bytes: Numbers
    weights: Numbers


@dataclass(frozen=True)
class _Widths:
    """Elements a token on one rank."""

    hidden: Numbers
    """Of what sequence parallelism shards."""
    query: Numbers
    key: Numbers
    inner: Numbers
    heads: Numbers


def _widths(job: Job) -> _Widths:
    model = job.model
    tp = np.asarray(job.layouts.tp)
    whole = 1 if job.whole_attention else tp
    return _Widths(
        hidden=model.hidden / np.where(np.asarray(job.layouts.sp) > 0, tp, 1),
        query=model.heads * model.head_dim / whole,
        key=np.maximum(model.kv_heads / whole, 1)
        * model.head_dim,  # fewer heads than ranks: each rank computes one
        inner=model.ffn / tp,
        heads=model.heads / whole,
    )


def hidden_width(job: Job) -> Numbers:
    """Elements a token of what passes between blocks, on one rank."""
    return _widths(job).hidden


def kept_bytes(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """(none, operators, full) for a token: what a block keeps in each mode."""
    none, operators, full = _by_formula(job)
    more = _besides(job)
    return (
        none + more[0],
        operators + more[1],
        (
            full
            if job.counted is None
            else full * job.counted.full / (job.element_bytes * job.model.hidden)
        ),
    )


def _besides(job: Job) -> tuple[Numbers, Numbers]:
    """(none, operators): what a block keeps besides the formula, by the count of it on one rank."""
    if job.counted is None:
        return 0.0, 0.0
    return (
        _difference(job, job.counted.none, lambda one: _by_formula(one)[0]) + _dropped(job),
        _difference(job, job.counted.operators, lambda one: _by_formula(one)[1]),
    )


def _dropped(job: Job) -> Numbers:
    """Masks and results of a dropout of scores, split as heads are."""
    scores = 0.0 if job.counted is None else job.counted.dropped_scores
    return scores / (1 if job.whole_attention else np.asarray(job.layouts.tp))


def _difference(job: Job, found: Kept, formula: Callable[[Job], Numbers]) -> Numbers:
    """What a count has besides a formula, which drops where the counted model does. More is as
    norms are, which only sequence parallelism splits; less, as the formula itself; scores are split
    as heads are.
    """
    assert job.counted is not None
    alike = (
        {}
        if job.counted.dropping
        else {"dropout": 0, "attention_dropout": 0, "embedding_dropout": 0}
    )
    bare = replace(job, model=replace(job.model, **alike))
    here = formula(bare)
    one = formula(replace(bare, layouts=Layouts(), whole_attention=False))
    more = found.linear - one
    scores = found.scores / (1 if job.whole_attention else np.asarray(job.layouts.tp))
    return (
        np.where(more > 0, more * _widths(job).hidden / job.model.hidden, more * here / one)
        + scores
    )


def _by_formula(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """The same by sizes alone."""
    at = job.layouts
    a = _widths(job)
    h = job.model.hidden
    tp = at.tp
    b = job.element_bytes
    sharded = np.asarray(at.sp) > 0
    several = np.asarray(tp) > 1
    residual = b * a.hidden
    none = _attention_kept(job) + _mlp_kept(job)
    each = products_of(job.model)
    # its products are none of those that are kept
    core = np.where(job.attention_in_parts, 0, b * a.query + 4 * a.heads)
    one = residual + b * (kept_columns(each.attention) + kept_columns(each.dense)) + core
    if job.whole_attention:
        operators = residual + b * a.inner + core
    else:
        operators = (
            residual
            + b * (a.query + a.key + a.inner)
            + core
            + np.where(sharded, b * h * each.dense[-1].kept, 0)
        )
    return none, np.where(several, operators, one), residual


def logits_bytes(job: Job) -> Numbers:
    """Head and loss at their peak. Whole: float32 log-probabilities and two gradients of them.
    Split over tp: the logits, them in float32, less their largest, exponentials. A loss in chunks
    has those of one, and the gradient of what goes into the head.
    """
    tp = np.asarray(job.layouts.tp)
    tokens = job.tokens
    in_chunks = np.asarray(job.layouts.loss_chunk) > 0
    logits = np.where(tp > 1, 14 / tp, 12) * job.model.vocab * job.loss_tokens
    return (
        logits
        + (_norm_kept(job) + np.where(in_chunks, job.element_bytes * job.model.hidden, 0)) * tokens
    )


def head_sums_bytes(job: Job, *, width: Numbers) -> Numbers:
    """For an element of the head: its gradient of a chunk, and the sum of those before in float32.
    Nothing where there is one chunk.
    """
    return np.where(job.loss_tokens < job.tokens, width + 4, 0)


def kept_head_gradient_bytes(job: Job, *, width: Numbers) -> Numbers:
    """Return the bytes of the head's gradient per element that exist from the forward to the
    backward.

    Only a chunked loss computes this gradient in the forward. A sum over several chunks is in
    float32.
    """
    is_chunked = np.asarray(job.layouts.loss_chunk) > 0
    has_several_chunks = job.loss_tokens < job.tokens
    return np.where(is_chunked, np.where(has_several_chunks, 4, width), 0)


def _has_layer_norms(job: Job) -> Numbers:
    return np.isin(np.asarray(job.model.model_type), _LAYER_NORMS)


def _norm_kept(job: Job) -> Numbers:
    """By a norm and the product behind it."""
    b = job.element_bytes
    return np.where(_has_layer_norms(job), b, 4 + b) * _widths(job).hidden + b * job.model.hidden


def _mask(job: Job) -> Numbers:
    """Bytes a token of a dropout's mask: a byte an element by torch's kernel for GPUs; on CPU cores
    in the dtype of computation.
    """
    return (
        np.where(reduces_on_host(job), job.element_bytes, 1)
        * job.model.dropout
        * _widths(job).hidden
    )


def embedding_mask(job: Job) -> Numbers:
    """The same behind the embedding."""
    return (
        np.where(reduces_on_host(job), job.element_bytes, 1)
        * job.model.embedding_dropout
        * _widths(job).hidden
    )


def _scores(job: Job) -> Numbers:
    """Attention's scores a token, where they are in memory."""
    return np.where(job.attention_in_parts, _widths(job).heads * job.sequence, 0)


def _attention_kept(job: Job) -> Numbers:
    """By the first norm and attention, the block's input and a dropout's mask included. In parts
    attention is computed in float32, and keeps the softmax, and with a dropout its mask and its
    result.
    """
    model = job.model
    a = _widths(job)
    b = job.element_bytes
    several = np.asarray(job.layouts.tp) > 1
    drops = np.asarray(model.attention_dropout) > 0
    in_parts = np.where(drops, 12, 4) * _scores(job) + np.where(
        job.attention_in_parts, b * (a.query + 2 * a.key) - 4 * a.heads, 0
    )
    # queries, keys and values are gathered, and attention's output is split
    if job.whole_attention:
        kept = (
            _norm_kept(job)
            + 2 * b * (a.query + a.key)
            + 4 * a.heads
            + np.where(several, b * a.query / job.layouts.tp, 0)
        )
    else:
        kept = _norm_kept(job) + (2 * b + (4 + b) * model.qk_norm) * (a.query + a.key) + 4 * a.heads
        # there the output is kept in two orders
        kept = kept + np.where(np.asarray(job.layouts.cp) > 1, b * a.query, 0)
    # values are a part of what was made with queries and keys
    kept = kept + np.where(turns_fused(model), b * (a.query + a.key), 0)
    return kept + in_parts + _mask(job)


def _mlp_kept(job: Job) -> Numbers:
    """By the second norm and the MLP, a dropout's mask included."""
    names = np.asarray(job.model.activation)
    ungated = np.select([names == name for name in _ONE_KERNEL], list(_ONE_KERNEL.values()), 10)
    inner = np.where(np.asarray(job.model.gated) > 0, 8, ungated)
    return _norm_kept(job) + inner * job.element_bytes / 2 * _widths(job).inner + _mask(job)


def block_backward(job: Job) -> tuple[Working, ...]:
    """The points of a block's backward that may be its peak: the MLP's product, the second norm,
    attention, the first norm.
    """
    points = _points(job)
    if job.counted is None:
        return points
    more = _difference(job, job.counted.working, _most) + _dropped(job)
    return tuple(replace(point, token_bytes=point.token_bytes + more) for point in points)


def _most(job: Job) -> Numbers:
    most: Numbers = np.max(
        np.broadcast_arrays(*(point.token_bytes for point in _points(job))), axis=0
    )
    return most


def _points(job: Job) -> tuple[Working, ...]:
    """The same by sizes alone."""
    model = job.model
    a = _widths(job)
    h = model.hidden
    wide = job.element_bytes / 2
    kept = _attention_kept(job)
    matrices = np.where(np.asarray(model.gated) > 0, 3, 2) * h * a.inner
    norm = np.where(_has_layer_norms(job), 8, 26) * wide * a.hidden
    every = model.block_parameters / model.layers / job.layouts.tp
    return (
        Working(
            kept + _mlp_kept(job) - _mask(job) + wide * (4 * a.inner + 2 * a.hidden), h * a.inner
        ),
        Working(kept + norm, matrices),
        Working(
            kept + 2 * wide * a.hidden + _attention_backward(job),
            matrices + h * model.heads * model.head_dim / job.layouts.tp,
        ),
        Working(norm, every),
    )


def _attention_backward(job: Job) -> Numbers:
    """Bytes a token while attention's gradients are made. Between the parts of sequences they are
    added up in float32: of keys and values of the full sequence, which are gathered, or of a part,
    of which the next one arrives.
    """
    a = _widths(job)
    cp = np.asarray(job.layouts.cp)
    whole = 2 * job.element_bytes * (a.query + a.key) + 4 * _scores(job)
    # The kernel of a CPU takes one key-value head per query head, so that gradients of the gathered
    # keys and values are as wide as the queries until they are summed per group. Fitted to dry runs
    # of Llama and Qwen3 at cp 4 and 8.
    key_gradients = np.where(reduces_on_host(job), a.query, a.key)
    gathered = (6 * key_gradients + 18 * a.key) * cp + 6.6 * a.key - 3 * a.query
    ring = 6 * a.query + 32 * a.key
    ulysses = 8 * a.query + 16 * a.key
    return np.where(
        cp > 1,
        np.choose(np.asarray(job.layouts.context), np.broadcast_arrays(gathered, ring, ulysses)),
        whole,
    )


def kept_while_recomputed(job: Job) -> tuple[Numbers, Numbers]:
    """(operators, full): bytes a token of what a block keeps in that mode and has no more use for
    once it has been computed again: its input, and results of products that something was made of.
    """
    model = job.model
    a = _widths(job)
    each = products_of(job.model)
    b = job.element_bytes
    # layer norms keep theirs in either case
    input_ = np.where(_has_layer_norms(job), 0, b * a.hidden)
    separate = np.asarray(each.attention[2].columns) > 0
    queries = np.where(separate, b * a.query, 0)
    in_parts = b * np.where(
        job.attention_in_parts, a.query + 2 * a.key - np.where(separate, a.query + a.key, 0), 0
    )
    # whose backward needs what it made
    rectified = np.where(np.asarray(model.activation) == "relu", b * a.inner, 0)
    return input_ + queries + in_parts + rectified + b * model.hidden * each.dense[-1].kept, input_


def deferred_bytes(job: Job) -> Numbers:
    """Bytes a token that a block holds besides what it kept, from the backward of its input to that
    of its weights: gradients of what its products and norms made.
    """
    a = _widths(job)
    return job.element_bytes / 2 * (4 * a.inner + 2 * a.query + 4 * a.key + 12 * a.hidden)


def deferred_bytes_of_ends(job: Job) -> Numbers:
    """The same of head and last norm: the logits' gradient, what the norm kept, and as much of its
    gradients.
    """
    # whose loss computes the gradients of the head's weights with those of its input
    in_chunks = np.asarray(job.layouts.loss_chunk) > 0
    return np.where(
        in_chunks, 0, job.element_bytes * job.model.vocab / job.layouts.tp
    ) + 2 * _norm_kept(job)


def kept_of_ends(job: Job) -> Numbers:
    """Bytes a token that loss and last norm keep for their backward."""
    logits = np.where(
        np.asarray(job.layouts.loss_chunk) > 0, 0, 4 * job.model.vocab / job.layouts.tp
    )
    return logits + _norm_kept(job)


def last_norm_backward(job: Job) -> Numbers:
    """Bytes a token while the gradient passes the norm before the head."""
    return np.where(_has_layer_norms(job), 6, 24) * job.element_bytes / 2 * _widths(job).hidden


def reduces_on_host(job: Job) -> Numbers:
    """Whether reduce-scatter is an all-to-all and a sum, which takes a second buffer: gloo's, for
    processes without GPUs.
    """
    return np.asarray(job.device.family) == FAMILIES.index("cpu")

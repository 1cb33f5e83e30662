"""Formulas for the activation memory of uncompiled Transformers blocks, in bytes.

They cover the tensors that the forward saves and the peak of the backward, and depend on
recomputation, tp, sp and cp. They are derived from `dryrun.dry_model` and the single-rank dry run,
which execute the model on fake tensors. Tests compare the formulas with these runs. All bytes per
token are for one rank.

For example, these bytes are saved per element of 16-bit hidden states: an eager RMS norm saves its
input in float32 and the normalized values in 16 bits (6), torch's layer norm kernel saves its input
(2), and sequence parallelism saves the gathered inputs of matrix multiplications (4).

"Counted bytes" were measured by a run on fake tensors (`plait.planner.built.counted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from plait.planner.architecture import products_of, rotates_fused_output, saved_columns
from plait.planner.built import CountedBytes, SavedBytes
from plait.planner.hardware import DEVICE_FAMILIES, Numbers
from plait.planner.job import Job, Layouts

_LAYER_NORMS = (
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
    "persimmon",
    "stablelm",
    "nemotron",
    "jais2",
)
"""Families whose norms are torch's layer norm kernel."""
_FUSED_ACTIVATIONS = {
    "relu": 2,
    "relu2": 4,
    "gelu": 4,
    "gelu_pytorch_tanh": 4,
    "gelu_python_tanh": 4,
}
"""Saved bytes per element of 16 bits for activation functions of one or two kernels.

They include the input of the product that follows. GPT-2's GELU, written in five steps, saves 10.
"""


@dataclass(frozen=True)
class BackwardMoment:
    """Memory at one point in time of a block's backward."""

    token_bytes: Numbers
    """Bytes per token of activations and of their gradients."""
    weights: Numbers
    """Number of elements of weights that have gradients."""


@dataclass(frozen=True)
class _Widths:
    """Sizes of a block's activations on one rank, in elements per token."""

    hidden: Numbers
    """Elements of hidden states, which sequence parallelism shards."""
    query: Numbers
    key: Numbers
    inner: Numbers
    heads: Numbers


def _widths(job: Job) -> _Widths:
    model = job.model
    tp = np.asarray(job.layouts.tp)
    attention_tp = np.asarray(job.attention_tp)
    return _Widths(
        hidden=model.hidden / np.where(np.asarray(job.layouts.sp) > 0, tp, 1),
        query=model.heads * model.head_dim / attention_tp,
        # With fewer key and value heads than ranks, each rank computes one.
        key=np.maximum(model.kv_heads / attention_tp, 1) * model.head_dim,
        inner=model.ffn / tp,
        heads=model.heads / attention_tp,
    )


def hidden_width(job: Job) -> Numbers:
    """Return the elements per token of the hidden states between blocks."""
    return _widths(job).hidden


def saved_bytes(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """Return the bytes per token that a block saves for backward, per mode of recomputation.

    The result is (bytes with mode none, with operators, with full).
    """
    none, operators, full = _by_formula(job)
    counted = job.counted
    if counted is None:
        return none, operators, full
    more_none = _difference(job, counted.none, lambda variant: _by_formula(variant)[0])
    more_operators = _difference(job, counted.operators, lambda variant: _by_formula(variant)[1])
    return (
        none + (more_none + _dropout_of_scores(job, counted)),
        operators + more_operators,
        full * counted.full / (job.element_bytes * job.model.hidden),
    )


def saved_by_recomputation(job: Job) -> tuple[Numbers, Numbers]:
    """Return the bytes that a block saves per micro-batch.

    Returns:
        (bytes without recomputation, bytes with the layout's recomputation).
    """
    none, operators, full = (np.asarray(value) * job.tokens for value in saved_bytes(job))
    mixed = full + job.layouts.kept_operators * (operators - full)
    # In the order of RECOMPUTE. Recomputing only the core of attention, which is one kernel, frees
    # almost nothing.
    kind = np.asarray(job.layouts.recompute).astype(int)
    return none, np.choose(kind, np.broadcast_arrays(none, none, full, operators, mixed))


def _dropout_of_scores(job: Job, counted: CountedBytes) -> Numbers:
    """Return the bytes per token of the masks and outputs of dropout on attention scores."""
    return counted.dropped_scores / np.asarray(job.attention_tp)


def _difference(job: Job, counted: SavedBytes, formula: Callable[[Job], Numbers]) -> Numbers:
    """Return the measured bytes of a block minus those of a formula, on one rank of the layout.

    Bytes are measured on fake tensors without parallelism and then scaled to the layout. A positive
    difference is attributed to norms, which only sequence parallelism shards. A negative difference
    scales like the formula. Attention scores are sharded like the heads. The formula includes
    dropout only if the model was counted with dropout.
    """
    assert job.counted is not None
    comparable = job
    if not job.counted.dropping:
        without_dropout = {"dropout": 0, "attention_dropout": 0, "embedding_dropout": 0}
        comparable = replace(job, model=replace(job.model, **without_dropout))
    local = formula(comparable)
    single_rank = formula(replace(comparable, layouts=Layouts(), replicates_attention=False))
    more = counted.linear - single_rank
    scores = counted.scores / np.asarray(job.attention_tp)

    by_width = more * _widths(job).hidden / job.model.hidden
    return np.where(more > 0, by_width, more * local / single_rank) + scores


def _by_formula(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """Compute `saved_bytes` from the sizes of the model."""
    widths = _widths(job)
    element = job.element_bytes
    residual = element * widths.hidden
    block_products = products_of(job.model)

    # Products inside attention are never saved, so they do not count as every second one.
    core = np.where(job.attention_in_parts, 0, element * widths.query + 4 * widths.heads)
    single_rank = (
        residual
        + element * (saved_columns(block_products.attention) + saved_columns(block_products.dense))
        + core
    )
    if job.replicates_attention:
        operators = residual + element * widths.inner + core
    else:
        sharded = np.asarray(job.layouts.sp) > 0
        operators = (
            residual
            + element * (widths.query + widths.key + widths.inner)
            + core
            + np.where(sharded, element * job.model.hidden * block_products.dense[-1].is_saved, 0)
        )

    return (
        _attention_saved(job) + _mlp_saved(job),
        np.where(np.asarray(job.layouts.tp) > 1, operators, single_rank),
        residual,
    )


def logits_bytes(job: Job) -> Numbers:
    """Return the peak bytes of the head and the loss.

    Without tp these are the float32 log-probabilities and two gradients of the same size. With tp
    they are the logits, a float32 copy, the differences to the largest logit, and the exponentials.
    A chunked loss has these tensors for one chunk only, and additionally has the gradient of the
    head's input.
    """
    tp = np.asarray(job.layouts.tp)
    logits = np.where(tp > 1, 14 / tp, 12) * job.model.vocab * job.loss_tokens
    gradient = np.where(_in_chunks(job), job.element_bytes * job.model.hidden, 0)
    return logits + (_norm_saved(job) + gradient) * job.tokens


def _in_chunks(job: Job) -> Numbers:
    return np.asarray(job.layouts.loss_chunk) > 0


def head_sums_bytes(job: Job, *, width: Numbers) -> Numbers:
    """Return the gradient bytes per element of the head's weight during a chunked loss.

    With several chunks these are the gradient of one chunk and the float32 sum over earlier chunks.
    The result is 0 for a single chunk.
    """
    return np.where(job.loss_tokens < job.tokens, width + 4, 0)


def head_gradient_bytes(job: Job, *, width: Numbers) -> Numbers:
    """Return the bytes per element of the head's gradient between the forward and the backward.

    Only a chunked loss computes this gradient in the forward; the result is 0 otherwise. With
    several chunks the gradient is a float32 sum.
    """
    has_several_chunks = job.loss_tokens < job.tokens
    return np.where(_in_chunks(job), np.where(has_several_chunks, 4, width), 0)


def _has_layer_norms(job: Job) -> Numbers:
    return np.isin(np.asarray(job.model.model_type), _LAYER_NORMS)


def _norm_saved(job: Job) -> Numbers:
    """Return the bytes per token that a norm and the following linear layer save for backward."""
    element = job.element_bytes
    return (
        np.where(_has_layer_norms(job), element, 4 + element) * _widths(job).hidden
        + element * job.model.hidden
    )


def _mask(job: Job) -> Numbers:
    """Return the bytes per token of a dropout mask in a block."""
    return _mask_element(job) * job.model.dropout * _widths(job).hidden


def embedding_mask(job: Job) -> Numbers:
    """Return the bytes per token of the dropout mask after the embedding."""
    return _mask_element(job) * job.model.embedding_dropout * _widths(job).hidden


def _mask_element(job: Job) -> Numbers:
    # torch's kernel for GPUs has one byte per element. On CPU cores the mask has the dtype of
    # computation.
    return np.where(reduces_on_host(job), job.element_bytes, 1)


def _scores(job: Job) -> Numbers:
    """Return the number of attention scores per token, or 0 with a fused attention kernel."""
    return np.where(job.attention_in_parts, _widths(job).heads * job.sequence, 0)


def _attention_saved(job: Job) -> Numbers:
    """Return the bytes per token that the first norm and attention save.

    They include the input of the block and the dropout mask. Attention without a fused kernel runs
    in float32. It saves the output of the softmax, and with dropout also the mask and the output of
    dropout.
    """
    model = job.model
    widths = _widths(job)
    element = job.element_bytes
    several = np.asarray(job.layouts.tp) > 1
    drops = np.asarray(model.attention_dropout) > 0
    in_parts = np.where(drops, 12, 4) * _scores(job) + np.where(
        job.attention_in_parts, element * (widths.query + 2 * widths.key) - 4 * widths.heads, 0
    )

    # Queries, keys and values are gathered, and the output of attention is split.
    if job.replicates_attention:
        saved = (
            _norm_saved(job)
            + 2 * element * (widths.query + widths.key)
            + 4 * widths.heads
            + np.where(several, element * widths.query / job.layouts.tp, 0)
        )
    else:
        saved = (
            _norm_saved(job)
            + (2 * element + (4 + element) * model.qk_norm) * (widths.query + widths.key)
            + 4 * widths.heads
        )
        # With context parallelism the output is saved in two orders.
        saved = saved + np.where(np.asarray(job.layouts.cp) > 1, element * widths.query, 0)

    # Values are a view of the fused product, which is saved as a whole.
    saved = saved + np.where(rotates_fused_output(model), element * (widths.query + widths.key), 0)
    return saved + in_parts + _mask(job)


def _mlp_saved(job: Job) -> Numbers:
    """Return the bytes per token that the second norm, the MLP and its dropout save."""
    names = np.asarray(job.model.activation)
    ungated = np.select(
        [names == name for name in _FUSED_ACTIVATIONS], list(_FUSED_ACTIVATIONS.values()), 10
    )
    inner = np.where(np.asarray(job.model.gated) > 0, 8, ungated)
    return _norm_saved(job) + inner * job.element_bytes / 2 * _widths(job).inner + _mask(job)


def block_backward(job: Job) -> tuple[BackwardMoment, ...]:
    """Return the memory at the four points of a block's backward that may be its peak.

    They are the backwards of the MLP's down projection, the second norm, attention, and the first
    norm.
    """
    points = _points(job)
    if job.counted is None:
        return points
    more = _difference(job, job.counted.working, _most) + _dropout_of_scores(job, job.counted)
    return tuple(replace(point, token_bytes=point.token_bytes + more) for point in points)


def _most(job: Job) -> Numbers:
    points = np.broadcast_arrays(*(point.token_bytes for point in _points(job)))
    return np.max(points, axis=0)


def _points(job: Job) -> tuple[BackwardMoment, ...]:
    """Compute `block_backward` from the sizes of the model."""
    model = job.model
    widths = _widths(job)
    wide = job.element_bytes / 2
    saved = _attention_saved(job)
    matrices = np.where(np.asarray(model.gated) > 0, 3, 2) * model.hidden * widths.inner
    norm = np.where(_has_layer_norms(job), 8, 26) * wide * widths.hidden

    return (
        BackwardMoment(
            saved + _mlp_saved(job) - _mask(job) + wide * (4 * widths.inner + 2 * widths.hidden),
            model.hidden * widths.inner,
        ),
        BackwardMoment(saved + norm, matrices),
        BackwardMoment(
            saved + 2 * wide * widths.hidden + _attention_backward(job),
            matrices + model.hidden * model.heads * model.head_dim / job.layouts.tp,
        ),
        BackwardMoment(norm, model.block_parameters / model.layers / job.layouts.tp),
    )


def _attention_backward(job: Job) -> Numbers:
    """Return the bytes per token that the backward of attention needs.

    With context parallelism the gradients of keys and values are summed in float32. With
    all-gather-kv they cover the full sequence. In a ring they cover one shard of the sequence while
    the next shard arrives.
    """
    widths = _widths(job)
    cp = np.asarray(job.layouts.cp)
    without_cp = 2 * job.element_bytes * (widths.query + widths.key) + 4 * _scores(job)

    # The kernel of a CPU takes one key-value head per query head, so that gradients of the gathered
    # keys and values are as wide as the queries until they are summed per group. Fitted to dry runs
    # of Llama and Qwen3 at cp 4 and 8.
    key_gradients = np.where(reduces_on_host(job), widths.query, widths.key)
    gathered = (6 * key_gradients + 18 * widths.key) * cp + 6.6 * widths.key - 3 * widths.query
    ring = 6 * widths.query + 32 * widths.key
    ulysses = 8 * widths.query + 16 * widths.key
    return np.where(
        cp > 1,
        np.choose(np.asarray(job.layouts.context), np.broadcast_arrays(gathered, ring, ulysses)),
        without_cp,
    )


def spent_while_recomputed(job: Job) -> tuple[Numbers, Numbers]:
    """Return the saved bytes per token that are not needed once a block has been recomputed.

    These bytes nevertheless stay in memory during the block's backward.

    Returns:
        (bytes for recomputation of operators, bytes for full recomputation). The first are those of
        the block's input and of some outputs of matrix multiplications, the second only those of
        the input.
    """
    widths = _widths(job)
    block_products = products_of(job.model)
    element = job.element_bytes

    # Layer norms still need the input.
    input_ = np.where(_has_layer_norms(job), 0, element * widths.hidden)
    separate = np.asarray(block_products.attention[2].columns) > 0
    queries = np.where(separate, element * widths.query, 0)
    in_parts = element * np.where(
        job.attention_in_parts,
        widths.query + 2 * widths.key - np.where(separate, widths.query + widths.key, 0),
        0,
    )

    # The backward of ReLU uses its output and not its input.
    rectified = np.where(np.asarray(job.model.activation) == "relu", element * widths.inner, 0)
    down = element * job.model.hidden * block_products.dense[-1].is_saved
    return input_ + queries + in_parts + rectified + down, input_


def deferred_bytes(job: Job) -> Numbers:
    """Return the bytes per token that a block keeps between the two halves of a split backward.

    These are the output gradients of the block's matrix multiplications and norms, in addition to
    the block's saved tensors.
    """
    widths = _widths(job)
    return (
        job.element_bytes
        / 2
        * (4 * widths.inner + 2 * widths.query + 4 * widths.key + 12 * widths.hidden)
    )


def deferred_bytes_of_ends(job: Job) -> Numbers:
    """Return the bytes per token of the head and last norm between the halves of a split backward.

    These are the gradient of the logits, the norm's saved tensors, and gradients of the norm that
    are as large as its saved tensors.
    """
    # A chunked loss computes the gradients of the head's weights in the forward.
    logits = job.element_bytes * job.model.vocab / job.layouts.tp
    return np.where(_in_chunks(job), 0, logits) + 2 * _norm_saved(job)


def saved_by_ends(job: Job) -> Numbers:
    """Return the bytes per token that the loss and the last norm save for the backward."""
    return np.where(_in_chunks(job), 0, 4 * job.model.vocab / job.layouts.tp) + _norm_saved(job)


def last_norm_backward(job: Job) -> Numbers:
    """Return the bytes per token that the backward of the model's last norm needs."""
    return np.where(_has_layer_norms(job), 6, 24) * job.element_bytes / 2 * _widths(job).hidden


def reduces_on_host(job: Job) -> Numbers:
    """Return True on CPU devices, where gloo implements reduce-scatter as an all-to-all and a sum.

    This needs a second buffer.
    """
    return np.asarray(job.device.family) == DEVICE_FAMILIES.index("cpu")

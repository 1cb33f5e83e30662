"""What Plait's own blocks, those of Transformers without compilation, hold on a rank: what they keep for the backward, and what the
backward of a block needs besides, by recomputation, tp and sp.

Derived from `dryrun.dry_model` and the single-rank dry run, which run the model on fake tensors; tests compare them. Eager RMS norms keep
their input in float32 and the normalised in 16 bits (6 a norm), and sequence parallelism keeps the gathered inputs of products (4 a hidden
element).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.hardware import FAMILIES, Numbers
from plait.planner.job import Job


@dataclass(frozen=True)
class Working:
    """A point of a block's backward: bytes per token of activations and their gradients, and gradients of so many elements of its
    weights."""

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
    model, tp = job.model, np.asarray(job.layouts.tp)
    whole = 1 if job.whole_attention else tp
    return _Widths(
        hidden=model.hidden / np.where(np.asarray(job.layouts.sp) > 0, tp, 1),
        query=model.heads * model.head_dim / whole,
        key=np.maximum(model.kv_heads / whole, 1) * model.head_dim,  # fewer heads than ranks: each rank computes one
        inner=model.ffn / tp,
        heads=model.heads / whole,
    )


def hidden_width(job: Job) -> Numbers:
    """Elements a token of what passes between blocks, on one rank."""
    return _widths(job).hidden


def kept_bytes(job: Job) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """(none, operators, full, logits) for a token: what a block keeps in each mode, and head and loss at their peak."""
    model, at, a = job.model, job.layouts, _widths(job)
    h, tp = model.hidden, at.tp
    sharded, several = np.asarray(at.sp) > 0, np.asarray(tp) > 1
    residual = 2 * a.hidden
    none = _attention_kept(job) + _mlp_kept(job)
    if job.whole_attention:
        operators = np.where(
            several, residual + 2 * a.query + 4 * a.heads + 2 * a.inner, 4 * h + 4 * a.query + 2 * a.key + 2 * a.inner + 4 * a.heads
        )
    else:
        split = 4 * a.query + 2 * a.key + 2 * a.inner + 4 * a.heads
        operators = split + np.where(several, residual + np.where(sharded, 2 * h, 0), 4 * h)
    # Whole: float32 log-probabilities and two gradients of them. Split: the logits, them in float32, less their largest, exponentials.
    logits = np.where(several, 14 / tp, 12) * model.vocab + _norm_kept(job)
    return none, operators, residual, logits


def _norm_kept(job: Job) -> Numbers:
    """By a norm and the product behind it: GPT-2's layer norms compute in 16 bits."""
    return (2 if job.whole_attention else 6) * _widths(job).hidden + 2 * job.model.hidden


def _attention_kept(job: Job) -> Numbers:
    """By the first norm and attention, the block's input included."""
    model, a = job.model, _widths(job)
    several = np.asarray(job.layouts.tp) > 1
    if job.whole_attention:  # queries, keys and values are gathered, and attention's output is split
        return _norm_kept(job) + 8 * a.query + 4 * a.heads + np.where(several, 2 * a.query / job.layouts.tp, 0)
    return _norm_kept(job) + 4 * a.query + 4 * a.key + 4 * a.heads + 6 * model.qk_norm * (a.query + a.key)


def _mlp_kept(job: Job) -> Numbers:
    """By the second norm and the MLP."""
    return _norm_kept(job) + (10 if job.whole_attention else 8) * _widths(job).inner  # GPT-2: a GELU written out in five steps


def block_backward(job: Job) -> tuple[Working, ...]:
    """The points of a block's backward that may be its peak: the MLP's product, the second norm, attention, the first norm."""
    model, a = job.model, _widths(job)
    h = model.hidden
    kept, matrices = _attention_kept(job), np.where(np.asarray(model.gated) > 0, 3, 2) * h * a.inner
    norm = 8 * a.hidden if job.whole_attention else 26 * a.hidden
    every = model.block_parameters / model.layers / job.layouts.tp
    return (
        Working(kept + _mlp_kept(job) + 4 * a.inner + 2 * a.hidden, h * a.inner),
        Working(kept + norm, matrices),
        Working(kept + 2 * a.hidden + 4 * a.query + 4 * a.key, matrices + h * model.heads * model.head_dim / job.layouts.tp),
        Working(norm, every),
    )


def kept_while_recomputed(job: Job) -> tuple[Numbers, Numbers]:
    """(operators, full): bytes a token of what a block keeps in that mode and has no more use for once it has been computed again: its
    input, and results of products that something was made of."""
    if job.whole_attention:  # layer norms keep their input in either case
        return 0.0, 0.0
    a = _widths(job)
    return 2 * a.query + 2 * a.hidden + 2 * job.model.hidden, 2 * a.hidden


def deferred_bytes(job: Job) -> Numbers:
    """Bytes a token that a block holds besides what it kept, from the backward of its input to that of its weights: gradients of what its
    products and norms made."""
    a = _widths(job)
    return 4 * a.inner + 2 * a.query + 4 * a.key + 12 * a.hidden


def deferred_bytes_of_ends(job: Job) -> Numbers:
    """The same of head and last norm: the logits' gradient, what the norm kept, and as much of its gradients."""
    return 2 * job.model.vocab / job.layouts.tp + 2 * _norm_kept(job)


def kept_of_ends(job: Job) -> Numbers:
    """Bytes a token that loss and last norm keep for their backward."""
    model, a = job.model, _widths(job)
    return 4 * model.vocab / job.layouts.tp + (2 if job.whole_attention else 6) * a.hidden + 2 * model.hidden


def last_norm_backward(job: Job) -> Numbers:
    """Bytes a token while the gradient passes the norm before the head."""
    return (6 if job.whole_attention else 24) * _widths(job).hidden


def reduces_on_host(job: Job) -> Numbers:
    """Whether reduce-scatter is an all-to-all and a sum, which takes a second buffer: gloo's, for processes without GPUs."""
    return np.asarray(job.device.family) == FAMILIES.index("cpu")

"""What Plait's own blocks, those of Transformers without compilation, keep for the backward: bytes a token, by recomputation, tp and sp.

Counted from `engine.dryrun`, which runs the model on fake tensors; tests hold the two together. Eager RMS norms keep their input in float32
and the normalised in 16 bits (6 a norm), and sequence parallelism keeps the gathered inputs of products (4 a hidden element).
"""

from __future__ import annotations

import numpy as np

from plait.planner.hardware import Numbers
from plait.planner.job import Job


def kept_bytes(job: Job) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """(none, operators, full, logits) for a token: what a block keeps in each mode, and head and loss at their peak."""
    model, at = job.model, job.layouts
    h, width, kv, ffn, heads = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.ffn, model.heads
    tp = at.tp
    sharded = np.asarray(at.sp) > 0
    several = np.asarray(tp) > 1
    residual = 2 * h / np.where(sharded, tp, 1)
    if job.whole_attention:  # GPT-2: layer norms in 16 bits, and a GELU written out in five steps
        none = 8 * h / np.where(sharded, tp, 1) + 8 * width + 4 * heads + 10 * ffn / tp + np.where(several, 2 * width / tp, 0)
        operators = np.where(several, residual + 2 * width + 4 * heads + 2 * ffn / tp, 4 * h + 4 * width + 2 * kv + 2 * ffn + 4 * heads)
    else:
        norms = np.where(sharded, 12 * h / tp + 4 * h, 16 * h)
        none = norms + (4 * width + 4 * kv + 8 * ffn + 4 * heads + 6 * model.qk_norm * (width + kv)) / tp
        split = (4 * width + 2 * kv + 2 * ffn + 4 * heads) / tp
        operators = split + np.where(several, residual + np.where(sharded, 2 * h, 0), 4 * h)
    last_norm = 4 * h if job.whole_attention else np.where(sharded, 6 * h / tp + 2 * h, 8 * h)
    logits = (10 / tp + 2) * model.vocab + last_norm
    return none, operators, residual, logits

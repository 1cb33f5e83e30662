"""Seconds of a layer and of the head on one device.

The seconds are sums over matrix multiplications ("products"), attention, element-wise kernels, and
kernel launches by the host. They are closed-form expressions over arrays of candidates. The time of
a product is its FLOPs, rounded up to full waves of tiles, divided by the FLOP/s that kernels reach,
plus the time to start and end the kernel (`ramp`). It is at least the product's bytes divided by
the memory bandwidth. Values are for the forward unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.parallel.context.families import WITH_CAPPED_SCORES
from plait.planner.architecture import Products, products_of, recomputed_share
from plait.planner.constants import Rates
from plait.planner.hardware import PRECISIONS, Numbers
from plait.planner.job import ATTENTION, RECOMPUTE, Job, recompute_share

_TILE = (128, 256)
"""Rows and columns of a product per multiprocessor: the usual tile of cuBLAS since Ampere."""
_RANDOM = 56
"""Bytes that pass through memory while a CPU core draws a random number: 5.6 ns at 10 GB/s."""
_FP8 = PRECISIONS.index("fp8")
_FP4 = PRECISIONS.index("fp4")


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer for one micro-batch on one rank."""

    products: Numbers
    attention: Numbers
    elementwise: Numbers
    host: Numbers
    """Seconds to launch the forward."""
    products_backward: Numbers
    attention_backward: Numbers
    elementwise_backward: Numbers
    again: Numbers
    """Seconds of recomputation in the backward."""

    @property
    def forward(self) -> Numbers:
        """Seconds of the forward on the device."""
        return self.products + self.attention + self.elementwise

    @property
    def backward(self) -> Numbers:
        """Seconds of the backward on the device, including recomputation."""
        return (
            self.products_backward
            + self.attention_backward
            + self.elementwise_backward
            + self.again
        )


def layer_cost(job: Job, rates: Rates) -> LayerCost:
    """Return the cost of a layer, averaged over dense layers and layers with experts."""
    model = job.model
    layouts = job.layouts
    tokens = job.tokens
    tp = layouts.tp
    block_products = products_of(model)
    scale = model.products_counted
    projections, projections_again = _projections(job, rates, block_products)
    share = model.expert_layers / model.layers
    last = scale * (1 - share) * _product(job, rates, tokens, model.ffn / tp, model.hidden)
    dense = (
        scale
        * (1 - share)
        * _product(job, rates, tokens, model.hidden, (1 + model.gated) * model.ffn / tp)
        + last
    )
    experts, experts_again = _experts(job, rates, block_products, share)
    products = scale * projections + dense + experts
    attention, attention_backward = _attention(job, rates)
    elementwise = _elementwise(job, rates)
    full = products + attention + elementwise - job.stops_early * last

    # torch's checkpoint and XLA do not compute operators again whose results no backward needs.
    dense_again = recomputed_share(block_products.dense, without_last=~job.needs_last) * dense
    operators = (
        scale * projections_again
        + dense_again
        + experts_again
        + elementwise
        + np.where(job.attention_in_parts, attention, 0.0)
    )
    kind = np.asarray(layouts.recompute)
    again = np.select(
        [kind == RECOMPUTE.index(name) for name in RECOMPUTE[1:]],
        [
            attention,
            full,
            operators,
            layouts.kept_operators * operators + (1 - layouts.kept_operators) * full,
        ],
        0.0,
    )

    # Collectives of tensor parallelism are launched as well.
    launches = 1 + job.framework.tp_launches * (np.asarray(tp) > 1)
    hooks = job.framework.hook_seconds * (np.asarray(layouts.stage) == 3)
    host = (job.framework.host_seconds * launches + hooks) * rates["host"]
    return LayerCost(
        products=products,
        attention=attention,
        elementwise=elementwise,
        host=host,
        products_backward=2 * products,
        attention_backward=attention_backward,
        elementwise_backward=2 * elementwise,
        again=again * recompute_share(job),
    )


def _projections(job: Job, rates: Rates, block_products: Products) -> tuple[Numbers, Numbers]:
    """Return (seconds of attention's projections, seconds of their recomputation).

    The second value assumes that the output of every second product is saved. The latents of latent
    attention are shared by all heads, so every tp rank computes all latents. With sequence
    parallelism it computes them only for its shard of the sequence.
    """
    model = job.model
    tokens = job.tokens
    tp = job.layouts.tp
    (_, queries), (_, keys), (_, values), (width, _) = model.products_of_attention[1:]
    inputs = _product(job, rates, tokens, model.hidden, (queries + keys + values) / tp)
    last = _product(job, rates, tokens, width / tp, model.hidden)
    plain = inputs + last
    plain_again = recomputed_share(block_products.attention) * plain
    if not np.any(model.is_latent):
        return plain, plain_again
    shard = tokens / np.where(np.asarray(job.layouts.sp) > 0, tp, 1)
    parts = []
    for index, product in enumerate(block_products.attention[:-1]):
        # Compressed queries and the latent (0 and 2) are computed in full, for a sequence shard.
        # Queries, and keys with values (1 and 3), are computed for all tokens and a rank's heads.
        rows, split = (tokens, tp) if index % 2 else (shard, 1)
        seconds = _product(
            job, rates, rows, np.maximum(product.inner, 1), np.maximum(product.columns, 1) / split
        )
        parts.append(np.where(np.asarray(product.columns) > 0, seconds, 0.0))

    parts.append(last)
    again = sum(
        seconds * (1 - product.is_saved)
        for seconds, product in zip(parts, block_products.attention, strict=True)
    )
    return np.where(model.is_latent, sum(parts), plain), np.where(
        model.is_latent, again, plain_again
    )


def head_cost(job: Job, rates: Rates) -> Numbers:
    """Return the seconds of the head and the loss, forward and backward, per micro-batch.

    These are the seconds of three products in 16 bits, and of reading and writing the logits.
    """
    tokens = job.tokens
    columns = job.model.vocab / job.layouts.tp
    flops = 6 * tokens * job.model.hidden * columns
    seconds = flops / (job.other_flops * rates.by_family("gemm", job.device) * _speed(job, rates))
    # Each of the buffers is written and read.
    moved = 2 * job.framework.logits * tokens * columns
    return seconds + moved / (memory_rate(job, rates))


def optimizer_seconds(job: Job, rates: Rates, parameters: Numbers) -> Numbers:
    """Return the seconds of the optimizer step for `parameters` on a rank.

    The bytes of the optimizer states are divided by the bandwidth of the memory that stores them.
    """
    device = parameters * job.framework.step_bytes / (memory_rate(job, rates))
    # The host moves 30 bytes per parameter through its memory, which the devices of a node share.
    # Gradients are copied to the host and weights to the device.
    host = parameters * (30 / 20e9 + 6 / job.device.host_bandwidth)
    return rates["optimizer"] * ((1 - job.layouts.offload) * device + job.layouts.offload * host)


def kernel_seconds(job: Job, rates: Rates) -> Numbers:
    """Return the seconds that the start and the end of a GPU kernel take.

    The result is 0 on CPU cores, where this overhead is part of the host's time.
    """
    return np.where(job.device.on_cpu, 0.0, rates["ramp"])


def memory_rate(job: Job, rates: Rates) -> Numbers:
    """Return the memory bandwidth that element-wise kernels reach, in bytes/s."""
    return job.device.memory_bandwidth * rates.on("memory", job.device) / _contention(job, rates)


def accumulation_seconds(job: Job, rates: Rates, parameters: Numbers) -> Numbers:
    """Return the seconds per step that gradient accumulation over micro-batches takes.

    Every addition reads two gradients and writes their sum.
    """
    moved = (
        job.framework.accumulate_bytes * parameters * np.maximum(job.layouts.accumulation - 1, 0)
    )
    return moved / memory_rate(job, rates)


def _contention(job: Job, rates: Rates) -> Numbers:
    """Return the factor by which the processes on a machine slow each other down.

    The factor is 1 on GPUs, because only processes on CPU cores share their memory bandwidth.
    """
    together = np.minimum(job.layouts.world, job.device.devices_per_node)
    return np.where(job.device.on_cpu, np.power(together, rates["crowding.cpu"]), 1.0)


def _gemm_share(job: Job, rates: Rates) -> Numbers:
    precision = np.asarray(job.precision)
    low = np.where(
        precision == _FP8, rates["gemm.fp8"], np.where(precision == _FP4, rates["gemm.fp4"], 1.0)
    )
    return rates.by_family("gemm", job.device) * low * _speed(job, rates)


def _speed(job: Job, rates: Rates) -> Numbers:
    return rates["overall"] * rates.by_stack(job.framework) / _contention(job, rates)


def _product(job: Job, rates: Rates, rows: Numbers, inner: Numbers, columns: Numbers) -> Numbers:
    """Return the seconds of a matrix multiplication [rows, inner] x [inner, columns]."""
    tiles = np.ceil(rows / _TILE[0]) * np.ceil(columns / _TILE[1])
    waves = tiles / job.device.units

    # If a wave is poorly filled, libraries choose other tiles and split the inner dimension. About
    # half of the loss remains.
    filled = np.sqrt(waves / np.ceil(waves))
    flops = 2 * rows * inner * columns
    reached = job.linear_flops * _gemm_share(job, rates)
    seconds = flops / filled / reached + kernel_seconds(job, rates)
    moved = (
        job.element_bytes
        * (rows * inner + inner * columns + rows * columns)
        / (memory_rate(job, rates))
    )

    # A cast of the inputs reads 2 bytes and writes 1. Dynamic scaling reads 2 more to find the
    # largest element, and does both for the weights as well.
    dynamic = job.framework.dynamic_scaling
    casts = (
        np.isin(np.asarray(job.precision), (_FP8, _FP4))
        * inner
        * ((3 + 2 * dynamic) * rows + 5 * dynamic * columns)
    )
    return np.maximum(seconds, moved) + casts / memory_rate(job, rates)


def _experts(
    job: Job, rates: Rates, block_products: Products, share: Numbers
) -> tuple[Numbers, Numbers]:
    """Return (seconds of routed and shared experts, seconds of their recomputed products).

    The second value assumes that the output of every second product is saved. Products of experts
    with 1,536 and 2,048 columns reach half the speed of large products (SimuMax's table for B200);
    experts as wide as a dense MLP reach the speed of the dense MLP.
    """
    if not np.any(share):
        return 0.0, 0.0
    model = job.model
    tp = job.layouts.tp
    routed = (
        2 * job.tokens * model.active * (2 + model.gated) * model.hidden * model.expert_ffn / tp
    )
    shared = 2 * job.tokens * model.shared_parameters / tp
    columns = model.expert_ffn / tp
    reached = np.maximum(columns / (columns + 1700), 0.55)
    rate = job.linear_flops * _gemm_share(job, rates)

    # Tokens are permuted to their experts and back.
    moved = job.element_bytes * job.tokens * model.active * model.hidden * 8 / tp
    seconds = routed / reached / rate + moved / memory_rate(job, rates)
    return share * (seconds + shared / rate), share * (
        seconds + recomputed_share(block_products.shared) * shared / rate
    )


def _attention(job: Job, rates: Rates) -> tuple[Numbers, Numbers]:
    """Return the seconds of attention, as (forward, backward).

    A fused kernel computes the causal half of the scores, and the output from scores and values.
    Its backward computes the scores again, two gradients as wide as a key and two as wide as a
    value. Without a fused kernel all scores are computed, and written and read several times.
    """
    model = job.model
    tp = job.attention_tp
    widths = model.head_dim + model.value_width
    flops = 2 * job.tokens * job.sequence * model.heads * widths / tp
    reached = (
        job.other_flops
        * rates.by_family("attention", job.device)
        * job.framework.flash
        * _speed(job, rates)
    )
    flash = 0.5 * flops / reached
    passes = np.choose(np.asarray(job.framework.attention), [0, 11, 18])
    scores = (
        job.tokens
        * job.sequence
        * model.heads
        / tp
        * passes
        * job.element_bytes
        / 2
        / (memory_rate(job, rates))
    )
    gemm = job.other_flops * 0.6 * rates.by_family("gemm", job.device) * _speed(job, rates)
    unfused = flops / gemm + scores
    is_fused = np.asarray(job.framework.attention) == 0
    backward = np.where(
        is_fused, (3 * model.head_dim + 2 * model.value_width) / widths * flash, 2 * unfused
    )
    in_parts, parts_backward = _attention_in_parts(job, rates, flops)
    forward = np.where(job.attention_in_parts, in_parts, np.where(is_fused, flash, unfused))
    backward = np.where(job.attention_in_parts, parts_backward, backward)
    uses_cp = job.is_plait & (np.asarray(job.layouts.cp) > 1) & ~np.asarray(job.device.on_cpu)
    if not np.any(uses_cp):
        return forward, backward
    cp_forward, cp_backward = _attention_with_cp(job, rates, forward)
    return np.where(uses_cp, cp_forward, forward), np.where(uses_cp, cp_backward, backward)


def _attention_with_cp(job: Job, rates: Rates, forward: Numbers) -> tuple[Numbers, Numbers]:
    """Return the seconds of attention with context parallelism on GPUs, as (forward, backward).

    `forward` is the time of the fused kernel if values need not be padded to the width of queries.
    FlexAttention, which is used for soft-capped scores, runs its forward again in the backward. In
    addition, element-wise kernels move data for each token of this rank:

    - ring: the outputs for the keys of each other rank are merged in float32. The outputs
      of all queries are merged for an earlier rank, and those of half of the queries for a later
      rank. The average is three quarters. Gradients are summed in float32.
    - all-gather-kv: keys and values of all ranks are reordered. Their gradients are summed in
      float32 and reordered back.
    - ulysses: queries, keys, values and outputs are packed for the exchange and unpacked.
    """
    model = job.model
    layouts = job.layouts
    element = job.element_bytes
    tp = job.attention_tp
    cp = np.asarray(layouts.cp)
    padding = (
        2 * np.maximum(model.head_dim, model.value_width) / (model.head_dim + model.value_width)
    )
    has_capped_scores = np.isin(np.asarray(model.model_type), WITH_CAPPED_SCORES)
    kernel = padding * forward

    # The backward has five products of one width where the forward has two.
    kernel_backward = 2.5 * kernel + has_capped_scores * kernel

    # Elements per token.
    queries = model.heads * model.head_dim / tp
    outputs = model.heads * model.value_width / tp
    kv_heads = np.maximum(model.kv_heads / tp, 1)
    keys_values = kv_heads * (model.head_dim + model.value_width)

    # Bytes per element: a cast to float32, and the addition of a gradient to a sum in float32,
    # which is read and written.
    cast = np.where(element < 4, element + 4, 0)
    addition = element + 8

    merges = 0.75 * (cp - 1)
    ring = merges * outputs * (cast + 12) + 2 * cast * outputs + 2 * element * keys_values
    ring_queries = merges * queries * addition + 2 * cast * queries
    ring_keys_values = 0.75 * cp * keys_values * addition + (4 + cast + 2 * element) * keys_values
    ring_backward = ring_queries + ring_keys_values
    gathered = 2 * element * keys_values * (1 + cp)
    gathered_backward = gathered + keys_values * cp * (4 + addition + cast + 4 * element)
    repeated_heads = np.lcm(np.asarray(kv_heads, dtype=int), np.asarray(cp, dtype=int))
    repeated = repeated_heads * (model.head_dim + model.value_width)
    ulysses = 4 * element * (queries + outputs + repeated / cp)

    kinds = np.asarray(layouts.context)
    moved = np.choose(kinds, np.broadcast_arrays(gathered, ring, ulysses))
    moved_backward = np.choose(
        kinds, np.broadcast_arrays(gathered_backward, ring_backward, ulysses)
    )
    # The backward has as many kernels.
    kernels = np.choose(kinds, np.broadcast_arrays(6.0, 6.0 * cp, 9.0))
    launches = kernels * kernel_seconds(job, rates)
    # For one byte of every token.
    seconds_per_byte = job.tokens / memory_rate(job, rates)
    forward = kernel + moved * seconds_per_byte + launches
    return forward, kernel_backward + moved_backward * seconds_per_byte + launches


def _attention_in_parts(job: Job, rates: Rates, flops: Numbers) -> tuple[Numbers, Numbers]:
    """Return the seconds of attention without a fused kernel, as (forward, backward).

    This attention runs in float32 in every precision. Scores are written, masked, normalized and
    read (24 bytes per score). Dropout writes a random number and a masked score, and reads the
    masked score (12 bytes per score). The backward moves as many bytes as the forward.
    """
    gemm = (
        job.device.flops.get("fp32", np.nan)
        * job.device.power
        * rates.by_family("gemm", job.device)
        * _speed(job, rates)
    )
    scores = (
        job.tokens * job.sequence * job.model.heads / job.attention_tp / memory_rate(job, rates)
    )
    drops = np.asarray(job.model.attention_dropout) > 0

    return (
        flops / gemm + (24 + (12 + _RANDOM) * drops) * scores,
        2 * flops / gemm + (24 + 12 * drops) * scores,
    )


def _elementwise(job: Job, rates: Rates) -> Numbers:
    """Return the seconds of norms, residuals, rotary positions and activation functions.

    The bytes that each operation reads and writes are divided by the memory bandwidth.
    """
    model = job.model
    layouts = job.layouts
    framework = job.framework
    width_factor = job.element_bytes / 2

    # Gated models have RMS norms and rotary positions; torch has a kernel for layer norms.
    gated = np.asarray(model.gated) > 0
    # Bytes (read, written) of the steps of an RMS norm: cast to float32 (2, 4), square (4, 4), mean
    # (4), scale (4, 4), cast back (4, 2), multiply by the weight (2, 2). In float32 the casts are
    # not needed.
    norm = 4 * width_factor + np.where(
        gated, framework.separate_norms * np.where(width_factor > 1, 20, 32), 0
    )

    # Latents are normalised too, by every rank of tp.
    latents = norm * (model.query_rank + model.latent_rank)
    replicated = ((2 * norm + 12 * width_factor) * model.hidden + latents) / np.where(
        np.asarray(layouts.sp) > 0, layouts.tp, 1
    )

    # Bytes (read, written) of rotary positions: multiply by the cosine (2, 2), negate one half (1,
    # 1), join the halves (2, 2), multiply by the sine (2, 2), add (4, 2).
    places = np.where(
        model.is_latent,
        (model.heads + 1) * model.rope_dim,
        (model.heads + model.kv_heads) * model.head_dim,
    )
    rotary = (4 + np.where(gated, 16 * framework.separate_rotary, 0)) * width_factor * places

    # With latents, queries and keys are concatenated from two parts, which are read and written.
    rotary = rotary + np.where(model.is_latent, 8 * width_factor * model.heads * model.head_dim, 0)
    share = model.expert_layers / model.layers
    # Queries and keys are normalised per head, at the cost of a norm of the hidden states.
    rotary = rotary + norm * model.qk_norm * (model.heads + model.kv_heads) * model.head_dim
    ffn = (1 - share) * model.ffn + share * (model.active * model.expert_ffn + model.shared_ffn)

    # GPT-2's GELU is either fused or written as eight operations. Frameworks that write attention
    # as separate operations do the same with the GELU.
    written_out = framework.separate_activation * (
        np.asarray(framework.attention) == ATTENTION.index("plain")
    )
    activation = (
        (4 + 2 * model.gated + np.where(gated, 4 * framework.separate_activation, 28 * written_out))
        * width_factor
        * ffn
    )
    kernels = 6 + np.where(
        gated,
        10 * framework.separate_norms
        + 8 * framework.separate_rotary
        + framework.separate_activation,
        7 * written_out,
    )
    seconds = (
        job.tokens * (replicated + (rotary + activation) / layouts.tp) / memory_rate(job, rates)
    )
    return seconds + kernels * kernel_seconds(job, rates)

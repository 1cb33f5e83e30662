"""Properties of a training framework as numbers: bytes of its states, fused kernels, overlap.

The search plans for Plait itself, which is described here. Runs of other frameworks are priced by
the same class (`benchmarks/planner_accuracy` has a table of them). Rates are in `constants`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from plait.planner.hardware import Numbers

ATTENTION = ("flash", "fused", "plain")
"""Implementations of attention.

flash: one kernel. fused: softmax and mask in one kernel, scores in memory. plain: every operation
in memory.
"""


@dataclass(frozen=True)
class Framework:
    """Properties of one framework; arrays with one entry per candidate."""

    name: Any
    """Name, and suffix of the constant `stack.NAME`, the fitted speed of its kernels."""
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    gathered: Numbers
    """Bytes per parameter of the copy that a forward uses, if weights have another dtype.

    The three fields before are the bytes per parameter of the model states.
    """
    wire_gather: Numbers
    wire_reduce: Numbers
    """Bytes per parameter in the reduction of gradients; `wire_gather` in the gather of weights."""
    norms_apart: Numbers
    rotary_apart: Numbers
    activation_apart: Numbers
    """Share of activation functions that run as single operations of torch through memory.

    The rest run as one kernel each. `norms_apart` and `rotary_apart` are the shares of RMS norms
    and rotary positions.
    """
    attention: Numbers
    """Index into ATTENTION."""
    hidden_tp: Numbers
    hidden_dp: Numbers
    """Share of data-parallel traffic that can overlap; `hidden_tp` of tensor-parallel traffic."""
    host_seconds: Numbers
    """Host time to launch one layer's forward."""
    logits: Numbers
    """Bytes per logit while the loss is computed."""
    norms: Numbers
    """Saved bytes per hidden element of the norms and residuals of a layer, without dropout masks.
    """
    slack: Numbers
    """Share of memory that the allocator reserves and does not use."""
    step_bytes: Numbers
    """Bytes per parameter that the optimizer step moves."""
    accumulate_bytes: Numbers = 0
    """Bytes per parameter to add a micro-batch's gradients; 0 if the product's kernel adds them."""
    flash: Numbers = 1.0
    """Speed of the attention kernel relative to FlashAttention 2."""
    send_seconds: Numbers = 25e-6
    """Seconds that a send between stages takes beyond the link."""
    dynamic_scaling: Numbers = 0
    """1 if products in 8 and 4 bits find the largest element in a pass of its own."""
    whole_logits: Numbers = 0
    """1 if tensor parallelism gathers the logits before the loss."""
    whole_inputs: Numbers = 0
    """Share of the inputs of products that sequence parallelism keeps gathered."""
    tp_launches: Numbers = 0.15
    """Additional launches with tensor parallelism, relative to those of a layer."""
    hook_seconds: Numbers = 0
    """Host time to gather and free one layer's weights at stage 3, if every module does so itself.
    """
    stops_early: Numbers = 0
    """1 if recomputation ends at the input of a block's last product.

    The backward needs nothing after it. Compiled blocks and torch's non-reentrant checkpoint (since
    2.1) stop there.
    """
    late_gradients: Numbers = 0
    """1 if a step's first backward allocates the gradients, as in torch's FSDP."""


@cache
def plait(*, precision: str = "bf16", pure: bool = False) -> Framework:
    """Return the properties of Plait: modules of Transformers, FSDP2, no fused kernels.

    Args:
        precision: Name in `hardware.PRECISIONS`.
        pure: Whether weights and states have 16 bits.
    """
    wide = precision == "fp32"
    weights, gradients, optimizer, gathered = 4, 4, 8, 2
    if pure:
        weights, gradients, optimizer, gathered = 2, 2, 4, 0
    if wide:
        # Weights are used in the dtype in which they are stored.
        gathered = 0

    return Framework(
        name="plait",
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        wire_gather=4 if wide else 2,
        wire_reduce=4,
        norms_apart=1,
        rotary_apart=1,
        activation_apart=1,
        attention=ATTENTION.index("flash"),
        hidden_tp=0.0,
        hidden_dp=0.8,
        host_seconds=500e-6,
        logits=14,
        norms=20,
        slack=0.08,
        step_bytes=36,
        accumulate_bytes=12 if wide else 10,
        whole_inputs=1,
        stops_early=1,
        late_gradients=1,
    )


def with_compiled_blocks(framework: Framework) -> Framework:
    """Return Plait with compiled blocks: fused kernels and fewer launches, like torchtitan's."""
    return replace(
        framework, norms_apart=0, rotary_apart=0, activation_apart=0, host_seconds=150e-6, norms=8
    )

"""How a framework computes, as numbers: bytes of its states, what it fuses, what it overlaps.

The search plans for Plait itself, which is here. Rows that others measured are priced by the same
class (`benchmarks/planner_accuracy` has a table of published ones). Rates are in `constants`, not
here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from plait.planner.hardware import Numbers

ATTENTION = ("flash", "fused", "plain")
"""One kernel; softmax and mask in one kernel, scores in memory; every step in memory."""


@dataclass(frozen=True)
class Framework:
    """Numbers of one framework; arrays hold one entry a candidate."""

    name: Any
    """What is fitted of its kernels is the constant `stack.NAME`."""
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    gathered: Numbers
    """Bytes a parameter of model states, and of the copy that a forward uses where weights are kept
    in another dtype.
    """
    wire_gather: Numbers
    wire_reduce: Numbers
    """Bytes a parameter in the gathering of weights and in the reduction of gradients."""
    norms_apart: Numbers
    rotary_apart: Numbers
    activation_apart: Numbers
    """Share of RMS norms, of rotary positions and of activation functions that run as torch's
    single operations, each through memory; the rest are one kernel each.
    """
    attention: Numbers
    """Index into ATTENTION."""
    hidden_tp: Numbers
    hidden_dp: Numbers
    """Share of that traffic that can be computed over."""
    host_seconds: Numbers
    """Time of the host to launch one layer's forward."""
    logits: Numbers
    """Bytes a logit while the loss is computed."""
    norms: Numbers
    """Bytes a hidden element that a layer's norms and residuals keep; dropout masks are extra."""
    slack: Numbers
    """What the allocator reserves and does not use."""
    step_bytes: Numbers
    """Bytes that the optimizer step moves a parameter."""
    accumulate_bytes: Numbers = 0
    """Bytes a parameter that it takes to add a micro-batch's gradients to those before it; 0 where
    the product's kernel adds.
    """
    flash: Numbers = 1.0
    """Speed of the attention kernel, of FlashAttention 2's."""
    send_seconds: Numbers = 25e-6
    """Time that a send between stages costs beyond the link."""
    dynamic_scaling: Numbers = 0
    """1: products in 8 and 4 bits look for the largest input and weight first, in a pass of its
    own.
    """
    whole_logits: Numbers = 0
    """1: tensor parallelism gathers the logits before the loss."""
    whole_inputs: Numbers = 0
    """Share of the products' inputs that sequence parallelism keeps gathered, not as shards."""
    tp_launches: Numbers = 0.15
    """What the host launches more with tensor parallelism, of a layer's launches without."""
    hook_seconds: Numbers = 0
    """Time of the host to gather and free one layer's weights in a forward of stage 3, where every
    module does so for itself.
    """
    stops_early: Numbers = 0
    """1: recomputation ends at the input of a block's last product, which is the last thing that
    the backward needs (torch's checkpoint where it is not reentrant, from 2.1 on, and compiled
    blocks).
    """
    late_gradients: Numbers = 0
    """1: a step's first backward allocates the gradients, so that none exist before it (torch's
    FSDP).
    """


@cache
def plait(*, precision: str = "bf16", pure: bool = False) -> Framework:
    """This package: Transformers' modules, FSDP2, no fused kernels unless compiled. `pure`: weights
    and states in 16 bits.
    """
    wide = precision == "fp32"
    weights, gradients, optimizer, gathered = (2, 2, 4, 0) if pure else (4, 4, 8, 2)
    return Framework(
        name="plait",
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=0 if wide else gathered,  # weights are used in the dtype that they are kept in
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


def with_compiled_blocks(found: Framework) -> Framework:
    """Plait with compiled blocks: element-wise kernels fused and launches fewer, as torchtitan's
    are.
    """
    return replace(
        found, norms_apart=0, rotary_apart=0, activation_apart=0, host_seconds=150e-6, norms=8
    )

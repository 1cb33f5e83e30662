"""Fused attention kernels of torch that return the log-sum-exp.

With the log-sum-exp, softmaxes over different keys can be combined into one.

All tensors are [batch, heads, tokens, head_dim]. A log-sum-exp is [batch, heads, queries] in
float32 or wider. The output and the log-sum-exp that a backward receives may belong to a softmax
over more keys than those that it receives. It then returns the share of the gradients that flows
through the received keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F

from plait.sizes import dtype_name

_ALIGNMENT = 8
"""Multiple to which head dimensions are padded.

Flash and efficient attention read 16 bytes at a time.
"""
_FLASH_HEAD_DIM = 256
"""Largest head dimension for which FlashAttention has kernels."""
_LOG_SUM_EXP_ALIGNMENT = 32
"""Multiple to which efficient attention pads the queries of its log-sum-exp.

The backward requires the padding.
"""
_FLEX_HEAD_DIM = 16
"""Smallest head dimension that FlexAttention compiles."""

FLASH_DTYPES = (torch.bfloat16, torch.float16)
EFFICIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, or their gradients."""


@dataclass(frozen=True)
class Band:
    """Keys that each query attends to, as a band around a diagonal of the attention matrix.

    The diagonal ends at the last query and the last key. Query i of n attends to key j of m if
    `i + m - n - left <= j <= i + m - n + right`. None means no limit.
    """

    left: int | None = None
    right: int | None = None

    def is_square(self, queries: int, keys: int) -> bool:
        """Return whether the band is the full rectangle, or causal with as many keys as queries.

        Every kernel supports these two bands.
        """
        return self.left is None and (self.right is None or (self.right == 0 and queries == keys))


class Softmax(NamedTuple):
    """Results of a softmax and the gradient of its output, as inputs of a backward.

    The softmax may be over more keys than the backward receives.
    """

    grad: torch.Tensor
    """Gradient of the output."""
    output: torch.Tensor
    log_sum_exp: torch.Tensor


@dataclass(frozen=True)
class FusedAttention:
    """Forward and backward of one attention kernel.

    Attributes:
        forward: Function of query, key and value, the band, and the scale. Returns the output and
            its log-sum-exp.
        backward: Function of query, key and value, the softmax, the band, and the scale. Returns
            the gradients of query, key and value.
        shares_heads: Whether keys and values may have fewer heads than queries.
        bands: Whether the kernel supports every band. Otherwise it supports only bands for which
            `Band.is_square` returns True.
    """

    forward: Callable[[Tensors, Band, float], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[Tensors, Softmax, Band, float], Tensors]
    shares_heads: bool
    bands: bool


def _cpu_forward(tensors: Tensors, band: Band, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sum_exp = kernel(*tensors, 0.0, band.right == 0, scale=scale)
    return output, log_sum_exp


def _cpu_backward(tensors: Tensors, softmax: Softmax, band: Band, scale: float) -> Tensors:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad, output, log_sum_exp = softmax
    gradients: Tensors = kernel(
        grad.contiguous(),
        *tensors,
        output,
        log_sum_exp,
        0.0,
        band.right == 0,
        scale=scale,
    )
    return gradients


def _flash_forward(tensors: Tensors, band: Band, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    # `_scaled_dot_product_flash_attention` calls this operator, but it has no window, and a causal
    # mask needs as many keys as queries.
    width = tensors[2].shape[3]
    query, key, value = _flash_inputs(tensors)
    output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        band.right == 0,
        False,
        scale=scale,
        window_size_left=band.left,
        window_size_right=band.right,
    )
    return output[..., :width].transpose(1, 2), log_sum_exp


def _flash_backward(tensors: Tensors, softmax: Softmax, band: Band, scale: float) -> Tensors:
    query, key, value = _flash_inputs(tensors)
    grad, output = (
        _padded(x.transpose(1, 2), query.shape[3]) for x in (softmax.grad, softmax.output)
    )
    # The state is not read, because there is no dropout.
    rng_state = query.new_empty(0)
    gradients = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        softmax.log_sum_exp,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        band.right == 0,
        rng_state,
        rng_state,
        scale=scale,
        window_size_left=band.left,
        window_size_right=band.right,
    )
    return _unpadded([x.transpose(1, 2) for x in gradients], tensors)


def _flash_inputs(tensors: Tensors) -> list[torch.Tensor]:
    """Return the tensors as [batch, tokens, heads, width], all padded to one aligned width."""
    query, _, value = tensors
    width = _aligned(max(query.shape[3], value.shape[3]))
    return [_padded(x.transpose(1, 2), width) for x in tensors]


def _efficient_forward(
    tensors: Tensors, band: Band, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, value = tensors
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *(_padded(x, _aligned(x.shape[3])) for x in tensors),
        None,
        True,
        0.0,
        band.right == 0,
        scale=scale,
    )
    return output[..., : value.shape[3]], log_sum_exp[..., : query.shape[2]]


def _efficient_backward(tensors: Tensors, softmax: Softmax, band: Band, scale: float) -> Tensors:
    query, key, value, grad, output = (
        _padded(x, _aligned(x.shape[3])) for x in (*tensors, softmax.grad, softmax.output)
    )
    log_sum_exp = softmax.log_sum_exp
    if torch.version.hip is None:
        # A padding query has an infinite log-sum-exp, so that its weights are 0.
        log_sum_exp = F.pad(
            log_sum_exp, (0, -log_sum_exp.shape[2] % _LOG_SUM_EXP_ALIGNMENT), value=inf
        )
    # The state is not read, because there is no dropout.
    rng_state = query.new_empty((), dtype=torch.int64)
    *gradients, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        key,
        value,
        None,
        # The kernel assumes that the tokens of an output follow each other in memory.
        output.transpose(1, 2).contiguous().transpose(1, 2),
        log_sum_exp.contiguous(),
        rng_state,
        rng_state,
        0.0,
        [True, True, True, False],
        band.right == 0,
        scale=scale,
    )
    return _unpadded(gradients, tensors)


def _unpadded(gradients: Sequence[torch.Tensor], tensors: Tensors) -> Tensors:
    """Return the gradients without the elements that padded the last dimension of `tensors`."""
    query, key, value = (
        x[..., : like.shape[3]] for x, like in zip(gradients, tensors, strict=True)
    )
    return query, key, value


def _aligned(width: int) -> int:
    return -(-width // _ALIGNMENT) * _ALIGNMENT


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the tensor with its last dimension contiguous and padded to `width`."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    if x.stride(3) != 1:
        return x.contiguous()
    return x


CPU = FusedAttention(_cpu_forward, _cpu_backward, shares_heads=False, bands=False)
# ROCm's kernels align a causal mask at the first key, and so does
# `_scaled_dot_product_efficient_attention`.
FLASH = FusedAttention(
    _flash_forward, _flash_backward, shares_heads=True, bands=torch.version.hip is None
)
EFFICIENT = FusedAttention(_efficient_forward, _efficient_backward, shares_heads=False, bands=False)


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return why FlashAttention does not support these heads, or an empty string if it does."""
    if dtype not in FLASH_DTYPES:
        return f"FlashAttention does not support {dtype_name(dtype)}"
    if head_dim > _FLASH_HEAD_DIM:
        return f"FlashAttention supports head dimensions up to {_FLASH_HEAD_DIM}, not {head_dim}"
    if not _is_built("_flash_attention_forward"):
        return "this torch has no FlashAttention"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(False) was called"
    capability = _capability(device)
    version = f"{capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"FlashAttention needs compute capability 8.0, and the device has {version}"
    # The backward needs more shared memory than these devices have. SDPA tests the same condition.
    if 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        return (
            f"FlashAttention's backward does not support a head dimension of {head_dim} on compute"
            f" capability {version}"
        )
    return ""


def why_not_efficient(dtype: torch.dtype) -> str:
    """Return why efficient attention does not support a dtype, or an empty string if it does."""
    if dtype not in EFFICIENT_DTYPES:
        return f"efficient attention does not support {dtype_name(dtype)}"
    if not _is_built("_scaled_dot_product_efficient_attention"):
        return "this torch has no efficient attention"
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "torch.backends.cuda.enable_mem_efficient_sdp(False) was called"
    return ""


def why_not_flex(dtype: torch.dtype, head_dim: int) -> str:
    """Return why FlexAttention does not compile for these heads, or an empty string if it does."""
    if dtype not in FLEX_DTYPES:
        return f"FlexAttention does not support {dtype_name(dtype)}"
    if head_dim < _FLEX_HEAD_DIM:
        return f"FlexAttention supports head dimensions from {_FLEX_HEAD_DIM}, not {head_dim}"
    if find_spec("triton") is None:
        return "FlexAttention needs Triton, which is not installed"
    return ""


def _is_built(operator: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CUDA"))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device.

    On a machine without a GPU the tensors are fake. The result is then that of a device that has
    all kernels.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return 9, 0

"""Attention on the simulated device by references of CUDA's fused operators, in float64."""

from contextlib import contextmanager

import torch

from plait._torch import attention
from plait._torch.operators import TorchDispatchMode
from tests import fused_attention
from tests.parity.context_parallel import train


@contextmanager
def _fused_in(dtype, name):
    """Let Plait choose a kernel for `dtype`.

    The references support float64, and only float64 shows a wrong term of a gradient.
    """
    before = getattr(attention, name)
    setattr(attention, name, (*before, dtype))
    try:
        with fused_attention.registered("CUDA"):
            yield
    finally:
        setattr(attention, name, before)


def train_fused(rank, world, case, dtypes):
    """Return the trace and the number of calls of a fused kernel. Runs on every rank.

    `dtypes` is the name of the kernel's list of dtypes.
    """
    calls = 0
    forward = {
        "FLASH_DTYPES": "_flash_attention_forward",
        "EFFICIENT_DTYPES": "_scaled_dot_product_efficient_attention",
    }[dtypes]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal calls
            calls += func._opname == forward
            return func(*args, **(kwargs or {}))

    with _fused_in(torch.float64, dtypes), Count():
        trace = train(rank, world, case)
    return trace, calls

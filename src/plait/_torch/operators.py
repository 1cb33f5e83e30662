"""Operators of torch: fake tensors, dispatch and function modes, pytrees, and foreach kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# One kernel for many tensors. `foreach_unscale_` multiplies 16-bit tensors by a float32 factor
# without rounding the factor to 16 bits.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""Function that returns the active function modes, outermost first."""


def grouped_by_device_and_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group tensors for foreach kernels, which require one device and one dtype.

    The groups are ordered by device type and dtype only, so that the order is the same on all
    ranks. Empty tensors are included.

    Returns:
        Indices into `tensors`, ascending in each group.
    """
    if not tensors:
        # torch refuses an empty list, and a pipeline stage may have no gradient.
        return []
    groups = torch._C._group_tensors_by_device_and_dtype([list(tensors)], True)
    by_name = sorted(groups.items(), key=lambda group: (group[0][0].type, str(group[0][1])))
    return [indices for _, (_, indices) in by_name]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, class or object inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def allowing_requires_grad() -> AbstractContextManager[None]:
    """Allow `requires_grad_` inside the block, although torch.func.jvp and vmap refuse it.

    They refuse it even for tensors that they do not transform.
    """
    return enable_inplace_requires_grad(True)


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Leave the transforms of torch.func (jvp, vmap, grad) inside the block.

    Transforms wrap the tensors that an operator returns, and a wrapped parameter does not train.
    """
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with torch._C._DisableFuncTorch():
        yield


def without_failed_operators() -> AbstractContextManager[None]:
    """Suppress log messages about operators that fail on fake tensors inside the block.

    torch logs each failure with its traceback, even if the caller handles the error.
    """
    return replaced(logging.getLogger(FakeTensorMode.__module__), "disabled", True)


class KernelWithoutMemory(RuntimeError):
    """Raised if a Triton kernel is called with fake or meta tensors."""


@contextmanager
def refusing_triton_kernels() -> Iterator[None]:
    """Raise KernelWithoutMemory if the block calls a Triton kernel with fake or meta tensors.

    Such tensors have the data pointer 0. The kernel would write to that address, and a later,
    unrelated call on the device would fail with an illegal memory access.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    launch = jit.JITFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
            raise KernelWithoutMemory(
                f"the Triton kernel {kernel.__name__} cannot run on tensors without memory"
            )
        return launch(kernel, *args, **kwargs)

    with replaced(jit.JITFunction, "run", run):
        yield


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `tensor` is a view of, or `tensor` itself if it is not a view."""
    base = tensor._base
    return tensor if base is None else base


def operator_named(name: str) -> Any | None:
    """Return the operator with a name like `aten.mm`, with all of its overloads.

    The result is None if this torch has no such operator.
    """
    namespace, _, operator = name.partition(".")
    if not operator:
        return None
    with suppress(AttributeError, RuntimeError):
        return getattr(getattr(torch.ops, namespace), operator)
    return None


def operator_name(operator: Any) -> str:
    """Return an operator's name without namespace and overload, for example `all_reduce`."""
    return str(operator._opname)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: its arguments, its results, and which of them alias."""
    return operator._schema

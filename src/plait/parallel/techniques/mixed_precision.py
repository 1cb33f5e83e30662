"""Mixed precision: dtypes of computation and of reduction, and the loss scale of float16.

Parameters, gradients and optimizer states stay in the dtype of the parameters (float32 master
weights, sharded by ZeRO). The casts are arguments of `fully_shard`, so `apply` only leaves them in
`Parts`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.model.facts import ModelFacts
from plait.model.float32_modules import float32_modules
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.parts import Parts
from plait.parallel.precision.loss_scale import LossScale
from plait.parallel.technique import Technique
from plait.units import dtype_of

ComputeDtype = Literal["float16", "bfloat16"]
ReduceDtype = Literal["float16", "bfloat16", "float32"]


class Precision(Technique):
    """Dtypes of computation and of reduction, and the loss scale."""

    compute: ComputeDtype | None = None
    """Dtype of forward and backward, or None for the dtype of the parameters."""
    reduce: ReduceDtype | None = None
    """Dtype of the gradient reduction.

    None means float32 if `compute` is set, and otherwise the dtype of the gradients.
    """
    loss_scale: LossScale | None = None
    """Settings of loss scaling, for float16 only."""
    check_overflow: bool = False
    """True to skip an optimizer step with non-finite gradients. Loss scaling always does."""
    float32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in float32 if `compute` is set.

    See `model.float32_modules`.
    """

    @property
    def reduction(self) -> ReduceDtype | None:
        """Resulting dtype of the gradient reduction."""
        if self.reduce is None and self.compute:
            return "float32"
        return self.reduce

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the dtypes in the settings of the technique that shards."""
        if self.reduction is not None:
            parts = parts.with_shard(reduce_dtype=dtype_of(self.reduction))
        if self.compute is None:
            return parts
        is_float16 = self.compute == "float16"
        return parts.with_shard(
            float32_modules=float32_modules(
                parts.model, self.float32_modules, is_float16=is_float16
            ),
            compute_dtype=dtype_of(self.compute),
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Store the element sizes in the ledger, for the technique that shards."""
        sizes = {"float16": 2, "bfloat16": 2, "float32": 4}
        if self.compute is not None:
            ledger = ledger.with_(compute_bytes=np.full_like(ledger.dp_shard, sizes[self.compute]))
        if self.reduction is not None:
            ledger = ledger.with_(reduce_bytes=np.full_like(ledger.dp_shard, sizes[self.reduction]))
        return ledger

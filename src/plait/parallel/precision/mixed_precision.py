"""Mixed precision: what forward and backward compute in, what gradients are reduced in, and how
float16 is kept from underflowing.

Parameters, gradients and optimizer states stay in the parameters' own dtype (float32 master
weights, sharded by ZeRO). The casts are arguments of the one call that shards, so `apply` only
leaves them in Parts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.model.facts import ModelFacts
from plait.model.float32_modules import float32_modules
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.precision.loss_scale import LossScale
from plait.parallel.technique import Parts, Technique
from plait.units import dtype_of

ComputeDtype = Literal["float16", "bfloat16"]
ReduceDtype = Literal["float16", "bfloat16", "float32"]


class Precision(Technique):
    """Compute and reduction dtypes, and the loss scale."""

    compute: ComputeDtype | None = None
    """Dtype of forward and backward; None computes in the parameters' own dtype."""
    reduce: ReduceDtype | None = None
    """Dtype of the gradient reduction; None means float32 where `compute` is set, else the
    gradients' own dtype.
    """
    loss_scale: LossScale | None = None
    """How the loss is scaled; only for float16."""
    check_overflow: bool = False
    """Skip an optimizer step whose gradients are not finite. Always done with a loss scale."""
    float32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in float32 where `compute` is set (see
    `model.float32_modules`).
    """

    @property
    def reduction(self) -> ReduceDtype | None:
        """The reduction dtype that results."""
        return self.reduce or ("float32" if self.compute else None)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Leave the dtypes for the technique that shards."""
        is_float16 = self.compute == "float16"
        kept = (
            float32_modules(parts.model, self.float32_modules, is_float16=is_float16)
            if self.compute
            else ()
        )
        return parts.with_shard(
            float32_modules=kept,
            compute_dtype=dtype_of(self.compute) if self.compute else None,
            reduce_dtype=dtype_of(self.reduction) if self.reduction else None,
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Leave the element sizes for the technique that shards."""
        size = {None: None, "float16": 2, "bfloat16": 2, "float32": 4}
        compute = size[self.compute]
        reduce = size[self.reduction]
        like = np.ones_like(ledger.dp_shard)
        return ledger.with_(
            compute_bytes=None if compute is None else like * compute,
            reduce_bytes=None if reduce is None else like * reduce,
        )

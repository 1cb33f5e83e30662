"""Compression scheme between data-parallel ranks: its collectives, and its cost in bytes.

`comm.compress` implements the collectives. A scheme installs them: as the reducer's buckets at ZeRO
stage 0, and per unit of `fully_shard` at stages 1 to 3. Every rank gets the same bits. With
`dp_replicate > 1` only the collectives over `dp_shard` are compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from plait._torch.units import gathered_shapes, reduced_shapes, sharded_modules
from plait.cluster.mesh import Levels
from plait.comm.all_reduce import Buckets, Flat
from plait.comm.compress import (
    POWERSGD_START,
    PowerSGDBuckets,
    QuantisedAllGather,
    QuantisedBuckets,
    QuantisedReduceScatter,
)
from plait.comm.quantise import BLOCK, Segment, blocks_of, packed_bytes
from plait.policy import Policy
from plait.sizes import MIB

MaybeBits = Literal[0, 4, 8]
Numbers = NDArray[np.int64]
_POWERSGD_CODE = 1
QUANTISED_BUCKET_BYTES = 4 * MIB
"""Default size of a bucket of gradients that are sent as int8 or int4.

At most 1 MiB is sent per bucket, so that most of it overlaps with the backward, and a bucket is
large enough for a thread (2 to 4 MiB were best on links of 1 Gbit/s and on fast ones).
"""


class Scheme(Policy):
    """Form in which data-parallel ranks send gradients and parameters to each other."""

    gradient_bits: MaybeBits = 0
    """Bits per element of a sent gradient; 0: uncompressed."""
    weight_bits: MaybeBits = 0
    """Bits per element of a gathered parameter, at stages 1 to 3; 0: uncompressed."""
    powersgd_rank: int = 0
    """Columns of the factors that are sent instead of a matrix, at ZeRO stage 0; 0: off."""
    error_feedback: bool = False
    """True to add the error of the last step to this step's gradients. PowerSGD always does."""
    revocable: bool = False
    """True if steps may be skipped.

    A step then writes residuals and factors to second tensors until it is known to be applied.
    """

    @property
    def name(self) -> str:
        """Description of the gradient compression."""
        if self.powersgd_rank:
            return f"PowerSGD of rank {self.powersgd_rank}"
        return f"int{self.gradient_bits}"

    @property
    def code(self) -> int:
        """Number that identifies the gradient compression in a checkpoint."""
        if self.powersgd_rank:
            return _POWERSGD_CODE
        return self.gradient_bits

    def bucket_bytes(self, default: int) -> int:
        """Return the bucket size for quantised gradients, or `default` for other gradients."""
        if self.gradient_bits:
            return QUANTISED_BUCKET_BYTES
        return default

    @property
    def gradients(self) -> bool:
        """True if gradients are compressed."""
        return bool(self.gradient_bits or self.powersgd_rank)

    def buckets(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        flats: Sequence[Flat],
        *,
        uncompressed_steps: int = POWERSGD_START,
    ) -> Buckets:
        """Return compressed buckets for ZeRO stage 0.

        Args:
            group: The ranks that sum gradients.
            device: The device of the gradients.
            flats: The form of each bucket.
            uncompressed_steps: Number of steps before PowerSGD begins to compress.
        """
        if self.powersgd_rank:
            return PowerSGDBuckets(
                group,
                flats,
                device,
                rank=self.powersgd_rank,
                uncompressed_steps=uncompressed_steps,
                revocable=self.revocable,
            )
        assert self.gradient_bits != 0
        return QuantisedBuckets(
            group,
            flats,
            device,
            bits=self.gradient_bits,
            feedback=self.error_feedback,
            revocable=self.revocable,
        )

    def install(self, model: nn.Module, levels: Levels | None) -> dict[str, QuantisedReduceScatter]:
        """Install the compressed collectives in every unit of a sharded model.

        Args:
            model: The sharded model.
            levels: Groups within and between machines, or None.

        Returns:
            The reduce-scatters of gradients by name. They store the compression errors.
        """
        scatters = {}
        for index, module in enumerate(sharded_modules(model)):
            if self.weight_bits:
                # Parameters of fewer than two dimensions are sent as they are.
                segments = [
                    Segment(numel, dimensions > 1)
                    for dimensions, numel, _ in gathered_shapes(module)
                ]
                module.set_custom_all_gather(QuantisedAllGather(segments, bits=self.weight_bits))
            if self.gradient_bits:
                segments = []
                for dimensions, numel, trainable in reduced_shapes(module):
                    if trainable:
                        segments.append(Segment(numel, dimensions > 1))
                scatter = QuantisedReduceScatter(
                    segments,
                    bits=self.gradient_bits,
                    feedback=self.error_feedback,
                    levels=levels,
                    revocable=self.revocable,
                )
                module.set_custom_reduce_scatter(scatter)
                scatters[f"unit.{index}"] = scatter
        return scatters


def sent_bytes(bits: Any, shape: Sequence[int], numel: Numbers, itemsize: Any) -> Numbers:
    """Return the bytes that a rank sends for `numel` elements of a parameter."""
    # Vectors are not compressed.
    if len(shape) < 2:
        return numel * itemsize
    bits = np.asarray(bits)
    return np.where(bits > 0, packed_bytes(numel, np.maximum(bits, 1)), numel * itemsize)


def error_bytes(scheme: Scheme, shape: Sequence[int], numel: Numbers, ranks: Numbers) -> Numbers:
    """Return the bytes of the compression error that a sharded unit stores for a parameter.

    The error is float32, and covers the shards of all ranks.
    """
    if len(shape) < 2:
        return np.zeros_like(numel)
    keeps_error = (np.asarray(scheme.gradient_bits) > 0) & np.asarray(scheme.error_feedback)
    return np.where(keeps_error, copies(scheme) * ranks * blocks_of(numel) * BLOCK * 4, 0)


def copies(scheme: Scheme) -> int:
    """Return how many copies of a persistent tensor exist: 2 if steps may be skipped, else 1."""
    return 1 + scheme.revocable

"""A scheme of compression between data-parallel ranks: which collectives it compresses, and the
same in numbers.

`comm.compress` holds the collectives. Here they are put in place: as the reducer's buckets at stage
0, as each unit's own at the sharded stages. Every rank ends with the same bits. With `dp_replicate
> 1` what is compressed are the collectives over `dp_shard`; the sum over the replicas is torch's.
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
from plait.comm.buckets import Buckets, Flat
from plait.comm.compress import (
    POWERSGD_START,
    PowerSGDBuckets,
    QuantisedAllGather,
    QuantisedBuckets,
    QuantisedReduceScatter,
)
from plait.comm.quantise import BLOCK, Segment, blocks_of, packed_bytes
from plait.policy import Policy
from plait.units import MIB

MaybeBits = Literal[0, 4, 8]
Numbers = NDArray[np.int64]
_POWERSGD_CODE = 1
QUANTISED_BUCKET_BYTES = 4 * MIB
"""Default bucket of gradients that are sent as int8 or int4: a MiB or less is sent, so that most of
it overlaps with the backward, and large enough for a thread (2 to 4 MiB were best on links of 1
Gbit/s and on fast ones).
"""


class Scheme(Policy):
    """What is compressed, and how."""

    gradient_bits: MaybeBits = 0
    """Bits per element of a sent gradient; 0: uncompressed."""
    weight_bits: MaybeBits = 0
    """Bits per element of a gathered parameter, at stages 1 to 3; 0: uncompressed."""
    powersgd_rank: int = 0
    """Stage 0: gradients of matrices are sent as factors of so many columns; 0 is off."""
    error_feedback: bool = False
    """Add what the last step lost to this step's gradients. PowerSGD always does."""
    revocable: bool = False
    """Steps may be skipped: a step writes residuals and factors to second tensors until it is known
    that it is applied.
    """

    @property
    def name(self) -> str:
        """A description of the compression."""
        return (
            f"PowerSGD of rank {self.powersgd_rank}"
            if self.powersgd_rank
            else f"int{self.gradient_bits}"
        )

    @property
    def code(self) -> int:
        """Of what gradients are sent as, in a checkpoint."""
        return _POWERSGD_CODE if self.powersgd_rank else self.gradient_bits

    def bucket_bytes(self, otherwise: int) -> int:
        """Of gradients in a bucket where no file and no measurement says it; `otherwise` where they
        are not quantised.
        """
        return QUANTISED_BUCKET_BYTES if self.gradient_bits else otherwise

    @property
    def gradients(self) -> bool:
        """Whether gradients are compressed at all."""
        return bool(self.gradient_bits or self.powersgd_rank)

    def buckets(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        flats: Sequence[Flat],
        *,
        whole_steps: int = POWERSGD_START,
    ) -> Buckets:
        """Stage 0's. `whole_steps`: those that PowerSGD sums as they are before it begins."""
        if self.powersgd_rank:
            return PowerSGDBuckets(
                group,
                flats,
                device,
                rank=self.powersgd_rank,
                whole_steps=whole_steps,
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
        """Give every unit of a sharded model its own compressed collectives; those that keep
        errors, by name.
        """
        found = {}
        for index, module in enumerate(sharded_modules(model)):
            if self.weight_bits:
                segments = [
                    Segment(numel, dimensions > 1)
                    for dimensions, numel, _ in gathered_shapes(module)
                ]
                module.set_custom_all_gather(QuantisedAllGather(segments, bits=self.weight_bits))
            if self.gradient_bits:
                segments = [
                    Segment(numel, dimensions > 1)
                    for dimensions, numel, trainable in reduced_shapes(module)
                    if trainable
                ]
                scatter = QuantisedReduceScatter(
                    segments,
                    bits=self.gradient_bits,
                    feedback=self.error_feedback,
                    levels=levels,
                    revocable=self.revocable,
                )
                module.set_custom_reduce_scatter(scatter)
                found[f"unit.{index}"] = scatter
        return found


def sent_bytes(bits: Any, shape: Sequence[int], numel: Numbers, itemsize: Any) -> Numbers:
    """Bytes of one rank's `numel` numbers of a parameter on the wire."""
    if len(shape) < 2:
        return numel * itemsize
    bits = np.asarray(bits)
    return np.where(bits > 0, packed_bytes(numel, np.maximum(bits, 1)), numel * itemsize)


def error_bytes(scheme: Scheme, shape: Sequence[int], numel: Numbers, ranks: Numbers) -> Numbers:
    """Bytes of the error that a sharded unit keeps for a parameter: float32, of all ranks'
    parts.
    """
    if len(shape) < 2:
        return np.zeros_like(numel)
    on = (np.asarray(scheme.gradient_bits) > 0) & np.asarray(scheme.error_feedback)
    return np.where(on, copies(scheme) * ranks * blocks_of(numel) * BLOCK * 4, 0)


def copies(scheme: Scheme) -> int:
    """Of everything that is carried from step to step."""
    return 2 if scheme.revocable else 1

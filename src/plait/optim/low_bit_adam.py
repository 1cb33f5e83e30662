"""AdamW with low-precision moments (`optimizer.states`: bf16, int8, float8).

A step reads the moments, updates them and the parameter in float32 (float64 for float64
parameters), and writes them back. The update uses the moments before they are rounded. Parameters
are updated in chunks, so the step needs a few MiB besides the states, whatever the size of a
parameter. States are plain tensors, or DTensors with the parameter's placements, so checkpoints
load on any layout. The result of a block depends on that block only, and blocks are never split
between ranks, so a step computes the same on every layout.

The codecs quantize to 8 bits with a scale per block: a block is divided by its largest magnitude.
int8 is the dynamic map of 8-bit Adam (arXiv 2110.02861, as in bitsandbytes and torchao): 256 levels
between -1 and 1, or 0 and 1, with more levels in every higher power of ten from 1e-6 on. float8 is
e4m3. Only plain operators are used; nothing is compiled.

Note [Second moments are not 0]
    The smallest code of a second moment is 1, not 0. Otherwise a small moment in a block with a
    large one would become 0, and its update would be divided by epsilon only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait._torch.tensors import local_tensor
from plait.errors import InputError
from plait.parallel.precision.optimizer_states import CODED, StateForm, block_of

_TINY = torch.finfo(torch.float32).tiny
_FLOAT8 = torch.float8_e4m3fn
_CHUNK_ON_CPU = 1 << 18
"""Number of elements per chunk on a CPU, whose cache a chunk fits. A multiple of the block size."""
_CHUNK_ON_DEVICE = 1 << 22
"""Number of elements per chunk on a GPU, which a chunk occupies. A multiple of the block size."""
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Name of each moment, and whether it has a sign."""


class SmallStateAdam(Optimizer):
    """Adam or AdamW with low-bit moments. amsgrad is not supported.

    Args:
        params: Parameters or parameter groups, as for every optimizer of torch.
        states: Storage format of the moments: bf16, int8 or float8.
        decoupled: True for AdamW. False adds the weight decay to gradients, as Adam does.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term that is added to the denominator.
        weight_decay: Weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        states: StateForm,
        decoupled: bool = True,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.states = states
        self.decoupled = decoupled
        self._codecs: dict[tuple[bool, torch.device], DynamicInt8] = {}
        """Codecs of int8, keyed by sign and device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise InputError(
                "SmallStateAdam.step takes no closure; compute the gradients, then call step()"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._init_state(parameter, state)
        state["step"] += 1
        local = local_tensor(parameter.detach())
        values = local.contiguous().view(-1)
        gradient = local_tensor(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        moments = [self._moment(parameter, name, signed) for name, signed in _MOMENTS]
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        decay = group["weight_decay"]
        # Tensors on the CPU: nothing waits for a device, and the dry run has no values.
        steps = state["step"].double()
        rate = lr / (1 - beta1**steps)
        root = (1 - beta2**steps).sqrt()

        chunk_size = _CHUNK_ON_CPU if values.device.type == "cpu" else _CHUNK_ON_DEVICE
        compute_dtype = torch.promote_types(values.dtype, torch.float32)
        for start in range(0, values.numel(), chunk_size):
            part = slice(start, min(start + chunk_size, values.numel()))
            value = values[part].to(compute_dtype)
            slope = gradient[part].to(compute_dtype)
            if self.decoupled:
                value.mul_(1 - lr * decay)
            elif decay:
                slope = slope.add(value, alpha=decay)

            mean, square = (moment.read(part, compute_dtype) for moment in moments)
            mean.lerp_(slope, 1 - beta1)
            square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            for moment, exact in zip(moments, (mean, square), strict=True):
                moment.write(part, exact)
            # With the exact moments, not with those that were rounded for the state.
            denominator = square.sqrt().div_(root).add_(group["eps"])
            value.sub_(mean.div(denominator).mul_(rate))
            if value.dtype != values.dtype:
                values[part] = value

        # `contiguous` has made a copy.
        if not local.is_contiguous():
            local.copy_(values.view(local.shape))

    def _moment(self, parameter: nn.Parameter, name: str, signed: bool) -> _StoredMoment:
        state = self.state[parameter]
        if name in state:
            return _StoredMoment(local_tensor(state[name]).view(-1))
        codes = local_tensor(state[f"{name}_{self.states}"]).view(-1)
        scales = local_tensor(state[f"{name}_{self.states}_scale"]).view(-1)
        return _StoredMoment(
            codes, scales, block_of(parameter.shape), self._codec(signed, parameter.device)
        )

    def _codec(self, signed: bool, device: torch.device) -> Codec:
        if self.states == "float8":
            return Float8(signed=signed)
        # Its tables are created once per sign and device.
        key = (signed, device)
        if key not in self._codecs:
            self._codecs[key] = DynamicInt8(signed=signed, device=device)
        return self._codecs[key]

    def _init_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        local = local_tensor(parameter.detach())
        device = local.device
        block = block_of(parameter.shape) if self.states in CODED else 0
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name, signed in _MOMENTS:
            if not block:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                # The second moment stays in float32 (see `precision.optimizer_states`).
                if self.states == "bf16" and signed:
                    dtype = torch.bfloat16
                zeros = torch.zeros(local.shape, dtype=dtype, device=device)
                state[name] = _sharded_like(parameter, zeros, parameter.shape)
                continue

            # One scale per block of a row: [rows, elements of a row / block]
            local_columns = math.prod(local.shape[1:]) // block
            columns = math.prod(parameter.shape[1:]) // block
            codes = torch.zeros(local.shape, dtype=torch.uint8, device=device)
            scales = torch.zeros(local.shape[0], local_columns, dtype=torch.float32, device=device)
            state[f"{name}_{self.states}"] = _sharded_like(parameter, codes, parameter.shape)
            state[f"{name}_{self.states}_scale"] = _sharded_like(
                parameter, scales, (parameter.shape[0], columns)
            )

    def fresh_states(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's states before its first step, to be filled from a checkpoint."""
        state: dict[str, Any] = {}
        self._init_state(parameter, state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer from `state_dict()`."""
        super().load_state_dict(state_dict)
        # torch has cast the states to the dtype of the parameter, which codes and scales do not
        # have.
        saved_keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved_keys, parameters, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][key])


def _sharded_like(
    parameter: torch.Tensor, local: torch.Tensor, shape: Iterable[int]
) -> torch.Tensor:
    """Return a state as a DTensor with its parameter's placements, if the parameter is a DTensor.

    Args:
        parameter: The parameter.
        local: This rank's shard of the state.
        shape: Shape of the full state.
    """
    if not isinstance(parameter, DTensor):
        return local
    full_shape = torch.Size(shape)
    stride = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=full_shape,
        stride=tuple(stride),
    )


@dataclass(frozen=True)
class _StoredMoment:
    """Flat moment of a parameter's local shard, possibly quantized.

    Attributes:
        stored: Values or codes of the n elements, [n].
        scales: Scales of the blocks, [n / block], or None for values without codes.
        block: Number of elements per block.
        codec: Codec of the codes, or None for values without codes.
    """

    stored: torch.Tensor
    scales: torch.Tensor | None = None
    block: int = 1
    codec: Codec | None = None

    def read(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return a part in `dtype`: a view of the stored values if they have that dtype already."""
        if self.codec is None or self.scales is None:
            return self.stored[part].to(dtype)
        return self.codec.decode(self.stored[part], self.scales[self._blocks(part)]).to(dtype)

    def write(self, part: slice, numbers: torch.Tensor) -> None:
        """Store new values for a part that was read with `read`."""
        if self.codec is not None and self.scales is not None:
            codes, scales = self.codec.encode(numbers, self.block)
            self.stored[part] = codes
            self.scales[self._blocks(part)] = scales
        # Numbers of the same dtype were changed in place.
        elif self.stored.dtype != numbers.dtype:
            self.stored[part] = numbers

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block, part.stop // self.block)


class Codec(Protocol):
    """Quantization of blocks of elements, and its inverse."""

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a flat tensor.

        Args:
            numbers: Tensor of n floating-point values, [n]. A block with non-finite values decodes
                to NaN or infinity.
            block: Number of elements per block, a divisor of n.

        Returns:
            Codes (uint8, [n]) and scales (float32, [n / block]).
        """

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize codes [n] with scales [n / block]. Return a new tensor, float32, [n]."""


class DynamicInt8:
    """Codec that rounds to the nearest of 256 levels.

    The code is looked up by the upper 16 bits of an element. The values that share these bits span
    at most two codes, so one table look-up and one comparison replace a search.

    Args:
        signed: Whether elements may be negative.
        device: Device of the tables.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        table = levels(signed=signed)
        borders = (table[1:] + table[:-1]) / 2
        upper_halves = torch.arange(1 << 16, dtype=torch.int32) << 16
        # The smallest float32 with each upper half. For negative numbers it has all lower bits set.
        lower_bits = torch.where(upper_halves < 0, upper_halves | 0xFFFF, upper_halves)
        smallest = lower_bits.view(torch.float32)
        codes = torch.bucketize(smallest, borders, right=True)
        self._levels = table.to(device)
        self._code = codes.to(torch.uint8).to(device)
        """Code of the smallest number with each upper half, [65536]."""
        self._border = torch.cat([borders, borders.new_tensor([torch.inf])])[codes].to(device)
        """Next border above that number, [65536]."""
        # See Note [Second moments are not 0].
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a flat tensor. See `Codec.encode`."""
        scaled, scales = _scaled(numbers, block)
        upper_half = scaled.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        codes = torch.index_select(self._code, 0, upper_half)
        codes.add_(scaled >= torch.index_select(self._border, 0, upper_half))
        return codes.clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize codes. See `Codec.decode`."""
        return _multiplied(torch.index_select(self._levels, 0, codes.int()), scales)


def levels(*, signed: bool) -> torch.Tensor:
    """Return the values of the int8 codes before scaling.

    They are rounded once, so they are the same on every machine.

    Args:
        signed: Whether half of the values are negative.

    Returns:
        float32, [256], ascending.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        exponent = power if signed else power + 1
        edges = np.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += middles.tolist()
        if signed:
            numbers += (-middles).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32)


class Float8:
    """Codec of e4m3, whose largest number is 448."""

    def __init__(self, *, signed: bool) -> None:
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a flat tensor. See `Codec.encode`."""
        scaled, scales = _scaled(numbers, block, largest=torch.finfo(_FLOAT8).max)
        return scaled.to(_FLOAT8).view(torch.uint8).clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize codes. See `Codec.decode`."""
        return _multiplied(codes.view(_FLOAT8).float(), scales)


def _scaled(
    numbers: torch.Tensor, block: int, *, largest: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each block by its scale.

    Returns:
        Numbers of at most `largest` in magnitude (float32, [n]), and the scales (float32,
        [n / block]).
    """
    # [blocks, block]
    blocked = numbers.float().view(-1, block)
    scales = (blocked.abs().amax(1) / largest).clamp_(min=_TINY)
    return (blocked / scales.unsqueeze(1)).view(-1), scales


def _multiplied(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply each block of values [n] by its scale, in place."""
    return numbers.view(scales.numel(), -1).mul_(scales.unsqueeze(1)).view(-1)

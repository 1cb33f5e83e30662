"""AdamW whose averages take fewer bytes than its parameters (`optimizer.states`: bf16, int8,
float8).

A step reads the averages, updates them and the parameter in float32 (float64 for parameters in it),
and writes them back; the update takes the averages before they are rounded. It updates a parameter
in chunks, so that it needs a few MiB besides the states, whatever the parameter's size. States are
plain tensors, or DTensors placed as the parameter is, so that checkpoints load on any layout. Every
number follows from the block that it is in and blocks are never cut, so that a step computes the
same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait._torch.dtensor import local_tensor
from plait.errors import InputError
from plait.optim.low_bit_codes import Codec, DynamicInt8, Float8
from plait.parallel.precision.optimizer_states import CODED, StateForm, block_of

_PIECE = 1 << 18
_PIECE_ON_DEVICE = 1 << 22
"""Elements of a chunk, a multiple of the block size: what fits a CPU's cache, what occupies a GPU.
"""
_AVERAGES = (("exp_avg", True), ("exp_avg_sq", False))
"""Name, and whether it has a sign."""


class SmallStateAdam(Optimizer):
    """Adam (`decoupled` false: decay is added to gradients) or AdamW. No amsgrad."""

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
        self._codecs: dict[tuple[bool, torch.device], Codec] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise InputError(
                "this optimizer takes no closure; compute the gradients first, then call step()"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._make(parameter, state)
        state["step"] += 1
        local = local_tensor(parameter.detach())
        values = local.contiguous().view(-1)
        gradient = local_tensor(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        averages = [self._average(parameter, name, signed) for name, signed in _AVERAGES]
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        decay = group["weight_decay"]
        # Tensors on the CPU: nothing waits for a device, and the dry run has no values.
        steps = state["step"].double()
        rate = lr / (1 - beta1**steps)
        root = (1 - beta2**steps).sqrt()
        piece = _PIECE if values.device.type == "cpu" else _PIECE_ON_DEVICE
        for start in range(0, values.numel(), piece):
            part = slice(start, min(start + piece, values.numel()))
            exact = torch.promote_types(values.dtype, torch.float32)
            value = values[part].to(exact)
            slope = gradient[part].to(exact)
            if self.decoupled:
                value.mul_(1 - lr * decay)
            elif decay:
                slope = slope.add(value, alpha=decay)
            mean, square = (average.read(part, exact) for average in averages)
            mean.lerp_(slope, 1 - beta1)
            square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            for average, found in zip(averages, (mean, square), strict=True):
                average.write(part, found)
            update = mean.div(square.sqrt().div_(root).add_(group["eps"])).mul_(rate)
            value.sub_(update)
            if value.dtype != values.dtype:
                values[part] = value
        if not local.is_contiguous():
            local.copy_(values.view(local.shape))

    def _average(self, parameter: nn.Parameter, name: str, signed: bool) -> _Average:
        state = self.state[parameter]
        if name in state:
            return _Average(local_tensor(state[name]).view(-1))
        key = (signed, parameter.device)
        if key not in self._codecs:
            self._codecs[key] = (
                Float8(signed=signed)
                if self.states == "float8"
                else DynamicInt8(signed=signed, device=parameter.device)
            )
        codes, scales = (
            local_tensor(state[f"{name}_{self.states}{end}"]).view(-1) for end in ("", "_scale")
        )
        return _Average(codes, scales, block_of(parameter.shape), self._codecs[key])

    def _make(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        local = local_tensor(parameter.detach())
        exact = torch.promote_types(parameter.dtype, torch.float32)
        block = block_of(parameter.shape) if self.states in CODED else 0
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name, signed in _AVERAGES:
            if not block:
                narrow = self.states == "bf16" and signed
                zeros = torch.zeros(
                    local.shape, dtype=torch.bfloat16 if narrow else exact, device=local.device
                )
                state[name] = _beside(parameter, zeros, parameter.shape)
                continue
            row = math.prod(local.shape[1:])
            whole_row = math.prod(parameter.shape[1:])
            codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
            scales = torch.zeros(
                local.shape[0], row // block, dtype=torch.float32, device=local.device
            )
            state[f"{name}_{self.states}"] = _beside(parameter, codes, parameter.shape)
            state[f"{name}_{self.states}_scale"] = _beside(
                parameter, scales, (parameter.shape[0], whole_row // block)
            )

    def fresh_states(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Those of a parameter before its first step, for a checkpoint to fill."""
        state: dict[str, Any] = {}
        self._make(parameter, state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from `state_dict()`. torch's own gives states the parameter's dtype, which codes
        and scales do not have.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][key])


class _Average:
    """One of the averages of a parameter's local part, flat, in whatever form."""

    def __init__(
        self,
        stored: torch.Tensor,
        scales: torch.Tensor | None = None,
        block: int = 1,
        codec: Codec | None = None,
    ) -> None:
        self.stored = stored
        self.scales = scales
        self.block = block
        self.codec = codec

    def read(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Numbers to calculate with; the stored ones themselves where they have this dtype."""
        if self.codec is None or self.scales is None:
            return self.stored[part].to(dtype)
        return self.codec.decode(self.stored[part], self.scales[self._blocks(part)]).to(dtype)

    def write(self, part: slice, found: torch.Tensor) -> None:
        """Keep what was calculated."""
        if self.codec is not None and self.scales is not None:
            self.stored[part], self.scales[self._blocks(part)] = self.codec.encode(
                found, self.block
            )
        elif self.stored.dtype != found.dtype:  # else the stored ones were calculated with
            self.stored[part] = found

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block, part.stop // self.block)


def _beside(parameter: torch.Tensor, local: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """This rank's part of a tensor of the unsharded `shape`, which is sharded as the parameter
    is.
    """
    if not isinstance(parameter, DTensor):
        return local
    whole = torch.Size(shape)
    stride = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole,
        stride=tuple(stride),
    )

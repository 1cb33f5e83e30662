"""`deepspeed.ops.adam`: DeepSpeed's Adams are torch's, with DeepSpeed's arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch

from plait.errors import InputError


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """torch.optim.AdamW, or Adam where `adam_w_mode` is False. Raises InputError for what neither
    of them does.
    """
    if not set_grad_none:
        raise InputError(
            "FusedAdam(set_grad_none=False): engine.step() frees gradients; leave it out"
        )
    return _adam(
        "FusedAdam",
        params,
        lr,
        bias_correction,
        betas,
        eps,
        weight_decay,
        amsgrad,
        decoupled=adam_w_mode,
    )


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """As `FusedAdam`; where it runs follows from the configuration (`offload_optimizer`). Raises
    InputError for what cannot be honoured.
    """
    if not fp32_optimizer_states:
        raise InputError(
            "DeepSpeedCPUAdam(fp32_optimizer_states=False): states have the dtype of the master"
            " weights; leave it out"
        )
    return _adam(
        "DeepSpeedCPUAdam",
        model_params,
        lr,
        bias_correction,
        betas,
        eps,
        weight_decay,
        amsgrad,
        decoupled=adamw_mode,
    )


def _adam(
    name: str,
    params: Any,
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    *,
    decoupled: bool,
) -> torch.optim.Optimizer:
    for argument, unusual in (
        ("bias_correction=False", not bias_correction),
        ("amsgrad=True", amsgrad),
    ):
        if unusual:
            raise InputError(
                f"{name}({argument}) cannot be honoured; leave it out, or pass an optimizer of"
                " your own"
            )
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

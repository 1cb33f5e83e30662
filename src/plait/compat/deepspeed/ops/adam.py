"""`deepspeed.ops.adam`: torch's Adam and AdamW with DeepSpeed's arguments and defaults."""

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
    """Return torch.optim.AdamW, or Adam if `adam_w_mode` is False.

    Raises:
        InputError: An argument has a value that torch's optimizers do not support.
    """
    if not set_grad_none:
        raise InputError(
            "FusedAdam(set_grad_none=False): engine.step() frees gradients; leave it out"
        )
    return _adam(
        "FusedAdam",
        params,
        decoupled=adam_w_mode,
        bias_correction=bias_correction,
        amsgrad=amsgrad,
        settings={"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
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
    """Return torch.optim.AdamW, or Adam if `adamw_mode` is False.

    `offload_optimizer` of the configuration decides whether it runs on the CPU.

    Raises:
        InputError: An argument has a value that is not supported.
    """
    if not fp32_optimizer_states:
        raise InputError(
            "DeepSpeedCPUAdam(fp32_optimizer_states=False): states have the dtype of the master"
            " weights; leave it out"
        )
    return _adam(
        "DeepSpeedCPUAdam",
        model_params,
        decoupled=adamw_mode,
        bias_correction=bias_correction,
        amsgrad=amsgrad,
        settings={"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
    )


def _adam(
    name: str,
    params: Any,
    *,
    decoupled: bool,
    bias_correction: bool,
    amsgrad: bool,
    settings: dict[str, Any],
) -> torch.optim.Optimizer:
    if amsgrad or not bias_correction:
        argument = "amsgrad=True" if amsgrad else "bias_correction=False"
        raise InputError(
            f"{name}({argument}) is not supported; leave it out, or pass an optimizer of your own"
        )
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    return optimizer_class(params, **settings)

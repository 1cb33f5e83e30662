"""Call of the independent reference with a plan and the layout's initial weights.

The reference gets the weights as arrays, and a model that Transformers or the user's function
built. The first reference checks the initialisation.
"""

from __future__ import annotations

import numpy as np
import torch

from plait.config.schema.optimization import OptimizerSpec
from plait.losses.loss import causal_lm_loss
from plait.model.experts import enables_balance_loss
from plait.parallel.micro_batches import to_device
from plait.verify import independent
from plait.verify.model_under_test import transformers_model
from plait.verify.parity import Trace
from plait.verify.plan import VerificationPlan
from plait.verify.shrink import without_dropout

_KERNELS = {"fused", "foreach", "capturable"}
"""Options of torch's optimizers that do not change the update."""


def adamw_of(spec: OptimizerSpec) -> independent.AdamW | str:
    """Return the settings of an AdamW, or the reason why the optimizer is not compared.

    Defaults are those of DeepSpeed: weight decay 0, or torch's 0.01 with `torch_adam`.
    """
    spec = spec.resolved()
    params = {name: value for name, value in spec.params.items() if name not in _KERNELS}
    decoupled = spec.type == "AdamW" or (spec.type == "Adam" and params.get("adam_w_mode", True))
    if not decoupled:
        return f"it has AdamW only, and the optimizer is {spec.type}"
    if spec.states is not None:
        return f"it keeps exact moments, and optimizer.states is {spec.states}"
    other = [name for name, value in params.items() if name in ("amsgrad", "maximize") and value]
    if other:
        return f"it has no {other[0]}"
    beta1, beta2 = params.get("betas", (0.9, 0.999))
    return independent.AdamW(
        lr=params.get("lr", 1e-3),
        beta1=beta1,
        beta2=beta2,
        eps=params.get("eps", 1e-8),
        weight_decay=params.get("weight_decay", 0.01 if params.get("torch_adam", False) else 0.0),
    )


def second_trace(plan: VerificationPlan, found: Trace) -> tuple[Trace | None, str]:
    """Train with the independent reference in float64.

    With another optimizer than AdamW the reference checks the first step up to its gradients.

    Returns:
        The trace, or None if nothing can be checked, and a description of what is not checked.
    """
    built = plan.build(torch.float64)
    if built.loss is not causal_lm_loss:
        return (
            None,
            (
                "not compared: it has cross entropy over tokens only, and the model brings its own"
                " loss"
            ),
        )
    if enables_balance_loss(built.model):
        return (
            None,
            (
                "not compared: it has no balance loss, which model.config.output_router_logits"
                " asks for"
            ),
        )
    adamw = adamw_of(plan.resolved.optimizer)
    is_adamw = isinstance(adamw, independent.AdamW)
    data = plan.data(built) if is_adamw else plan.data(built)[:1]
    model = _model(plan)
    lost = sorted({name for name, _ in model.named_parameters()} ^ set(found.initial))
    if lost:
        # The first reference reports these weights as a difference.
        return (
            None,
            (
                f"not compared: {len(lost)} weights are in the model or in the layout alone:"
                f" {', '.join(lost[:3])}"
            ),
        )
    with plan.lifting("float64", model):
        result = independent.train(
            model,
            {name: tensor.double().numpy() for name, tensor in found.initial.items()},
            [[to_device(piece, torch.device(plan.device)) for piece in step] for step in data],
            optimizer=(
                adamw
                if isinstance(adamw, independent.AdamW)
                else independent.AdamW(0.0, 0.0, 0.0, 1.0, 0.0)
            ),
            clipping=plan.resolved.gradient_clipping,
            skipped=found.skipped,
        )
    trace = Trace(
        tuple(result.losses),
        tuple(result.norms),
        tuple(
            {name: None if g is None else torch.from_numpy(g) for name, g in step.items()}
            for step in result.gradients
        ),
        (
            {name: torch.from_numpy(np.asarray(value)) for name, value in result.parameters.items()}
            if is_adamw
            else {}
        ),
    )
    return trace, (
        ""
        if is_adamw
        else (
            "compared: the first step's loss, norm and gradients; not compared: what follows,"
            f" because {adamw}"
        )
    )


def _model(plan: VerificationPlan) -> torch.nn.Module:
    """Return the model in float64, with the buffers that its own code creates."""
    if plan.tested.fields is not None:
        model = transformers_model(plan.tested.fields, dtype=torch.float64, device="cpu")
        without_dropout(model)
        _fill_buffers_again(model)
        return model.train().to(plan.device)
    return plan.build(torch.float64).model.to(plan.device)


def _fill_buffers_again(model: torch.nn.Module) -> None:
    """Compute buffers again by Transformers' `_init_weights`, as `from_pretrained` does.

    Constructors compute tables (GPT-J's sines) in the current default dtype, so a model that is
    built for float64 has other tables than one that is built on meta.
    """
    with torch.no_grad():
        for module in model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                model._init_weights(module)  # type: ignore[operator]

"""From an OptimizerSpec and a model's parameters to one torch optimizer.

Parameters may be plain tensors or shards (DTensor); each step updates a rank's own shard. Weight
decay goes to every parameter, as in DeepSpeed. Which kernel runs (`fused`) is chosen here for this
device and layout, and is not taken from a checkpoint: a checkpoint of another layout may name a
kernel that these parameters do not have.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait._torch.dtensor import local_tensor
from plait.cluster import accelerator
from plait.config.schema import optimizers
from plait.config.schema.optimization import OptimizerSpec
from plait.config.values.names import instead
from plait.errors import ConfigError, ModelError, Problem
from plait.optim.low_bit_adam import SmallStateAdam
from plait.optim.placement_groups import step_by_placement
from plait.parallel.memory_layout import dims_in_memory
from plait.parallel.precision.optimizer_states import refuse_cut_blocks

Named = tuple[str, nn.Parameter]
_KERNEL = ("fused", "foreach")
_FUSED = {**dict.fromkeys(("Adam", "AdamW", "SGD"), ("cpu", accelerator.NAME)), "Adagrad": ("cpu",)}
"""Devices with a fused kernel that is used without asking."""
_FUSED_SHARDED = ("Adam", "AdamW")
"""torch 2.13 has no rule for the other fused kernels on shards (`aten._fused_sgd_ does not have a
sharding strategy`).
"""
_EMBEDDING = ("embed", "lm_head", "wte", "wpe")
"""DeepSpeed's words for what Muon leaves to AdamW, and GPT-2's names for its embeddings."""


def refuse_nothing_to_train(model: nn.Module) -> None:
    """Raises ModelError for a model without a parameter that requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "no parameter of the model requires a gradient, so there is nothing to train; unfreeze"
            " some (requires_grad_(True))"
        )


def build_optimizer(spec: OptimizerSpec, named_parameters: Iterable[Named]) -> Optimizer:
    """The optimizer that a file asks for, over the parameters that require a gradient; one without
    parameters for a pipeline stage that has none of these.

    A parameter that appears under two names is updated once. Raises ConfigError for parameters that
    do not fit the optimizer, and ModelError for a model that the optimizer cannot train.
    """
    unique: dict[int, Named] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            unique.setdefault(id(parameter), (name, parameter))
    named = list(unique.values())
    spec = spec.resolved()
    # a library's class may have a parameter of such a name, and means it
    own_names = optimizers.is_path(spec.type)
    params = {
        name: value
        for name, value in spec.params.items()
        if own_names or name not in optimizers.ONLY
    }
    if spec.type == "Muon":
        return _keep_kernel(_muon(params, named))
    if spec.states is not None:
        return _small_states(spec, params, named)
    found, params = _class_and_params(spec.type, params)
    return _keep_kernel(_make(found, params, named))


def _small_states(spec: OptimizerSpec, params: dict[str, Any], named: Sequence[Named]) -> Optimizer:
    """Adam or AdamW with averages of fewer bytes. What torch's kernels would be told was refused by
    the configuration.
    """
    found, params = _adam(spec.type, params)
    own = {
        name: value
        for name, value in params.items()
        if name in ("lr", "betas", "eps", "weight_decay")
    }
    if found is torch.optim.AdamW and "weight_decay" not in own:
        own["weight_decay"] = 0.01  # torch's default, which `torch_adam` asks for
    assert spec.states is not None
    refuse_cut_blocks(spec.states, named)
    parameters = [parameter for _, parameter in named]
    return SmallStateAdam(
        parameters or [{"params": []}],
        states=spec.states,
        decoupled=found is torch.optim.AdamW,
        **own,
    )


def _class_and_params(kind: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    if kind in ("Adam", "AdamW"):
        return _adam(kind, params)
    if kind == "Lion":
        return _imported("lion_pytorch.Lion", "pip install lion-pytorch"), {
            **optimizers.LION,
            **params,
        }
    if optimizers.is_path(kind):
        return (
            _imported(kind, f"install the package `{kind.split('.')[0]}`, or correct the path"),
            params,
        )
    return optimizers.torch_class(kind), params


def _adam(kind: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """DeepSpeed 0.19.8 (`runtime/engine.py`, `_configure_basic_optimizer`): `Adam` is AdamW unless
    `adam_w_mode` is false, which `AdamW` ignores; weight decay is 0 by default, torch's 0.01 only
    with `torch_adam`.
    """
    decoupled = params.pop("adam_w_mode", True) or kind == "AdamW"
    if not params.pop("torch_adam", False):
        params = {"weight_decay": 0.0, **params}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), params


def _imported(path: str, remedy: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            Problem("optimizer.type", path, f"it cannot be imported ({error})", remedy)
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            Problem(
                "optimizer.type",
                path,
                "it is not a subclass of torch.optim.Optimizer",
                "name an optimizer class",
            )
        )
    return found


def _make(found: type[Optimizer], params: Mapping[str, Any], named: Sequence[Named]) -> Optimizer:
    allowed = optimizers.settable(found)
    unknown = [name for name in params if name not in allowed]
    if unknown:
        rule = f"{found.__name__} has no such parameter"
        raise ConfigError(
            *(
                Problem(f"optimizer.params.{name}", params[name], rule, instead(name, allowed))
                for name in unknown
            )
        )
    if needs_closure(found):
        rule = (
            "its step calls a function that computes the loss again, and a training step has none"
            " to give"
        )
        raise ConfigError(
            Problem(
                "optimizer.type",
                found.__name__,
                rule,
                "use an optimizer of one gradient a step, AdamW for one",
            )
        )
    refuse_sharded(found, named)
    build: Callable[..., Optimizer] = found
    try:
        optimizer = build(_groups(found, params, [parameter for _, parameter in named]), **params)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in params.items())
        reason = str(error) or type(error).__name__
        raise ConfigError(
            Problem(
                "optimizer.params",
                None,
                f"{found.__name__}({shown}) says: {reason}",
                "correct the value",
            )
        ) from error
    step_by_placement(optimizer)  # before other hooks of the step, which look at groups
    if found is torch.optim.SGD:
        optimizer.register_step_pre_hook(_start_late_momentum)
    return optimizer


@torch.no_grad()
def _start_late_momentum(optimizer: Optimizer, *_: object) -> None:
    """Give a momentum to parameters of fused SGD whose first gradient comes after that of others.

    torch's fused kernel starts all momenta of a group in one step, and fails where only some of
    them exist (an unused branch, a block that is unfrozen). The other kernels of SGD start each by
    itself, with the gradient. The buffer is such that the kernel's own update makes it the
    gradient.
    """
    for group in optimizer.param_groups:
        momentum = group["momentum"]
        if not (group["fused"] and momentum):
            continue
        trained = [p for p in group["params"] if p.grad is not None]
        late = [p for p in trained if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(late) == len(trained):  # torch starts them, in one step
            continue

        for parameter in late:
            gradient = -parameter.grad if group["maximize"] else parameter.grad
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
            # momentum * buffer + (1 - dampening) * gradient is what the kernel computes.
            optimizer.state[parameter]["momentum_buffer"] = gradient.mul_(
                group["dampening"] / momentum
            )


def needs_closure(kind: type[Optimizer]) -> bool:
    """Whether `step` cannot be called without a function (LBFGS)."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def refuse_sharded(found: type[Optimizer], named: Sequence[Named]) -> None:
    """Raises ModelError for torch's optimizers that fail at their first step on shards."""
    why = (
        optimizers.NOT_SHARDED.get(found.__name__)
        if found.__module__.startswith("torch.optim")
        else None
    )
    sharded = [name for name, parameter in named if isinstance(parameter, DTensor)]
    if why and sharded:
        raise ModelError(
            f"the optimizer {found.__name__}: {why}, and torch cannot do that on sharded parameters"
            f" ({len(sharded)} here, first `{sharded[0]}`); use AdamW, or zero_optimization.stage 0"
            " without tensor parallelism"
        )


def _groups(
    found: type[Optimizer], params: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    # One group on every layout: a schedule's state and a script's code count groups.
    kernel = _kernel(found, params, parameters) if parameters else {}
    return [{"params": list(parameters), **kernel}]


def _kernel(
    found: type[Optimizer], params: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[str, bool]:
    """`fused` for one group. What a user wrote is used as written, or refused; otherwise torch's
    default stays where fused is not available.
    """
    if found.__module__.partition(".")[0] != "torch" or "fused" not in optimizers.settable(found):
        return {}
    why_not = _why_not_fused(found.__name__, parameters)
    if params.get("fused") and why_not:
        raise ConfigError(
            Problem(
                "optimizer.params.fused",
                True,
                why_not,
                "leave it out: it is used wherever it works",
            )
        )
    if params.get("fused") is not None or params.get("foreach") or params.get("capturable"):
        return {}
    return {} if why_not else {"fused": True}


def _why_not_fused(name: str, parameters: Sequence[nn.Parameter]) -> str | None:
    devices = {parameter.device.type for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters}
    if not devices <= set(_FUSED.get(name, ())):
        return f"the fused {name} is not used on {', '.join(sorted(devices))}"
    if not all(dtype.is_floating_point for dtype in dtypes):
        return f"the fused {name} takes real floating point parameters only"
    if any(dims_in_memory(local_tensor(parameter.detach())) is None for parameter in parameters):
        return f"torch's fused {name} takes a parameter with gaps in its memory for one without"
    if name not in _FUSED_SHARDED and any(
        isinstance(parameter, DTensor) for parameter in parameters
    ):
        return f"torch's fused {name} does not run on sharded parameters"
    if name == "SGD" and "cpu" in devices and dtypes & {torch.float16, torch.bfloat16}:
        return (
            "torch's fused SGD leaves most float16 and bfloat16 parameters unchanged on CPU"
            " (pytorch issue 191763)"
        )
    return None


def _muon(params: dict[str, Any], named: Sequence[Named]) -> Optimizer:
    """Muon for the matrices inside the model, AdamW for everything else, with DeepSpeed's split and
    defaults (`set_optimizer_flags`, `MuonWithAuxAdam`).

    torch's Muon orthogonalises full matrices: on shards every rank gathers them, which costs
    traffic that AdamW does not have. It multiplies in bfloat16, which makes a difference of 1e-7
    between the gradients of two layouts one of about 1e-2 between their updates (norms), of up to
    7e-2 where gradients have a low rank, and single elements differ by up to half of the largest.
    """
    matrices = [
        (name, p)
        for name, p in named
        if p.ndim == 2 and not any(word in name.lower() for word in _EMBEDDING)
    ]
    chosen = {id(parameter) for _, parameter in matrices}
    rest = [(name, p) for name, p in named if id(p) not in chosen]
    if named and not matrices:
        raise ModelError(
            "optimizer.type = 'Muon': it trains two-dimensional weights inside a model, and this"
            " one has none; use AdamW"
        )
    shared = {"weight_decay": params.get("weight_decay", 0.0)}
    own: dict[str, Any] = {
        name: params[name]
        for name in ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
        if name in params
    }
    muon = _make(
        torch.optim.Muon,
        {"lr": params.get("muon_lr", params.get("lr", 0.02)), **shared, **own},
        matrices,
    )
    if not rest:
        return muon
    adam = {
        "lr": params.get("adam_lr", params.get("lr", 3e-4)),
        "betas": params.get("betas", (0.9, 0.95)),
        "eps": params.get("eps", 1e-10),
    }
    return JoinedOptimizer(muon, _make(torch.optim.AdamW, {**adam, **shared}, rest))


class JoinedOptimizer(Optimizer):
    """Several optimizers, each with its own parameters, that look and are saved as one.

    The groups and the states of the parts are those of one optimizer, so schedules, checkpoints and
    clipping need not know.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: a group added later would belong to none of the parts."""
        if self.parts:
            raise ModelError(
                "optimizer.type = 'Muon': parameters cannot be added to it later; build a new"
                " optimizer over all of them"
            )
        super().add_param_group(param_group)

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part. A closure is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all parts from `state_dict()`."""
        super().load_state_dict(state_dict)
        self._share()


def _keep_kernel(optimizer: Optimizer) -> Optimizer:
    """Loading a state keeps this optimizer's own kernels. Done before torch looks at the state,
    because a fused kernel wants its step counts on the device of the parameters.
    """

    def own_kernels(receiver: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        own = receiver.param_groups
        if len(own) != len(state["param_groups"]):
            return state  # torch's own message about the number of groups follows
        groups = [
            {**saved, **{key: group[key] for key in _KERNEL if key in group}}
            for saved, group in zip(state["param_groups"], own, strict=True)
        ]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(own_kernels)
    return optimizer

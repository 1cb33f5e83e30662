"""Construction of a torch optimizer from an OptimizerSpec and a model's parameters.

Parameters may be plain tensors or shards (DTensor). Each step updates this rank's shards. Weight
decay applies to every parameter, as in DeepSpeed.

Note [Choice of kernels]
    `fused` is chosen here for this device and layout. It is never taken from a checkpoint, because
    a checkpoint of another layout may name a kernel that these parameters do not support.

Note [Groups during a step]
    A fused or foreach call accepts either plain tensors or shards of one device mesh. The layout
    decides which parameters are plain: under tensor parallelism, for example, the norms and the
    biases of row-parallel layers. If plain parameters had permanent groups, the number of groups
    would depend on the layout too. An LR scheduler's state has one rate per group, so it could not
    be loaded on another layout. Groups are therefore split for the duration of a step only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from plait._torch.tensors import local_tensor
from plait.cluster import accelerator
from plait.config.schema import optimizers
from plait.config.schema.optimization import OptimizerSpec
from plait.errors import ConfigError, ModelError, Problem, raise_problems
from plait.names import suggest_names
from plait.optim.low_bit_adam import SmallStateAdam
from plait.parallel.parameter_layout import dims_in_memory
from plait.parallel.precision.optimizer_states import refuse_cut_blocks

Group = dict[str, Any]
"""Parameter group of an optimizer."""
Named = tuple[str, nn.Parameter]
"""A parameter with its name."""
_KERNEL_KEYS = ("fused", "foreach")
_FUSED = {**dict.fromkeys(("Adam", "AdamW", "SGD"), ("cpu", accelerator.NAME)), "Adagrad": ("cpu",)}
"""Devices on which the fused kernel of an optimizer is used by default."""
_FUSED_SHARDED = ("Adam", "AdamW")
"""Optimizers whose fused kernel supports shards.

torch 2.13 has no rule for the others (`aten._fused_sgd_ does not have a sharding strategy`).
"""
_EMBEDDING = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of parameters that Muon leaves to AdamW.

They are those that DeepSpeed excludes, and GPT-2's names for its embeddings.
"""


def build_optimizer(spec: OptimizerSpec, named_parameters: Iterable[Named]) -> Optimizer:
    """Build the optimizer of a configuration over the parameters that require a gradient.

    A pipeline stage without such parameters gets an optimizer without parameters. A parameter that
    appears under two names is updated once.

    Args:
        spec: Specification of the optimizer.
        named_parameters: (name, parameter) pairs.

    Raises:
        ConfigError: Values of the specification do not fit the optimizer.
        ModelError: The optimizer cannot train the model.
    """
    unique: dict[int, Named] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            unique.setdefault(id(parameter), (name, parameter))
    named = list(unique.values())
    spec = spec.resolved()
    # A library's class may have a parameter with the name of one of Plait's settings. In that case
    # it is meant for the class.
    is_library_class = optimizers.is_path(spec.type)
    params = {
        name: value
        for name, value in spec.params.items()
        if is_library_class or name not in optimizers.SINGLE_VALUED_PARAMS
    }
    if spec.type == "Muon":
        return _keep_kernel(_build_muon(params, named))
    if spec.states is not None:
        return _build_small_state_adam(spec, params, named)
    kind, params = _class_and_params(spec.type, params)
    return _keep_kernel(_build(kind, params, named))


def _class_and_params(kind: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    if kind in ("Adam", "AdamW"):
        return _adam(kind, params)
    if kind == "Lion":
        lion = _import_class("lion_pytorch.Lion", "pip install lion-pytorch")
        return lion, {**optimizers.LION, **params}
    if optimizers.is_path(kind):
        remedy = f"install the package `{kind.split('.')[0]}`, or correct the path"
        return _import_class(kind, remedy), params
    return optimizers.torch_class(kind), params


def _adam(kind: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and parameters of Adam or AdamW by the rules of DeepSpeed.

    The rules are those of DeepSpeed 0.19.8 (`runtime/engine.py`, `_configure_basic_optimizer`):
    `Adam` is AdamW unless `adam_w_mode` is false. `AdamW` ignores `adam_w_mode`. The default weight
    decay is 0; with `torch_adam` it is torch's 0.01.
    """
    decoupled = params.pop("adam_w_mode", True) or kind == "AdamW"
    if not params.pop("torch_adam", False):
        params = {"weight_decay": 0.0, **params}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), params


def _import_class(path: str, remedy: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            Problem("optimizer.type", path, f"it cannot be imported ({error})", remedy)
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        rule = "it is not a subclass of torch.optim.Optimizer"
        raise ConfigError(Problem("optimizer.type", path, rule, "name an optimizer class"))
    return kind


def _build(kind: type[Optimizer], params: Mapping[str, Any], named: Sequence[Named]) -> Optimizer:
    allowed = optimizers.settable_params(kind)
    rule = f"{kind.__name__} has no such parameter"
    raise_problems(
        Problem(f"optimizer.params.{name}", value, rule, suggest_names(name, allowed))
        for name, value in params.items()
        if name not in allowed
    )
    if needs_closure(kind):
        raise ConfigError(
            Problem(
                "optimizer.type",
                kind.__name__,
                "its step requires a closure that computes the loss again, but a training step has"
                " none to pass",
                "use an optimizer that needs one gradient per step, such as AdamW",
            )
        )
    refuse_sharded(kind, named)

    constructor: Callable[..., Optimizer] = kind
    try:
        parameters = [parameter for _, parameter in named]
        kernel = _kernel(kind, params, parameters) if parameters else {}
        # One group on every layout: a schedule's state and a script's code count groups.
        optimizer = constructor([{"params": parameters, **kernel}], **params)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in params.items())
        rule = f"{kind.__name__}({shown}) says: {str(error) or type(error).__name__}"
        raise ConfigError(Problem("optimizer.params", None, rule, "correct the value")) from error
    # Before other hooks of the step, which read the groups.
    step_by_placement(optimizer)
    if kind is torch.optim.SGD:
        optimizer.register_step_pre_hook(_start_late_momentum)
    return optimizer


def _kernel(
    kind: type[Optimizer], params: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[str, bool]:
    """Return the `fused` argument for one group, or an empty mapping for torch's default.

    A value in the configuration is used as it is, or refused. See Note [Choice of kernels].
    """
    if kind.__module__.partition(".")[0] != "torch" or "fused" not in optimizers.settable_params(
        kind
    ):
        return {}
    why_not = _why_not_fused(kind.__name__, parameters)
    if params.get("fused") and why_not:
        remedy = "leave it out: it is used wherever it works"
        raise ConfigError(Problem("optimizer.params.fused", True, why_not, remedy))
    if params.get("fused") is not None or params.get("foreach") or params.get("capturable"):
        return {}
    return {} if why_not else {"fused": True}


def _why_not_fused(name: str, parameters: Sequence[nn.Parameter]) -> str | None:
    """Return the reason why the fused kernel is not used for these parameters, or None."""
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


@torch.no_grad()
def _start_late_momentum(optimizer: Optimizer, *_: object) -> None:
    """Create the momentum of fused SGD for parameters whose first gradient arrives late.

    torch's fused kernel creates all momenta of a group in one step. It fails if only some of them
    exist, for example because of an unused branch or a block that was unfrozen later. The other
    kernels of SGD create each momentum separately, equal to the gradient. The value set here
    becomes equal to the gradient when the fused kernel updates it.
    """
    for group in optimizer.param_groups:
        momentum = group["momentum"]
        if not (group["fused"] and momentum):
            continue
        trained = [p for p in group["params"] if p.grad is not None]
        late = [p for p in trained if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(late) == len(trained):
            continue  # torch creates all of them in this step.

        for parameter in late:
            gradient = -parameter.grad if group["maximize"] else parameter.grad
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
            # momentum * buffer + (1 - dampening) * gradient is what the kernel computes.
            optimizer.state[parameter]["momentum_buffer"] = gradient.mul_(
                group["dampening"] / momentum
            )


def _keep_kernel(optimizer: Optimizer) -> Optimizer:
    """Keep an optimizer's own choice of kernels when a state is loaded.

    See Note [Choice of kernels]. The state is changed before torch reads it, because a fused kernel
    requires its step counts on the device of the parameters.
    """

    def keep(receiver: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if len(receiver.param_groups) != len(state["param_groups"]):
            return state  # torch's own message about the number of groups follows.
        groups = []
        for saved, group in zip(state["param_groups"], receiver.param_groups, strict=True):
            kernel = {key: group[key] for key in _KERNEL_KEYS if key in group}
            groups.append({**saved, **kernel})
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep)
    return optimizer


def step_by_placement(optimizer: Optimizer) -> None:
    """Split an optimizer's groups by the placement of their parameters during every step.

    See Note [Groups during a step].

    Args:
        optimizer: Any optimizer. Only torch's optimizers are changed, because other optimizers may
            store additional values in their groups.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        _GroupSplitter(optimizer)


class _GroupSplitter:
    """Hooks that replace an optimizer's groups before its step and restore them after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[Group] | None = None
        """The optimizer's groups before the split. None outside a step."""
        optimizer.register_step_pre_hook(self._split)
        optimizer.register_step_post_hook(self._restore)

    def _split(self, optimizer: Optimizer, *_: object) -> None:
        # torch calls no post hook after a step that raises.
        self._restore(optimizer)
        groups = [split for group in optimizer.param_groups for split in _by_placement(group)]
        if len(groups) > len(optimizer.param_groups):
            self._groups = optimizer.param_groups
            optimizer.param_groups = groups

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        if self._groups is not None:
            optimizer.param_groups = self._groups
            self._groups = None


def _by_placement(group: Group) -> list[Group]:
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh) <= 1:
        return [group]
    return [{**group, "params": members} for members in by_mesh.values()]


def _build_small_state_adam(
    spec: OptimizerSpec, params: dict[str, Any], named: Sequence[Named]
) -> Optimizer:
    """Build Adam or AdamW with low-bit moments.

    The configuration has refused settings that only torch's kernels support.
    """
    assert spec.states is not None
    kind, params = _adam(spec.type, params)
    supported = ("lr", "betas", "eps", "weight_decay")
    arguments = {name: value for name, value in params.items() if name in supported}
    is_adamw = kind is torch.optim.AdamW
    if is_adamw and "weight_decay" not in arguments:
        # torch's default, which `torch_adam` selects.
        arguments["weight_decay"] = 0.01
    # A block of codes must not be divided between ranks.
    refuse_cut_blocks(spec.states, named)
    parameters = [parameter for _, parameter in named]
    return SmallStateAdam(
        parameters or [{"params": []}], states=spec.states, decoupled=is_adamw, **arguments
    )


def _build_muon(params: dict[str, Any], named: Sequence[Named]) -> Optimizer:
    """Build Muon for the matrices of hidden layers, and AdamW for all other parameters.

    The split and the defaults are DeepSpeed's (`set_optimizer_flags`, `MuonWithAuxAdam`).

    torch's Muon orthogonalises full matrices: on shards every rank gathers them, which costs
    traffic that AdamW does not have. Muon multiplies in bfloat16, which amplifies differences
    between layouts: gradients whose norms differ by 1e-7 give updates whose norms differ by about
    1e-2, or by up to 7e-2 if the gradients have a low rank. Single elements differ by up to half of
    the largest element.
    """
    matrices = [
        (name, p)
        for name, p in named
        if p.ndim == 2 and not any(part in name.lower() for part in _EMBEDDING)
    ]
    matrix_names = {name for name, _ in matrices}
    others = [(name, p) for name, p in named if name not in matrix_names]
    if named and not matrices:
        raise ModelError(
            "optimizer.type = 'Muon': it trains two-dimensional weights inside a model, but this"
            " one has none; use AdamW"
        )
    shared = {"weight_decay": params.get("weight_decay", 0.0)}
    muon_params: dict[str, Any] = {"lr": params.get("muon_lr", params.get("lr", 0.02)), **shared}
    for name in ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"):
        if name in params:
            muon_params[name] = params[name]
    muon = _build(torch.optim.Muon, muon_params, matrices)
    if not others:
        return muon
    adam_params = {
        "lr": params.get("adam_lr", params.get("lr", 3e-4)),
        "betas": params.get("betas", (0.9, 0.95)),
        "eps": params.get("eps", 1e-10),
    }
    return JoinedOptimizer(muon, _build(torch.optim.AdamW, {**adam_params, **shared}, others))


class JoinedOptimizer(Optimizer):
    """Several optimizers with disjoint parameters that are used and saved as one.

    Its groups and states contain those of all parts, so schedules, checkpoints and clipping treat
    it as any other optimizer.

    Args:
        parts: The optimizers.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during the construction.

        Raises:
            ModelError: The optimizer has been built, and none of its parts would update the group.
        """
        if self.parts:
            raise ModelError(
                "optimizer.type = 'Muon': parameters cannot be added to it later; build a new"
                " optimizer over all of them"
            )
        super().add_param_group(param_group)

    def _share(self) -> None:
        """Assign this optimizer's groups and states to the parts that own them, without copies."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the step of every wrapped optimizer. A closure is called only once."""
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


def refuse_nothing_to_train(model: nn.Module) -> None:
    """Raise ModelError for a model without a parameter that requires a gradient.

    Parameters of `nn.LazyLinear` and the like have no shape before their first forward, so they are
    refused too.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"`{name}` has no shape yet: its lazy module makes the parameter in its first"
                " forward; call the model once on a small batch before you pass it to Plait"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "no parameter of the model requires a gradient, so there is nothing to train; unfreeze"
            " some (requires_grad_(True))"
        )


def needs_closure(kind: type[Optimizer]) -> bool:
    """Return True if an optimizer's `step` requires a closure, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def refuse_sharded(kind: type[Optimizer], named: Sequence[Named]) -> None:
    """Raise ModelError if the first step of a torch optimizer would fail on shards.

    Args:
        kind: Class of the optimizer.
        named: (name, parameter) pairs.
    """
    if not kind.__module__.startswith("torch.optim"):
        return
    reason = optimizers.NOT_SHARDED.get(kind.__name__)
    sharded = [name for name, parameter in named if isinstance(parameter, DTensor)]
    if reason and sharded:
        raise ModelError(
            f"the optimizer {kind.__name__}: {reason}, and torch cannot do that on sharded"
            f" parameters ({len(sharded)} here, first `{sharded[0]}`); use AdamW, or"
            " zero_optimization.stage 0 without tensor parallelism"
        )


def make_fake_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states of an optimizer with a step on zero gradients.

    It changes the parameters, so it is for fake tensors, dry runs and measurements only.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None

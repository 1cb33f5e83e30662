"""Initial weights for a model that was built and sharded on `meta`.

The weights have the same bits on every layout, and no process ever holds the full model.

Note [Initialisation of a meta model]
    Each unit (a block, or an outer module without blocks) is built unsharded on the CPU,
    initialised by its own class, copied slice by slice into the sharded model, and freed. Every
    module draws from a generator seeded by its name, so the order of units and the layout do not
    matter. Memory is filled with NaN first. If a tensor still contains NaN afterwards, it was not
    initialised, and an error names it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.modules import direct_buffers, direct_parameters, reset_method
from plait._torch.tensors import local_window, version_of
from plait.errors import ModelError
from plait.hashing import seed_of
from plait.model.layers import tied_names

Initialise = Callable[[nn.Module], None]
"""Function that fills the parameters and buffers that a module owns itself, in place.

`_init_weights` of Transformers and `reset_parameters` of torch are of this kind.
"""

_WRITES = "_plait_writes"
"""Attribute of a template that has the number of writes to each parameter on `meta`, by name."""


def is_meta(model: nn.Module) -> bool:
    """Return True if the model is on `meta`, so its parameters have no data yet.

    Raises:
        ModelError: Some of its parameters are on `meta` and others are not.
    """
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta and len(on_meta) < len(list(model.parameters())):
        raise ModelError(
            f"{on_meta[0]} is on meta and other parameters are not; build the whole model under"
            " torch.device('meta') or none of it"
        )
    return bool(on_meta)


def template_of(model: nn.Module) -> nn.Module:
    """Copy a `meta` model before techniques change it. The copy takes no memory."""
    template = copy.deepcopy(model)
    # The version counters of copied tensors start at 0, so the counts come from the original.
    writes = {name: version_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
    object.__setattr__(template, _WRITES, writes)
    return template


def allocate(model: nn.Module, device: torch.device, *, host_units: Collection[str] = ()) -> None:
    """Allocate uninitialised storage for a sharded `meta` model. Tied parameters stay tied.

    Args:
        model: The sharded model, of which each rank allocates its shards only.
        device: The device of the parameters and buffers.
        host_units: Names of modules whose parameters are on the CPU instead. "" stands for all
            modules.
    """
    ties = tied_names(model)
    model.to_empty(device=device)
    if "" in host_units:
        host_units = ("",)
    for unit in host_units:
        model.get_submodule(unit).to_empty(device=torch.device("cpu"))
    if host_units:
        # `to_empty` has moved the buffers too, and only parameters are offloaded.
        for module in model.modules():
            for name, buffer in direct_buffers(module).items():
                if buffer is not None:
                    direct_buffers(module)[name] = buffer.to(device)

    # `to_empty` makes a separate tensor for each name of a tied parameter.
    for first, *other_names in ties:
        parameter = model.get_parameter(first)
        for name in other_names:
            owner, _, leaf = name.rpartition(".")
            direct_parameters(model.get_submodule(owner))[leaf] = parameter


def initialise(
    model: nn.Module,
    template: nn.Module,
    blocks: tuple[str, ...],
    *,
    seed: int,
    filled: Callable[[torch.Tensor], None] = lambda _: None,
) -> None:
    """Fill `model` with initial weights. See Note [Initialisation of a meta model].

    Args:
        model: The model, sharded or not.
        template: Copy of the model, made by `template_of`. Its modules initialise the weights.
        blocks: Names of the repeated blocks.
        seed: Seed of all draws.
        filled: Called with each tensor of `model` after its values were written.

    Raises:
        ModelError: A parameter or buffer has no initialisation that can be run again.
    """
    targets = dict(_own_tensors(model, "", recurse=True))
    name_of_target = {id(target): name for name, target in reversed(targets.items())}
    ties = tied_names(template)
    _tie(targets, ties)

    filled_targets: set[int] = set()
    rules = _rules(template)
    writes: dict[str, int] = getattr(template, _WRITES, {})
    tied_parameters = {name for names in ties for name in names}
    for prefix, unit, recurse in _units(template, blocks):
        if not any(name in targets for name, _ in _own_tensors(unit, prefix, recurse=recurse)):
            # On another pipeline stage.
            continue

        _allocate_poisoned(unit, recurse=recurse)
        versions = {
            name: version_of(value) for name, value in _own_tensors(unit, prefix, recurse=recurse)
        }
        members = [(prefix, unit)]
        if recurse:
            members = list(unit.named_modules(prefix=prefix))
        # Children before parents, which may override them (GPT-2's residual projections).
        for name, module in reversed(members):
            _run(rules[name], module, name, seed)

        for name, value in _own_tensors(unit, prefix, recurse=recurse):
            if name not in targets:
                continue
            # Models of Transformers repeat `_init_weights` only, which is less than their
            # constructors did. A tied parameter counts the writes under all of its names.
            if (
                name in writes
                and name not in tied_parameters
                and not rules[name.rpartition(".")[0]].is_of_transformers
            ):
                _refuse_lost_writes(
                    name,
                    unit,
                    original_writes=writes[name],
                    repeated_writes=version_of(value) - versions[name],
                )
            if _is_poisoned(value):
                raise ModelError(
                    f"{name} was not initialised: {type(unit).__name__} computes it only in its"
                    " constructor, which has run on meta; give the class a `reset_parameters` that"
                    " fills it, load weights from a folder, or build the model with real weights"
                )
            target = targets[name]
            # A tied parameter takes the value of its first name.
            if id(target) not in filled_targets:
                filled_targets.add(id(target))
                with torch.no_grad():
                    if isinstance(target, DTensor):
                        target.to_local().copy_(value[local_window(target)])
                    else:
                        target.copy_(value)
                filled(target)
        unit.to_empty(device="meta", recurse=recurse)

    missing = [name for target, name in name_of_target.items() if target not in filled_targets]
    if missing:
        raise ModelError(
            f"{missing[0]} received no values, because sharding has changed which parameters it is"
            " tied to; build the model with real weights instead of on meta"
        )


def _tie(targets: dict[str, torch.Tensor], ties: Iterable[Sequence[str]]) -> None:
    """Assign one target tensor to all names of a tied parameter.

    This tensor is the target of the first name that exists on this pipeline stage.
    """
    for names in ties:
        target = next((targets[name] for name in names if name in targets), None)
        if target is not None:
            targets.update(dict.fromkeys(names, target))


def broadcast(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Copy the weights and buffers of a group's first rank to all of its ranks. Collective.

    Args:
        model: A model that is not sharded yet. It is changed in place.
        group: The ranks, by default all.
    """
    if dist.get_world_size(group) == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            unexpanded = _each_element_once(tensor.data)
            # The memory layouts of ranks may differ, and a broadcast copies storage in order.
            buffer = unexpanded.contiguous()
            dist.broadcast(buffer, group_src=0, group=group)
            if buffer is not unexpanded:
                unexpanded.copy_(buffer)


def fill_buffers(model: nn.Module, template: nn.Module) -> None:
    """Rebuild the non-persistent buffers (rotary frequencies, masks), which checkpoints lack.

    Raises:
        ModelError: The class of a module cannot rebuild its buffer.
    """
    persistent = set(template.state_dict(keep_vars=True))
    rules = _rules(template)
    targets = dict(_own_tensors(model, "", recurse=True))
    for name, module in template.named_modules():
        buffers = [full_name for full_name, _ in module.named_buffers(prefix=name, recurse=False)]
        missing = [buffer for buffer in buffers if buffer in targets and buffer not in persistent]
        if not missing:
            continue
        _allocate_poisoned(module, recurse=False)
        _run(rules[name], module, name, 0)
        for buffer in missing:
            value = template.get_buffer(buffer)
            if _is_poisoned(value):
                raise ModelError(
                    f"{buffer} is a non-persistent buffer, but {type(module).__name__} cannot"
                    " rebuild it; make it persistent"
                )
            targets[buffer].copy_(value)
        module.to_empty(device="meta", recurse=False)


def _each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor that contains each element of its storage once."""
    for dim in range(tensor.ndim):
        if not isinstance(tensor, DTensor) and tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _units(template: nn.Module, blocks: tuple[str, ...]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each unit as (name, module, whether the submodules are included).

    No tensor is in two units. Blocks, and modules that contain no block, include their submodules.
    The unit of a module that contains a block has only the module's direct tensors.
    """

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        holds_block = any(block.startswith(f"{name}.") for block in blocks)
        if name in blocks or (name and not holds_block):
            yield name, module, True
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}".removeprefix("."), child)
        yield name, module, False

    yield from walk("", template)


def _refuse_lost_writes(
    name: str, unit: nn.Module, *, original_writes: int, repeated_writes: int
) -> None:
    """Raise ModelError if initialisation repeats fewer writes than construction made on `meta`.

    Values that are written on `meta` are lost.
    """
    if original_writes > repeated_writes:
        raise ModelError(
            f"{name} was written to {original_writes} times while the model was built on meta,"
            " where values are lost, and reset_parameters and _init_weights repeat only"
            f" {repeated_writes} of these writes: a constructor ({type(unit).__name__}, or a class"
            " that contains it) sets this tensor; set it in reset_parameters of its class or in"
            " _init_weights(self, module) of the model, load weights from a folder, or build the"
            " model with real weights"
        )


@dataclass(frozen=True)
class _Rule:
    """Initialisation of one module: `reset_parameters`, and then `_init_weights` of its model.

    The order is that of a constructor that ends with `self.apply(self._init_weights)`.
    """

    reset: Callable[[], Any] | None
    apply: Initialise | None
    is_of_transformers: bool

    def __call__(self, module: nn.Module) -> None:
        # `_init_weights` of Transformers initialises modules of all kinds by itself.
        if self.reset is not None and not self.is_of_transformers:
            self.reset()
        if self.apply is not None:
            self.apply(module)


def _rules(template: nn.Module) -> dict[str, _Rule]:
    """Return the initialisation of each module by its name."""
    rules: dict[str, _Rule] = {}

    def walk(
        name: str, module: nn.Module, inherited: Initialise | None, is_of_transformers: bool
    ) -> None:
        method: Any = getattr(module, "_init_weights", None)
        if method is not None and _is_of_transformers(module):
            inherited = method
            is_of_transformers = True
        elif method is not None and not is_of_transformers and _takes_a_module(method):
            inherited = method
        rules[name] = _Rule(reset_method(module), inherited, is_of_transformers)
        for child_name, child in module.named_children():
            child_path = f"{name}.{child_name}".removeprefix(".")
            walk(child_path, child, inherited, is_of_transformers)

    walk("", template, None, False)
    return rules


def _is_of_transformers(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in type(module).__mro__)


def _takes_a_module(method: Callable[..., Any]) -> bool:
    """Return True if a bound method can be called with one argument, as `nn.Module.apply` does."""
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _run(rule: _Rule, module: nn.Module, name: str, seed: int) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Seed the CPU's generator only: torch.manual_seed keeps a stack trace per call until CUDA
        # starts, which took a quarter of the start of a small run.
        torch.default_generator.manual_seed(seed_of(f"{seed}:{name}"))
        rule(module)


def _allocate_poisoned(module: nn.Module, *, recurse: bool) -> None:
    """Allocate CPU tensors, and fill them with values that no initialisation produces."""
    module.to_empty(device="cpu", recurse=recurse)
    with torch.no_grad():
        for _, tensor in _own_tensors(module, "", recurse=recurse):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _own_tensors(
    module: nn.Module, prefix: str, *, recurse: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(prefix=prefix, recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(prefix=prefix, recurse=recurse, remove_duplicate=False)

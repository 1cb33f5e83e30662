"""Tensor-parallel plan of one model for one degree.

The plan has the style of every module and the split dimension of every parameter. It is created and
checked from shapes only, before any process group exists. `parallel.tensor` applies it.

Splits follow the rule of `torch.chunk`, so widths and vocabularies need not be divisible by the
degree; numbers of heads must be. Invariant: `TensorPlan.dims` has an entry for every parameter of
the model, and all names of a tied parameter have the same entry.

Note [Replicated parameters in split regions]
    Between a column-parallel and a row-parallel layer, a rank computes only its own heads or
    channels. A norm over the width of one head, or an activation with a weight, is applied only to
    these heads or channels. The gradient of its weight on a rank is partial and must be summed over
    the ranks.

    For other parameters in such a region it is not known what they are applied to. If the rules
    come from a model family, the layers around them are gathered instead, which is correct for any
    parameter. A user's rules are applied as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast

from torch import nn

from plait.cluster.layout import shard_length, shard_lengths
from plait.errors import ConfigError, ModelError, Problem
from plait.model.adapters import (
    LEARNED_KEYS,
    adapted_layers,
    adapter_matrices,
    base_name,
    copied_layers,
    refuse_adapted_parameters,
    refuse_prompts,
    split_adapters,
    without_adapters,
)
from plait.model.heads import (
    GROUPS,
    Attention,
    allows,
    check_heads,
    count_attributes,
    find_attentions,
    head_width,
    local_count,
    replicates_keys,
)
from plait.model.layers import (
    COLUMN_STYLES,
    RuleSet,
    Style,
    assign,
    check_style,
    first_names,
    generic,
    in_features,
    is_norm,
    matches,
    out_features,
    split_dims,
    tied_names,
)
from plait.model.outer_layers import split_boundary_layers
from plait.model.sequence import is_inside, sequence_facts
from plait.model.sources import rules_for

_GATHERED_STYLES: dict[Style, Style] = {
    "colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
}


@dataclass(frozen=True)
class StyledModule:
    """Module of a plan, and its tensor-parallel style."""

    name: str
    """Full name of the module."""
    style: Style


@dataclass(frozen=True)
class TensorPlan:
    """Split of a model over the ranks of tensor parallelism. All names are full names (FQNs)."""

    tp: int
    """Degree of tensor parallelism."""
    modules: tuple[StyledModule, ...]
    """Modules with a style, in model order.

    A style of a container is assigned to the descendants that own parameters.
    """
    dims: Mapping[str, int | None]
    """Dimension that is split over tp, for every parameter under all of its names.

    None means that the parameter is replicated on every rank.
    """
    attributes: tuple[tuple[str, str, int], ...]
    """Integers that count heads, as (module, attribute, value on one rank)."""
    kv_heads: Mapping[str, int]
    """Number of heads of every `kv_replicated` module."""
    heads: Mapping[str, int]
    """Number of heads of every attention whose heads are split, if it is known.

    Outputs per head, such as attention weights, are those of this rank's heads.
    """
    norms: tuple[str, ...]
    """Modules with replicated parameters that compute on sequence shards.

    They are norms that are children of blocks, and the final norm. Under sequence parallelism their
    gradients are summed over tp, like the biases of row-split layers inside blocks.
    """
    regions: tuple[str, ...]
    """Children of blocks (attention, MLP) whose first input is gathered along the sequence.

    Under sequence parallelism they derive shapes and positions from that input. Row-parallel layers
    inside return sequence shards. A column-parallel layer that is itself a child of a block gathers
    its own input.
    """
    all_token_modules: tuple[str, ...]
    """Children of blocks that every rank computes on all tokens under sequence parallelism.

    They are layers of experts, and attention that is not split. Their first input is gathered along
    the sequence, and each rank keeps its own tokens of the output. Inside, layers are split as
    without sequence parallelism.
    """
    final_norm: str | None
    head: str | None
    """Language-model head that is split along the vocabulary."""
    embedding: str | None
    """Embedding that is split along the vocabulary."""
    sequence_parallel: Literal[True] | str
    """True if the blocks can work on sequence shards, otherwise the reason why not."""
    source: str
    """Source of the rules, for messages."""
    adapters: tuple[str, ...] = ()
    """Replicated matrices of adapters around layers that are split inside blocks.

    Under sequence parallelism their gradients are summed over tp, like those of `norms`.
    """

    @property
    def styles(self) -> dict[str, Style]:
        """Style of each module, by module name."""
        return {entry.name: entry.style for entry in self.modules}


def make_plan(
    model: nn.Module, *, tp: int, user: Mapping[str, str] | None = None, blocks: Sequence[str]
) -> TensorPlan:
    """Create the tensor-parallel plan of a model.

    Args:
        model: The model, on any device (`meta` included).
        tp: Degree of tensor parallelism.
        user: Style by pattern. If it is given, no other rules are used. Patterns match adapted
            layers by their names in the model without adapters.
        blocks: Names of the repeated blocks.

    Raises:
        ModelError: The rules do not fit the model.
        ConfigError: The degree does not fit the sizes of the model.
    """
    refuse_prompts(model, "parallel.tp", LEARNED_KEYS)
    wrappers = adapted_layers(model)
    if not wrappers:
        return _plan_without_adapters(model, tp=tp, user=user, blocks=blocks)

    refuse_adapted_parameters(model)
    # See Note [Plans with adapters] in `adapters`.
    with without_adapters(model, wrappers):
        plan = _plan_without_adapters(model, tp=tp, user=user, blocks=blocks)
    return _add_adapters(plan, model, wrappers, blocks)


def _plan_without_adapters(
    model: nn.Module, *, tp: int, user: Mapping[str, str] | None, blocks: Sequence[str]
) -> TensorPlan:
    rule_set = rules_for(model, user=user, blocks=blocks)
    styles = assign(model, rule_set)
    head, embedding = split_boundary_layers(model, styles, rule_set)
    for name in set(styles) & set(copied_layers(model)):
        raise ModelError(
            f"parallel.tp: {name} is trained in full (modules_to_save), which is supported for a"
            " head and an embedding only, because other layers compute with a part of their input;"
            " move it from modules_to_save to target_modules (which adapts it), or use parallel.tp"
            " = 1"
        )
    for name, style in styles.items():
        check_style(model, name, style, rule_set.source)

    # Inner rules look for parameters whose owner has no style, so containers come first. The heads
    # are checked before keys are replicated, because only valid degrees are.
    styles = _spread_to_owners(model, styles)
    complete_inner_rules(model, styles, rule_set, blocks)
    attentions = find_attentions(model, styles)
    check_heads(attentions, tp)
    styles, kv_heads = _replicate_keys(styles, attentions, tp)
    # From the order of the rules to that of the model.
    styles = {name: styles[name] for name, _ in model.named_modules() if name in styles}

    dims = _split_dims_of_parameters(model, styles)
    _check_tied(model, dims, rule_set.source)
    _check_widths(model, styles, attentions, tp)
    if all(dim is None for dim in dims.values()):
        raise ModelError(
            f"{rule_set.source}: no parameter of {type(model).__name__} is split, so parallel.tp ="
            f" {tp} would only repeat work; use 1"
        )

    heads = {}
    for attention in attentions:
        if attention.heads is not None:
            heads[attention.name] = attention.heads
    sequence = sequence_facts(model, styles, blocks, rule_set.full_sequence_reason)
    return TensorPlan(
        tp=tp,
        modules=tuple(StyledModule(name, style) for name, style in styles.items()),
        dims=dims,
        attributes=_local_attributes(model, attentions, rule_set, tp),
        kv_heads=kv_heads,
        heads=heads,
        norms=tuple(sequence.norms),
        regions=tuple(sequence.regions),
        all_token_modules=tuple(sequence.all_token_modules),
        final_norm=sequence.final_norm,
        head=head,
        embedding=embedding,
        sequence_parallel=sequence.reasons[0] if sequence.reasons else True,
        source=rule_set.source,
    )


def _add_adapters(
    plan: TensorPlan, model: nn.Module, wrappers: Mapping[str, nn.Module], blocks: Sequence[str]
) -> TensorPlan:
    """Extend the plan of a model without adapters to the model with adapters."""
    plain = plan.styles
    styles: dict[str, str] = {base_name(name, wrappers): style for name, style in plain.items()}
    replicated: list[str] = []
    for name, wrapper in wrappers.items():
        split = split_adapters(name, wrapper, plain.get(name))
        styles |= split
        # Parts that are computed on all tokens have complete gradients.
        if split and is_inside(name, blocks) and not is_inside(name, plan.all_token_modules):
            replicated += adapter_matrices(name, wrapper) - split.keys()
    modules = []
    for name, _ in model.named_modules():
        if name in styles:
            modules.append(StyledModule(name, cast(Style, styles[name])))

    base_dims = {base_name(name, wrappers): dim for name, dim in plan.dims.items()}
    dims = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in base_dims:
            dims[name] = base_dims[name]
        else:
            # A matrix of an adapter, [r, in] or [out, r].
            style = styles.get(name.rpartition(".")[0], "")
            dims[name] = {"colwise": 0, "rowwise": 1}.get(style)

    return replace(plan, modules=tuple(modules), dims=dims, adapters=tuple(sorted(replicated)))


SMALL_SHARE = 0.5
"""Share of the split parameters below which a plan causes a warning."""


def small_split_warning(
    plan: TensorPlan, model: nn.Module, *, excluded: Collection[str] = ()
) -> str | None:
    """Return a warning if a plan splits so little that ranks mostly repeat each other's work.

    Args:
        plan: The plan.
        model: The model of the plan.
        excluded: Names of parameters that are ignored, because other axes split them.

    Returns:
        The text of the warning, or None.
    """
    replicated: dict[str, int] = {}
    split = 0
    for name, parameter in model.named_parameters():
        if name in excluded:
            continue
        if plan.dims[name] is None:
            layer = generic(name)
            replicated[layer] = replicated.get(layer, 0) + parameter.numel()
        else:
            split += parameter.numel()

    # At least 1, because experts can be all of a model's parameters.
    share = split / max(1, split + sum(replicated.values()))
    if share >= SMALL_SHARE:
        return None
    largest = sorted(replicated, key=lambda name: -replicated[name])[:3]
    counted = "the parameters"
    if excluded:
        counted += " besides experts"
    return (
        f"parallel.tp = {plan.tp}: {plan.source} splits {share:.1%} of {counted} of this"
        f" {type(model).__name__}; every rank of tp holds and computes the rest in full, most of it"
        f" in {', '.join(largest)}; set parallel.plan with styles for these layers, or use"
        " parallel.tp = 1"
    )


def _spread_to_owners(model: nn.Module, styles: dict[str, Style]) -> dict[str, Style]:
    """Assign a container's style to the descendants that own parameters."""
    spread: dict[str, Style] = {}
    for name, style in styles.items():
        if style != "replicated_with_grad_allreduce":
            spread[name] = style
            continue
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if next(module.parameters(recurse=False), None) is not None:
                spread[inner] = style
    return spread


def _replicate_keys(
    styles: dict[str, Style], attentions: Sequence[Attention], tp: int
) -> tuple[dict[str, Style], dict[str, int]]:
    """Assign the style `kv_replicated` to key and value projections with fewer heads than ranks.

    Returns:
        (changed styles, number of heads of every `kv_replicated` module).
    """
    kv_heads: dict[str, int] = {}
    changed = dict(styles)
    for attention in attentions:
        replicated = replicates_keys(attention, tp)
        for name in attention.keys_values:
            if replicated and attention.kv_heads is not None:
                changed[name] = "kv_replicated"
                kv_heads[name] = attention.kv_heads
            elif styles[name] == "kv_replicated":
                rule = (
                    f"{name} is 'kv_replicated', but its {attention.kv_heads} heads are not fewer"
                    " than the ranks"
                )
                raise ConfigError(Problem("parallel.tp", tp, rule, "use the style 'colwise'"))

    for name, style in styles.items():
        if style == "kv_replicated" and name not in kv_heads:
            raise ModelError(
                f"{name} is 'kv_replicated', but its number of heads is not known; set"
                " num_key_value_heads on its module"
            )
    return changed, kv_heads


def _parameter_styles(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style | None]:
    """Return, for every name of every parameter, the style of the module that owns it."""
    # A module may have several names, and has a style under the first.
    module_names = {id(module): name for name, module in model.named_modules()}
    parameter_styles = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        parameter_styles[name] = styles.get(module_names[id(owner)])
    return parameter_styles


def _split_dims_of_parameters(
    model: nn.Module, styles: Mapping[str, Style]
) -> dict[str, int | None]:
    dims: dict[str, int | None] = {}
    for name, style in _parameter_styles(model, styles).items():
        owner, _, leaf = name.rpartition(".")
        dims[name] = None
        if style is not None:
            dims[name] = split_dims(model.get_submodule(owner), style)[leaf]
    return dims


def _check_tied(model: nn.Module, dims: dict[str, int | None], source: str) -> None:
    """Check that all names of a tied parameter have the same split.

    If the bias of a head is also registered on the head's parent, the entry of `dims` for the
    parent's name is replaced with that of the head.
    """
    for names in tied_names(model):
        distinct = {dims[name] for name in names}
        if len(distinct) == 1:
            continue
        # A bias [vocabulary] of the head that its parent registers as well.
        if distinct == {None, 0} and all(model.get_parameter(name).ndim == 1 for name in names):
            dims.update(dict.fromkeys(names, 0))
            continue

        splits = []
        for name in names:
            dim = "no dimension" if dims[name] is None else f"dimension {dims[name]}"
            splits.append(f"{name} along {dim}")
        raise ModelError(
            f"{source}: one tied parameter would be split {', '.join(splits)}; use the styles"
            " 'embedding_rowwise' and 'vocab_head' for its modules, or no style for any of them"
        )


@dataclass(frozen=True)
class _SplitSize:
    """Size of a module's dimension that tensor parallelism splits."""

    name: str
    """Name of the module."""
    size: int
    unit: str
    """Name of the dimension that is split: rows, outputs or inputs."""
    of_heads: bool
    """True if the size must be split between heads."""

    def violated_rule(self, tp: int) -> str | None:
        """Return the rule that a split between `tp` ranks violates, or None."""
        if shard_length(self.size, tp, tp - 1) == 0:
            ranks = sum(length > 0 for length in shard_lengths(self.size, tp))
            return (
                f"{self.name} has {self.size} {self.unit}, of which only {ranks} ranks would get"
                " some"
            )
        if self.of_heads and self.size % tp:
            return (
                f"{self.name} has {self.size} {self.unit} and {self.size} % {tp} != 0, so a head"
                " would be cut"
            )
        return None


def _check_widths(
    model: nn.Module, styles: Mapping[str, Style], attentions: Sequence[Attention], tp: int
) -> None:
    """Check that every rank receives a part of each layer, and that no head is divided.

    Raises:
        ConfigError: A layer or head cannot be split. The error suggests the next smaller degree
            that fits.
    """
    sizes = list(_split_sizes(model, styles, attentions))
    # Of the same layer in many blocks, only the first one is reported.
    problems: dict[str, str] = {}
    for size in sizes:
        rule = size.violated_rule(tp)
        if rule is not None:
            problems.setdefault(generic(size.name), rule)
    if not problems:
        return

    def fits(degree: int) -> bool:
        if not allows(attentions, degree):
            return False
        return all(size.violated_rule(degree) is None for size in sizes)

    remedy = f"use {next(degree for degree in range(tp - 1, 0, -1) if fits(degree))}"
    raise ConfigError(*[Problem("parallel.tp", tp, rule, remedy) for rule in problems.values()])


def _split_sizes(
    model: nn.Module, styles: Mapping[str, Style], attentions: Sequence[Attention]
) -> Iterator[_SplitSize]:
    attention_names = [attention.name for attention in attentions]
    for name, style in styles.items():
        if style in ("kv_replicated", "replicated_with_grad_allreduce"):
            continue
        module = model.get_submodule(name)
        in_attention = is_inside(name, attention_names)
        of_heads = in_attention and style in ("colwise", "rowwise")
        if style == "embedding_rowwise":
            rows = int(module.get_parameter("weight").shape[0])
            yield _SplitSize(name, rows, "rows", of_heads)
        elif style in COLUMN_STYLES:
            yield _SplitSize(name, out_features(module), "outputs", of_heads)
        else:
            yield _SplitSize(name, in_features(module), "inputs", of_heads)


def _local_attributes(
    model: nn.Module, attentions: Sequence[Attention], rule_set: RuleSet, tp: int
) -> tuple[tuple[str, str, int], ...]:
    """Return the changed head-counting attributes of a rank. See `TensorPlan.attributes`."""
    changed = []
    for attention in attentions:
        module = model.get_submodule(attention.name)
        for name in _counting_attributes(module, attention, rule_set, tp):
            value = local_count(attention, name, tp)
            if value is not None and value != getattr(module, name):
                changed.append((attention.name, name, value))
    return tuple(changed)


def _counting_attributes(
    module: nn.Module, attention: Attention, rule_set: RuleSet, tp: int
) -> list[str]:
    if rule_set.known_counts:
        return list(count_attributes(module))
    names: list[str] = []
    for counts in rule_set.counts:
        if matches(attention.name, counts.pattern):
            names += counts.attributes
    # With replicated keys the number of queries per key changes, whether the keys are computed
    # by this layer or by another one.
    if attention.kv_heads is not None and attention.kv_heads < tp:
        names += [name for name in count_attributes(module) if name in GROUPS and name not in names]
    return names


def complete_inner_rules(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet, blocks: Sequence[str]
) -> None:
    """Assign styles in split regions. See Note [Replicated parameters in split regions].

    Args:
        model: The model without adapters.
        styles: Style by module name. It is changed in place.
        rule_set: The rules that `styles` come from.
        blocks: Names of the repeated blocks.

    Raises:
        ModelError: A user's rules split the heads around a parameter that has a row for each head.
    """
    attentions = {attention.name: attention for attention in find_attentions(model, styles)}
    for region in _split_regions(styles, blocks):
        attention = attentions.get(region)
        unknown = []
        for name, module in _unstyled_owners(model, region, styles):
            if _has_partial_gradients(model, name, module, region, attention):
                styles[name] = "replicated_with_grad_allreduce"
            else:
                unknown.append((name, module))

        child_styles = {
            style for name, style in styles.items() if name.rpartition(".")[0] == region
        }
        if unknown and not rule_set.complete and child_styles >= _GATHERED_STYLES.keys():
            _gather(styles, region)
        elif attention is not None:
            for name, module in unknown:
                _refuse_per_head(name, module, attention, rule_set)


def _split_regions(styles: dict[str, Style], blocks: Sequence[str]) -> list[str]:
    """Return the modules with children whose outputs or inputs are split.

    A block is left out even if such layers are its own children, because its norms are outside the
    split.
    """
    excluded = {"", *blocks}
    regions: dict[str, None] = {}
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if style in _GATHERED_STYLES and parent not in excluded:
            regions[parent] = None
    return list(regions)


def _unstyled_owners(
    model: nn.Module, region: str, styles: dict[str, Style]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a region that own parameters and have no style.

    A module inside a submodule of the region is left out if that submodule has styled layers.
    """
    # The caller adds styles while it iterates, so `styles` is looked up again for every module.
    for name, module in list(model.get_submodule(region).named_modules(prefix=region)):
        if name in styles or next(module.parameters(recurse=False), None) is None:
            continue
        parent = name.rpartition(".")[0] if name != region else region
        if parent == region or not any(styled.startswith(f"{parent}.") for styled in styles):
            yield name, module


def _has_partial_gradients(
    model: nn.Module, name: str, module: nn.Module, region: str, attention: Attention | None
) -> bool:
    parent, _, leaf = name.rpartition(".")
    parameters = list(module.parameters(recurse=False))
    is_activation = name != region and leaf.startswith("act")
    if is_activation and all(parameter.numel() == 1 for parameter in parameters):
        return True  # a scalar weight, which is applied to this rank's channels
    if attention is None or not is_norm(module) or parent != region:
        return False
    width = head_width(model, attention)
    return width is not None and all(tuple(p.shape) == (width,) for p in parameters)


def _gather(styles: dict[str, Style], region: str) -> None:
    """Replace the styles of a region with styles that are correct for any layer."""
    for name, style in list(styles.items()):
        if not name.startswith(f"{region}."):
            continue
        if style in _GATHERED_STYLES and name.rpartition(".")[0] == region:
            styles[name] = _GATHERED_STYLES[style]
        elif style == "replicated_with_grad_allreduce":
            # It is now applied to all heads, so every rank has the full gradient.
            del styles[name]


def _refuse_per_head(name: str, module: nn.Module, attention: Attention, rule_set: RuleSet) -> None:
    if attention.heads is None or attention.heads < 2:
        return
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1 and parameter.shape[0] == attention.heads:
            raise ModelError(
                f"{rule_set.source}: {name} has weights for each of {attention.heads} heads, but a"
                " rank computes only some of them; use 'colwise_gather_output' and"
                f" 'rowwise_split_input' for the layers of {attention.name}"
            )


REPLICATED = "replicated"


@dataclass(frozen=True)
class PlanRow:
    """Row of a printed tensor-parallel plan: a parameter and its split."""

    parameter: str
    shape: tuple[int, ...]
    style: str
    """Style of the parameter's module, or `REPLICATED`."""
    local_shape: tuple[int, ...]
    """Shape on rank 0, which has the largest part."""
    note: str
    """Remark for the reader: an uneven split, replicated key heads, or a tied name."""


def describe(plan: TensorPlan, model: nn.Module) -> list[PlanRow]:
    """Return one row per name of every parameter, in model order. A tied parameter has several."""
    tied = first_names(model)
    styles = _parameter_styles(model, plan.styles)
    rows = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = plan.dims[name]
        shape = tuple(parameter.shape)
        local = list(shape)
        notes = []
        if dim is not None:
            local[dim] = shard_length(shape[dim], plan.tp, 0)
            if shape[dim] % plan.tp:
                last = shard_length(shape[dim], plan.tp, plan.tp - 1)
                excess = prod(local) * plan.tp / prod(shape) - 1
                notes.append(
                    f"uneven: {local[dim]} to {last} of {shape[dim]}, {100 * excess:.1f} % above an"
                    " equal share"
                )
        if styles[name] == "kv_replicated":
            notes.append(
                f"{plan.kv_heads[name.rpartition('.')[0]]} heads for {plan.tp} ranks: each"
                " computes one"
            )
        if tied.get(name, name) != name:
            notes.append(f"tied to {tied[name]}")
        rows.append(
            PlanRow(name, shape, styles[name] or REPLICATED, tuple(local), "; ".join(notes))
        )
    return rows

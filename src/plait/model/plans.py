"""The tensor parallel plan of one model for one degree: every module with a style, every parameter
with the dimension that is split.

Made and checked from shapes alone, before any process group exists; `parallel.tensor` applies it.
Splits follow torch.chunk's rule, so widths and vocabularies need not divide; heads must. Invariant:
`dims` names every parameter of the model, and tied parameters have one answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast

from torch import nn

from plait.errors import ConfigError, ModelError, Problem
from plait.model.adapters import (
    adapted_layers,
    base_name,
    copied_layers,
    split_adapters,
    without_adapters,
)
from plait.model.boundary_layers import split_boundary_layers
from plait.model.heads import (
    GROUPS,
    Attention,
    allows,
    check_heads,
    count_attributes,
    find_attentions,
    local_count,
    replicates_keys,
)
from plait.model.layers import check_style, in_features, out_features, split_dims
from plait.model.partial import complete_inner_rules
from plait.model.rules import COLUMN_STYLES, RuleSet, Style, assign, generic, matches
from plait.model.sequence import sequence_facts
from plait.model.sources import rules_for
from plait.model.tied import tied_names
from plait.shards import shard_length, shard_lengths


@dataclass(frozen=True)
class Sharded:
    """A module, by its full name, and its style."""

    name: str
    style: Style


@dataclass(frozen=True)
class TensorPlan:
    """See the module's docstring. Names are full names (FQNs)."""

    tp: int
    modules: tuple[Sharded, ...]
    """Every module with a style, in model order. A style for a container is given to the
    descendants that own parameters.
    """
    dims: Mapping[str, int | None]
    """Every parameter (tied ones under all their names) to the dimension that is split over tp;
    None: replicated on every rank.
    """
    attributes: tuple[tuple[str, str, int], ...]
    """(module, attribute, value): integers that count heads and must become this rank's."""
    kv_heads: Mapping[str, int]
    """Every `kv_replicated` module to its number of heads."""
    heads: Mapping[str, int]
    """Every attention whose heads are split to their number, where it is known. What it returns per
    head is this rank's.
    """
    norms: tuple[str, ...]
    """Modules with replicated parameters that compute on sequence shards under sequence
    parallelism: norms that are children of blocks, and the final norm. Their gradients are then
    summed over tp, as are the biases of row-split layers inside blocks.
    """
    regions: tuple[str, ...]
    """Children of blocks (attention, MLP) whose first input is gathered along the sequence under
    sequence parallelism: they derive shapes and positions from it. Row-parallel layers inside
    return sequence shards. A column-parallel layer that is itself a child of a block gathers its
    own input.
    """
    whole: tuple[str, ...]
    """Children of blocks (layers of experts, attention that is not split) that every rank computes
    on all tokens under sequence parallelism: their first input is gathered along the sequence, and
    each rank keeps its own tokens of the output. Inside, layers are split as without sequence
    parallelism.
    """
    final_norm: str | None
    head: str | None
    embedding: str | None
    sequence_parallel: Literal[True] | str
    """True where the blocks can work on sequence shards, else the reason why not."""
    source: str

    @property
    def styles(self) -> dict[str, Style]:
        """Module to style."""
        return {entry.name: entry.style for entry in self.modules}


def make_plan(
    model: nn.Module, *, tp: int, user: Mapping[str, str] | None = None, blocks: Sequence[str]
) -> TensorPlan:
    """Plan `model` (any device, `meta` included) for `tp` ranks.

    `user` is `{pattern: style}`, used alone when given; `blocks` are the names of the repeated
    blocks. An adapted layer is named as without its adapter. Raises ModelError for rules that do
    not fit the model, ConfigError for a degree that does not fit its sizes.
    """
    wrappers = adapted_layers(model)
    if not wrappers:
        return _plan_of(model, tp=tp, user=user, blocks=blocks)
    with without_adapters(model, wrappers):
        plan = _plan_of(model, tp=tp, user=user, blocks=blocks)
    return _with_adapters(plan, model, wrappers)


def _plan_of(
    model: nn.Module, *, tp: int, user: Mapping[str, str] | None, blocks: Sequence[str]
) -> TensorPlan:
    rule_set = rules_for(model, user=user, blocks=blocks)
    styles = assign(model, rule_set)
    head, embedding = split_boundary_layers(model, styles, rule_set)
    for name in set(styles) & set(copied_layers(model)):
        raise ModelError(
            f"parallel.tp: {name} is trained in full (modules_to_save), and only a head and an "
            "embedding are, because other layers compute with a part of their input; leave it out "
            "of modules_to_save (target_modules adapts it), or use parallel.tp = 1"
        )
    for name, style in styles.items():
        check_style(model, name, style, rule_set.source)
    styles = _spread(model, styles)
    complete_inner_rules(model, styles, rule_set, blocks)
    attentions = find_attentions(model, styles)
    check_heads(attentions, tp)
    styles, kv_heads = _share_keys(styles, attentions, tp)
    styles = {name: styles[name] for name, _ in model.named_modules() if name in styles}
    dims = _dims(model, styles)
    _check_tied(model, dims, rule_set.source)
    _check_widths(model, styles, attentions, tp)
    if all(dim is None for dim in dims.values()):
        raise ModelError(
            f"{rule_set.source}: no parameter of {type(model).__name__} is split, so parallel.tp ="
            f" {tp} would only repeat work; use 1"
        )
    order = sequence_facts(model, styles, blocks, rule_set.whole_sequence)
    return TensorPlan(
        tp=tp,
        modules=tuple(Sharded(name, style) for name, style in styles.items()),
        dims=dims,
        attributes=_attributes(model, attentions, rule_set, tp),
        kv_heads=kv_heads,
        heads={
            attention.name: attention.heads
            for attention in attentions
            if attention.heads is not None
        },
        norms=order.norms,
        regions=order.regions,
        whole=order.whole,
        final_norm=order.final_norm,
        head=head,
        embedding=embedding,
        sequence_parallel=order.possible,
        source=rule_set.source,
    )


def _with_adapters(
    plan: TensorPlan, model: nn.Module, wrappers: Mapping[str, nn.Module]
) -> TensorPlan:
    """The plan of a model with adapters from that of the model without."""
    plain = plan.styles
    styles: dict[str, str] = {base_name(name, wrappers): style for name, style in plain.items()}
    for name, wrapper in wrappers.items():
        styles |= split_adapters(name, wrapper, plain.get(name))
    modules = tuple(
        Sharded(name, cast(Style, styles[name]))
        for name, _ in model.named_modules()
        if name in styles
    )
    known = {base_name(name, wrappers): dim for name, dim in plan.dims.items()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        known.setdefault(
            name, {"colwise": 0, "rowwise": 1}.get(styles.get(name.rpartition(".")[0], ""))
        )
    dims = {name: known[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    reason = (
        "low-rank adapters would see a part of the sequence on every rank, and their gradients are"
        " not summed over the parts"
    )
    return replace(plan, modules=modules, dims=dims, sequence_parallel=reason)


LITTLE = 0.5
"""A plan that splits less of the parameters than this is warned of."""


def little_is_split(
    plan: TensorPlan, model: nn.Module, *, besides: Collection[str] = ()
) -> str | None:
    """The warning for a plan that splits so little of the model that tensor parallelism mostly
    repeats work; None for others. `besides`: parameters that are split over other axes, which do
    not count.
    """
    whole: dict[str, int] = {}
    split = 0
    for name, parameter in model.named_parameters():
        if name in besides:
            continue
        if plan.dims[name] is None:
            whole[generic(name)] = whole.get(generic(name), 0) + parameter.numel()
        else:
            split += parameter.numel()
    share = split / max(1, split + sum(whole.values()))
    if share >= LITTLE:
        return None
    largest = sorted(whole, key=lambda name: -whole[name])[:3]
    counted = "the parameters" if not besides else "the parameters besides experts"
    return (
        f"parallel.tp = {plan.tp}: {plan.source} splits {share:.1%} of {counted} of this"
        f" {type(model).__name__}; every rank of tp holds and computes the rest in full, most of it"
        f" in {', '.join(largest)}; give parallel.plan with styles for these layers, or use"
        " parallel.tp = 1"
    )


def _spread(model: nn.Module, styles: dict[str, Style]) -> dict[str, Style]:
    """A container's style goes to the descendants that own parameters."""
    spread: dict[str, Style] = {}
    for name, style in styles.items():
        if style != "replicated_with_grad_allreduce":
            spread[name] = style
            continue
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if next(module.parameters(recurse=False), None) is not None:
                spread[inner] = style
    return spread


def _share_keys(
    styles: dict[str, Style], attentions: Sequence[Attention], tp: int
) -> tuple[dict[str, Style], dict[str, int]]:
    """Key and value projections with fewer heads than ranks become `kv_replicated`."""
    kv_heads: dict[str, int] = {}
    changed = dict(styles)
    for attention in attentions:
        shared = replicates_keys(attention, tp)
        for name in attention.keys_values:
            if shared and attention.kv_heads is not None:
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
                f"{name} is 'kv_replicated', but its number of heads is not known; keep it on its"
                " module as num_key_value_heads"
            )
    return changed, kv_heads


def _parameter_styles(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style | None]:
    """Every parameter, under all its names, to the style of the module that owns it."""
    # a module may sit in several places
    first_names = {id(module): name for name, module in model.named_modules()}
    owners = {
        name: model.get_submodule(name.rpartition(".")[0])
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    return {name: styles.get(first_names[id(owner)]) for name, owner in owners.items()}


def _dims(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, int | None]:
    dims: dict[str, int | None] = {}
    for name, style in _parameter_styles(model, styles).items():
        owner, _, leaf = name.rpartition(".")
        dims[name] = None if style is None else split_dims(model.get_submodule(owner), style)[leaf]
    return dims


def _check_tied(model: nn.Module, dims: dict[str, int | None], source: str) -> None:
    """One parameter, one split. A second name on a module that only holds the parameter follows the
    first (in place).
    """
    for names in tied_names(model):
        answers = {dims[name] for name in names}
        if len(answers) == 1:
            continue
        if answers == {None, 0} and all(model.get_parameter(name).ndim == 1 for name in names):
            dims.update(dict.fromkeys(names, 0))  # a head's bias that its parent registers too
            continue
        shown = ", ".join(
            f"{name} along {'no dimension' if dims[name] is None else f'dimension {dims[name]}'}"
            for name in names
        )
        raise ModelError(
            f"{source}: one tied parameter would be split {shown}; give its modules"
            " 'embedding_rowwise' and 'vocab_head', or none a style"
        )


def _check_widths(
    model: nn.Module, styles: Mapping[str, Style], attentions: Sequence[Attention], tp: int
) -> None:
    """No rank may be left without a part, and the layers of an attention split between heads."""
    sizes: list[tuple[str, int, str, bool]] = []
    for name, style in styles.items():
        if style in ("kv_replicated", "replicated_with_grad_allreduce"):
            continue
        module = model.get_submodule(name)
        if style == "embedding_rowwise":
            size = int(module.get_parameter("weight").shape[0])
            what = "rows"
        else:
            size, what = (
                (out_features(module), "outputs")
                if style in COLUMN_STYLES
                else (in_features(module), "inputs")
            )
        of_heads = style in ("colwise", "rowwise") and any(
            name.startswith(f"{attention.name}.") for attention in attentions
        )
        sizes.append((name, size, what, of_heads))
    broken = [
        (name, rule)
        for name, size, what, of_heads in sizes
        if (rule := _width_rule(name, size, what, tp, of_heads=of_heads))
    ]
    if broken:

        def fits(degree: int) -> bool:
            return allows(attentions, degree) and not any(
                _width_rule(n, s, w, degree, of_heads=h) for n, s, w, h in sizes
            )

        # a layer of many blocks is told of once
        once = {generic(name): rule for name, rule in reversed(broken)}
        remedy = f"use {next(degree for degree in range(tp - 1, 0, -1) if fits(degree))}"
        raise ConfigError(
            *[Problem("parallel.tp", tp, rule, remedy) for rule in reversed(once.values())]
        )


def _width_rule(name: str, size: int, what: str, tp: int, *, of_heads: bool) -> str | None:
    """The rule that a split of `size` between `tp` ranks breaks, or None."""
    if shard_length(size, tp, tp - 1) == 0:
        return (
            f"{name} has {size} {what}, of which only"
            f" {sum(part > 0 for part in shard_lengths(size, tp))} ranks would get some"
        )
    if of_heads and size % tp:
        return f"{name} has {size} {what} and {size} % {tp} != 0, so a head would be cut"
    return None


def _attributes(
    model: nn.Module, attentions: Sequence[Attention], rule_set: RuleSet, tp: int
) -> tuple[tuple[str, str, int], ...]:
    changed = []
    for attention in attentions:
        module = model.get_submodule(attention.name)
        if rule_set.known_counts:
            names: tuple[str, ...] = count_attributes(module)
        else:
            names = tuple(
                name
                for counts in rule_set.counts
                if matches(attention.name, counts.pattern)
                for name in counts.attributes
            )
            # its own, or those of another layer that it reads
            if attention.kv_heads is not None and attention.kv_heads < tp:
                names += tuple(
                    name
                    for name in count_attributes(module)
                    if name in GROUPS and name not in names
                )
        for name in names:
            value = local_count(attention, name, tp)
            if value is not None and value != getattr(module, name):
                changed.append((attention.name, name, value))
    return tuple(changed)


REPLICATED = "replicated"


@dataclass(frozen=True)
class PlanRow:
    """One parameter of a plan, for printing."""

    parameter: str
    shape: tuple[int, ...]
    style: str
    """The style of its module, or `REPLICATED`."""
    local_shape: tuple[int, ...]
    """On rank 0, which has the largest part."""
    note: str
    """What a reader should know: an uneven split, shared key heads, a tied name."""


def describe(plan: TensorPlan, model: nn.Module) -> list[PlanRow]:
    """Every parameter of `model` under `plan`, in model order."""
    first = {name: group[0] for group in tied_names(model) for name in group[1:]}
    styles = _parameter_styles(model, plan.styles)
    rows = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = plan.dims[name]
        shape = tuple(parameter.shape)
        style = styles[name]
        local = tuple(
            shard_length(size, plan.tp, 0) if axis == dim else size
            for axis, size in enumerate(shape)
        )
        notes = []
        if dim is not None and shape[dim] % plan.tp:
            last = shard_length(shape[dim], plan.tp, plan.tp - 1)
            excess = prod(local) * plan.tp / prod(shape) - 1
            notes.append(
                f"uneven: {local[dim]} to {last} of {shape[dim]}, {100 * excess:.1f} % above an"
                " equal share"
            )
        if style == "kv_replicated":
            notes.append(
                f"{plan.kv_heads[name.rpartition('.')[0]]} heads for {plan.tp} ranks: each"
                " computes one"
            )
        if name in first:
            notes.append(f"tied to {first[name]}")
        rows.append(PlanRow(name, shape, style or REPLICATED, local, "; ".join(notes)))
    return rows

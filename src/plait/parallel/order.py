"""Order of the techniques and their hooks, and the loops over them.

`check_all` refuses impossible settings, `apply_all` changes the modules of the engine, `attach_all`
returns the hooks of a step, and `account_all` adds up bytes and traffic for the planner.
`UNSUPPORTED_COMBINATIONS` lists combinations of settings that no test has proven yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from plait.cluster.layout import AXES
from plait.cluster.mesh import Groups, Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.data.buffers import ChangingBuffers
from plait.parallel.data.compression import CompressionAutotuner, Residuals
from plait.parallel.data.reducer import Reducer
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.parts import Parts, Plans
from plait.parallel.shared_state import SharedState
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.context_parallel import ContextParallel, SequenceShards
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel, ShardedSteps
from plait.parallel.techniques.experts import (
    BiasUpdate,
    ExpertGradients,
    ExpertParallel,
    Routing,
)
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import ActivationOffload, OptimizerOffload, ParameterOffload
from plait.parallel.techniques.pipeline_parallel import Pipeline, PipelineRank
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.techniques.tiled_mlp import TiledMLP

ORDER: tuple[type[Technique], ...] = (
    Precision,
    TensorParallel,
    ContextParallel,
    Routing,
    Pipeline,
    ExpertParallel,
    TiledMLP,
    ActivationOffload,
    Recompute,
    Compile,
    ParameterOffload,
    OptimizerOffload,
    Compression,
    DataParallel,
)
"""Order in which techniques are applied.

Techniques that change the forward of a block come before those that shard it. Precision, offload
and compression leave settings for the technique that shards and reduces. Precision comes first,
because the bytes of all others depend on the size of an element. A pipeline comes after tensor
parallelism, whose plan covers the full model, and before techniques that change the blocks of this
rank.
"""

HOOKS: tuple[type[StepHook], ...] = (
    ShardedSteps,
    Reducer,
    UnusedTracker,
    ExpertGradients,
    SequenceShards,
    PipelineRank,
    OffloadedActivations,
    RouterStatistics,
    BiasUpdate,
    SharedState,
    ChangingBuffers,
    CompressionAutotuner,
    Residuals,
)
"""Order in which a step calls hooks. Hooks of other classes come last.

Each reduction of a gradient continues with the result of the one before:

1. `Reducer` completes the sum over the data-parallel ranks. `fully_shard` has completed it in the
   backward, and `ShardedSteps` frees the gathered parameters.
2. `UnusedTracker` restores None for parameters that no rank used.
3. `ExpertGradients` sums over the ranks that have the same experts, `SequenceShards` over the parts
   of the sequences, and `PipelineRank` over the stages that hold a tied parameter.

The selection of compression comes before the state of the compressed collectives, so that a
checkpoint's residuals find their collectives. Ranks compare what a forward changed before buffers
are made equal.
"""


def check_all(context: TechniqueContext) -> Plans:
    """Refuse impossible settings: first unsupported combinations, then settings of one technique.

    Returns:
        The plans of all techniques.
    """
    refuse_incompatible(context)
    return check_each(context.techniques, context)


def check_each(techniques: Iterable[Technique], context: TechniqueContext) -> Plans:
    """Check techniques separately, without their combinations, and return their plans."""
    plans = Plans()
    for technique in techniques:
        plans = plans.merge(technique.check(context) or Plans())
    return plans


def groups_of(context: TechniqueContext) -> Groups:
    """Return the groups that all techniques need, in order.

    Args:
        context: The context, with the plans of `check_all`.
    """
    return sum((technique.groups(context) for technique in context.techniques), start=Groups())


def apply_all(techniques: Iterable[Technique], parts: Parts, mesh: Mesh) -> Parts:
    """Apply every technique to the model, in order.

    Attributes that a user has set on a parameter (for example to exclude it from weight decay) are
    copied to its replacement.

    Raises:
        ModelError: A technique changed parameter names.
    """
    techniques = in_order(techniques)
    parts = replace(parts, batch_axes=batch_axes(techniques))
    named = parts.model.named_parameters(remove_duplicate=False)
    attributes = {name: dict(vars(parameter)) for name, parameter in named}
    names = list(attributes)
    for technique in techniques:
        parts = technique.apply(parts, mesh)
        new_names = [name for name, _ in parts.model.named_parameters(remove_duplicate=False)]
        if isinstance(technique, Pipeline):
            # A rank keeps the parameters of its stages.
            remaining = set(new_names)
            names = [name for name in names if name in remaining]
        if new_names != names:
            changed = sorted(set(new_names) ^ set(names))[:4]
            raise ModelError(
                f"{type(technique).__name__} changed parameter names ({', '.join(changed)}); a"
                " technique must keep them"
            )

    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        for key, value in attributes[name].items():
            # Attributes that a technique has set itself stay.
            if key not in vars(parameter):
                setattr(parameter, key, value)
    return parts


def attach_all(techniques: Iterable[Technique], parts: Parts, mesh: Mesh) -> Parts:
    """Attach every technique to a model with weights, and sort their hooks. Collective."""
    hooks = [hook for technique in in_order(techniques) for hook in technique.attach(parts, mesh)]
    positions = {kind: index for index, kind in enumerate(HOOKS)}
    hooks.sort(key=lambda hook: positions.get(type(hook), len(HOOKS)))
    return replace(parts, hooks=Hooks(hooks))


def account_all(techniques: Iterable[Technique], ledger: Ledger, facts: ModelFacts) -> Ledger:
    """Add the bytes and traffic of every technique to the ledger, in order."""
    for technique in in_order(techniques):
        ledger = technique.account(ledger, facts)
    return ledger


def in_order(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Sort techniques by ORDER.

    A user's own technique is not in ORDER. It comes after the pipeline, and before the techniques
    that change the forward of this rank's blocks or shard the blocks.
    """
    positions: dict[type, float] = {kind: index for index, kind in enumerate(ORDER)}
    default = positions[Pipeline] + 0.5
    return tuple(sorted(techniques, key=lambda technique: positions.get(type(technique), default)))


def batch_axes(techniques: Iterable[Technique]) -> tuple[str, ...]:
    """Return the axes over which any of the techniques splits the batch."""
    used = {axis for technique in techniques for axis in technique.batch_axes}
    return tuple(axis for axis in AXES if axis in used)


def refuse_incompatible(context: TechniqueContext) -> None:
    """Refuse all unsupported combinations at once.

    Raises:
        ConfigError: Settings cannot be combined. The error lists all such combinations.
    """
    problems = []
    for combination in UNSUPPORTED_COMBINATIONS:
        if combination.applies(context):
            problems.append(
                Problem(
                    combination.field,
                    combination.value(context),
                    combination.rule,
                    combination.remedy,
                )
            )
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True)
class UnsupportedCombination:
    """Combination of settings that `refuse_incompatible` refuses."""

    field: str
    """Setting that the error names."""
    value: Callable[[TechniqueContext], object]
    """Function that returns the value of the setting."""
    applies: Callable[[TechniqueContext], bool]
    """Function that returns True if a context has the combination."""
    rule: str
    """Reason, for the error."""
    remedy: str
    """Settings to use instead, for the error."""


UNSUPPORTED_COMBINATIONS: tuple[UnsupportedCombination, ...] = (
    UnsupportedCombination(
        field="parallel.cp",
        value=lambda context: context.layout.cp,
        applies=lambda context: (
            context.layout.cp > 1
            and not any("cp" in technique.batch_axes for technique in context.techniques)
        ),
        rule="no technique splits sequences over cp",
        remedy="use 1; the processes become data parallel",
    ),
    UnsupportedCombination(
        field="compile.enabled",
        value=lambda _: "true",
        applies=lambda context: context.technique(Compile).enabled and context.layout.tp > 1,
        rule=(
            "torch.compile is not tested with blocks that tensor parallelism has split, and could"
            " change their gradients"
        ),
        remedy="use false, or parallel.tp = 1",
    ),
    UnsupportedCombination(
        field="compile.enabled",
        value=lambda _: "true",
        applies=lambda context: context.technique(Compile).enabled and context.layout.pp > 1,
        rule="torch.compile is not tested with pipeline stages",
        remedy="use false, or parallel.pp = 1",
    ),
    UnsupportedCombination(
        field="parallel.secondary_partition",
        value=lambda context: context.technique(DataParallel).secondary_partition,
        applies=lambda context: (
            context.technique(DataParallel).secondary_partition > 0
            and context.layout.pp * context.layout.tp > 1
        ),
        rule=(
            "all processes create the groups of a secondary partition together, but other pipeline"
            " stages and tp slices create other groups: it would hang"
        ),
        remedy="use 0, or parallel.pp = 1 and parallel.tp = 1",
    ),
)

"""The one order of techniques, and the iterations over them: to refuse, with modules by the engine,
with numbers by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.cluster.layout import AXES
from plait.cluster.mesh import Groups, Mesh
from plait.errors import ModelError
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.activation_offload import ActivationOffload
from plait.parallel.activations.recompute import Recompute
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.buffers import ChangingBuffers
from plait.parallel.compatibility import refuse_incompatible
from plait.parallel.compile import Compile
from plait.parallel.context.context_parallel import ContextParallel, SequenceParts
from plait.parallel.data.autotune import CompressionAutotuner
from plait.parallel.data.compression import Compression
from plait.parallel.data.data_parallel import DataParallel, ShardedSteps
from plait.parallel.data.reducer import Reducer
from plait.parallel.data.residuals import Residuals
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.experts.bias_update import BiasUpdate
from plait.parallel.experts.expert_parallel import ExpertGradients, ExpertParallel
from plait.parallel.experts.routing import RecordedBalance, Routing
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.pipeline.pipeline_parallel import Pipeline, PipelineRank
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.technique import Context, Parts, Technique, notes_of
from plait.parallel.tensor.tensor_parallel import TensorParallel
from plait.parallel.tiles.tiled_mlp import TiledMLP

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
"""What changes a block's forward comes before what shards it; precision, offload and compression
leave settings that the technique which shards and reduces consumes. Precision comes first because
the others ask for the size of an element when they are priced. A pipeline comes after the split
over tp, which is decided for the whole model, and before what is done to a rank's own blocks.
"""


def in_order(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Sort by ORDER. One that is not in it, which the caller brings, comes after the pipeline:
    before what is done to the forward of a rank's own blocks, and before what shards them.
    """
    position = {kind: index for index, kind in enumerate(ORDER)}
    return tuple(
        sorted(
            techniques,
            key=lambda technique: position.get(type(technique), position[Pipeline] + 0.5),
        )
    )


def batch_axes(techniques: Iterable[Technique]) -> tuple[str, ...]:
    """The axes over which the batch is split, by any of the techniques."""
    used = {axis for technique in techniques for axis in technique.batch_axes}
    return tuple(axis for axis in AXES if axis in used)


HOOKS: tuple[type[StepHook], ...] = (
    ShardedSteps,
    Reducer,
    UnusedTracker,
    ExpertGradients,
    SequenceParts,
    PipelineRank,
    OffloadedActivations,
    RecordedBalance,
    BiasUpdate,
    ChangingBuffers,
    CompressionAutotuner,
    Residuals,
)
"""The order in which a step calls hooks; others come after these. A gradient is summed over the
data-parallel ranks, then None is put back where no rank used the parameter, then the parts of
sequences are summed, then tied parameters over the stages that hold them: each asks for what the
one before left. What chooses the collectives comes before what is carried in them, so that a
checkpoint's residuals find theirs.
"""


def check_all(context: Context) -> dict[type, object]:
    """Refuse what cannot be: pairs first, then by every technique. Returns the notes that `Parts`
    begins with.
    """
    refuse_incompatible(context)
    return notes_of(technique.check(context) for technique in context.techniques)


def groups_of(context: Context) -> Groups:
    """The groups that all techniques need, in order; `context` has the notes of the checks."""
    return sum((technique.groups(context) for technique in context.techniques), start=Groups())


def apply_all(techniques: Iterable[Technique], parts: Parts, mesh: Mesh) -> Parts:
    """Apply every technique to the model, in order; parameter names are checked to be unchanged.
    Attributes that a user has set on a parameter (to tell an optimizer which ones not to decay,
    say) are on what takes its place.
    """
    techniques = in_order(techniques)
    parts = parts.with_(batch_axes=batch_axes(techniques))
    named = parts.model.named_parameters(remove_duplicate=False)
    attributes = {name: dict(vars(parameter)) for name, parameter in named if vars(parameter)}
    names = [name for name, _ in parts.model.named_parameters(remove_duplicate=False)]
    for technique in techniques:
        parts = technique.apply(parts, mesh)
        now = [name for name, _ in parts.model.named_parameters(remove_duplicate=False)]
        kept = (
            [name for name in names if name in set(now)]
            if isinstance(technique, Pipeline)
            else names
        )
        if now != kept:
            changed = sorted(set(now) ^ set(kept))[:4]
            raise ModelError(
                f"{type(technique).__name__} changed parameter names ({', '.join(changed)}); a"
                " technique must keep them"
            )
        names = now
    for name, parameter in (
        parts.model.named_parameters(remove_duplicate=False) if attributes else ()
    ):
        for key, value in attributes.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    return parts


def attach_all(techniques: Iterable[Technique], parts: Parts, mesh: Mesh) -> Parts:
    """Attach every technique to the steps of a model that has its weights; the hooks are in their
    order.
    """
    hooks = [hook for technique in in_order(techniques) for hook in technique.attach(parts, mesh)]
    position = {kind: index for index, kind in enumerate(HOOKS)}
    return parts.with_(
        hooks=Hooks(sorted(hooks, key=lambda hook: position.get(type(hook), len(HOOKS))))
    )


def account_all(techniques: Iterable[Technique], ledger: Ledger, facts: ModelFacts) -> Ledger:
    """Price every technique, in order."""
    for technique in in_order(techniques):
        ledger = technique.account(ledger, facts)
    return ledger

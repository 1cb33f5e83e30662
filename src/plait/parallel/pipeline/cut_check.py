"""Check that the pipeline stages of a model compute the same results as the full model.

The check runs before the first use of every kind of batch, on all ranks and without communication.
It traces one forward and the loss of a copy without weights (`model.dataflow`). The trace also
shows which entries of the model's output the last stage lacks, such as earlier hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait._torch.tensors import storage_key
from plait.errors import ModelError, PlaitError
from plait.model.dataflow import (
    Dataflow,
    ForwardTrace,
    SettingName,
    Skeleton,
    Untraceable,
    ValueOrigin,
    changed_settings,
    outer_modules,
    outer_settings,
    set_settings,
    setting_text,
)
from plait.model.sequence import is_inside
from plait.model.stages import (
    StageCut,
    check_order,
    output_fields,
    stages_needed,
    with_unavailable_entries,
)
from plait.parallel.micro_batches import entries, map_tensors
from plait.parallel.pipeline.stage import with_empty_cache

LossFunction = Callable[[Any, Any], tuple[torch.Tensor, Any]]
"""Function of (output, micro-batch) that returns (loss, weight)."""


@dataclass
class CutCheck:
    """Check of a model's stages, once per kind of batch and again after a setting has changed.

    Attributes:
        skeleton: Copy of the uncut model without weights.
        cut: Cut of the model into stages.
        model: The model of this rank.
    """

    skeleton: Skeleton
    cut: StageCut
    model: nn.Module
    _results: dict[Any, CutResult] = field(default_factory=dict, init=False)
    _set_by_forward: set[SettingName] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        # The blocks of other stages are placeholders, which have the same names.
        self._modules = outer_modules(self.model, self.skeleton.blocks)
        self._settings = outer_settings(self._modules)

    def result(
        self,
        batch: Any,
        *,
        forward: Callable[[nn.Module, Any], Any],
        loss: LossFunction | None,
        training: bool,
    ) -> CutResult:
        """Return the result for micro-batches of the kind of `batch`.

        Args:
            batch: A micro-batch.
            forward: Calls a model with a micro-batch.
            loss: Computes the loss of an output and a micro-batch. None if no loss is computed.
            training: Whether the model is in training mode.

        Raises:
            ModelError: The stages would compute something else, or the copy cannot be traced.
        """
        key = (training, loss is not None, _kind(batch))
        if key not in self._results:
            self._results[key] = self._trace_batch(batch, forward, loss, training)
        return self._results[key]

    def follow_settings(self) -> None:
        """Copy changed attributes of the model to `skeleton`, and drop older results."""
        settings = outer_settings(self._modules)
        changed = changed_settings(self._settings, settings)
        self._settings = settings
        # The forward of the copy sets these itself.
        changed = {
            name: value for name, value in changed.items() if name not in self._set_by_forward
        }
        if changed:
            set_settings(self.skeleton.model, changed)
            self._results.clear()

    def _refuse_state(self, flow: Dataflow, name: str) -> None:
        """Raise ModelError if only one stage changes some state, or the loss reads parameters."""
        last = self.cut.blocks[-1]
        if flow.late_settings:
            setting = setting_text(min(flow.late_settings))
            raise ModelError(
                f"parallel.pp: the forward of {name} sets {setting} after {last}, where only the"
                " last stage runs, so the other stages would read another value; set it"
                " before the first block or between two steps, or use parallel.pp = 1"
            )
        if flow.late_buffers:
            raise ModelError(
                f"parallel.pp: the forward of {name} changes the buffer {min(flow.late_buffers)}"
                f" after {last}, where only the last stage runs, but other stages read it;"
                " change it before the first block or between two steps, or use parallel.pp = 1"
            )
        last_stage = self.cut.stages - 1
        unavailable = set()
        for parameter in flow.foreign_tensors:
            is_owned = last_stage in self.cut.owners.get(parameter, ())
            if not is_owned or is_inside(parameter, self.cut.blocks):
                unavailable.add(parameter)
        if unavailable:
            raise ModelError(
                f"parallel.pp: the loss reads parameters of the model ({min(unavailable)}), and"
                " every stage has only the parameters of its blocks; replace an L2 penalty with the"
                " optimizer's weight_decay, or use parallel.pp = 1"
            )

    def _trace_batch(
        self,
        batch: Any,
        forward: Callable[[nn.Module, Any], Any],
        loss: LossFunction | None,
        training: bool,
    ) -> CutResult:
        name = type(self.skeleton.model).__name__
        cpu_batch = map_tensors(lambda tensor: tensor.detach().cpu(), batch)
        missing: dict[str | int, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {storage_key(p): parameter for parameter, p in named}

        def run(model: nn.Module, trace: ForwardTrace) -> None:
            missing.clear()
            uncached_batch = with_empty_cache(cpu_batch)
            output = forward(model, uncached_batch)
            # Before the loss, which would fail for a reason that follows from the order.
            check_order(trace.flow, self.cut.bounds, name)
            fields = output_fields(output)
            for entry, leaves in fields.items():
                reason = self._why_missing(entry, leaves, trace)
                if reason:
                    missing[entry] = reason
            if loss is not None:
                available = with_unavailable_entries(output, missing)
                value = _loss_of_copy(loss, available, uncached_batch, trace, parameters)
                trace.need([value], "the loss")

        try:
            trace = self.skeleton.trace(run, training=training)
        except Untraceable as error:
            raise ModelError(
                f"parallel.pp: cannot check that the pipeline stages of {name} compute what the"
                " full model computes, because its forward cannot be traced without weights"
                f" ({error}); pass forward=, a function of (model, batch) that can be traced, for"
                " example without the arguments that take the failing path, or use parallel.pp = 1"
            ) from error
        self._set_by_forward |= set(trace.flow.settings)
        self._refuse_state(trace.flow, name)
        self._refuse_other_owners(trace.flow, name)
        # `_shapes_differ` calls `run` again, which clears and refills `missing`.
        result_missing = dict(missing)
        depends_on_values = trace.flow.values
        if not depends_on_values and trace.flow.decides:
            depends_on_values = self._shapes_differ(run, trace, training)
        return CutResult(result_missing, depends_on_values)

    def _refuse_other_owners(self, flow: Dataflow, name: str) -> None:
        """Raise ModelError if a stage uses a parameter that the cut does not assign to it."""
        needed = stages_needed(flow, self.cut.bounds, name=name)
        for owners, available, verb in (
            (needed.owners, self.cut.owners, "uses"),
            (needed.recomputed, self.cut.recomputed, "needs a value computed from"),
        ):
            for parameter, stages in owners.items():
                lacking = stages - available.get(parameter, frozenset())
                if lacking:
                    owners_of_parameter = sorted(self.cut.owners.get(parameter, ()))
                    owner_list = ", ".join(map(str, owners_of_parameter)) or "none"
                    raise ModelError(
                        f"parallel.pp: on this batch stage {min(lacking)} of {name} {verb}"
                        f" {parameter}, which belongs to stage {owner_list}:"
                        " the cut was determined by a forward with token ids only, and this batch"
                        " takes another path through the model; use parallel.pp = 1"
                    )

    def _shapes_differ(
        self, run: Callable[[nn.Module, ForwardTrace], Any], trace: ForwardTrace, training: bool
    ) -> bool:
        """Return True if taking the other side of every data-dependent branch changes shapes."""
        try:
            inverted = self.skeleton.trace(run, training=training, negate=True)
        except PlaitError:
            return True
        return inverted.flow.shapes != trace.flow.shapes

    def _why_missing(
        self, entry: str | int, leaves: list[torch.Tensor], trace: ForwardTrace
    ) -> str | None:
        """Return the error message if the last stage lacks an entry of the output, else None."""
        last = self.cut.stages - 1
        begin = self.cut.bounds[last]
        for leaf in leaves:
            origin = trace.origin(leaf)
            lacking = self._lacking_parameter(origin, last)
            if origin.since < begin:
                reason = (
                    f"follows from blocks before {self.cut.blocks[begin]}, not only through the"
                    " chain of blocks"
                )
            elif lacking is not None:
                reason = (
                    f"follows from {lacking}, which belongs to stage"
                    f" {min(self.cut.owners[lacking])}"
                )
            else:
                continue
            return (
                f"parallel.pp: the model's output `{entry}` {reason} (hidden states, attentions, or"
                f" router logits and a loss of them), and stage {last}, which computes the loss,"
                f" does not have that; compute the loss without `{entry}`, or use parallel.pp = 1"
            )
        return None

    def _lacking_parameter(self, origin: ValueOrigin, stage: int) -> str | None:
        """Return a parameter that a value depends on and a stage does not have, or None."""
        begin = self.cut.bounds[stage]
        for name, used_at in sorted(origin.parameters):
            recomputes = used_at >= begin or stage in self.cut.recomputed.get(name, ())
            if stage not in self.cut.owners.get(name, ()) or not recomputes:
                return name
        return None


@dataclass(frozen=True)
class CutResult:
    """Result of the check for one kind of batch.

    Attributes:
        missing: Error messages, keyed by the entries of the output that the last stage does not
            have.
        values: Whether the shapes of tensors between stages may depend on the batch's values, not
            only on its shapes.
    """

    missing: dict[str | int, str]
    values: bool


def _loss_of_copy(
    loss: LossFunction, output: Any, batch: Any, trace: ForwardTrace, parameters: dict[int, str]
) -> torch.Tensor:
    """Compute the loss of a traced output.

    The trace records which of the real parameters the loss reads. `parameters` maps their storages
    to names.
    """
    # Only during the loss: in the forward, modules that deepcopy shares (closures) read real
    # parameters legitimately.
    trace.foreign_tensors = parameters
    try:
        return loss(output, batch)[0]
    except Exception as error:
        # `trace.failed`: a module that the loss runs has failed.
        if isinstance(error, PlaitError) or trace.failed:
            raise
        raise ModelError(
            "parallel.pp: the loss cannot be computed from only the model's output and the batch"
            f" ({type(error).__name__}: {error}), and every stage has only the attributes of its"
            " blocks; return the values that the loss needs from every block and in the model's"
            " output, or use parallel.pp = 1"
        ) from error
    finally:
        trace.foreign_tensors = {}


def _kind(batch: Any) -> Any:
    """Return a key of a batch's entries, dtypes and flags.

    Batches with equal keys are assumed to follow the same path through a model.
    """
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.ndim
    items = entries(batch)
    if items is not None:
        return type(batch), tuple((key, _kind(entry)) for key, entry in items.items())
    # Numbers do not count, because every batch with another number would be traced again.
    return type(batch), batch if isinstance(batch, bool | str) else None

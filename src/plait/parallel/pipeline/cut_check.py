"""Whether a model that was cut into pipeline stages computes on a batch what the uncut one does; asked before the first use of every kind
of batch, on all ranks and without communication.

The answer comes from one forward, and the loss, of a copy without weights (`model.dataflow`), so it also says which entries of the model's
output the last stage does not have: recorded values of earlier stages' blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.errors import ModelError, PlaitError
from plait.model.dataflow import Dataflow, Origin, Skeleton, Trace, Untraceable, storage_key
from plait.model.outer_state import (
    SettingName,
    changed_settings,
    outer_modules,
    outer_settings,
    set_settings,
    setting_text,
)
from plait.model.stages import StageCut, check_order, stages_needed
from plait.model.unavailable import output_fields, without
from plait.parallel.containers import entries, rebuilt
from plait.parallel.pipeline.stage_cache import with_empty_cache

LossFunction = Callable[[Any, Any], tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class CutResult:
    """About one kind of batch."""

    missing: dict[str | int, str]
    """Entries of the output that the last stage does not have, and why."""
    values: bool
    """Whether shapes between stages may follow from the batch's values, not only from its shapes."""


@dataclass
class CutCheck:
    """Asks once for every kind of batch, and again when attributes of the model outside of its blocks have changed."""

    skeleton: Skeleton
    cut: StageCut
    model: nn.Module
    """The model of this rank."""
    _results: dict[Any, CutResult] = field(default_factory=dict, init=False)
    _set_by_forward: set[SettingName] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        # The blocks of other stages are placeholders, which have the same names.
        self._modules = outer_modules(self.model, self.skeleton.blocks)
        self._settings = outer_settings(self._modules)

    def result(self, piece: Any, *, forward: Callable[[nn.Module, Any], Any], loss: LossFunction | None, training: bool) -> CutResult:
        """For a micro-batch like `piece`. Raises ModelError where the cut model would compute something else, or where that cannot be
        known."""
        self._follow_settings()
        key = (training, loss is not None, _kind(piece))
        if key not in self._results:
            self._results[key] = self._ask(piece, forward, loss, training)
        return self._results[key]

    def _follow_settings(self) -> None:
        """Give the copy the attributes that were changed since the last call, and forget what was found with the old ones."""
        settings = outer_settings(self._modules)
        changed = changed_settings(self._settings, settings)
        self._settings = settings
        changed = {name: value for name, value in changed.items() if name not in self._set_by_forward}
        if changed:
            set_settings(self.skeleton.model, changed)
            self._results.clear()

    def _refuse_state(self, flow: Dataflow, name: str) -> None:
        """Refuse state that only the last stage would change, and parameters that the loss reads."""
        last = self.cut.blocks[-1]
        if flow.late_settings:
            setting = setting_text(min(flow.late_settings))
            raise ModelError(
                f"parallel.pp: the forward of {name} sets {setting} after {last}, where only the last stage runs, so the other stages "
                "would read another value; set it in the training loop, between two steps, or before the first block, or use "
                "parallel.pp = 1"
            )
        if flow.late_buffers:
            raise ModelError(
                f"parallel.pp: the forward of {name} changes the buffer {min(flow.late_buffers)} after {last}, where only the last stage "
                "runs, and reads it before, on other stages; change it in the training loop, between two steps, or before the first "
                "block, or use parallel.pp = 1"
            )
        owned_by_last = {parameter for parameter, stages in self.cut.owners.items() if self.cut.stages - 1 in stages}
        inside = tuple(f"{block}." for block in self.cut.blocks)
        foreign = {parameter for parameter in flow.strangers if parameter.startswith(inside) or parameter not in owned_by_last}
        if foreign:
            raise ModelError(
                f"parallel.pp: the loss reads parameters of the model ({min(foreign)}), of which each stage has its own only; leave a "
                "penalty on squares to the optimizer's weight_decay, or use parallel.pp = 1"
            )

    def _ask(self, piece: Any, forward: Callable[[nn.Module, Any], Any], loss: LossFunction | None, training: bool) -> CutResult:
        name = type(self.skeleton.model).__name__
        cpu = _on_cpu(piece)
        missing: dict[str | int, str] = {}

        def run(model: nn.Module, trace: Trace) -> None:
            missing.clear()
            here = with_empty_cache(cpu)
            output = forward(model, here)
            # Before the loss, which would fail for a reason that follows from the order.
            check_order(trace.flow, self.cut.bounds, name)
            fields = output_fields(output)
            missing.update({entry: why for entry, leaves in fields.items() if (why := self._why_missing(entry, leaves, trace))})
            if loss is not None:
                trace.need([self._loss_of_copy(loss, without(output, missing), here, trace)], "the loss")

        try:
            trace = self.skeleton.trace(run, training=training)
        except Untraceable as error:
            raise ModelError(
                f"parallel.pp: whether {name} is right when it is cut cannot be known, because its forward cannot be run without its "
                f"weights ({error}); use parallel.pp = 1"
            ) from error
        self._set_by_forward |= set(trace.flow.settings)
        self._refuse_state(trace.flow, name)
        needed = stages_needed(trace.flow, self.cut.bounds, name=name)
        for owners, has, verb in (
            (needed.owners, self.cut.owners, "uses"),
            (needed.recomputed, self.cut.recomputed, "needs what follows from"),
        ):
            for parameter, stages in owners.items():
                if lacking := stages - has.get(parameter, frozenset()):
                    raise ModelError(
                        f"parallel.pp: on this batch stage {min(lacking)} of {name} {verb} {parameter}, which belongs to stage "
                        f"{', '.join(map(str, sorted(self.cut.owners.get(parameter, ())))) or 'none'}: the model was cut by a forward of "
                        "token ids alone, and this batch takes another path through it; use parallel.pp = 1"
                    )
        found = dict(missing)
        return CutResult(found, trace.flow.values or (trace.flow.decides and self._shapes_differ(run, trace, training)))

    def _loss_of_copy(self, loss: LossFunction, output: Any, piece: Any, trace: Trace) -> torch.Tensor:
        # Not during the forward: modules that a deepcopy shares (closures) use them there.
        parameters = self.model.named_parameters(remove_duplicate=False)
        trace.strangers = {storage_key(local_tensor(p.detach())): name for name, p in parameters}
        try:
            return loss(output, piece)[0]
        except Exception as error:
            if isinstance(error, PlaitError) or trace.failed:  # a module that the loss runs has failed
                raise
            raise ModelError(
                f"parallel.pp: the loss cannot be computed from the model's output and the batch alone ({type(error).__name__}: {error}), "
                "and each stage has the attributes of its own blocks only; return what the loss reads in the model's output, or use "
                "parallel.pp = 1"
            ) from error
        finally:
            trace.strangers = {}

    def _shapes_differ(self, run: Callable[[nn.Module, Trace], Any], trace: Trace, training: bool) -> bool:
        """Whether blocks would return other shapes if the questions that the model asks about a batch's values had another answer."""
        try:
            return self.skeleton.trace(run, training=training, negate=True).flow.shapes != trace.flow.shapes
        except PlaitError:
            return True

    def _why_missing(self, entry: str | int, leaves: list[torch.Tensor], trace: Trace) -> str | None:
        last = self.cut.stages - 1
        begin = self.cut.bounds[last]
        for leaf in leaves:
            origin = trace.origin(leaf)
            if origin.since < begin:
                what = f"follows from blocks before {self.cut.blocks[begin]}, not only through the chain of blocks"
            elif lacking := self._lacking(origin, last):
                what = f"follows from {lacking}, which belongs to stage {min(self.cut.owners[lacking])}"
            else:
                continue
            return (
                f"parallel.pp: the model's output `{entry}` {what} (hidden states, attentions, or router logits and a loss of them), and "
                f"stage {last}, which computes the loss, does not have that; use parallel.pp = 1, or leave it out of the loss"
            )
        return None

    def _lacking(self, origin: Origin, stage: int) -> str | None:
        begin = self.cut.bounds[stage]
        for name, used_at in sorted(origin.parameters):
            recomputes = used_at >= begin or stage in self.cut.recomputed.get(name, ())
            if stage not in self.cut.owners.get(name, ()) or not recomputes:
                return name
        return None


def _kind(piece: Any) -> Any:
    """Equal for batches that take the same path through a model: the same entries, dtypes and flags."""
    if isinstance(piece, torch.Tensor):
        return piece.dtype, piece.ndim
    inside = entries(piece)
    if inside is None:
        return type(piece), piece if isinstance(piece, bool | str) else None
    return type(piece), tuple((key, _kind(entry)) for key, entry in inside.items())


def _on_cpu(piece: Any) -> Any:
    if isinstance(piece, torch.Tensor):
        return piece.detach().cpu()
    inside = entries(piece)
    return piece if inside is None else rebuilt(piece, {key: _on_cpu(entry) for key, entry in inside.items()})

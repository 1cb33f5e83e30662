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

from plait.errors import ModelError, PlaitError
from plait.model.dataflow import Origin, Skeleton, Trace, Untraceable
from plait.model.stages import StageCut, stages_needed
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
    """Asks once for every kind of batch."""

    skeleton: Skeleton
    cut: StageCut
    _results: dict[Any, CutResult] = field(default_factory=dict, init=False)

    def result(self, piece: Any, *, forward: Callable[[nn.Module, Any], Any], loss: LossFunction | None, training: bool) -> CutResult:
        """For a micro-batch like `piece`. Raises ModelError where the cut model would compute something else, or where that cannot be
        known."""
        key = (training, loss is not None, _kind(piece))
        if key not in self._results:
            self._results[key] = self._ask(piece, forward, loss, training)
        return self._results[key]

    def _ask(self, piece: Any, forward: Callable[[nn.Module, Any], Any], loss: LossFunction | None, training: bool) -> CutResult:
        name = type(self.skeleton.model).__name__
        cpu = _on_cpu(piece)
        missing: dict[str | int, str] = {}

        def run(model: nn.Module, trace: Trace) -> None:
            missing.clear()
            here = with_empty_cache(cpu)
            output = forward(model, here)
            fields = output_fields(output)
            missing.update({entry: why for entry, leaves in fields.items() if (why := self._why_missing(entry, leaves, trace))})
            if loss is not None:
                trace.need([loss(without(output, missing), here)[0]], "the loss")

        try:
            trace = self.skeleton.trace(run, training=training)
        except Untraceable as error:
            raise ModelError(
                f"parallel.pp: whether {name} is right when it is cut cannot be known, because its forward cannot be run without its "
                f"weights ({error}); use parallel.pp = 1"
            ) from error
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
                f"stage {last}, which computes the loss, does not have that; leave it out of the loss, or use parallel.pp = 1"
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

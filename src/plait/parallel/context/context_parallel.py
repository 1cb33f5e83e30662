"""Context parallelism: each rank of the cp axis has a part of every sequence, in all layers.

All layers but attention compute a token from itself. Attention sees the other parts in one of three
kinds (`kinds`). What depends on where a token stands in its sequence is decided from the full
batch, before it is cut: the label that it predicts, its position, the keys that it sees. Parameters
are the same on all ranks of the axis, and a gradient is the sum over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.operators import FakeTensor
from plait.cluster import accelerator
from plait.cluster.fake_group import is_fake
from plait.cluster.mesh import Mesh
from plait.errors import InputError, Problem, refuse, warn
from plait.model.adapters import without_wrapper
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.compile import Compile
from plait.parallel.containers import entries, rebuilt
from plait.parallel.context import interface, visible
from plait.parallel.context.families import (
    WITHOUT_DOCUMENTS,
    implementation_of,
    refuse_unknown_model,
    why_in_tiles,
)
from plait.parallel.context.interface import PartialAttention
from plait.parallel.context.kinds import Kind, Place
from plait.parallel.context.layout import SequenceLayout
from plait.parallel.context.traffic import context_traffic
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.hooks import StepHook
from plait.parallel.micro_batches import CACHES, IGNORED, LABELS, SHIFTED, explicit
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tokens import mark

IN_TILES = (
    "attention is computed in tiles of matrix products, which is many times slower than a fused"
    " kernel"
)
"""Begin of the message if a GPU uses no fused kernel. The reason follows."""


class ContextParallel(Technique):
    """How sequences are cut over the cp axis; its degree is the layout's."""

    batch_axes: ClassVar[tuple[str, ...]] = ("cp",)
    context: Kind = "all-gather-kv"
    """How attention sees the other parts."""

    def check(self, context: Context) -> None:
        """Raise ConfigError or ModelError for what is not computed as in one process, or not proven
        to be.
        """
        cp = context.layout.cp
        if cp == 1:
            return
        states = context.chosen(OptimizerOffload)
        shards = context.chosen(ParameterOffload)
        rules = (
            (
                context.chosen(DataParallel).update_in_backward,
                (
                    "parallel.optimizer_in_backward updates a parameter before its gradient is"
                    " summed over cp"
                ),
                "set that to false",
            ),
            (
                context.chosen(Compile).enabled,
                (
                    "compile.enabled is true, and parts of sequences are not proven under"
                    " torch.compile"
                ),
                "set that to false",
            ),
            (
                "nvme" in (states.device, shards.device),
                "gradients in files are not summed over cp",
                'use device "cpu" or "none" in offload_optimizer and offload_param',
            ),
        )
        refuse(
            Problem("parallel.cp", cp, rule, f"{remedy}, or use 1")
            for applies, rule, remedy in rules
            if applies
        )
        if context.model is not None:
            refuse_unknown_model(
                context.model,
                cp=cp,
                kind=self.context,
                tp=context.layout.tp,
                device_type=context.device_type,
            )

    def layout(self, ranks: int, rank: int) -> SequenceLayout:
        """Which tokens a rank has: one run of them where each rank computes all tokens of its
        heads, otherwise an equal share of the work of causal attention.
        """
        return SequenceLayout(ranks, rank, zigzag=self.context != "ulysses")

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Give the model its attention."""
        group = mesh.group("cp")
        if group is None:
            return parts
        model: Any = without_wrapper(parts.model)
        place = Place(self.layout(mesh.layout.cp, mesh.coordinates["cp"]), group)
        before = str(model.config._attn_implementation)
        implementation = implementation_of(model)
        interface.install(model, PartialAttention(self.context, place, implementation))
        return parts.with_notes(Installed(before, implementation, place))

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Cut every micro-batch; sum gradients."""
        installed = parts.noted(Installed)
        if installed is None:
            return []
        summed = [
            p
            for p in parts.model.parameters()
            if p.requires_grad and "cp" in parts.reduction(p).summed
        ]
        dtype = parts.shard.compute_dtype or next(parts.model.parameters()).dtype
        model = without_wrapper(parts.model)
        return [SequenceParts(model, self, installed, summed, dtype, device=mesh.device)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """The traffic of attention and of gradients; nothing where cp is 1."""
        if (ledger.cp == 1).all():
            return ledger
        for collective, count in context_traffic(facts, ledger, self.context).items():
            ledger = ledger.add_traffic(collective, count)
        return ledger

    def part(
        self, batch: Any, layout: SequenceLayout, *, keeps_cache: bool = False, family: str = ""
    ) -> dict[str, Any]:
        """A rank's part of a micro-batch that is `explicit`: what has a row for each token is cut,
        and `attention_mask` says what each may see. `labels`, which a loss would shift at the wrong
        end, are left out. `keeps_cache`: the model keeps a cache unless it is told otherwise.
        `family`: its `config.model_type`. Raises InputError for a batch that cannot be cut.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise InputError(
                "parallel.cp: a batch is a mapping with `input_ids` [batch, seq]; a batch in"
                " another form cannot be cut"
            )
        if batch.get("use_cache") or any(batch.get(name) is not None for name in CACHES):
            raise InputError(
                "parallel.cp: a cache would hold a part of each sequence; leave"
                f" {', '.join(CACHES)} and use_cache out"
            )
        if batch.get("output_attentions"):
            raise InputError(
                "parallel.cp: attention weights are never computed in full; leave"
                " output_attentions out"
            )
        starts = visible.document_starts(batch)
        if starts is not None:
            if batch.get("use_cache", keeps_cache):
                raise InputError(
                    "parallel.cp: position_ids begin anew within a row, and Transformers takes that"
                    " for documents only where no cache is made, which model.config.use_cache ="
                    " True does; set it to False (documents do not see each other), on every layout"
                )
            if family in WITHOUT_DOCUMENTS:
                raise InputError(
                    f"parallel.cp: position_ids begin anew within a row, and Transformers' {family}"
                    " pays no heed to them where it masks attention: in one process documents of a"
                    " row see each other, and parts of a sequence would separate them; give each"
                    " document a row of its own"
                )
            length = starts.shape[1]
            # what is added sees itself
            alone = torch.arange(length, layout.padded(length), device=starts.device)
            starts = torch.cat([starts, alone.expand(len(starts), -1)], 1)
            if self.context != "ulysses":  # where a rank has all tokens
                starts = layout.cut(starts, dim=1)
        found = {
            name: _cut(name, entry, ids, layout)
            for name, entry in batch.items()
            if name not in (LABELS, "attention_mask")
        }
        mask = mark(visible.as_mask(starts, len(ids), ids.device), _tokens(batch, ids, layout))
        return Part(found, attention_mask=mask, use_cache=False)


def _tokens(
    batch: Mapping[str, Any], ids: torch.Tensor, layout: SequenceLayout
) -> torch.Tensor | None:
    length = ids.shape[1]
    given = batch.get("attention_mask")
    if isinstance(given, torch.Tensor):
        return layout.cut(given, dim=1)
    return layout.cut(torch.ones_like(ids), dim=1) if layout.padded(length) != length else None


def _cut(name: str, entry: Any, ids: torch.Tensor, layout: SequenceLayout) -> Any:
    if not isinstance(entry, torch.Tensor) or entry.ndim < 2:
        return entry
    rows, length = ids.shape
    if entry.shape[1] != length or entry.shape[0] not in (1, rows):
        raise InputError(
            f"parallel.cp: the batch's `{name}` is {list(entry.shape)}, and what is cut has a row"
            f" for each token: [{rows}, {length}, ...]; give it that shape, or leave it out"
        )
    return layout.cut(entry, dim=1, fill=IGNORED if name == SHIFTED else 0)


class Part(dict[str, Any]):
    """A rank's part of a micro-batch."""

    def __missing__(self, key: str) -> Any:
        if key == LABELS:
            raise InputError(
                "parallel.cp: the loss reads `labels`, which it would shift within a part of a"
                " sequence; read `shift_labels`, which each position predicts"
            )
        raise KeyError(key)


class Installed:
    """What `apply` has changed."""

    def __init__(self, before: str, implementation: str, place: Place) -> None:
        self.before = before
        self.implementation = implementation
        self.place = place


class SequenceParts(StepHook):
    """This rank's part of every sequence, and the sums of gradients over all parts."""

    def __init__(
        self,
        model: nn.Module,
        technique: ContextParallel,
        installed: Installed,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> None:
        """Create the hook.

        Args: model: The model, after `ContextParallel.apply`. technique: Its settings. installed:
            What `apply` has changed. parameters: Parameters whose gradients are summed over the
            axis. dtype: Dtype in which attention is computed. device: Device of the model.
            Micro-batches are moved to it after their values were read on the
                host, so that reading them does not wait for the device.
        """
        self.device = device
        self.model = model
        self.technique = technique
        self.before = installed.before
        self.parameters = parameters
        self._compared = False
        self.layout = installed.place.layout
        self.group = installed.place.group
        chunks = "2 chunks, from both ends" if self.layout.zigzag else "one chunk"
        self.said = (
            f"each sequence is cut over {self.layout.ranks} ranks ({technique.context}; a rank has"
            f" {chunks})"
        )
        self._implementation = installed.implementation
        self._dtype = dtype
        self._tiles_reason = self._why_in_tiles(documents=False)
        if self._tiles_reason:
            self.said += f"; {IN_TILES}: {self._tiles_reason}"
        self._checked_documents = False

    def _why_in_tiles(self, *, documents: bool) -> str:
        if not self.parameters:
            return ""
        return why_in_tiles(
            self.model.config, self._implementation, self.device, self._dtype, documents=documents
        )

    def transform(self, batch: Any) -> Any:
        """Labels are shifted and positions written already."""
        self._compare(batch)
        config = getattr(self.model, "config", None)
        keeps_cache = bool(getattr(config, "use_cache", False))
        family = str(getattr(config, "model_type", ""))
        part = self.technique.part(batch, self.layout, keeps_cache=keeps_cache, family=family)
        if not self._checked_documents and visible.of_mask(part["attention_mask"]) is not None:
            self._checked_documents = True
            reason = self._why_in_tiles(documents=True)
            if reason and not self._tiles_reason:
                warn(f"parallel.cp: rows have several documents, and {IN_TILES}: {reason}")
        return interface.on_device(self.model, part, self.device)

    def _compare(self, batch: Any) -> None:
        """The first batch is the same on all ranks: each cuts its part from what it is given, and a
        loader may give them different rows.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if (
            self._compared
            or not isinstance(ids, torch.Tensor)
            or isinstance(ids, FakeTensor)
            or is_fake()
        ):
            return
        self._compared = True
        weights = torch.arange(1, ids.numel() + 1, device=ids.device)
        digest = (ids.reshape(-1) * weights).sum() * 31 + ids.shape[-1]
        largest = torch.stack([digest, -digest]).to(self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        if int(largest[0]) != -int(largest[1]):
            raise InputError(
                f"parallel.cp = {self.layout.ranks}: the first batch is not the same on all ranks"
                " of the cp axis, which cut their parts from it; give every rank the rows of its"
                " engine.dp_rank (of engine.dp_size), in full"
            )

    def join(self, output: Any, batch: Any) -> Any:
        """Full sequences from the outputs of all parts. Collective over cp."""
        length = batch["input_ids"].shape[1]
        part = self.layout.padded(length) // self.layout.ranks

        def joined(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.ndim < 2 or value.shape[1] != part:
                    return value
                gathered = [
                    torch.empty_like(value, memory_format=torch.contiguous_format)
                    for _ in range(self.layout.ranks)
                ]
                dist.all_gather(gathered, value.contiguous(), group=self.group)
                return self.layout.join(gathered, dim=1).narrow(1, 0, length)
            inside = entries(value)
            return (
                value
                if inside is None
                else rebuilt(value, {key: joined(entry) for key, entry in inside.items()})
            )

        return joined(output)

    def finish_reduction(self) -> None:
        """After the sums over data-parallel ranks. A parameter that no part used keeps no
        gradient.
        """
        if not self.parameters:
            return
        used = [p.grad is not None for p in self.parameters]
        flags = accelerator.tensor_of(used, dtype=torch.uint8, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        # Only a rank that missed one has to look, and wait for its device: where it used all, all
        # are used.
        wanted = [True] * len(used) if all(used) or is_fake() else flags.tolist()
        sums = []
        for parameter, use in zip(self.parameters, wanted, strict=True):
            if use:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                sums.append(_Sum(local_tensor(parameter.grad), self.group))
        for one in sums:
            one.wait()

    def release(self) -> None:
        """The model's own attention."""
        interface.remove(self.model, self.before)


class _Sum:
    """A gradient on the way to the sum over all parts, in its own memory."""

    def __init__(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._gradient, self._sent = gradient, gradient.contiguous()
        self._work = dist.all_reduce(self._sent, group=group, async_op=True)

    def wait(self) -> None:
        """The sum is there."""
        if self._work is not None:
            self._work.wait()
        if self._sent is not self._gradient:
            self._gradient.copy_(self._sent)


def local_batch(batch: Any, technique: ContextParallel, cp: int, rank: int) -> Any:
    """The part of a rank of a micro-batch as it comes from a user; the batch itself where cp is
    1.
    """
    return batch if cp == 1 else dict(technique.part(explicit(batch), technique.layout(cp, rank)))

"""Context parallelism: each rank of the cp axis has a part of every sequence, in all layers.

All layers except attention compute each token independently. `context.kinds` has three
implementations of attention to the keys of other parts. Labels, positions and attention masks
depend on the full sequence, so they are computed before a batch is split. All ranks of the axis
have the same parameters, whose gradients are summed over the axis.

Note [Traffic of context parallelism]
    With T tokens per micro-batch, n ranks, e bytes per element, q elements of a token's queries,
    and w elements of its keys and values together (q and w: on one rank of tp), a rank sends for
    each block and micro-batch:

    all-gather-kv   forward:  all-gather of T w e (n-1)/n
                    backward: the same, and a reduce-scatter of T w e (n-1)/n
    ring            forward:  n-1 messages of T w e / n
                    backward: the same, and n messages of gradients in float32 or wider
    ulysses         forward:  all-to-all of (2 q + w') (T/n) e (n-1)/n, where w' is w with
                              key-value heads repeated until n divides their number
                    backward: the same

    The bytes of an all-to-all are counted under reduce-scatter, because Plait's reduce-scatter for
    gloo is an all-to-all (`comm.collectives`). `Recompute.account` adds the collectives that
    recomputation repeats. Sequence lengths are assumed to be divisible by the number of chunks. A
    parameter's gradient is all-reduced once per step, after data parallelism has reduced and
    sharded it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from plait._torch.operators import FakeTensor
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import is_fake
from plait.errors import InputError, Problem, raise_problems, warn
from plait.model.adapters import without_wrapper
from plait.model.facts import ModelFacts
from plait.model.heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from plait.model.plans import TensorPlan
from plait.parallel.accounting.ledger import Array, Ledger, gradient_bytes
from plait.parallel.context import attention_function
from plait.parallel.context.attention_function import InstalledAttention, PartialAttention
from plait.parallel.context.families import (
    WITHOUT_DOCUMENTS,
    implementation_of,
    refuse_unknown_model,
    why_in_tiles,
)
from plait.parallel.context.kinds import Kind, SequenceLayout, SequencePlacement
from plait.parallel.data.reducer import sum_gradients
from plait.parallel.hooks import StepHook
from plait.parallel.micro_batches import (
    CACHES,
    IGNORED,
    LABELS,
    SHIFTED,
    attach_token_mask,
    map_tensors,
    with_explicit_entries,
)
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.offload import OptimizerOffload, ParameterOffload

IN_TILES = (
    "attention is computed in tiles of matrix products, which is many times slower than a fused"
    " kernel"
)
"""Beginning of the message if a GPU uses no fused kernel. The reason follows."""


class ContextParallel(Technique):
    """Settings of context parallelism over the cp axis, whose degree the layout defines."""

    batch_axes: ClassVar[tuple[str, ...]] = ("cp",)
    context: Kind = "all-gather-kv"
    """Implementation of attention to the keys of other ranks."""

    def check(self, context: TechniqueContext) -> None:
        """Raise ConfigError or ModelError for settings and models that are not supported.

        The supported models are those that tests compare with one process.
        """
        cp = context.layout.cp
        if cp == 1:
            return
        raise_problems(
            Problem("parallel.cp", cp, rule, f"{remedy}, or use 1")
            for applies, rule, remedy in _rules(context)
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
        """Return the tokens of a rank: one chunk with `ulysses`, otherwise two chunks (zigzag)."""
        # Zigzag balances causal attention. With `ulysses` each rank computes all tokens of its
        # heads, so the work is balanced in any order.
        return SequenceLayout(ranks, rank, zigzag=self.context != "ulysses")

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Replace the attention of the model with the configured implementation."""
        group = mesh.group("cp")
        if group is None:
            return parts
        model: Any = without_wrapper(parts.model)
        place = SequencePlacement(self.layout(mesh.layout.cp, mesh.coordinates["cp"]), group)
        original = str(model.config._attn_implementation)
        implementation = implementation_of(model)
        attention_function.install(model, PartialAttention(self.context, place, implementation))
        return replace(parts, attention=InstalledAttention(original, implementation, place))

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that splits micro-batches and sums gradients."""
        installed = parts.attention
        if installed is None:
            return []
        parameters = []
        for parameter in parts.model.parameters():
            if parameter.requires_grad and "cp" in parts.reduction(parameter).summed:
                parameters.append(parameter)
        dtype = parts.shard.compute_dtype or next(parts.model.parameters()).dtype
        model = without_wrapper(parts.model)
        return [SequenceShards(model, self, installed, parameters, dtype, device=mesh.device)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add the traffic of attention and of gradients."""
        if (ledger.cp == 1).all():
            return ledger
        for collective, count in _traffic(facts, ledger, self.context).items():
            ledger = ledger.add_traffic(collective, count)
        return ledger

    def local_batch(
        self, batch: Any, layout: SequenceLayout, *, keeps_cache: bool = False, family: str = ""
    ) -> dict[str, Any]:
        """Return a rank's part of a micro-batch.

        Entries [batch, seq, ...] are split along the sequence. `attention_mask` is replaced with
        the result of `attention_function.as_mask`. `labels` are left out, because a loss would
        shift them within the part.

        Args:
            batch: The micro-batch, after `with_explicit_entries`.
            layout: Tokens of the rank.
            keeps_cache: Whether the model creates a KV cache by default.
            family: The model's `config.model_type`.

        Raises:
            InputError: The batch cannot be split.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise InputError(
                "parallel.cp: the batch is not a mapping with `input_ids` [batch, seq], so it"
                " cannot be split; pass such a mapping, or use parallel.cp = 1"
            )
        if batch.get("use_cache") or any(batch.get(name) is not None for name in CACHES):
            raise InputError(
                "parallel.cp: a KV cache would contain only a part of each sequence; leave"
                f" {', '.join(CACHES)} and use_cache out of the batch"
            )
        if batch.get("output_attentions"):
            raise InputError(
                "parallel.cp: attention weights are never computed in full; leave"
                " output_attentions out of the batch"
            )
        starts = attention_function.document_starts(batch)
        if starts is not None:
            _refuse_packed_documents(caches=batch.get("use_cache", keeps_cache), family=family)
            length = starts.shape[1]
            # A padding token sees only itself.
            padding = torch.arange(length, layout.padded(length), device=starts.device)
            starts = torch.cat([starts, padding.expand(len(starts), -1)], 1)
            # With `ulysses` a rank computes attention for all tokens.
            if self.context != "ulysses":
                starts = layout.shard(starts, dim=1)
        local_entries = {}
        for name, entry in batch.items():
            if name not in (LABELS, "attention_mask"):
                local_entries[name] = _split_entry(name, entry, ids, layout)
        mask = attention_function.as_mask(starts, len(ids), ids.device)
        attach_token_mask(mask, _local_token_mask(batch, ids, layout))
        return LocalBatch(local_entries, attention_mask=mask, use_cache=False)


def _rules(context: TechniqueContext) -> tuple[tuple[bool, str, str], ...]:
    """Return (is violated, rule, remedy) for each rule about settings that are combined with cp."""
    offload_devices = (
        context.technique(OptimizerOffload).device,
        context.technique(ParameterOffload).device,
    )
    return (
        (
            context.technique(DataParallel).update_in_backward,
            (
                "parallel.optimizer_in_backward updates a parameter before its gradient is summed"
                " over cp"
            ),
            "set parallel.optimizer_in_backward to false",
        ),
        (
            context.technique(Compile).enabled,
            "compile.enabled is true, and split sequences are not tested with torch.compile",
            "set compile.enabled to false",
        ),
        (
            "nvme" in offload_devices,
            "gradients in files are not summed over cp",
            'use device "cpu" or "none" in offload_optimizer and offload_param',
        ),
    )


class SequenceShards(StepHook):
    """Hook that splits every micro-batch over the cp axis and sums gradients over this axis."""

    def __init__(
        self,
        model: nn.Module,
        technique: ContextParallel,
        installed: InstalledAttention,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> None:
        """Create the hook.

        Args:
            model: The model, after `ContextParallel.apply`.
            technique: Settings of the cp axis.
            installed: Record of what `ContextParallel.apply` has changed.
            parameters: Parameters whose gradients are summed over the axis.
            dtype: Dtype in which attention is computed.
            device: Device of the model. The host reads the values of a micro-batch before it moves
                the micro-batch to the device, so that reading does not wait for the device.
        """
        self.device = device
        self.model = model
        self.technique = technique
        self.parameters = parameters
        self.layout = installed.place.layout
        self.group = installed.place.group
        self._original = installed.original
        self._implementation = installed.implementation
        self._dtype = dtype
        self._compared = False
        self._checked_documents = False
        chunks = "one chunk"
        if self.layout.zigzag:
            chunks = "2 chunks, from both ends"
        self.description = (
            f"each sequence is split over {self.layout.ranks} ranks ({technique.context}; a rank"
            f" has {chunks})"
        )
        self._tiles_reason = self._why_in_tiles(documents=False)
        if self._tiles_reason:
            self.description += f"; {IN_TILES}: {self._tiles_reason}"

    def _why_in_tiles(self, *, documents: bool) -> str:
        if not self.parameters:
            return ""
        return why_in_tiles(
            self.model.config, self._implementation, self.device, self._dtype, documents=documents
        )

    def transform(self, batch: Any) -> Any:
        """Return this rank's part of a micro-batch, on the device.

        Args:
            batch: The micro-batch, after `with_explicit_entries`.
        """
        self._compare_first(batch)
        config = getattr(self.model, "config", None)
        keeps_cache = bool(getattr(config, "use_cache", False))
        family = str(getattr(config, "model_type", ""))
        shard = self.technique.local_batch(
            batch, self.layout, keeps_cache=keeps_cache, family=family
        )
        if (
            not self._checked_documents
            and attention_function.starts_of_mask(shard["attention_mask"]) is not None
        ):
            self._checked_documents = True
            reason = self._why_in_tiles(documents=True)
            if reason and not self._tiles_reason:
                warn(f"parallel.cp: rows have several documents, and {IN_TILES}: {reason}")
        return attention_function.on_device(self.model, shard, self.device)

    def _compare_first(self, batch: Any) -> None:
        """Raise InputError if the first batch differs between the ranks. Collective.

        Each rank splits the batch of its own data loader, so the loaders of all ranks of the axis
        must return the same rows.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if self._compared or not isinstance(ids, torch.Tensor):
            return
        if isinstance(ids, FakeTensor) or is_fake():
            return
        self._compared = True
        weights = torch.arange(1, ids.numel() + 1, device=ids.device)
        digest = (ids.reshape(-1) * weights).sum() * 31 + ids.shape[-1]
        # The maximum of the negative digests is the smallest digest, so one all-reduce suffices.
        extremes = torch.stack([digest, -digest]).to(self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        if int(extremes[0]) != -int(extremes[1]):
            raise InputError(
                f"parallel.cp = {self.layout.ranks}: the first batch is not the same on all ranks"
                " of the cp axis, and each rank splits its own copy; select the rows by"
                " engine.dp_rank and engine.dp_size, and pass them with full length"
            )

    def join(self, output: Any, batch: Any) -> Any:
        """Gather the outputs of a micro-batch along the sequence. Collective over cp."""
        length = batch["input_ids"].shape[1]
        part_length = self.layout.padded(length) // self.layout.ranks

        def join_tensor(part: torch.Tensor) -> torch.Tensor:
            if part.ndim < 2 or part.shape[1] != part_length:
                return part
            gathered = [
                torch.empty_like(part, memory_format=torch.contiguous_format)
                for _ in range(self.layout.ranks)
            ]
            dist.all_gather(gathered, part.contiguous(), group=self.group)
            # [batch, padded length, ...] to [batch, length, ...]
            return self.layout.join(gathered, dim=1).narrow(1, 0, length)

        return map_tensors(join_tensor, output)

    def finish_reduction(self) -> None:
        """Sum the gradients over cp, after they were summed over data-parallel ranks. Collective.

        The gradient of a parameter that no rank used stays None.
        """
        sum_gradients(self.parameters, self.group, users=self.group)

    def release(self) -> None:
        """Restore the original attention of the model."""
        attention_function.remove(self.model, self._original)


def local_batch(batch: Any, technique: ContextParallel, cp: int, rank: int) -> Any:
    """Return a cp rank's part of a micro-batch. If cp is 1, the part is the full micro-batch."""
    if cp == 1:
        return batch
    return dict(technique.local_batch(with_explicit_entries(batch), technique.layout(cp, rank)))


class LocalBatch(dict[str, Any]):
    """Part of a micro-batch on one cp rank. Reading `labels` raises InputError."""

    def __missing__(self, key: str) -> Any:
        if key == LABELS:
            raise InputError(
                "parallel.cp: the loss reads `labels`, which it would shift within a part of a"
                " sequence; read `shift_labels`, the targets that are shifted already"
            )
        raise KeyError(key)


def _split_entry(name: str, entry: Any, ids: torch.Tensor, layout: SequenceLayout) -> Any:
    if not isinstance(entry, torch.Tensor) or entry.ndim < 2:
        return entry
    rows, length = ids.shape
    if entry.shape[1] != length or entry.shape[0] not in (1, rows):
        raise InputError(
            f"parallel.cp: the batch's `{name}` has the shape {list(entry.shape)}, but an entry"
            f" must have one row per token to be split: [{rows}, {length}, ...]; give it that"
            " shape, or leave it out"
        )
    return layout.shard(entry, dim=1, fill=IGNORED if name == SHIFTED else 0)


def _local_token_mask(
    batch: Mapping[str, Any], ids: torch.Tensor, layout: SequenceLayout
) -> torch.Tensor | None:
    """Return this rank's part of the mask [batch, seq] of non-padding tokens.

    The result is None if the batch has no `attention_mask` and its sequences need no padding.
    """
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return layout.shard(mask, dim=1)
    length = ids.shape[1]
    if layout.padded(length) == length:
        return None
    return layout.shard(torch.ones_like(ids), dim=1)


def _refuse_packed_documents(*, caches: bool, family: str) -> None:
    """Raise InputError if a single process would attend across the documents of a row.

    Context parallelism never attends across documents, so its results would differ.
    """
    if caches:
        raise InputError(
            "parallel.cp: position_ids restart within a row. Transformers treats this as several"
            " documents only if it creates no KV cache, but model.config.use_cache = True creates"
            " one, so that a document would attend to others; set model.config.use_cache = False,"
            " also in runs without context parallelism"
        )
    if family in WITHOUT_DOCUMENTS:
        raise InputError(
            f"parallel.cp: position_ids restart within a row, and Transformers' {family} ignores"
            " them when it masks attention: a document would attend to others in one process, but"
            " not with context parallelism; use one row per document"
        )


def _traffic(facts: ModelFacts, ledger: Ledger, kind: Kind) -> dict[str, Array]:
    """Return the bytes that one rank sends per optimizer step, by collective.

    See Note [Traffic of context parallelism].
    """
    n = ledger.cp
    one_per_candidate = np.ones_like(ledger.cp)
    sent = {"all_reduce": 2 * _summed_bytes(facts, ledger) * (n - 1) // n}
    shape = facts.attention
    if shape is None or not facts.blocks:
        return sent

    itemsize = one_per_candidate * facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = one_per_candidate * ledger.compute_bytes
    # Tokens of all micro-batches and blocks.
    tokens = ledger.accumulation * len(facts.blocks) * ledger.tokens
    tp = one_per_candidate
    if _splits_heads(facts.tensor_plan):
        tp = ledger.tp
    heads = shape.heads // tp
    kv_heads = np.maximum(shape.kv_heads // tp, 1)
    kv_width = kv_heads * (shape.head_dim + shape.value_dim)
    if kind == "all-gather-kv":
        gathered = tokens * kv_width * itemsize * (n - 1) // n
        return {**sent, "all_gather": 2 * gathered, "reduce_scatter": gathered}

    if kind == "ring":
        part = tokens * kv_width // n
        gradient_messages = np.where(n > 1, n, 0)
        gradient_itemsize = np.maximum(itemsize, 4)
        bytes_per_element = (2 * n - 2) * itemsize + gradient_messages * gradient_itemsize
        return {**sent, "send": part * bytes_per_element}

    repeated_kv_heads = np.asarray(
        [lcm(int(count), int(ranks)) for count, ranks in zip(kv_heads, n, strict=True)]
    )
    width = (heads + repeated_kv_heads) * (shape.head_dim + shape.value_dim)
    return {**sent, "reduce_scatter": 2 * tokens * width * itemsize // n * (n - 1) // n}


def _summed_bytes(facts: ModelFacts, ledger: Ledger) -> Array:
    """Return the bytes of the gradients that are summed over cp."""
    if facts.experts is None or not facts.experts.parameters:
        return gradient_bytes(facts, ledger)
    # Gradients of experts on different ranks are reduced over their own axis.
    experts = frozenset(facts.experts.parameters)
    others = tuple(p for p in facts.parameters if p.name not in experts)
    without_experts = replace(facts, parameters=others)
    return np.where(
        ledger.ep > 1, gradient_bytes(without_experts, ledger), gradient_bytes(facts, ledger)
    )


def _splits_heads(plan: TensorPlan | None) -> bool:
    """Return True if each tp rank has a part of the heads.

    A fused projection whose heads are not contiguous is gathered, and each rank computes all heads.
    """
    if plan is None:
        return False
    names = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    styles = {entry.style for entry in plan.modules if entry.name.rpartition(".")[2] in names}
    return bool(styles) and "colwise_gather_output" not in styles

"""Activation checkpointing: activations that a block does not save are recomputed in backward.

The recomputation is bitwise identical, including dropout. It is built on torch's non-reentrant
checkpoint.

A block's own `forward` is replaced, in place. Names of parameters do not change. Sharding and
sequence parallelism act around a block (gather its parameters, split the sequence), so their work
is not repeated. The mode of every block is fixed before the first step: by the setting or, with a
memory budget, by a search over measured activations (`accounting.activations`).

If the forward of a block changes buffers or attributes, the block is recomputed with the values
from before the forward, see Note [State of recomputed blocks].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait._torch.operators import tree_flatten, tree_leaves, tree_unflatten
from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.activations import Assignment, BlockMode, RankActivations
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations import selective
from plait.parallel.activations.activation_store import ActivationStore, SavedTensors
from plait.parallel.activations.block_state import BlockState
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.tensor.styles import Region
from plait.sizes import GIB, format_bytes

Mode = Literal["none", "full", "selective", "budget"]
"""Values of `Recompute.mode`."""


class Recompute(Technique):
    """Settings of activation checkpointing: which blocks are recomputed, and what they save."""

    mode: Mode = "none"
    """Recomputation mode.

    none: blocks keep all activations. full: a recomputed block keeps only its input. selective: it
    also keeps the results of chosen operators. budget: the mode of each block is chosen so that the
    activations fit into `budget_bytes`.
    """
    every: int = 1
    """Interval between recomputed blocks with full and selective. 1: every block."""
    keep: tuple[str, ...] = selective.DEFAULT_KEEP
    """Operators, or groups of them, whose results are kept with selective and budget."""
    budget_bytes: int = 0
    """Limit of the bytes of activations, logits and one block's recomputation together.

    With budget only. The limit applies to all micro-batches that are in flight on a rank, which is
    one without a pipeline.
    """
    sequence_length: int = 0
    """Tokens per sequence, with budget only."""
    partition_inputs: bool = False
    """True if each tp rank keeps only its slice of a recomputed block's input.

    The full input is gathered for the recomputation.
    """
    assignment: tuple[BlockMode, ...] | None = None
    """Mode of every block that `solved` has chosen, or None."""

    def modes(self, count: int) -> tuple[BlockMode, ...]:
        """Return the mode of each of `count` blocks.

        Raises:
            ValueError: The mode is "budget". Call this method on the result of `solved` instead.
        """
        if self.assignment is not None:
            return self.assignment
        if self.mode == "budget":
            raise ValueError('mode "budget" has no modes of blocks yet; call `solved` first')
        modes: list[BlockMode] = ["none"] * count
        for index in range(0, count, self.every):
            modes[index] = self.mode
        return tuple(modes)

    def check(self, context: TechniqueContext) -> None:
        """Raise ModelError or ConfigError for a model or settings that are not supported."""
        if self.mode == "none":
            return
        field = "parallel.recompute.mode"
        value = self.mode
        if context.model is not None:
            _check_model(context.model, context.blocks, setting=f"{field} = {value!r}")
        # Raises ConfigError for unknown operators.
        selective.kept_operators(self.keep)
        if context.technique(Compile).enabled and self.mode != "full":
            rule = "the compiler replaces the operators of a block whose results would be kept"
            raise ConfigError(Problem(field, value, rule, 'use "full", or compile.enabled = false'))
        if self.partition_inputs and context.technique(TensorParallel).sequence_parallel:
            rule = "sequence parallelism already shards a block's input over tp"
            raise ConfigError(
                Problem("activation_checkpointing.partition_activations", "true", rule, "use false")
            )

    def solved(self, ranks: Sequence[RankActivations], *, rank: int = 0) -> Recompute:
        """Return the settings with the modes of a rank's blocks solved from the budget.

        The modes recompute as few operations as possible, such that the activations of all
        micro-batches in flight fit into the budget. Each rank is solved separately: a rank with
        fewer micro-batches in flight recomputes less, which does not delay other ranks. If the mode
        is not "budget", the settings are returned unchanged.

        Args:
            ranks: Measured activations of all pipeline ranks.
            rank: The rank whose modes are solved.

        Raises:
            ConfigError: A rank exceeds the budget even if it recomputes every block. All ranks
                raise this error.
        """
        if self.mode != "budget":
            return self
        minima = [activations.least() for activations in ranks]
        largest_minimum = max(minima)[0]
        problems = []
        for activations, (least_bytes, modes) in zip(ranks, minima, strict=True):
            if least_bytes > self.budget_bytes:
                rule = _budget_rule(activations, least_bytes, modes)
                remedy = _budget_remedy(largest_minimum)
                problems.append(
                    Problem("parallel.recompute.budget_gib", self.budget_bytes / GIB, rule, remedy)
                )
        if problems:
            raise ConfigError(*problems)
        assignment = ranks[rank].solve(self.budget_bytes)
        assert assignment is not None
        return self.model_copy(update={"assignment": assignment})

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Replace the forward of blocks that are recomputed or whose activations are offloaded."""
        modes = self.modes(len(parts.blocks))
        kept_operators = selective.kept_operators(self.keep)
        region = parts.region
        offloaded = parts.offloaded_activations
        partition = None
        if self.partition_inputs and region is not None:
            partition = region.group
        for index, (name, mode) in enumerate(zip(parts.blocks, modes, strict=True)):
            block = parts.model.get_submodule(name)
            store = None
            if offloaded is not None and index < offloaded.blocks:
                store = offloaded.store
            if offloaded is not None and index == offloaded.blocks:
                _prefetch_before_backward(block, offloaded.store)
            if mode == "none" and store is None:
                continue

            # Only a recomputed block keeps its input, which is what the partition divides.
            input_partition = None
            if mode != "none":
                input_partition = partition
            saved = SavedTensors(block, store=store, partition=input_partition, index=index)
            contexts = None
            if mode == "selective":
                contexts = selective.selective_contexts(kept_operators)
            if parts.experts:
                # A recomputed router must send its tokens to the same experts.
                contexts = selective.recording_contexts(contexts)
            _wrap(block, mode=mode, contexts=contexts, saved=saved, region=region)
        return replace(parts, recompute_modes=modes)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that restores the forwards of the blocks when the model is released."""
        # `apply` may have been given modes that were solved from a budget.
        modes = parts.recompute_modes or self.modes(len(parts.blocks))
        recomputed = []
        for name, mode in zip(parts.blocks, modes, strict=True):
            if mode != "none":
                recomputed.append(parts.model.get_submodule(name))
        return [Recomputed(recomputed)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add the activations of one micro-batch, and the collectives that recomputation repeats.

        The ledger is returned unchanged if no activations were measured.
        """
        measured = ledger.activations
        if measured is None:
            return ledger
        (stage,) = measured.stages
        modes = self.solved([measured]).modes(stage.blocks)
        figures = {
            "activations": stage.saved(modes),
            "logits": stage.modes["none"].head,
            "restored_activations": stage.restored(modes),
            "stored_activations": stage.stored(modes),
        }
        for kind, count in figures.items():
            ledger = ledger.add_memory(kind, np.full_like(ledger.dp_shard, count))
        for collective, sent in stage.repeated_traffic(modes).items():
            ledger = ledger.add_traffic(collective, ledger.accumulation * sent)
        return ledger


class Recomputed(StepHook):
    """Hook that restores the forward of recomputed blocks when the model is released."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        """Restore the forward of the blocks."""
        for block in self.blocks:
            # Only the replacement by `_wrap` is undone.
            block.forward = block.forward.__wrapped__  # type: ignore[attr-defined]
        self.blocks = ()


def _check_model(model: nn.Module, blocks: Sequence[str], *, setting: str) -> None:
    """Raise ModelError for a model without blocks, or one that already recomputes its blocks."""
    if not blocks:
        raise ModelError(
            f"{setting}: the model has no repeated blocks; name some with parallel.blocks, or use"
            ' "none"'
        )
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"{setting}: {name or 'the model'} already recomputes its blocks"
                " (gradient_checkpointing is on), so each would be computed three times; call"
                ' model.gradient_checkpointing_disable(), or use "none"'
            )


def _budget_rule(rank: RankActivations, least: int, modes: Assignment) -> str:
    """Return the part of an error message that says how much memory a rank needs at least."""
    if rank.schedule.pp == 1:
        (stage,) = rank.stages
        head = stage.modes["none"].head
        backward = stage.restored(modes)
        shares = (
            f"blocks {format_bytes(stage.saved(modes))}, head and loss {format_bytes(head)}, one"
            f" block in backward {format_bytes(backward)}"
        )
        return f"with every block recomputed a micro-batch needs {least / GIB:.4g} GiB ({shares})"
    counts = [
        f"{modes.count(mode)} {mode}" for mode in ("full", "selective", "none") if mode in modes
    ]
    return (
        f"rank {rank.rank} of the pipeline needs at least {least / GIB:.4g} GiB"
        f" ({', '.join(counts)}), because {rank.schedule.name} has up to"
        f" {rank.most_in_flight():.3g} micro-batches in flight there"
    )


def _budget_remedy(least: int) -> str:
    # Rounded up to four digits, so that the printed number suffices.
    gib = Context(prec=4, rounding=ROUND_CEILING).create_decimal(least / GIB)
    return f"use {float(gib):g} or more, a smaller micro-batch or sequence, or more parallel.tp"


def _wrap(
    block: nn.Module,
    *,
    mode: BlockMode,
    contexts: Callable[[], tuple[Any, Any]] | None,
    saved: SavedTensors,
    region: Region | None,
) -> None:
    """Replace the forward of a block.

    Args:
        block: The block.
        mode: Recomputation mode of the block.
        contexts: `context_fn` of torch's checkpoint, or None.
        saved: Hooks that offload or partition the tensors that the block saves for backward.
        region: State of tensor parallelism, with the length of a sequence that is split over tp.
    """
    forward = block.forward
    state = BlockState(block)
    # torch.compile only supports calls without this argument.
    context_fn: dict[str, Any] = {}
    if contexts is not None:
        context_fn["context_fn"] = contexts

    @functools.wraps(forward)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hooks: AbstractContextManager[Any] = nullcontext()
        if saved.needed:
            hooks = saved.hooks(args, kwargs)
        if mode == "none":
            with hooks:
                return forward(*args, **kwargs)

        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        # torch's checkpoint handles tensors only as positional arguments.
        leaves, structure = tree_flatten((args, kwargs))
        length = region.length if region is not None else 0

        def run(*leaves: Any) -> Any:
            if region is not None:
                # Another micro-batch may have gone through the model since the forward.
                region.length = length
            args, kwargs = tree_unflatten(leaves, structure)
            return forward(*args, **kwargs)

        if torch.compiler.is_compiling():
            # Without a context, inside which torch.compile cannot resume after a graph break.
            # The saved tensors of compiled blocks are never moved.
            return checkpoint(
                run, *leaves, use_reentrant=False, preserve_rng_state=True, **context_fn
            )

        snapshot = state.save()
        has_run = False

        def run_with_state(*leaves: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                return run(*leaves)
            with state.restored(snapshot):
                return run(*leaves)

        with hooks:
            output = checkpoint(
                run_with_state,
                *leaves,
                use_reentrant=False,
                preserve_rng_state=True,
                **context_fn,
            )
        state.record_changes(snapshot)
        return output

    block.forward = checkpointed_forward


def _without_cache(value: Any) -> Any:
    """Return None for a KV cache, and other values unchanged.

    A recomputed block would append its keys and values to the cache a second time. Training needs
    no cache, and Transformers' gradient checkpointing drops it as well.
    """
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return value


def _prefetch_before_backward(block: nn.Module, store: ActivationStore) -> None:
    """Register a hook that prefetches the previous block when the backward of `block` begins.

    `block` is the first block that is not offloaded. Offloaded blocks need no such hook, because
    their backward prefetches the block before them.
    """

    def register_prefetch(_module: nn.Module, _args: object, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        # The first tensor is the hidden states.
        if tensors and tensors[0].requires_grad:
            prefetch = store.prefetcher()
            tensors[0].register_hook(lambda grad: prefetch())

    block.register_forward_hook(register_prefetch)

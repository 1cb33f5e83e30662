"""Activation checkpointing: what a block does not keep from forward is computed again in backward,
bit for bit the same, dropout included.

A block's own `forward` is replaced, in place: names stay, and what sharding and sequence
parallelism do around a block (gather parameters, cut the sequence) stays outside and is not
repeated. Built on torch's non-reentrant checkpoint. The recomputation modes are decided before
anything runs: by mode, or, for a budget, from measured figures (`accounting.activations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from plait.parallel.activations import decisions, selective
from plait.parallel.activations.changed_buffers import ChangedBuffers
from plait.parallel.activations.decisions import Deciding
from plait.parallel.activations.saved_tensors import OffloadedActivations, SavedTensors, Store
from plait.parallel.compile import Compile
from plait.parallel.hooks import StepHook
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor.styles import Region
from plait.parallel.tensor.tensor_parallel import TensorParallel
from plait.units import GIB, format_bytes

Mode = Literal["none", "full", "selective", "budget"]


class Recompute(Technique):
    """Which blocks recompute what."""

    mode: Mode = "none"
    """none keeps everything; full keeps a block's input alone; selective keeps the results of
    chosen operators too; budget chooses for every block so that activations fit.
    """
    every: int = 1
    """full and selective: every n-th block, the first included."""
    keep: tuple[str, ...] = selective.DEFAULT
    """selective and budget: what is kept, as names of operators or of groups."""
    budget_bytes: int = 0
    """budget: the most that activations, logits and the block being recomputed take together, for
    one micro-batch; in a pipeline for all that are in flight on a rank.
    """
    sequence_length: int = 0
    """budget: tokens of a sequence."""
    partition_inputs: bool = False
    """Each rank of the tp axis keeps its slice of a recomputed block's input; the full input is
    gathered when it is needed.
    """
    assignment: tuple[BlockMode, ...] | None = None
    """The mode of every block, as solved from a budget."""

    def modes(self, count: int) -> tuple[BlockMode, ...]:
        """The mode of each of `count` blocks."""
        if self.assignment is not None:
            return self.assignment
        if self.mode == "budget":
            raise ValueError("a budget is solved before it is used")
        chosen: BlockMode = self.mode
        return tuple(chosen if index % self.every == 0 else "none" for index in range(count))

    def check(self, context: Context) -> None:
        """Raise ModelError or ConfigError for what cannot be recomputed."""
        if self.mode == "none":
            return
        field = "parallel.recompute.mode"
        value = self.mode
        if context.model is not None:
            _refuse_unfit(context.model, context.blocks, setting=f"{field} = {value!r}")
        selective.kept(self.keep)
        if context.chosen(Compile).enabled and self.mode != "full":
            rule = "operators cannot be kept one by one inside a compiled block, which has its own"
            raise ConfigError(Problem(field, value, rule, 'use "full", or compile.enabled = false'))
        if self.partition_inputs and context.chosen(TensorParallel).sequence_parallel:
            rule = "with sequence parallelism a block's input is sharded over tp already"
            raise ConfigError(
                Problem("activation_checkpointing.partition_activations", "true", rule, "use false")
            )

    def solved(self, ranks: Sequence[RankActivations], *, rank: int = 0) -> Recompute:
        """The same with the modes of this rank's blocks decided: those that repeat the fewest
        operations while all micro-batches in flight keep the budget; a mode other than budget as it
        is. Every rank for itself: one with fewer in flight repeats less, which delays none. Raises
        ConfigError where any rank cannot keep it, on every rank.
        """
        if self.mode != "budget":
            return self
        least = [each.least() for each in ranks]
        problems = [
            Problem(
                "parallel.recompute.budget_gib",
                self.budget_bytes / GIB,
                _least_rule(each, *one),
                _remedy(max(least)[0], len(ranks)),
            )
            for each, one in zip(ranks, least, strict=True)
            if one[0] > self.budget_bytes
        ]
        if problems:
            raise ConfigError(*problems)
        found = ranks[rank].solve(self.budget_bytes)
        assert found is not None
        return self.model_copy(update={"assignment": found})

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Replace the forward of the blocks that recompute, and of those whose saved tensors go
        elsewhere.
        """
        modes = self.modes(len(parts.blocks))
        kept = selective.kept(self.keep)
        region = parts.noted(Region)
        offloaded = parts.noted(OffloadedActivations)
        partition = region.group if self.partition_inputs and region is not None else None
        for index, (name, mode) in enumerate(zip(parts.blocks, modes, strict=True)):
            block = parts.model.get_submodule(name)
            store = offloaded.store if offloaded is not None and index < offloaded.blocks else None
            if offloaded is not None and index == offloaded.blocks:
                _announce(block, offloaded.store)
            if mode == "none" and store is None:
                continue
            saved = SavedTensors(
                block, store=store, partition=partition if mode != "none" else None, index=index
            )
            contexts = selective.contexts(kept) if mode == "selective" else None
            if parts.noted(Deciding) is not None:
                contexts = decisions.contexts(contexts)
            _wrap(block, mode=mode, contexts=contexts, saved=saved, region=region)
        return parts.with_notes(self)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """What brings the blocks' own forward back, should the model get another owner."""
        # a budget was solved before
        modes = (parts.noted(Recompute) or self).modes(len(parts.blocks))
        return [
            Recomputed(
                [
                    parts.model.get_submodule(name)
                    for name, mode in zip(parts.blocks, modes, strict=True)
                    if mode != "none"
                ]
            )
        ]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Bytes that one micro-batch keeps, and the traffic that recomputation repeats; nothing
        where no activations were measured.
        """
        measured = ledger.activations
        if measured is None:
            return ledger
        (stage,) = measured.stages
        modes = self.solved([measured]).modes(stage.blocks)
        figures = {
            "activations": stage.kept(modes),
            "logits": stage.modes["none"].head,
            "returning_activations": stage.returning(modes),
            "stored_activations": stage.stored(modes),
        }
        for kind, count in figures.items():
            ledger = ledger.add_memory(kind, np.full_like(ledger.dp_shard, count))
        for collective, sent in stage.repeated_traffic(modes).items():
            ledger = ledger.add_traffic(collective, ledger.accumulation * sent)
        return ledger


class Recomputed(StepHook):
    """Blocks whose forward was replaced."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        """They have their own again."""
        for block in self.blocks:
            block.forward = block.forward.__wrapped__  # type: ignore[attr-defined]  # recompute replaced it, and only that is undone
        self.blocks = ()


def _refuse_unfit(model: nn.Module, blocks: Sequence[str], *, setting: str) -> None:
    if not blocks:
        raise ModelError(
            f"{setting}: the model has no repeated blocks; name some with parallel.blocks, or use"
            " none"
        )
    own = next(
        (
            name
            for name, module in model.named_modules()
            if getattr(module, "gradient_checkpointing", False) is True
        ),
        None,
    )
    if own is not None:
        raise ModelError(
            f"{setting}: {own or 'the model'} already recomputes (gradient_checkpointing is on),"
            " and every block would be computed three times; call"
            " model.gradient_checkpointing_disable(), or use none"
        )


def _least_rule(rank: RankActivations, least: int, modes: Assignment) -> str:
    if rank.schedule.pp == 1:
        (stage,) = rank.stages
        head = stage.modes["none"].head
        back = stage.returning(modes)
        shares = (
            f"blocks {format_bytes(stage.kept(modes))}, head and loss {format_bytes(head)}, one"
            f" block in backward {format_bytes(back)}"
        )
        return f"with every block recomputed a micro-batch holds {least / GIB:.4g} GiB ({shares})"
    return (
        f"rank {rank.rank} of the pipeline holds {least / GIB:.4g} GiB at least ({_counts(modes)}):"
        f" up to {rank.most_in_flight():.3g} micro-batches are in flight there with"
        f" {rank.schedule.name}"
    )


def _remedy(least: int, ranks: int) -> str:
    if ranks == 1:
        return (
            "raise it, lower train_micro_batch_size_per_gpu or the sequence length, or raise"
            " parallel.tp"
        )
    return f"use {least / GIB:.4g} or more, a smaller micro-batch or sequence, or more parallel.tp"


def _counts(modes: Sequence[BlockMode]) -> str:
    return ", ".join(
        f"{modes.count(mode)} {mode}" for mode in ("full", "selective", "none") if mode in modes
    )


def _wrap(
    block: nn.Module,
    *,
    mode: BlockMode,
    contexts: Callable[[], tuple[Any, Any]] | None,
    saved: SavedTensors,
    region: Region | None,
) -> None:
    forward = block.forward
    buffers = ChangedBuffers(block)
    # torch.compile knows only calls that leave it out
    keep: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    @functools.wraps(forward)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hooks: AbstractContextManager[Any] = (
            saved.hooks(args, kwargs) if saved.needed else nullcontext()
        )
        if mode == "none":
            with hooks:
                return forward(*args, **kwargs)
        args = tuple(_no_cache(value) for value in args)
        kwargs = {name: _no_cache(value) for name, value in kwargs.items()}
        leaves, structure = tree_flatten((args, kwargs))
        length = region.length if region is not None else 0

        def run(*values: Any) -> Any:
            if region is not None:
                region.length = length  # another micro-batch may have gone through since
            given, named = tree_unflatten(values, structure)
            return forward(*given, **named)

        if not buffers or torch.compiler.is_compiling():
            with hooks:
                return checkpoint(
                    run, *leaves, use_reentrant=False, preserve_rng_state=True, **keep
                )
        before = buffers.before()
        ran = False

        def run_alike(*values: Any) -> Any:
            nonlocal ran
            again = ran
            ran = True
            with buffers.as_before(before) if again else nullcontext():
                return run(*values)

        with hooks:
            output = checkpoint(
                run_alike, *leaves, use_reentrant=False, preserve_rng_state=True, **keep
            )
        buffers.note(before)
        return output

    block.forward = remembering


def _announce(block: nn.Module, store: Store) -> None:
    """The first block that keeps its own: when its backward begins, the prefetch of the block
    before it starts.
    """

    def when_backward_comes(_module: nn.Module, _args: object, output: Any) -> None:
        hidden = next(
            (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None
        )
        if hidden is not None and hidden.requires_grad:
            prefetch = store.prefetcher()
            hidden.register_hook(lambda grad: prefetch())

    block.register_forward_hook(when_backward_comes)


def _no_cache(value: Any) -> Any:
    """None in place of an object that collects keys and values over calls: a recomputed block would
    add its own a second time. Training needs none, and Transformers drops them too where it
    recomputes.
    """
    return None if hasattr(value, "get_seq_length") and hasattr(value, "update") else value

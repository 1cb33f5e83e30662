"""Refusal of models, losses, optimizers and calls that would silently train wrong weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.passes import begin_sharded, runs_forward
from plait.cluster.layout import crossing_warning, refuse_wider_than_a_node
from plait.cluster.mesh import Mesh
from plait.cluster.topology import discover, place
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, InputError, ModelError, Problem, warn
from plait.losses.loss import PerSample
from plait.model.adapters import refuse_rank_allocation
from plait.optim.optimizer import needs_closure, refuse_sharded
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.pipeline.stage import StageCaches

MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""Part of torch's message for an operator that receives a shard and a full tensor."""


_USER_SEED_LIMIT = 1 << 32
"""Limit of the seeds that users choose. The seed of an unseeded generator has 64 random bits."""


GATHERED_AT_ONCE = 2**24
"""Smallest number of parameters for which `warn_of_no_blocks` warns."""


def refuse_unfit_layers(model: nn.Module, resolved: Resolved) -> None:
    """Raise ModelError for layers that would get the weight or gradient of one process only.

    Needs no process group.
    """
    ranks = resolved.layout.dp * resolved.layout.cp
    if resolved.data_parallel.stage == 3 and ranks > 1:
        refuse_rank_allocation(model)
    is_copied = (
        resolved.precision.compute is not None or resolved.parameter_offload.device != "none"
    )
    is_split = resolved.data_parallel.stage > 0 or resolved.layout.tp * resolved.layout.pp > 1
    for name, module in model.named_modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted and (is_split or is_copied) and any(True for _ in module.parameters()):
            raise ModelError(
                f"`{name}` is a module of torch.jit, whose parameters cannot become shards or"
                " copies; pass the nn.Module from which it was made, or use ZeRO stage 0 in the"
                " model's own dtype, without tensor and pipeline parallelism"
            )
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None and (ranks > 1 or is_copied):
            reason = "in a copy that is cast"
            if ranks > 1:
                reason = f"by what its own batch looks up, so {ranks} ranks would drift apart"
            raise ModelError(
                f"`{name}` has max_norm = {module.max_norm:g}: it changes its weight in the"
                f" forward, {reason}; use max_norm=None, and renormalise the weight between steps,"
                " or normalise its output in the forward"
            )
        if module.scale_grad_by_freq and ranks > 1:
            raise ModelError(
                f"`{name}` has scale_grad_by_freq=True: it divides by how often a row is in the"
                f" batch, and each of {ranks} ranks has only its own part of the batch; use"
                " scale_grad_by_freq=False, or one data-parallel rank"
            )


def check_placement(resolved: Resolved) -> None:
    """Refuse tensor parallelism wider than a machine, and warn about groups that span machines.

    An existing process group is the user's choice, and is not checked.

    Raises:
        ConfigError: `parallel.tp` is larger than the number of devices of a machine.
    """
    if dist.is_initialized() or resolved.layout.tp == 1:
        return
    machines = discover()
    refuse_wider_than_a_node(resolved.layout, machines)
    note = crossing_warning(resolved.layout, machines)
    if note and place().rank == 0:
        warn(note)


def warn_of_no_blocks(model: nn.Module, blocks: Sequence[str], *, stage: int) -> None:
    """Warn on rank 0 about a large model without blocks, which ZeRO stage 3 gathers all at once.

    Args:
        model: The model.
        blocks: Names of its repeated blocks.
        stage: ZeRO stage.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    if stage == 3 and not blocks and size >= GATHERED_AT_ONCE and place().rank == 0:
        warn(
            f"zero_optimization.stage = 3: {type(model).__name__} has no list of repeated layers,"
            f" so all of its {size:,} parameters are gathered at once; name its layers in"
            " parallel.blocks"
        )


def explain_methods(model: nn.Module) -> None:
    """Make methods of the user's model raise a clear error if they compute with shards.

    torch's own error names neither the method nor a remedy. `forward` and all public methods are
    wrapped, in the class that torch made for the sharded model. The user's class is not changed.
    """
    if not isinstance(model, FSDPModule):
        return
    sharded_class: Any = type(model)
    for base in sharded_class.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "transformers", "peft", "builtins"):
            continue
        for name, method in vars(base).items():
            is_public = not name.startswith("_")
            if is_public and inspect.isfunction(method) and name not in vars(sharded_class):
                setattr(sharded_class, name, _explain_error(method, base.__name__, name))


def _explain_error(method: Callable[..., Any], owner: str, attribute: str) -> Callable[..., Any]:
    name = f"{owner}.{attribute}"
    is_forward = attribute == "forward"

    @wraps(method)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Otherwise the first layer that the method runs would become an FSDP root of its own.
        begin_sharded(model)
        try:
            # Looked up now, because code may have replaced the method of the user's class since.
            return getattr(super(FSDPModule, model), attribute)(*args, **kwargs)
        except RuntimeError as error:
            # Of the methods that a forward calls, only the forward itself explains the error.
            if MIXED_TENSORS not in str(error) or runs_forward(model) != is_forward:
                raise
            if is_forward:
                raise InputError(
                    f"{name} computes with parameters of a block that are shards, because the"
                    " block's own forward does not run; call the block itself (not its forward(),"
                    " its modules or its parameters), list the modules that are called in"
                    " parallel.blocks, or use ZeRO stage 0"
                ) from error
            raise InputError(
                f"{name} computes with parameters that are shards outside the model's forward; "
                "call the method from forward() (a flag in the batch can select it), or use ZeRO"
                " stage 0"
            ) from error

    return call


def refuse_resized(shapes: Sequence[tuple[str, nn.Parameter, torch.Size]]) -> None:
    """Raise InputError for a parameter whose shape has changed.

    `resize_token_embeddings` changes shapes, for example. Gradients and optimizer states keep the
    former shape, and an update would write past their end.

    Args:
        shapes: (name, parameter, shape) of the parameters when the model was given to Plait.
    """
    for name, parameter, shape in shapes:
        if parameter.shape != shape:
            raise InputError(
                f"`{name}` has shape {tuple(parameter.shape)}, and had {tuple(shape)} when the "
                "model was passed to Plait: gradients and optimizer states still have the old "
                "shape; load the model, resize it (resize_token_embeddings), and then train it "
                "or pass it to plait.initialize"
            )


def refuse_cache(parts: Parts, mesh: Mesh, cache: Any) -> None:
    """Refuse a KV cache that does not fit the layout.

    A valid cache contains full sequences. In a pipeline it has the layers of this rank's stages.

    Args:
        parts: The model after all techniques were applied.
        mesh: Mesh of the ranks.
        cache: The cache.

    Raises:
        InputError: The cache does not fit.
    """
    pp = mesh.layout.pp
    if pp > 1 and not isinstance(cache, StageCaches):
        raise InputError(
            f"parallel.pp = {pp}: predict(cache=...) got a {type(cache).__name__}, but each of "
            f"{pp} stages computes keys and values of its own blocks only; pass what "
            "engine.new_cache() returns"
        )
    refuse_own_batches(parts, "predict(cache=...)")


def refuse_own_batches(parts: Parts, call: str) -> None:
    """Refuse a call that bypasses the techniques' changes of a batch.

    Args:
        parts: The model after all techniques were applied.
        call: Name of the call, for the message.

    Raises:
        InputError: A technique changes batches, or experts are on several ranks.
    """
    refuse_split_experts(parts, call)
    if parts.hooks.transform:
        techniques = ", ".join(
            type(hook).__name__
            for hook in parts.hooks.all
            if type(hook).transform is not StepHook.transform
        )
        raise InputError(
            f"{call} passes a batch to the model unchanged, but {techniques} must transform every"
            " micro-batch (for example to this rank's part of the sequence); call"
            " engine.train_batch, engine.eval_batch or engine.predict(batch)"
        )


def refuse_split_experts(parts: Parts, call: str) -> None:
    """Refuse a call that some ranks may make more often than others, if experts are distributed.

    Ranks exchange tokens in every layer with experts, so such a call could wait forever.

    Args:
        parts: The model after all techniques were applied.
        call: Name of the call, for the message.

    Raises:
        InputError: Experts are on several ranks.
    """
    if parts.experts:
        raise InputError(
            f"parallel.ep: {call} is not tested with experts on different processes, which exchange"
            " tokens in every layer; call engine.train_batch, engine.eval_batch or"
            " engine.predict(batch), or use parallel.ep = 1"
        )


def refuse_loss_of_samples(loss: Any, resolved: Resolved) -> None:
    """Refuse a loss that is a mean over samples if each rank of cp has a part of every sample.

    Raises:
        ConfigError: The loss is `plait.per_sample` and `parallel.cp` is larger than 1.
    """
    if resolved.layout.cp > 1 and isinstance(loss, PerSample):
        raise ConfigError(
            Problem(
                "parallel.cp",
                resolved.layout.cp,
                "the loss is a mean over samples (plait.per_sample), and each of the ranks would"
                " count every sample as its own",
                "use 1, or a loss that is a mean over tokens (plait.causal_lm_loss)",
            )
        )


def refuse_trained_loss(loss: Any, model: nn.Module) -> None:
    """Raise InputError for trainable parameters of a loss.

    They would neither be reduced over ranks nor saved.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for module in _modules_of(loss):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise InputError(
                    f"the loss {type(module).__name__} has a trainable parameter, `{name}`, that is"
                    " not part of the model, so its gradient would not be reduced and checkpoints"
                    " would not contain it; make the loss a part of the model (model.loss = loss,"
                    " before plait.initialize), or freeze it (requires_grad_(False))"
                )


def _modules_of(loss: Any) -> Iterator[nn.Module]:
    candidates = [loss]
    if hasattr(loss, "__dict__"):
        candidates += vars(loss).values()
    for candidate in candidates:
        # The object of a bound method.
        owner = getattr(candidate, "__self__", candidate)
        if isinstance(owner, nn.Module):
            yield owner


def checked_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Check an optimizer that the caller created for the model, and return it.

    Raises:
        InputError: The object is not an optimizer, updates parameters outside the model, or needs a
            closure.
        ModelError: The optimizer does not support sharded parameters.
    """
    if not hasattr(optimizer, "param_groups"):
        raise InputError(
            f"optimizer= returned a {type(optimizer).__name__}, which has no param_groups; return a"
            " torch.optim.Optimizer"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise InputError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not"
                    " (or no longer) part of the model, so its gradient would not be reduced; build"
                    " the optimizer over the parameters that the function receives, or over"
                    " model.parameters() inside it"
                )
    if needs_closure(type(optimizer)):
        raise InputError(
            f"{type(optimizer).__name__}.step requires a closure that computes the loss again, and"
            " engine.step has none to pass; use an optimizer that needs one gradient per step"
            " (AdamW)"
        )
    refuse_sharded(type(optimizer), list(model.named_parameters()))
    return optimizer


def warn_of_unused_sections(resolved: Resolved, *, optimizer: Any, lr_scheduler: Any) -> None:
    """Warn on rank 0 about a section of the configuration that an argument overrides."""
    if place().rank != 0:
        return
    replacements = (
        ("optimizer", "optimizer", optimizer),
        ("scheduler", "lr_scheduler", lr_scheduler),
    )
    for section, argument, value in replacements:
        is_configured = resolved.sources.get(f"{section}.type", "default") != "default"
        if value is not None and is_configured:
            warn(
                f"`{section}` of the configuration is not used: plait.initialize was given"
                f" {argument}=; leave one of the two out"
            )


def with_callers_seed(resolved: Resolved, seed: int) -> Resolved:
    """Return the configuration with the caller's seed, unless it sets a seed itself.

    Args:
        resolved: The configuration.
        seed: The initial seed of rank 0's default generator, as set by `torch.manual_seed`.
    """
    if resolved.sources.get("run.seed", "default") != "default" or seed >= _USER_SEED_LIMIT:
        return resolved
    sources = {**resolved.sources, "run.seed": "torch.manual_seed, on rank 0"}
    return resolved.model_copy(update={"seed": seed, "sources": sources})

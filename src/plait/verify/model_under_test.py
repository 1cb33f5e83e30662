"""What is verified: how to build the model (on meta, or with weights of its own), what it takes and
which loss it has.

A TestedModel is data, so that the process that checks and the processes that run build the same
thing. Nothing here knows of layouts.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from plait.errors import InputError, ModelError
from plait.importing import NotImportable, module_of
from plait.losses.loss import Loss, causal_lm_loss
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.parallel.micro_batches import Forward, default_forward
from plait.policy import Policy
from plait.verify.batches import BatchFunction, token_batches
from plait.verify.shrink import Fields, cut_blocks, without_dropout


class TestedModel(Policy):
    """A model under comparison."""

    title: str
    """Its name: `llama`, `package.module:function`."""
    fields: Fields | None = None
    """A Transformers configuration with its `model_type`."""
    function: str | None = None
    """`package.module:function` that returns a module, or (module, loss, micro-batch function)."""
    depth: int | None = None
    """How many blocks of the function's model are kept; None keeps all."""
    blocks: tuple[str, ...] = ()
    """Names or patterns of its blocks; empty: found in the model."""
    vocabulary: int | None = None
    """Tokens of a language model; None where the function brings its own batches."""
    first: str = "input_ids"
    """The argument of `forward` that takes the tokens."""
    mask: str | None = None
    """The argument that takes the attention mask, if there is one."""
    on_meta: bool = True
    """Its weights can be drawn by its classes on every layout; else each process builds it with
    weights, and rank 0's count.
    """
    left_padding: bool = True
    """It takes rows that are padded on the left."""
    bare_logits: bool = False
    """The model returns its logits [batch, seq, vocab] themselves."""
    exact: bool = True
    """Nothing in the forward rounds a float64 tensor, once its own casts are left out."""


@dataclass(frozen=True)
class Built:
    """A model with what it takes to train it."""

    model: nn.Module
    loss: Loss
    forward: Forward
    micro_batch: BatchFunction


def build(tested: TestedModel, *, dtype: torch.dtype) -> Built:
    """The model in training mode without dropout: on meta for Transformers, where it can be; with
    the weights it comes with for others.
    """
    loss = None
    micro_batch = None
    if tested.fields is not None:
        model = transformers_model(
            tested.fields, dtype=dtype, device="meta" if tested.on_meta else "cpu"
        )
    else:
        assert tested.function is not None
        model, loss, micro_batch = call_function(tested.function)
        if tested.depth is not None:
            cut_blocks(model, find_blocks(model, tested.blocks or None), tested.depth)
        model = model.to(dtype)
    without_dropout(model)
    if loss is None or micro_batch is None:
        if tested.vocabulary is None:
            raise ModelError(
                f"{tested.title}: a model without an embedding is no language model;"
                f" {_WHAT_A_FUNCTION_RETURNS}"
            )
        loss = causal_lm_loss
        micro_batch = token_batches(
            vocabulary=tested.vocabulary,
            first=tested.first,
            mask=tested.mask,
            left=tested.left_padding,
        )
    return Built(
        model.train(), loss, _bare_logits if tested.bare_logits else default_forward, micro_batch
    )


def _bare_logits(model: nn.Module, batch: Any) -> Any:
    return SimpleNamespace(logits=default_forward(model, batch))


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators, any of which a function may draw its weights
    from.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def give_weights(model: nn.Module, *, blocks: tuple[str, ...], seed: int) -> nn.Module:
    """A model on meta gets the weights that every layout draws for `seed`, on the CPU; any other
    keeps its own.
    """
    if materialise.is_meta(model):
        template = materialise.template_of(model)
        materialise.allocate(model, torch.device("cpu"))
        materialise.initialise(model, template, find_blocks(model, blocks or None), seed=seed)
    return model


def transformers_model(fields: Fields, *, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """The causal language model of a configuration; on another device than meta with weights and
    buffers of its own.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = dict(fields)
    attention = fields.pop("attn_implementation", None)
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    config.use_cache = False
    if dtype == torch.float64 and attention not in (None, "eager", "sdpa"):
        attention = "sdpa"  # flash attention takes no float64
    settings = {"attn_implementation": attention} if attention else {}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, **settings
        )
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    built: nn.Module = model
    if dtype == torch.float64:
        for parameter in built.parameters():  # some are float32 whatever the model's dtype is
            parameter.data = (
                parameter.data.double() if parameter.is_floating_point() else parameter.data
            )
    return built


_WHAT_A_FUNCTION_RETURNS = (
    "the function returns a module that maps tokens to logits, or (module, loss, micro_batch) with"
    " micro_batch(samples, generator) -> a micro-batch and loss as plait.initialize takes it"
    " (plait.causal_lm_loss, plait.per_sample(...))"
)


def call_function(path: str) -> tuple[nn.Module, Loss | None, BatchFunction | None]:
    """What `package.module:function` returns, called without arguments. Raises InputError where it
    cannot be called or returns else.
    """
    function = _imported(path)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--model {path}: it is called without arguments ({error}); {_WHAT_A_FUNCTION_RETURNS}"
        ) from None
    except ValueError:  # it is not of Python and has no signature
        pass
    made = function()
    if isinstance(made, nn.Module):
        return made, None, None
    if isinstance(made, tuple) and len(made) == 3:
        model, loss, micro_batch = made
        if isinstance(model, nn.Module) and isinstance(loss, Loss) and callable(micro_batch):
            return model, loss, micro_batch
    raise InputError(f"--model {path}: it returned {_described(made)}; {_WHAT_A_FUNCTION_RETURNS}")


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"


def _imported(path: str) -> Callable[[], Any]:
    try:
        module, attribute = module_of(
            path, form="not package.module:function", example="mymodels.small:build"
        )
    except NotImportable as error:
        raise InputError(f"--model {path}: {error}") from None
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [
            known
            for known, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        listed = f"; it has {', '.join(names[:6])}" if names else ""
        raise InputError(f"--model {path}: {module.__name__} has no function {attribute!r}{listed}")
    built: Callable[[], Any] = found
    return built

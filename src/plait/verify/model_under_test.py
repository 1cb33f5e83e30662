"""Description of the model under test, and functions that build the model, its loss and its data.

A TestedModel can be serialized, so that the process that compares and the processes that train
build the same model. This module does not depend on the layout.

A comparison uses few and short samples that are uneven like real batches: micro-batches have
different lengths, samples are padded on the right or on the left, numbers of targets differ, and
one micro-batch has no target at all. The data of a micro-batch depend only on the step and on the
index of the micro-batch, so a layout and one process train on the same data.
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
from plait.importing import NamedImportError, import_named
from plait.losses.loss import Loss, causal_lm_loss
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.parallel.micro_batches import IGNORED, Forward, default_forward
from plait.policy import Policy
from plait.verify.shrink import Fields, cut_blocks, without_dropout

BatchFunction = Callable[[int, torch.Generator], Any]
"""Function of (samples, generator) that returns one micro-batch.

Users provide one for a model that is not a language model.
"""


class TestedModel(Policy):
    """Serializable description of the small model that a verification trains."""

    title: str
    """Name of the model, such as `llama` or `package.module:function`."""
    fields: Fields | None = None
    """Transformers configuration with its `model_type`."""
    function: str | None = None
    """Path `package.module:function`, which returns a module or (module, loss, micro_batch)."""
    depth: int | None = None
    """Number of blocks of the function's model to keep. None keeps all."""
    blocks: tuple[str, ...] = ()
    """Names or patterns of the blocks. If empty, blocks are detected."""
    vocabulary: int | None = None
    """Tokens of a language model, or None if the function provides batches."""
    first: str = "input_ids"
    """Argument of `forward` that takes the tokens."""
    mask: str | None = None
    """Argument of `forward` that takes the attention mask, or None."""
    on_meta: bool = True
    """True if a model on meta can be initialised.

    Otherwise each process builds the model with weights, and those of rank 0 are used.
    """
    left_padding: bool = True
    """True if the forward accepts rows that are padded on the left."""
    bare_logits: bool = False
    """True if the model returns logits [batch, seq, vocab] instead of an output object."""
    exact: bool = True
    """True if the forward rounds no float64 tensor inside `keeping_float64`."""


@dataclass(frozen=True)
class TestableModel:
    """Small model of a verification, with its loss, its forward and its data."""

    model: nn.Module
    loss: Loss
    forward: Forward
    micro_batch: BatchFunction


def build(tested: TestedModel, *, dtype: torch.dtype) -> TestableModel:
    """Build the model in training mode, without dropout.

    Models of Transformers are on the meta device if their weights can be initialised later. Models
    of a function have the weights that the function gives them.

    Raises:
        ModelError: The model is not a language model, and its function provides no batches.
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
                f"{tested.title}: a model without an embedding is not a language model;"
                f" {_WHAT_A_FUNCTION_RETURNS}"
            )
        loss = causal_lm_loss
        micro_batch = token_batches(
            vocabulary=tested.vocabulary,
            first=tested.first,
            mask=tested.mask,
            left=tested.left_padding,
        )
    forward = _wrap_logits if tested.bare_logits else default_forward
    return TestableModel(model.train(), loss, forward, micro_batch)


def _wrap_logits(model: nn.Module, batch: Any) -> Any:
    return SimpleNamespace(logits=default_forward(model, batch))


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, because a function may use any of them."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def initialise_weights(model: nn.Module, *, blocks: tuple[str, ...], seed: int) -> nn.Module:
    """Initialise a meta-device model on the CPU, with weights that depend only on `seed`.

    Every layout initialises the same weights. A model that is not on the meta device keeps its
    weights.
    """
    if materialise.is_meta(model):
        template = materialise.template_of(model)
        materialise.allocate(model, torch.device("cpu"))
        materialise.initialise(model, template, find_blocks(model, blocks or None), seed=seed)
    return model


def transformers_model(fields: Fields, *, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """Return the causal language model of a Transformers configuration.

    The model has initial weights and buffers, unless the device is meta.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = dict(fields)
    attention = fields.pop("attn_implementation", None)
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    # Training needs no cache of keys and values.
    config.use_cache = False
    if dtype == torch.float64 and attention not in (None, "eager", "sdpa"):
        # FlashAttention does not support float64.
        attention = "sdpa"
    settings = {"attn_implementation": attention} if attention else {}
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, **settings
        )
    if dtype != torch.float64:
        return model
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if set_experts is not None:
        # torch's grouped matrix multiplication does not support float64.
        set_experts("eager")
    # Some parameters are float32 whatever the model's dtype is.
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    return model


_WHAT_A_FUNCTION_RETURNS = (
    "it must return a module that maps tokens to logits, or (module, loss, micro_batch) with"
    " micro_batch(samples, generator) -> a micro-batch and loss as plait.initialize takes it"
    " (plait.causal_lm_loss, plait.per_sample(...))"
)


def call_function(path: str) -> tuple[nn.Module, Loss | None, BatchFunction | None]:
    """Call `package.module:function` without arguments.

    Returns:
        (module, loss, function that creates micro-batches). The last two are None for a language
        model.

    Raises:
        InputError: The function cannot be called, or returns neither a module nor such a tuple.
    """
    function = _import_function(path)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--model {path}: the function cannot be called without arguments ({error});"
            f" {_WHAT_A_FUNCTION_RETURNS}"
        ) from None
    except ValueError:
        # A builtin has no signature.
        pass
    result = function()
    if isinstance(result, nn.Module):
        return result, None, None
    if isinstance(result, tuple) and len(result) == 3:
        model, loss, micro_batch = result
        if isinstance(model, nn.Module) and isinstance(loss, Loss) and callable(micro_batch):
            return model, loss, micro_batch
    returned = f"a {type(result).__name__}"
    if isinstance(result, tuple):
        returned = f"({', '.join(type(part).__name__ for part in result)})"
    raise InputError(
        f"--model {path}: the function returned {returned}; {_WHAT_A_FUNCTION_RETURNS}"
    )


def _import_function(path: str) -> Callable[[], Any]:
    try:
        module, attribute = import_named(
            path, form="not package.module:function", example="mymodels.small:build"
        )
    except NamedImportError as error:
        raise InputError(f"--model {path}: {error}") from None
    function: Callable[[], Any] | None = getattr(module, attribute, None)
    if not callable(function):
        names = []
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                names.append(name)
        listed = f"; it has {', '.join(names[:6])}" if names else ""
        raise InputError(f"--model {path}: {module.__name__} has no function {attribute!r}{listed}")
    return function


SHORTEST = 5
LONGEST = 12


def ragged_steps(
    *, steps: int, micro_batches: int, size: int, seed: int, micro_batch: BatchFunction
) -> list[list[Any]]:
    """Return micro-batches of random data, one list per step.

    If micro-batches have `labels`, one of them has no targets: the second one of the first step,
    or, with one micro-batch per step, the one of the second step.

    Args:
        steps: Number of optimizer steps.
        micro_batches: Micro-batches per step, over all data-parallel ranks.
        size: Samples per micro-batch.
        seed: Seed of the generator that is passed to `micro_batch`.
        micro_batch: Function that creates a micro-batch.
    """
    # Another seed than that of the weights, so that data and weights do not share random numbers.
    generator = torch.Generator().manual_seed(seed + 1)
    batches = [micro_batch(size, generator) for _ in range(steps * micro_batches)]
    if len(batches) > 1 and isinstance(batches[1], dict) and "labels" in batches[1]:
        batches[1]["labels"].fill_(IGNORED)
    firsts = range(0, len(batches), micro_batches)
    return [batches[first : first + micro_batches] for first in firsts]


def token_batches(
    *, vocabulary: int, first: str, mask: str | None, left: bool = True
) -> BatchFunction:
    """Return a function that creates micro-batches of random tokens.

    A micro-batch has the tokens [size, length] int64, `labels` [size, length] int64 with -100 at
    padding, and an attention mask [size, length] int64. Samples alternate between padding on the
    right, padding on the left and no padding.

    Args:
        vocabulary: Number of tokens.
        first: Key of the tokens, such as `input_ids`.
        mask: Key of the attention mask, or None for a model without this argument.
        left: Whether samples may be padded on the left.
    """
    kinds = ("right", "left", "full") if left else ("right", "full")

    def micro_batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=generator))
        ids = torch.randint(0, vocabulary, (size, length), generator=generator)
        labels = ids.clone()
        visible = torch.ones_like(ids)
        first_kind = int(torch.randint(0, len(kinds), (1,), generator=generator))
        for row in range(size):
            kind = kinds[(first_kind + row) % len(kinds)]
            # At least three tokens of a row stay, so that it has targets.
            count = int(torch.randint(length // 3, length - 2, (1,), generator=generator))
            if kind != "full":
                padded = slice(0, count)
                if kind == "right":
                    padded = slice(length - count, length)
                # Padding is not a target, and the attention mask hides it.
                labels[row, padded] = IGNORED
                visible[row, padded] = 0
        batch = {first: ids, "labels": labels}
        if mask:
            batch[mask] = visible
        return batch

    return micro_batch

"""Generation with Plait during an evaluation (`predict_with_generate`), on any layout.

The result is the tensor of rows that Transformers' `generate` would return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from plait._torch.units import leave_gathered, sharded_modules
from plait.config.resolving.resolve import Resolved
from plait.engine.engine import Engine
from plait.errors import InputError, Problem
from plait.inference.capacity import USABLE_SHARE, free_bytes, gathered_bytes, is_sharded
from plait.inference.generation_settings import NAMES, settings_of
from plait.inference.requests import append_answers
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sizes import dtype_of, format_bytes

DEFAULT_NEW_TOKENS = 20
"""Default number of new tokens in Transformers."""
_BEAMS = "plait generates without beams"


def generates(args: Any) -> bool:
    """Return True if an evaluation of a Trainer with these arguments generates."""
    return bool(getattr(args, "predict_with_generate", False))


def has_encoder(model: Any) -> bool:
    """Return True for an encoder-decoder model.

    Transformers' own `generate` is used for such a model. Each rank generates for its own batch.
    """
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def problems_of(model: Any, args: Any, resolved: Resolved) -> list[Problem]:
    """Return the reasons why an evaluation cannot generate on a layout.

    Args:
        model: The Trainer's model, or None.
        args: Arguments of the Trainer.
        resolved: The configuration.
    """
    if not generates(args) or model is None:
        return []
    layout = resolved.layout
    field = "TrainingArguments.predict_with_generate"
    if has_encoder(model):
        offload = resolved.parameter_offload.device
        if layout.dp == layout.world_size and layout.ep == 1 and offload == "none":
            return []
        rule = (
            f"{type(model).__name__} has an encoder and a decoder, whose generate is Transformers'"
            f" own and needs the whole model on every process, and this layout is {layout} with"
            f" offload_param.device {offload}"
        )
        remedy = "leave it out, or use a layout without tp, pp, ep and offload of parameters"
        return [Problem(field, True, rule, remedy)]

    problems = []
    if layout.ep > 1:
        rule = "experts on different processes do not generate"
        problems.append(Problem(field, True, rule, "leave it out, or use parallel.ep = 1"))
    beams = args.generation_num_beams
    if (beams or 1) > 1:
        name = "TrainingArguments.generation_num_beams"
        problems.append(Problem(name, beams, _BEAMS, "use 1, or leave it out"))
    return problems


@contextmanager
def gathered_parameters(engine: Engine) -> Iterator[None]:
    """Return a context in which all parameters stay gathered for Transformers' own `generate`.

    `generate` of Transformers calls the encoder without the root module, so the parameters outside
    the layers would not be gathered. Ranks end after different numbers of tokens, so no collective
    may run inside.

    Raises:
        InputError: The parameters take more than this rank's free memory.
    """
    if not is_sharded(engine.model):
        yield
        return
    name = engine.config.precision.compute
    dtype = dtype_of(name) if name is not None else None
    required = gathered_bytes(engine.model, dtype)
    free = free_bytes(engine.device, engine.mesh.local_world_size)
    if free is not None and required > USABLE_SHARE * free:
        raise InputError(
            "predict_with_generate: Transformers' generate needs all parameters of"
            f" {type(engine.model).__name__} on every process, {format_bytes(required)}, but"
            f" {format_bytes(free)} are free; use predict_with_generate=False, and"
            " generate from the saved model"
        )
    # Without `leave_gathered` a forward of the model would reshard its parameters.
    with leave_gathered(engine.model):
        for module in sharded_modules(engine.model):
            module.unshard()
        try:
            yield
        finally:
            free_gathered(engine.model)


def check_settings(model: Any) -> None:
    """Raise InputError if the model's `generation_config` has an unsupported setting."""
    settings_of(model, {})


def generated(
    engine: Engine,
    inputs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    first: int,
    seed: int,
) -> torch.Tensor:
    """Return the rows of `input_ids` with the tokens that the model adds to them. Collective.

    Padding of a row, on either side, is ignored.

    Args:
        engine: The engine.
        inputs: A batch with `input_ids`, [batch, seq].
        arguments: Arguments of Transformers' `generate`.
        first: Index of the first row. Row i draws from its own generator, which is seeded by `seed`
            and `first + i`.
        seed: Seed of the run.

    Returns:
        The rows, padded on the right: int64, [batch, length of the longest row].
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise InputError(
            "predict_with_generate: a batch has no `input_ids` of shape [batch, seq], the prompts"
            " of the generation; return them from the data collator"
        )
    settings = _generate_settings(engine.model, arguments, ids.shape[1])
    pad = settings_of(engine.model, settings).pad_token_id
    mask = _attention_mask(engine.model, inputs, ids).bool()
    prompts = [row[row_mask].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    # No row has the generator of a row of a run with another seed.
    seeds = [(seed << 32) + first + index for index in range(len(prompts))]
    generations = engine.generate(prompts, seed=seeds, **settings)
    return append_answers(ids, generations, pad)


@contextmanager
def answering(model: Any, tokens: torch.Tensor) -> Iterator[None]:
    """Return a context in which `model.generate(...)` returns the given tokens.

    The Trainer's own code then pads the tokens, and computes the loss of the batch. Changes that
    this code makes to the model's `generation_config` are undone at the end.
    """
    config = model.generation_config
    model.generation_config = deepcopy(config)
    model.generate = lambda *args, **kwargs: tokens
    try:
        yield
    finally:
        del model.generate
        model.generation_config = config


def _generate_settings(model: Any, arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return settings for Plait's `generate` from arguments of Transformers' `generate`.

    The number of new tokens and the sampling follow Transformers' rules. In particular,
    `max_length` includes the prompt with its padding.

    Args:
        model: The model.
        arguments: Arguments of Transformers' `generate`.
        length: Length of the prompts with their padding.
    """
    settings = {
        name: value
        for name, value in arguments.items()
        if value is not None and name != "synced_gpus"
    }
    if settings.pop("num_beams", 1) != 1:
        raise InputError(f"num_beams = {arguments['num_beams']}: {_BEAMS}; use 1, or leave it out")
    unknown = [name for name in settings if name not in NAMES]
    if unknown:
        raise InputError(
            f"predict_with_generate: plait's generate has no setting `{unknown[0]}`; leave"
            f" it out, or use one of {', '.join(NAMES)}"
        )

    config = model.generation_config
    settings.setdefault("do_sample", bool(config.do_sample))
    max_length = settings.pop("max_length", None)
    if "max_new_tokens" not in settings:
        settings["max_new_tokens"] = _new_tokens(config, max_length, length)
    return settings


def _new_tokens(config: Any, max_length: int | None, length: int) -> int:
    """Return the number of new tokens.

    `max_length` of the call has priority over `max_new_tokens` of the model's configuration, which
    has priority over `max_length` of the configuration.
    """
    if max_length is None:
        if config.max_new_tokens is not None:
            max_length = length + config.max_new_tokens
        elif config.max_length is not None:
            max_length = config.max_length
        else:
            return DEFAULT_NEW_TOKENS
    if max_length - length < 1:
        raise InputError(
            f"max_length = {max_length} leaves no token to add to prompts of {length}; raise"
            " generation_max_length, or pass max_new_tokens to evaluate or predict"
        )
    return max_length - length


def _attention_mask(model: Any, inputs: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor:
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask
    settings = settings_of(model, {})
    pad = getattr(model.generation_config, "pad_token_id", None)
    # A padding token that also ends a text may be a token of the prompt.
    if pad is None or pad in settings.eos_token_id:
        return torch.ones_like(ids)
    return ids != pad

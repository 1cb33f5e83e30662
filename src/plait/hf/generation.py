"""`predict_with_generate`: what an evaluation generates, by Plait on any layout, as rows that
Transformers' `generate` would return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from plait._torch.units import kept_gathered, sharded_modules
from plait.config.resolving.resolve import Resolved
from plait.engine.engine import Engine
from plait.errors import InputError, Problem
from plait.inference.capacity import ROOM, free_bytes, gathered_bytes, is_sharded
from plait.inference.settings import NAMES, settings_of
from plait.parallel.data.data_parallel import free_gathered
from plait.units import dtype_of, format_bytes

DEFAULT_NEW_TOKENS = 20
"""Transformers'."""
_BEAMS = "plait generates without beams"


def generates(args: Any) -> bool:
    """Whether an evaluation of a Trainer with these arguments generates."""
    return bool(getattr(args, "predict_with_generate", False))


def has_encoder(model: Any) -> bool:
    """Whether Transformers' own `generate` runs instead, on every rank for its own batch."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def problems_of(model: Any, args: Any, resolved: Resolved) -> list[Problem]:
    """What a layout cannot generate."""
    if not generates(args) or model is None:
        return []
    layout = resolved.layout
    field = "TrainingArguments.predict_with_generate"
    if has_encoder(model):
        if (
            layout.dp == layout.world_size
            and layout.ep == 1
            and resolved.parameter_offload.device == "none"
        ):
            return []
        rule = (
            f"{type(model).__name__} has an encoder and a decoder, whose generate is Transformers'"
            f" own and needs the whole model on every process, and this layout is {layout} with"
            f" offload_param.device {resolved.parameter_offload.device}"
        )
        return [
            Problem(
                field,
                True,
                rule,
                "leave it out, or use a layout without tp, pp, ep and offload of parameters",
            )
        ]
    found = []
    if layout.ep > 1:
        found.append(
            Problem(
                field,
                True,
                "experts on different processes do not generate",
                "leave it out, or use parallel.ep = 1",
            )
        )
    if (args.generation_num_beams or 1) > 1:
        found.append(
            Problem(
                "TrainingArguments.generation_num_beams",
                args.generation_num_beams,
                _BEAMS,
                "use 1, or leave it out",
            )
        )
    return found


@contextmanager
def whole_parameters(engine: Engine) -> Iterator[None]:
    """Keep all parameters gathered in this context, for a model that Transformers generates with.

    `generate` of Transformers calls the encoder without the root module, so the parameters outside
    of the layers would not be gathered. Ranks end after different numbers of tokens, so no
    collective may run inside.

    Raises:
        InputError: The parameters take more than this rank's free memory.
    """
    if not is_sharded(engine.model):
        yield
        return
    name = engine.config.precision.compute
    needed = gathered_bytes(engine.model, dtype_of(name) if name is not None else None)
    free = free_bytes(engine.device, engine.mesh.ranks_here)
    if free is not None and needed > ROOM * free:
        raise InputError(
            "predict_with_generate: Transformers' generate needs all parameters of"
            f" {type(engine.model).__name__} on every process, {format_bytes(needed)}, and"
            f" {format_bytes(free)} are free; leave it out, and generate from the saved model"
        )
    with kept_gathered(engine.model):
        for module in sharded_modules(engine.model):
            module.unshard()
        try:
            yield
        finally:
            free_gathered(engine.model)


def check_settings(model: Any) -> None:
    """Raise InputError where the model's generation_config, or that of the arguments, has what
    Plait does not generate with.
    """
    settings_of(model, {})


def generated(
    engine: Engine, inputs: Mapping[str, Any], given: Mapping[str, Any], *, first: int, seed: int
) -> torch.Tensor:
    """Every row of `input_ids` [batch, seq] with what the model adds to it, filled up with padding;
    int64 [batch, longest]. A row's padding, on either side, is not read. `given` are the arguments
    that Transformers' `generate` would have. Row i draws from a generator of its own, by `seed` and
    `first + i`. Collective.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise InputError(
            "predict_with_generate: a batch has no `input_ids` of shape [batch, seq], which Plait"
            " generates from"
        )
    settings = _settings(engine.model, given, ids.shape[1])
    pad = settings_of(engine.model, settings).pad_token_id
    kept = _mask(engine.model, inputs, ids).bool()
    prompts = [row[here].tolist() for row, here in zip(ids, kept, strict=True)]
    seeds = [(seed << 32) + first + index for index in range(len(prompts))]
    answers = [one.token_ids for one in engine.generate(prompts, seed=seeds, **settings)]
    longest = ids.shape[1] + max(map(len, answers), default=0)
    rows = torch.full((len(ids), longest), pad, dtype=ids.dtype, device=ids.device)
    rows[:, : ids.shape[1]] = ids
    for row, new in zip(rows, answers, strict=True):
        row[ids.shape[1] : ids.shape[1] + len(new)] = torch.tensor(new, dtype=ids.dtype)
    return rows


@contextmanager
def answering(model: Any, tokens: torch.Tensor) -> Iterator[None]:
    """`model.generate(...)` returns `tokens` inside: the Trainer's own code pads them, and computes
    the loss beside them. What it writes into the model's generation_config is undone.
    """
    config = model.generation_config
    model.generation_config = deepcopy(config)
    model.generate = lambda *args, **kwargs: tokens
    try:
        yield
    finally:
        del model.generate
        model.generation_config = config


def _settings(model: Any, given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The call's settings, with Transformers' rules for lengths (the padding of a prompt counts)
    and for draws.
    """
    found = {
        name: value for name, value in given.items() if value is not None and name != "synced_gpus"
    }
    if found.pop("num_beams", 1) != 1:
        raise InputError(f"num_beams = {given['num_beams']}: {_BEAMS}; use 1, or leave it out")
    if unknown := [name for name in found if name not in NAMES]:
        raise InputError(
            f"predict_with_generate: plait's generate has no setting `{unknown[0]}`; it has"
            f" {', '.join(NAMES)}"
        )
    config = model.generation_config
    found.setdefault("do_sample", bool(config.do_sample))
    if "max_new_tokens" not in found:
        most = found.pop("max_length", None)
        new = None if most is not None else config.max_new_tokens
        if new is None:
            most = most if most is not None else config.max_length
            new = DEFAULT_NEW_TOKENS if most is None else most - length
        if new < 1:
            raise InputError(
                f"max_length = {most} leaves no token to add to prompts of {length}; set"
                " generation_max_length, or max_new_tokens"
            )
        found["max_new_tokens"] = new
    found.pop("max_length", None)
    return found


def _mask(model: Any, inputs: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor:
    given = inputs.get("attention_mask")
    if isinstance(given, torch.Tensor):
        return given
    settings = settings_of(model, {})
    pad = getattr(model.generation_config, "pad_token_id", None)
    if pad is None or pad in settings.eos_token_id:
        return torch.ones_like(ids)
    return ids != pad

"""Choice of a small model that represents the user's model.

A user gives a `model` section, a folder, a name on the Hugging Face hub, a config.json or a
function. Candidates are tried from small to large, each by one forward and backward on the CPU in
float64. An architecture for which a shrinking rule (`verify.shrink`) is wrong therefore fails
before any process of the verification starts. The report explains the choice.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.cluster.layout import Layout
from plait.config.schema.config import Config
from plait.errors import ConfigError, InputError, ModelError, Problem, first_line
from plait.files import is_path, user_path
from plait.model.blocks import find_blocks
from plait.model.described import check_sizes, described_config, require_transformers
from plait.model.layers import count_parameters
from plait.planner.models import find_model, named
from plait.sizes import DTYPES, dtype_name, format_count
from plait.verify import shrink
from plait.verify.keep_float64 import keeping_float64, roundings
from plait.verify.model_under_test import (
    TestableModel,
    TestedModel,
    build,
    call_function,
    initialise_weights,
    ragged_steps,
    transformers_model,
)

_MOST_DEPTH = 8
"""Largest depth of a shrunk model that contains every kind of module of the large one."""
_MOST_PARAMETERS = 30_000_000
"""Largest small model, in parameters. A process allocates about ten times its float64 bytes."""
_FUNCTION = "package.module:function"
_MASK = "attention_mask"


@dataclass(frozen=True)
class ModelChoice:
    """Small model for a verification, with the lines of the report that describe it."""

    tested: TestedModel
    lines: tuple[str, ...]
    names: tuple[str, ...]
    """Names of the blocks of the small model."""
    share: float
    """Parameters of the small model, as a fraction of those of the large one."""
    dtype: str
    """Dtype of the parameters in the configured precision."""


def choose(config: Config, source: str | None, *, layout: Layout) -> ModelChoice:
    """Return the small model that represents the user's model.

    Args:
        config: The configuration, whose `model` section is used if `source` is None.
        source: Folder, name, config.json or `package.module:function`, or None.
        layout: The layout. The small model must support the layout's degrees of parallelism in the
            same way as the large model.

    Raises:
        InputError: `source` cannot be read.
        ConfigError: The configuration names no model.
        ModelError: No small version of the model runs.
    """
    blocks = config.parallel.blocks
    if source is not None and ":" in source and not Path(source).exists():
        return _choose_function(source, blocks, layout)
    if source is None and config.model is None:
        example = '"model": {"config": {"model_type": "llama"}}'
        remedy = f"add {example}, or --model FOLDER, NAME or {_FUNCTION}"
        raise ConfigError(Problem("model", None, "the file names no model", remedy))
    fields, title = fields_of(config, source)
    dtype = config.model.dtype if config.model is not None else "float32"
    return _choose_transformers(fields, title, blocks, layout, dtype=dtype)


def fields_of(config: Config, source: str | None) -> tuple[shrink.Fields, str]:
    """Return (Transformers configuration of the user's model before shrinking, title).

    Raises:
        InputError: `source` (a name, folder or file) cannot be read.
        ConfigError: The `model` section is wrong.
    """
    if source is not None:
        return _read_fields(source, "--model"), source
    assert config.model is not None
    if config.model.config is None:
        assert config.model.path is not None
        return _read_fields(config.model.path, "model.path"), config.model.path
    defaults = {}
    vocabulary = config.data.trained_vocabulary() if config.data is not None else None
    if vocabulary is not None:
        defaults["vocab_size"] = vocabulary
    fields: shrink.Fields = described_config(config.model.config, defaults=defaults).to_dict()
    return fields, config.model.config["model_type"]


def _read_fields(source: str, option: str) -> shrink.Fields:
    """Return the configuration of a folder, a file, a known public model or a model on the hub."""
    require_transformers(option)
    from transformers import AutoConfig

    path = user_path(source, option)
    if not path.exists() and named(source) is not None:
        public = described_config(find_model(source).section["config"], defaults={})
        return public.to_dict()
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(
            f"{option} = {source!r}: the folder has no config.json; name a folder that"
            " save_pretrained wrote"
        )
    if not path.exists() and (is_path(source) or path.suffix == ".json"):
        raise InputError(
            f"{option} = {source!r}: there is no such file or folder; name a folder, a file"
            f" config.json or {_FUNCTION}"
        )
    if not _contains_object(path / "config.json" if path.is_dir() else path):
        raise InputError(
            f"{option} = {source!r}: contains no JSON object; name a folder that save_pretrained"
            " wrote"
        )
    try:
        name = str(path) if path.exists() else source
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # The hub, the network and each configuration class raise exceptions of their own.
        raise InputError(
            f"{option} = {source!r}: Transformers cannot read it ({first_line(error)}); name a"
            " folder that save_pretrained wrote"
        ) from error
    read: shrink.Fields = config.to_dict()
    check_sizes(read, f"{option} {source}: ")
    return read


def _contains_object(file: Path) -> bool:
    """Return False if a file contains JSON other than an object, about which Transformers fails.

    Transformers has messages of its own about a file that is missing or not JSON.
    """
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return True


def _choose_transformers(
    fields: shrink.Fields, title: str, blocks: tuple[str, ...], layout: Layout, *, dtype: str
) -> ModelChoice:
    try:
        # On the meta device, so that the size of the large model does not matter.
        large = transformers_model(fields, dtype=torch.float32)
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{title}: not a causal language model of Transformers ({first_line(error)})"
        ) from error
    kinds = {type(module).__name__ for module in large.modules()}
    tested, model, missing = _smallest(
        fields, TestedModel(title=title, blocks=blocks), kinds, layout
    )
    changes = [str(change) for change in shrink.changes(fields, tested.fields or {})]
    lines = [f"{title}, as it is"]
    if changes:
        lines = [f"{title}, shrunk: {'; '.join(changes)}"]
    if missing:
        lines.append(f"not in the small model, so not verified: {', '.join(missing)}")
    return _make_choice(tested, model, lines, large=count_parameters(large), dtype=dtype)


def _smallest(
    fields: shrink.Fields, tested: TestedModel, kinds: set[str], layout: Layout
) -> tuple[TestedModel, nn.Module, list[str]]:
    """Return the smallest of the runnable models that lack the fewest kinds of modules.

    A model lacks a kind of module if the large model has it and the small one does not.

    Returns:
        The description of the model, the model, and the kinds of modules that it lacks.

    Raises:
        ModelError: No small model runs.
    """
    failure: Exception | None = None
    best: tuple[TestedModel, nn.Module, list[str]] | None = None
    best_depth = None
    for small in _candidates(fields, layout):
        if best is not None and shrink.depth_of(small) == best_depth:
            # Only a deeper model can have more kinds of modules.
            continue
        try:
            completed, model = _try_model(tested.model_copy(update={"fields": small}))
        except (ConfigError, InputError):
            raise
        except Exception as error:
            # A model that is too small for its architecture raises any exception.
            if failure is None or isinstance(failure, _TooLarge):
                failure = error
            continue
        missing = sorted(kinds - {type(module).__name__ for module in model.modules()})
        if best is None or len(missing) < len(best[2]):
            best = (completed, model, missing)
            best_depth = shrink.depth_of(small)
        if not missing:
            break
    if best is not None:
        return best
    assert failure is not None
    if isinstance(failure, _TooLarge):
        raise failure
    raise ModelError(
        f"{tested.title}: no small version of it runs a forward and backward in float64"
        f" ({first_line(failure)})"
    ) from failure


def _candidates(fields: shrink.Fields, layout: Layout) -> Iterator[shrink.Fields]:
    """Yield configurations of small models, from small to large.

    The last one has all layers at full width, with a small vocabulary and without dropout.
    """
    least = _least_depth(layout)
    full_depth = shrink.depth_of(fields) or least
    depths = range(least, max(least, _MOST_DEPTH) + 1)
    for depth in sorted({min(depth, full_depth) for depth in depths}):
        shallow = shrink.with_depth(fields, depth)
        for head_size in shrink.HEAD_SIZES:
            try:
                narrow = shrink.with_width(shallow, layout, head_size=head_size)
            except ValueError:
                # The configuration has no hidden size, so no head size helps.
                break
            yield shrink.with_small_vocabulary(narrow, layout)
    # An architecture that does not run with narrow layers may run at full width.
    yield shrink.with_small_vocabulary(shrink.with_depth(fields, least), layout)
    yield shrink.with_small_vocabulary(fields, layout)


def _least_depth(layout: Layout) -> int:
    """Return the smallest number of blocks for a layout: with a pipeline, two per stage."""
    if layout.pp == 1:
        return shrink.DEPTH
    return max(shrink.DEPTH, 2 * layout.pp)


def _choose_function(path: str, blocks: tuple[str, ...], layout: Layout) -> ModelChoice:
    model, loss, _ = call_function(path)
    large = count_parameters(model)
    dtype = "float32"
    for parameter in model.parameters():
        if parameter.dtype in DTYPES.values():
            dtype = dtype_name(parameter.dtype)
            break
    fields: dict[str, Any] = {"title": path, "function": path, "blocks": blocks}
    if loss is None:
        fields |= _language_model(model, path)
    depth = _least_depth(layout)
    before = shrink.cut_blocks(model, find_blocks(model, blocks or None), depth)
    lines = [f"{path}, as it is"]
    if before is not None:
        try:
            tested, small = _try_model(TestedModel(**fields, depth=depth))
            lines = [f"{path}, shrunk: {before} blocks -> {depth}"]
            return _make_choice(tested, small, lines, large=large, dtype=dtype)
        except Exception as error:
            # The forward may depend on the number of blocks.
            lines = [
                f"{path}, as it is: with {depth} of its {before} blocks it does not run"
                f" ({first_line(error)})"
            ]
    try:
        tested, small = _try_model(TestedModel(**fields))
    except (ModelError, InputError):
        raise
    except Exception as error:
        raise ModelError(
            f"{path}: the model does not run a forward and backward in float64 on the CPU"
            f" ({first_line(error)}); correct its code, or verify another model"
        ) from error
    return _make_choice(tested, small, lines, large=large, dtype=dtype)


def _language_model(model: nn.Module, path: str) -> dict[str, Any]:
    """Return the fields of a TestedModel that describe how a language model is called."""
    embeddings = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    names = list(inspect.signature(model.forward).parameters)
    if not embeddings or not names:
        raise InputError(
            f"--model {path}: the module has no embedding, so it is not a language model; return"
            " (module, loss, micro_batch), where micro_batch(samples, generator) creates a"
            " micro-batch, and loss is a loss_fn of plait.initialize"
        )
    return {
        "vocabulary": embeddings[0],
        "first": names[0],
        "mask": _MASK if _MASK in names else None,
    }


class _TooLarge(ModelError):
    """Error for a model whose smallest version is too large."""

    def __init__(self, title: str, size: int) -> None:
        rule = (
            f"its smallest version that builds has {format_count(size)} parameters, more than"
            f" {format_count(_MOST_PARAMETERS)}"
        )
        super().__init__(
            f"{title}: {rule}, and no rule for narrower layers applies to it; pass a small"
            " configuration as --model config.json"
        )


def _try_model(tested: TestedModel) -> tuple[TestedModel, nn.Module]:
    """Run a forward and backward in float64 on the CPU.

    Returns:
        The TestedModel with all fields set, and the float64 model.

    Raises:
        Exception: Any error that the model raises.
    """
    if tested.fields is not None:
        model = transformers_model(tested.fields, dtype=torch.float64)
        if count_parameters(model) > _MOST_PARAMETERS:
            raise _TooLarge(tested.title, count_parameters(model))
        takes_mask = _MASK in inspect.signature(model.forward).parameters
        config: Any = model.config
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is None:
            # A model of several parts has it in its text part.
            vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        tested = tested.model_copy(
            update={"vocabulary": vocabulary, "mask": _MASK if takes_mask else None}
        )
    built = build(tested, dtype=torch.float64)
    try:
        model = initialise_weights(built.model, blocks=tested.blocks, seed=0)
    except ModelError:
        # Only the constructor fills some parameter.
        tested = tested.model_copy(update={"on_meta": False})
        built = build(tested, dtype=torch.float64)
        model = built.model
    with keeping_float64(model):
        if tested.mask is not None and not _takes_left_padding(built, model):
            tested = tested.model_copy(update={"left_padding": False})
            built = build(tested, dtype=torch.float64)
        micro_batch = _three_rows(built)
        output = built.forward(model, micro_batch)
        if isinstance(output, torch.Tensor) and tested.vocabulary is not None:
            tested = tested.model_copy(update={"bare_logits": True})
            built = build(tested, dtype=torch.float64)

        def loss() -> torch.Tensor:
            total, _ = built.loss(built.forward(model, micro_batch), micro_batch)
            return total

        # `keeping_float64` skips casts in Python. Operators that still round are found here.
        exact = not roundings(loss)
        # A model with little randomness can return the same loss twice by chance.
        for _ in range(3):
            _refuse_random(tested, loss().item(), loss().item())
        loss().backward()
    return tested.model_copy(update={"exact": exact}), model


def _three_rows(built: TestableModel) -> Any:
    """Return a micro-batch of three samples: padded on the right, on the left, and not padded."""
    steps = ragged_steps(steps=1, micro_batches=1, size=3, seed=0, micro_batch=built.micro_batch)
    return steps[0][0]


def _takes_left_padding(built: TestableModel, model: nn.Module) -> bool:
    micro_batch = _three_rows(built)
    try:
        output = built.forward(model, micro_batch)
        logits: Any = getattr(output, "logits", output)
        return bool(torch.isfinite(logits).all())
    except Exception:
        # The next forward, without left padding, shows any other error.
        return False


def _refuse_random(tested: TestedModel, first: float, second: float) -> None:
    if not math.isfinite(first):
        raise ModelError(
            f"{tested.title}: the loss of its small version is {first}, which cannot be compared;"
            " correct the model or its loss such that the loss is finite"
        )
    if first != second:
        raise ModelError(
            f"{tested.title}: two forwards on the same data have the losses {first!r} and"
            f" {second!r}. The model is random even without dropout, so runs cannot be compared;"
            " turn the noise off"
        )


def _make_choice(
    tested: TestedModel, model: nn.Module, lines: list[str], *, large: int, dtype: str
) -> ModelChoice:
    small = count_parameters(model)
    shrunk_from = f"{format_count(large)} -> " if small != large else ""
    lines.append(f"{shrunk_from}{format_count(small)} parameters")
    if not tested.on_meta:
        lines.append(
            "only the constructor initialises some parameter, so the model is built with weights;"
            " plait.initialize needs a model with weights too"
        )
    if not tested.left_padding:
        lines.append(
            "its forward does not support rows that are padded on the left, so none are compared"
        )
    if not tested.exact:
        lines.append(
            "some operators of its forward round float64 to a narrower dtype, so float64 is"
            " compared within 1e-7"
        )
    return ModelChoice(
        tested,
        tuple(lines),
        find_blocks(model, tested.blocks or None),
        small / max(large, 1),
        dtype,
    )

"""Export of a checkpoint to a folder that `from_pretrained` can load.

The checkpoint may have any layout. Its weights are streamed, one file at a time. An exported folder
can be compared with its checkpoint: tensors, logits and generated tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from plait.checkpoint import places
from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.load import Reader, build_described_model
from plait.checkpoint.states import MODEL_START
from plait.checkpoint.windows import dtype_of
from plait.errors import CheckpointError, InputError, first_line
from plait.files import names_open_file, try_lock
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.rope_by_length import rope_by_length
from plait.inference.source import Source
from plait.model.described import require_transformers
from plait.model.layers import tied_names
from plait.train.run_folder import GENERATION

FILE_BYTES = 4 << 30
"""Largest size of a file of weights, which is also the memory that an export needs."""


@dataclass(frozen=True)
class ExportResult:
    """Summary of a written folder.

    Attributes:
        folder: The folder.
        step: Number of optimizer steps of the checkpoint.
        tensors: Number of tensors.
        size: Bytes of all weights.
        dtype: Dtype of the first tensor.
    """

    folder: Path
    step: int
    tensors: int
    size: int
    dtype: torch.dtype


def _no_progress(written_bytes: int, total_bytes: int) -> None:
    """Report nothing."""


def export(
    checkpoint: CheckpointFolder,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    generation: Path | None = None,
    verify: Callable[[Path], None] | None = None,
    progress: Callable[[int, int], None] = _no_progress,
) -> ExportResult:
    """Write the model of a checkpoint of `plait train`: config.json and safetensors with an index.

    The checkpoint is verified first.

    Args:
        checkpoint: The checkpoint to export.
        out: Folder to create.
        dtype: Dtype of the weights. None keeps the dtypes of the checkpoint.
        tokenizer: Folder of the tokenizer, which is copied.
        generation: File with the generation settings, which is copied.
        verify: Receives the finished folder, which still has a temporary name.
        progress: Receives (bytes written, bytes in total) after each file.

    Raises:
        InputError: `out` exists, another export writes it, or the disk is full or not writable.
        CheckpointError: The checkpoint is damaged or was not written by `plait train`, or `verify`
            raised it. No folder remains in these cases.
    """
    require_transformers("plait export")
    # A dangling symbolic link too, because a folder cannot be renamed to it.
    if os.path.lexists(out):
        raise InputError(f"--out {out}: exists; pass another name, or remove it first")
    reader = Reader(checkpoint)
    reader.verify("full")
    model = build_described_model(checkpoint, dtype=dtype)
    stored = dict(reader.under(MODEL_START))
    names = _exported_names(model, stored, checkpoint)

    model_tensors = model.state_dict()
    dtypes: dict[str, torch.dtype] = {}
    sizes: dict[str, int] = {}
    for name in names:
        # The requested dtype does not apply to all tensors: integers remain integers, and a class
        # may keep some in float32. The model knows.
        dtypes[name] = dtype_of(stored[name])
        if dtype is not None and name in model_tensors:
            dtypes[name] = model_tensors[name].dtype
        sizes[name] = torch.Size(stored[name].shape).numel() * dtypes[name].itemsize

    temporary = out.with_name(f".{out.name}.tmp")
    descriptor = None
    published = False
    try:
        descriptor = _claim(temporary, out)
        _write_weights(reader, temporary, dtypes, sizes, progress)
        settings: Any = model.config
        settings.architectures = [type(model).__name__]
        settings.dtype = dtype or dtype_of(stored[names[0]])
        settings.use_cache = True
        settings.save_pretrained(temporary)
        if tokenizer is not None and tokenizer.is_dir():
            # Tokenizers with several chat templates have a subfolder.
            shutil.copytree(tokenizer, temporary, dirs_exist_ok=True)
        if generation is not None:
            shutil.copyfile(generation, temporary / GENERATION)
        _sync(temporary)
        if verify is not None:
            _verify(verify, temporary, out)
        places.publish(temporary, out)
        published = True
    except (OSError, SafetensorError) as error:
        raise InputError(f"--out {out} cannot be written: {_reason(error)}") from error
    finally:
        if descriptor is not None:
            # Ctrl-C also arrives here.
            if not published:
                shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)

    step = int(checkpoint.manifest.metadata["global_steps"])
    return ExportResult(out, step, len(names), sum(sizes.values()), dtypes[names[0]])


def _exported_names(
    model: nn.Module, stored: dict[str, Any], checkpoint: CheckpointFolder
) -> list[str]:
    """Return the names of the tensors to write, each tied tensor only under its first name.

    Raises:
        CheckpointError: The checkpoint lacks a tensor of the model.
    """
    model_names = list(model.state_dict())
    tied_duplicates: set[str] = set()
    for group in tied_names(model):
        tied_duplicates.update(sorted(group, key=model_names.index)[1:])

    names = [name for name in stored if name not in tied_duplicates]
    missing = sorted(set(model_names) - tied_duplicates - set(names))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} tensors of its model, first"
            f" {missing[0]}; export another checkpoint"
        )
    return names


def _write_weights(
    reader: Reader,
    folder: Path,
    dtypes: dict[str, torch.dtype],
    sizes: dict[str, int],
    progress: Callable[[int, int], None],
) -> None:
    """Write the tensors in order, and an index if they need several files."""
    total_bytes = sum(sizes.values())
    written_bytes = 0
    files = _group_by_file(sizes, FILE_BYTES)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: reader.read(f"{MODEL_START}{name}").to(dtypes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        written_bytes += sum(sizes[name] for name in names)
        progress(written_bytes, total_bytes)

    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)


def _group_by_file(sizes: dict[str, int], file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    free_bytes = file_bytes
    for name, size in sizes.items():
        if files[-1] and size > free_bytes:
            files.append([])
            free_bytes = file_bytes
        files[-1].append(name)
        free_bytes -= size
    return files


def _claim(temporary: Path, out: Path) -> int:
    """Return the descriptor of an empty folder to which only this process writes.

    Files of an interrupted export are removed.

    Raises:
        InputError: Another export writes to it.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    # Another export may have published, and so renamed, the folder since it was opened.
    if (
        not try_lock(descriptor)
        or not names_open_file(temporary, descriptor)
        or os.path.lexists(out)
    ):
        os.close(descriptor)
        raise InputError(
            f"--out {out}: another export is writing it; wait until it ends, or pass another name"
        )
    for leftover in temporary.iterdir():
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return descriptor


def _verify(verify: Callable[[Path], None], temporary: Path, out: Path) -> None:
    try:
        verify(temporary)
    except CheckpointError as error:
        raise CheckpointError(
            f"--out {out}: {error}; the exported folder was removed; export without --verify to"
            " keep it"
        ) from error


def _sync(folder: Path) -> None:
    """Flush the files of a folder to disk. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_dir():
            places.sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    """Return the system's message, plus the source file if copying a file failed."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return getattr(error, "strerror", None) or str(error)


PROMPT_TOKENS = 16
"""Number of random tokens in the prompt of the comparison with Transformers."""

GREEDY_TOKENS = 64
"""Number of tokens to generate, if the model has enough positions."""

LOGIT_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}
"""Largest difference of a logit as a fraction of the largest logit. Sums differ in their order."""


def _load_with_transformers(folder: Path) -> Any:
    """Load the folder as a Transformers user would.

    Raises:
        CheckpointError: Transformers cannot open it.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    except Exception as error:
        # A class may raise anything for a configuration or tensors that do not fit.
        raise CheckpointError(
            f"Transformers cannot open it ({type(error).__name__}: {first_line(error)})"
        ) from error


def compare_reloaded(checkpoint: CheckpointFolder, out: Path) -> int:
    """Compare the tensors that Transformers loads from a folder to those of its checkpoint.

    They are compared in the dtype of the folder.

    Args:
        checkpoint: The checkpoint to compare with.
        out: The exported folder.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: Transformers cannot open the folder, or a tensor differs. The message names
            the first tensor that differs.
    """
    model = _load_with_transformers(out)
    reader = Reader(checkpoint)
    count = 0
    for name, tensor in model.state_dict().items():
        if f"{MODEL_START}{name}" not in reader.tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}, which the model has in the installed"
                " Transformers; export with the Transformers that the run was trained with"
            )
        expected = torch.empty_like(tensor)
        reader.fill({f"{MODEL_START}{name}": expected})
        if not torch.equal(expected, tensor):
            raise CheckpointError(
                f"{name} differs from the checkpoint after Transformers has loaded it"
            )
        count += 1
    return count


@dataclass(frozen=True)
class ExportComparison:
    """Agreement between Plait's model of a checkpoint and Transformers' model of the export.

    Attributes:
        logits: Largest absolute difference between the two models' logits of the prompt.
        tokens: Number of greedy tokens that were compared. All of them are equal.
    """

    logits: float
    tokens: int


def compare_generated(checkpoint: CheckpointFolder, out: Path) -> ExportComparison:
    """Compare the logits of a prompt and the greedy tokens after it.

    The checkpoint is loaded as `plait generate` loads it, and the folder as a user of Transformers
    does. Both models are in memory at the same time.

    Args:
        checkpoint: The checkpoint to compare with.
        out: The exported folder.

    Raises:
        CheckpointError: Tokens differ, or logits differ by more than their dtype explains.
    """
    reference = _load_with_transformers(out).eval()
    config = reference.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or PROMPT_TOKENS + GREEDY_TOKENS
    prompt_length = min(PROMPT_TOKENS, positions // 2)
    new_tokens = min(GREEDY_TOKENS, positions - prompt_length)
    prompt = torch.randint(
        0, config.vocab_size, (1, prompt_length), generator=torch.Generator().manual_seed(0)
    )

    model = load_model(Source(out, checkpoint, None), dtype=reference.dtype)
    try:
        prompt = prompt.to(model.device)
        reference.to(model.device)
        with torch.no_grad():
            expected_logits = reference(input_ids=prompt).logits.float()
        logits = model.predict({"input_ids": prompt}).logits.float()
        difference = float((logits - expected_logits).abs().max())
        tokens = generate(
            model,
            prompt,
            max_new_tokens=new_tokens,
            temperature=0,
            # No token has this number, so that generation does not end early.
            eos_token_id=[config.vocab_size],
            pad_token_id=0,
        )[0].token_ids
        expected_tokens = _greedy_tokens(reference, prompt, new_tokens)
    finally:
        model.close()

    tolerance = LOGIT_TOLERANCE[reference.dtype] * max(1.0, float(expected_logits.abs().max()))
    # NaN also fails this comparison.
    if not difference <= tolerance:
        raise CheckpointError(
            f"Transformers' logits differ by {difference:.2g} from those of the checkpoint, more"
            f" than the tolerance of {tolerance:.2g}"
        )
    for number, (token, expected) in enumerate(zip(tokens, expected_tokens, strict=True), 1):
        if token != expected:
            raise CheckpointError(
                f"greedy token {number} of {new_tokens} of Transformers differs from that of the"
                " checkpoint"
            )
    return ExportComparison(difference, new_tokens)


def _greedy_tokens(model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Return the tokens that Transformers generates after a prompt [1, tokens]."""
    from transformers import GenerationConfig

    # The model's settings may contain penalties, which are not part of the comparison.
    model.generation_config = GenerationConfig()
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    rope = rope_by_length(model)
    if rope is not None and rope.rereads_tokens:
        # Past the original length of longrope, the tokens of most classes of Transformers
        # depend on the KV cache: it keeps keys of the previous frequencies. Phi3 drops them,
        # but before Transformers 5.20 it reads only its last token again.
        settings["use_cache"] = False
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens

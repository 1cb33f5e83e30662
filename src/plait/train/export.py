"""A trained model as a folder that `from_pretrained` opens: streamed from a checkpoint of any layout, a file at a time."""

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

from plait.checkpoint import durable
from plait.checkpoint.described import described_model
from plait.checkpoint.folder import Found
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import START
from plait.checkpoint.windows import dtype_of
from plait.errors import CheckpointError, InputError
from plait.files import is_at, is_only_writer
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.source import Source
from plait.model.described import require_transformers
from plait.model.tied import tied_names

FILE_BYTES = 4 << 30
"""Of one file of weights, and so of the memory that exporting takes."""


PROMPT_TOKENS, GREEDY_TOKENS = 16, 64
"""Of the comparison with Transformers; fewer where the model has fewer positions."""
LOGITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Most that a logit may differ, of the largest logit: the order of sums differs."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    tensors: int
    size: int
    """Bytes of weights."""


def export(
    found: Found,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the model of a checkpoint of `plait train`: config.json, safetensors with an index, and the tokenizer. The checkpoint is
    verified first. `dtype`: of the weights; None keeps the checkpoint's. `progress` gets (bytes written, bytes in all).

    Raises InputError where `out` exists, CheckpointError for a damaged checkpoint or one that `plait train` did not write.
    """
    require_transformers("plait export")
    if out.exists():
        raise InputError(f"--out {out}: exists; give another name, or remove it first")
    reader = Reader(found)
    reader.verify("full")
    model = described_model(found, dtype=dtype)
    stored, of_model = dict(reader.under(START)), model.state_dict()
    doubles = {name for group in tied_names(model) for name in sorted(group, key=list(of_model).index)[1:]}
    names = [name for name in stored if name not in doubles]
    missing = sorted(set(of_model) - doubles - set(names))
    if missing:
        raise CheckpointError(f"{found.path} lacks {len(missing)} tensors of its model, first {missing[0]}")
    # Another dtype is not all tensors': integers stay, and so does what the class keeps in float32.
    dtypes = {name: of_model[name].dtype if dtype is not None and name in of_model else dtype_of(stored[name]) for name in names}
    sizes = {name: _bytes(stored[name].shape, dtypes[name]) for name in names}
    total, done = sum(sizes.values()), 0
    temporary = out.with_name(f".{out.name}.tmp")
    held, is_done = None, False
    try:
        held = _claimed(temporary, out)
        files = _files(sizes, file_bytes)
        index: dict[str, str] = {}
        for number, members in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = {name: reader.read(f"{START}{name}").to(dtypes[name]) for name in members}
            save_file(tensors, temporary / file, metadata={"format": "pt"})
            index |= dict.fromkeys(members, file)
            done += sum(sizes[name] for name in members)
            progress(done, total)
        if len(files) > 1:
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
            (temporary / "model.safetensors.index.json").write_text(text)
        settings: Any = model.config
        settings.architectures = [type(model).__name__]
        settings.dtype = dtype or dtype_of(stored[names[0]])
        settings.use_cache = True
        settings.save_pretrained(temporary)
        if tokenizer is not None and tokenizer.is_dir():
            shutil.copytree(tokenizer, temporary, dirs_exist_ok=True)  # several chat templates lie in a folder of their own
        _sync(temporary)
        durable.publish(temporary, out)
        is_done = True
    except (OSError, SafetensorError) as error:
        raise InputError(f"--out {out} cannot be written: {_why(error)}") from error
    finally:
        if held is not None:
            if not is_done:  # also after Ctrl-C
                shutil.rmtree(temporary, ignore_errors=True)
            os.close(held)
    return Exported(out, int(found.manifest.metadata["global_steps"]), len(names), total)


def _claimed(temporary: Path, out: Path) -> int:
    """An empty folder, open, which this process alone writes to. What an export that was killed left there is removed. Raises InputError
    where another export is writing it."""
    temporary.mkdir(parents=True, exist_ok=True)
    held = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not is_only_writer(held) or not is_at(temporary, held) or out.exists():
        os.close(held)
        raise InputError(f"--out {out}: another export writes it now; wait for its end, or give another name")
    for left in temporary.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return held


def _sync(folder: Path) -> None:
    """Put the files of a folder on the disk. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_dir():
            durable.sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _why(error: Exception) -> str:
    """What the system says, and of which file where it is not one of the folder's own."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return getattr(error, "strerror", None) or str(error)


def compare_reloaded(found: Found, out: Path) -> int:
    """Open the folder as a user would, and compare every tensor with the checkpoint, in the dtype of the folder. Returns their number.
    Raises CheckpointError, naming the first that differs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    reader, count = Reader(found), 0
    for name, tensor in model.state_dict().items():
        if f"{START}{name}" not in reader.tensors:
            raise CheckpointError(f"{out}: Transformers gives the model a tensor that the checkpoint does not have, {name}")
        wanted = torch.empty_like(tensor)
        reader.fill({f"{START}{name}": wanted})
        if not torch.equal(wanted, tensor):
            raise CheckpointError(f"{out}: {name} is not what the checkpoint holds after Transformers has loaded it")
        count += 1
    return count


@dataclass(frozen=True)
class Compared:
    """Plait's model of a checkpoint and Transformers' of the exported folder, on the same prompt."""

    logits: float
    """The largest difference of a logit."""
    tokens: int
    """Greedy ones, the same in both."""


def compare_generated(found: Found, out: Path) -> Compared:
    """Load the checkpoint as `plait generate` does and the folder as a user of Transformers does; compare the logits of a prompt and
    `GREEDY_TOKENS` greedy tokens after it. Both models are in memory. Raises CheckpointError where tokens differ, or logits by more than
    their dtype explains."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    config = theirs.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or PROMPT_TOKENS + GREEDY_TOKENS
    length = min(PROMPT_TOKENS, positions // 2)
    new = min(GREEDY_TOKENS, positions - length)
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ours = load_model(Source(out, found, None), dtype=theirs.dtype)
    try:
        here = ids.to(ours.device)
        theirs.to(ours.device)
        with torch.no_grad():
            expected = theirs(input_ids=here).logits.float()
        difference = float((ours.predict({"input_ids": here}).logits.float() - expected).abs().max())
        made = generate(ours, here, max_new_tokens=new, temperature=0, eos_token_id=[config.vocab_size], pad_token_id=0)[0].token_ids
        theirs.generation_config.eos_token_id = None
        wanted = theirs.generate(here, attention_mask=torch.ones_like(here), max_new_tokens=new, do_sample=False, pad_token_id=0)
    finally:
        ours.close()
    most = LOGITS[theirs.dtype] * max(1.0, float(expected.abs().max()))
    if not difference <= most:
        raise CheckpointError(f"{out}: Transformers' logits differ by {difference:.2g} from those of the checkpoint, and {most:.2g} may be")
    differing = [at for at, (one, other) in enumerate(zip(made, wanted[0, length:].tolist(), strict=True)) if one != other]
    if differing:
        raise CheckpointError(f"{out}: of {new} greedy tokens, number {differing[0] + 1} differs from that of the checkpoint")
    return Compared(difference, new)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _files(sizes: dict[str, int], most: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    return files

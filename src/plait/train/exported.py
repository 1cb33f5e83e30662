"""An exported folder compared with its checkpoint: the tensors, logits and tokens that Transformers
makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.folder import Found
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import START
from plait.errors import CheckpointError, first_line
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.rope_by_length import rope_by_length
from plait.inference.source import Source

PROMPT_TOKENS = 16
GREEDY_TOKENS = 64
"""Of the comparison with Transformers; fewer where the model has fewer positions."""
LOGITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Most that a logit may differ, of the largest logit: the order of sums differs."""


def opened(out: Path) -> Any:
    """The folder as a user of Transformers opens it. Raises CheckpointError where that fails."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(out, dtype="auto", trust_remote_code=False)
    except (
        Exception
    ) as error:  # whatever a class raises for a configuration or tensors that do not fit
        raise CheckpointError(
            f"Transformers cannot open it ({type(error).__name__}: {first_line(error)})"
        ) from error


def compare_reloaded(found: Found, out: Path) -> int:
    """Open the folder as a user would, and compare every tensor with the checkpoint, in the dtype
    of the folder. Returns their number. Raises CheckpointError, naming the first that differs.
    """
    model = opened(out)
    reader = Reader(found)
    count = 0
    for name, tensor in model.state_dict().items():
        if f"{START}{name}" not in reader.tensors:
            raise CheckpointError(
                f"Transformers gives the model a tensor that the checkpoint does not have, {name}"
            )
        wanted = torch.empty_like(tensor)
        reader.fill({f"{START}{name}": wanted})
        if not torch.equal(wanted, tensor):
            raise CheckpointError(
                f"{name} is not what the checkpoint holds after Transformers has loaded it"
            )
        count += 1
    return count


@dataclass(frozen=True)
class Compared:
    """Plait's model of a checkpoint and Transformers' of the exported folder, on the same
    prompt.
    """

    logits: float
    """The largest difference of a logit."""
    tokens: int
    """Greedy ones, the same in both."""


def compare_generated(found: Found, out: Path) -> Compared:
    """Load the checkpoint as `plait generate` does and the folder as a user of Transformers does;
    compare the logits of a prompt and `GREEDY_TOKENS` greedy tokens after it. Both models are in
    memory. Raises CheckpointError where tokens differ, or logits by more than their dtype explains.
    """
    from transformers import GenerationConfig

    theirs = opened(out).eval()
    config = theirs.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or PROMPT_TOKENS + GREEDY_TOKENS
    length = min(PROMPT_TOKENS, positions // 2)
    new = min(GREEDY_TOKENS, positions - length)
    ids = torch.randint(
        0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    )
    ours = load_model(Source(out, found, None), dtype=theirs.dtype)
    try:
        here = ids.to(ours.device)
        theirs.to(ours.device)
        with torch.no_grad():
            expected = theirs(input_ids=here).logits.float()
        difference = float(
            (ours.predict({"input_ids": here}).logits.float() - expected).abs().max()
        )
        made = generate(
            ours,
            here,
            max_new_tokens=new,
            temperature=0,
            eos_token_id=[config.vocab_size],
            pad_token_id=0,
        )[0].token_ids
        # a penalty of the model's own is none of what is compared
        theirs.generation_config = GenerationConfig()
        settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        rope = rope_by_length(theirs)
        if rope is not None and rope.reads_anew:
            # Past the original length of longrope, the tokens of most classes of Transformers
            # depend on the KV cache: it keeps keys of the previous frequencies. Phi3 drops them,
            # but before Transformers 5.20 it reads only its last token again.
            settings["use_cache"] = False
        wanted = theirs.generate(here, attention_mask=torch.ones_like(here), **settings)
    finally:
        ours.close()
    most = LOGITS[theirs.dtype] * max(1.0, float(expected.abs().max()))
    if not difference <= most:
        raise CheckpointError(
            f"Transformers' logits differ by {difference:.2g} from those of the checkpoint, and"
            f" {most:.2g} may be"
        )
    differing = [
        at
        for at, (one, other) in enumerate(zip(made, wanted[0, length:].tolist(), strict=True))
        if one != other
    ]
    if differing:
        raise CheckpointError(
            f"of {new} greedy tokens, number {differing[0] + 1} differs from that of the checkpoint"
        )
    return Compared(difference, new)

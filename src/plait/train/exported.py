"""Comparison of an exported folder with its checkpoint: tensors, logits and generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import START
from plait.errors import CheckpointError, first_line
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.rope_by_length import rope_by_length
from plait.inference.source import Source

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
    """Open the folder as a user of Transformers does.

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
    """Compare every tensor that Transformers loads with the checkpoint, in the folder's dtype.

    Args:
        checkpoint: The checkpoint to compare with.
        out: The exported folder.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: Transformers cannot open the folder, or a tensor differs. The message names
            the first one.
    """
    model = _load_with_transformers(out)
    reader = Reader(checkpoint)
    count = 0
    for name, tensor in model.state_dict().items():
        if f"{START}{name}" not in reader.tensors:
            raise CheckpointError(
                f"Transformers gives the model a tensor that the checkpoint does not have, {name}"
            )
        expected = torch.empty_like(tensor)
        reader.fill({f"{START}{name}": expected})
        if not torch.equal(expected, tensor):
            raise CheckpointError(
                f"{name} differs from the checkpoint after Transformers has loaded it"
            )
        count += 1
    return count


@dataclass(frozen=True)
class ExportComparison:
    """Agreement of Plait's model of a checkpoint with Transformers' model of the exported folder.

    Attributes:
        logits: Largest difference of a logit of the prompt.
        tokens: Number of greedy tokens, which are the same in both.
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
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (1, prompt_length), generator=generator)

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
    # A NaN fails this comparison too.
    if not difference <= tolerance:
        raise CheckpointError(
            f"Transformers' logits differ by {difference:.2g} from those of the checkpoint, more"
            f" than the tolerance of {tolerance:.2g}"
        )
    for number, (token, expected) in enumerate(zip(tokens, expected_tokens, strict=True), 1):
        if token != expected:
            raise CheckpointError(
                f"greedy token {number} of {new_tokens} differs from that of the checkpoint"
            )
    return ExportComparison(difference, new_tokens)


def _greedy_tokens(model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Return the tokens that Transformers generates after a prompt [1, tokens]."""
    from transformers import GenerationConfig

    # The model's settings may contain penalties, which are not part of the comparison.
    model.generation_config = GenerationConfig()
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    rope = rope_by_length(model)
    if rope is not None and rope.reads_anew:
        # Past the original length of longrope, the tokens of most classes of Transformers
        # depend on the KV cache: it keeps keys of the previous frequencies. Phi3 drops them,
        # but before Transformers 5.20 it reads only its last token again.
        settings["use_cache"] = False
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens

"""A text from the model in training, through the same sharded forward that training uses.

Every rank runs the same number of forward passes over the same tokens: the parameters of a sharded model are gathered inside, so no rank
may finish earlier. Without a key-value cache; for serving there is `plait generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from plait.config.schema.sections import SampleSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample(
    predict: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    section: SampleSection,
    *,
    seed: int,
    device: torch.device,
) -> str:
    """`section.prompt` and what the model adds to it, up to `section.tokens` tokens or the end of the text.

    `predict` takes tokens [1, seq] int64 and returns the logits [vocabulary] of the next one, the same on every rank. The choice follows
    from `seed` alone and leaves torch's generators as they were.
    """
    random = torch.Generator().manual_seed(seed)
    prompt = tokenizer(section.prompt, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([prompt], dtype=torch.long, device=device)
    for _ in range(section.tokens):
        logits = predict(tokens)[: len(tokenizer)].float().cpu()
        tokens = torch.cat([tokens, chosen(logits, section, random).to(device).view(1, 1)], dim=1)
    added = tokens[0, len(prompt) :].tolist()
    if tokenizer.eos_token_id in added:
        added = added[: added.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode([*prompt, *added]))


def chosen(logits: torch.Tensor, section: SampleSection, random: torch.Generator) -> torch.Tensor:
    """One token from `logits` [vocabulary]: the likeliest at temperature 0, else a draw among the `top_k` likeliest."""
    if section.temperature == 0:
        return logits.argmax()
    if 0 < section.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(section.top_k).values[-1], -torch.inf)
    return torch.multinomial(torch.softmax(logits / section.temperature, dim=0), 1, generator=random)

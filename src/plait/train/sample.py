"""A text from the model in training, on the layout that it is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.config.schema.sections import SampleSection
from plait.engine.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, section: SampleSection, *, seed: int
) -> str:
    """`section.prompt` and what the model adds to it, up to `section.tokens` tokens, the end of the
    text, or the last position that the model knows. Collective.
    """
    prompt = tokenizer(section.prompt, add_special_tokens=False)["input_ids"]
    config = getattr(engine.model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or len(prompt) + section.tokens
    (made,) = engine.generate(
        [prompt],
        tokenizer=tokenizer,
        max_new_tokens=max(1, min(section.tokens, positions - len(prompt))),
        temperature=section.temperature,
        top_k=section.top_k,
        eos_token_id=tokenizer.eos_token_id,
        seed=seed,
    )
    return str(tokenizer.decode([*prompt, *made.token_ids], skip_special_tokens=True))

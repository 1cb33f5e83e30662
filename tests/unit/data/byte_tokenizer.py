"""A tokenizer with one token per byte, whose chat template marks answers."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
END_OF_TEXT = 256


def tokenizer(template=TEMPLATE, *, merges=()):
    """Return a tokenizer with one more token for each of `merges`, such as "a b" for "ab"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "</s>", *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split()) for merge in merges]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.chat_template = template
    return fast

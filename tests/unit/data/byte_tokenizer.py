"""A tokenizer with one token a byte and a chat template that marks answers."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template=TEMPLATE, *, merges=None):
    """One token a byte, and one for each of `merges`, two letters with a space between."""
    alphabet = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    pairs = [tuple(merge.split()) for merge in merges or []]
    merged = {"".join(pair): 257 + number for number, pair in enumerate(pairs)}
    made = Tokenizer(models.BPE(vocab={**alphabet, "</s>": 256, **merged}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    found.chat_template = template
    return found

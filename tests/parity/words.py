"""A tokenizer and texts of its words, for trainers that are given texts."""

import torch

from tests.parity import trainers


def tokenizer():
    """Of as many words as the model has rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(trainers.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w1"
    )


def _words(count, draw):
    return " ".join(
        f"w{index}"
        for index in torch.randint(3, trainers.VOCABULARY, (count,), generator=draw).tolist()
    )


def texts():
    """Of different lengths."""
    import datasets

    draw = torch.Generator().manual_seed(5)
    return datasets.Dataset.from_list(
        [{"text": _words(4 + index % 5, draw)} for index in range(trainers.SAMPLES)]
    )


def preferences(rows=trainers.SAMPLES):
    """Prompts with a better and a worse answer, of different lengths."""
    import datasets

    draw = torch.Generator().manual_seed(6)
    pairs = [
        {
            "prompt": _words(2 + i % 3, draw),
            "chosen": " " + _words(2 + i % 5, draw),
            "rejected": " " + _words(5 - i % 4, draw),
        }
        for i in range(rows)
    ]
    return datasets.Dataset.from_list(pairs)

"""A tokenizer and texts of its words, for trainers that are given texts."""

import torch

from tests.parity import trainers


def tokenizer():
    """Return a tokenizer with as many words as the model has rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{index}": index for index in range(trainers.VOCABULARY)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="w0", eos_token="w2", unk_token="w1"
    )


def _text(count, generator):
    indices = torch.randint(3, trainers.VOCABULARY, (count,), generator=generator)
    return " ".join(f"w{index}" for index in indices.tolist())


def texts():
    """Return texts of different lengths."""
    import datasets

    generator = torch.Generator().manual_seed(5)
    rows = [{"text": _text(4 + index % 5, generator)} for index in range(trainers.SAMPLES)]
    return datasets.Dataset.from_list(rows)


def preferences(rows=trainers.SAMPLES):
    """Return prompts with a better and a worse answer, of different lengths."""
    import datasets

    generator = torch.Generator().manual_seed(6)
    pairs = [
        {
            "prompt": _text(2 + index % 3, generator),
            "chosen": " " + _text(2 + index % 5, generator),
            "rejected": " " + _text(5 - index % 4, generator),
        }
        for index in range(rows)
    ]
    return datasets.Dataset.from_list(pairs)

"""A tokenizer of 300 tokens, trained once for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.config.schema.sections import DataSection
from plait.data.text import Corpus
from plait.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers")
    cache: Path = tmp_path_factory.mktemp("tokenizer")
    texts = [f"def add_{number}(a, b):\n    return a + b\n" * 3 for number in range(50)]
    corpus = Corpus("made up", "1", "data.paths", lambda: iter(texts))
    section = DataSection(vocab_size=300)
    return load_tokenizer(train_tokenizer(corpus, section, cache=cache, report=lambda text: None))

"""Model folder that the tests of `plait generate` and `plait plan infer` share."""

import pytest

from tests.integration.model_folder import model_folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A Llama of random weights with a tokenizer, as Transformers saves it. It is not changed."""
    return model_folder(tmp_path_factory.mktemp("llama"))

"""The loss in chunks equals the loss of full logits in one process, on every kind of layout."""

import pytest

from tests.parity.tensor_parallel import check, settings

# Chunks of 7 tokens divide no micro-batch.
CHUNK_TOKENS = 7
FULL = {"recompute": {"mode": "full"}}
SELECTIVE = {"recompute": {"mode": "selective"}}


@pytest.mark.parametrize(
    ("kind", "tied", "tp", "stage", "sequence", "overrides"),
    [
        ("llama", True, 1, 0, False, {}),
        ("gpt2", True, 1, 2, False, {}),
        ("qwen3", False, 1, 3, False, FULL),
        ("llama", False, 2, 0, False, {}),
        ("llama", True, 2, 0, False, {"loss_parallel": False}),
        ("qwen3", True, 2, 0, True, SELECTIVE),
    ],
)
def test_two_ranks_equal_one_process(pool, kind, tied, tp, stage, sequence, overrides):
    config = settings(2, tp, stage, 1, 2, sequence, loss_chunk_tokens=CHUNK_TOKENS, **overrides)
    check(pool, 2, kind, tied, config)


@pytest.mark.parametrize("stage", [1, 3])
def test_four_ranks_with_recompute_equal_one_process(pool, stage):
    recompute = {"mode": "full", "every": 2}
    config = settings(4, 2, stage, 1, 2, True, loss_chunk_tokens=CHUNK_TOKENS, recompute=recompute)
    check(pool, 4, "llama", True, config)

"""The loss in pieces on every kind of layout against one process with whole logits."""

import pytest

from tests.parity.tensor_parallel import check, settings


@pytest.mark.parametrize(
    ("kind", "tied", "tp", "stage", "sequence", "more"),
    [
        ("llama", True, 1, 0, False, {}),
        ("gpt2", True, 1, 2, False, {}),
        ("qwen3", False, 1, 3, False, {"recompute": {"mode": "full"}}),
        ("llama", False, 2, 0, False, {}),
        ("llama", True, 2, 0, False, {"loss_parallel": False}),
        ("qwen3", True, 2, 0, True, {"recompute": {"mode": "selective"}}),
    ],
)
def test_equals_one_process(pool, kind, tied, tp, stage, sequence, more):
    """Pieces of 7 tokens, which divide nothing."""
    check(pool, 2, kind, tied, settings(2, tp, stage, 1, 2, sequence, loss_chunk_tokens=7, **more))


@pytest.mark.parametrize("stage", [1, 3])
def test_with_everything(pool, stage):
    """tp 2 x dp 2."""
    check(
        pool,
        4,
        "llama",
        True,
        settings(
            4, 2, stage, 1, 2, True, loss_chunk_tokens=7, recompute={"mode": "full", "every": 2}
        ),
    )

"""The search for the largest size, and that an attempt that runs out of memory is told from one that fails."""

from __future__ import annotations

import pytest

from benchmarks.largest_model.__main__ import Failed, _parse, _try
from benchmarks.largest_model.search import largest


@pytest.mark.parametrize("true", [0, 1, 2, 3, 7, 8, 9, 31, 64])
def test_largest(true: int) -> None:
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= true

    found = largest(fits, most=64)
    assert found <= true <= found * 1.1 + 1
    assert found == 0 or found in tried
    assert len(tried) == len(set(tried)) <= 14
    assert max(tried) <= 64


@pytest.mark.proof
def test_memory_that_runs_out_is_no_failure() -> None:
    options = _parse(["--quick", "--memory-gib", "1"], on_gpu=False)
    answer = _try("torch", 1, options)
    assert answer is not None and answer["parameters"] > 0 and len(answer["losses"]) == 3
    options.vocabulary, options.hidden = 200_000, 1024
    assert _try("torch", 1, options) is None
    options.vocabulary, options.sequence = 256, -1
    with pytest.raises(Failed, match="exit code"):
        _try("torch", 1, options)

"""Where one stage of a pipeline fails in a generation or a score, all ranks raise at once, and the next call and training go on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from plait.errors import InputError, ModelError
from tests.parity.generation import PROMPTS, built, engine_on
from tests.parity.layouts import FOUR, TWO

ASKED: dict[str, dict[str, Any]] = {
    "a token": {},
    "a prompt in pieces": {"prefill_tokens": 2},
    "no cache": {"use_cache": False},
    "score": {},
}
IDS = torch.tensor([PROMPTS[0]])


class _Fails:
    """A hook that fails in a forward of a block, counted from when it is armed."""

    def __init__(self):
        self.left = -1

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("of this block")


def failing(rank, world, layout, layers, forwards, names):
    """What is heard of blocks that fail, in the order of the arguments. Runs in a worker."""
    config = {**TWO, **FOUR}[layout]
    engine = engine_on(config, built(), size=1)
    fails, heard = _Fails(), []
    expected = [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=6)]
    for layer in layers:
        handle = engine.module.model.layers[layer].register_forward_hook(fails)
        for at in forwards:
            for name in names:
                call = (
                    partial(engine.score, PROMPTS, batch_size=1)
                    if "score" in name
                    else partial(engine.generate, PROMPTS, max_new_tokens=6)
                )
                fails.left = at
                with pytest.raises((RuntimeError, InputError)) as error:
                    call(**ASKED[name])
                heard.append(f"{type(error.value).__name__}: {error.value}")
                fails.left = -1
        handle.remove()
        assert [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=6)] == expected
    pieces = [{"input_ids": IDS, "labels": IDS}] * config.get("gradient_accumulation_steps", 1)
    losses = [float(engine.train_batch(pieces).loss) for _ in range(2)]
    assert losses[1] != losses[0]
    engine.close()
    return heard


def check(found, owners, count, chooses):
    """`owners` of each block that failed: ranks of the pool. `count`: calls for each."""
    for rank, heard in enumerate(found):
        assert len(heard) == len(owners) * count
        for at, words in enumerate(heard):
            own = owners[at // count]
            if rank in own:
                assert words.endswith("of this block"), (rank, words)
            else:
                who = (
                    "the rank that chooses tokens"
                    if chooses in own
                    else "parallel.pp, rank 0 of the pipeline"
                )
                assert (
                    who in words
                    and words.startswith("InputError")
                    and words.endswith("of this block")
                ), (rank, words)


def test_a_stage_that_fails(pool):
    names = list(ASKED)
    check(
        pool.run(2, failing, "pp", [0, 3], [1, 3], names, timeout=60), [{0}, {1}], 2 * len(names), 1
    )


def test_stages_of_one_rank(pool):
    """A rank has the first and the third of four."""
    owners = [{0}, {1}, {0}, {1}]
    check(
        pool.run(2, failing, "pp, interleaved", [0, 1, 2, 3], [2], ["a token"], timeout=60),
        owners,
        1,
        1,
    )


@pytest.mark.proof
def test_stages_of_two_tensor_parallel_ranks(pool):
    check(
        pool.run(4, failing, "tp x pp", [0, 3], [1, 3], list(ASKED), timeout=120),
        [{0, 1}, {2, 3}],
        2 * len(ASKED),
        2,
    )


def without_an_index(rank, world):
    """A stage that cannot keep keys and values. Runs in a worker."""
    engine = engine_on(TWO["pp"], built(), size=1)
    for module in engine.module.modules() if rank == 1 else ():
        vars(module).pop("layer_idx", None)
    with pytest.raises((InputError, ModelError)) as error:
        engine.generate(PROMPTS, max_new_tokens=2)
    engine.close()
    return str(error.value)


def test_a_stage_that_cannot_keep_keys(pool):
    assert all(
        "does not say which layer of a cache is its own" in heard
        for heard in pool.run(2, without_an_index, timeout=60)
    )

"""All ranks raise at once if a pipeline stage fails in a generation, and the engine goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from plait.errors import InputError, ModelError
from tests.parity.generation import PROMPTS, built, engine_on
from tests.parity.layouts import FOUR, TWO

ARGUMENTS: dict[str, dict[str, Any]] = {
    "a token": {},
    "a prompt in chunks": {"prefill_tokens": 2},
    "no cache": {"use_cache": False},
    "score": {},
}
ERROR = "error of this block"


class FailingHook:
    """Forward hook that raises an error.

    Attributes:
        remaining: Number of the forward that fails. Zero or less: none.
    """

    def __init__(self):
        self.remaining = 0

    def __call__(self, *_):
        self.remaining -= 1
        if self.remaining == 0:
            raise RuntimeError(ERROR)


def messages_of_failures(rank, world, layout, layers, forwards, names):
    """Return the message of each call, for each layer that fails in turn. Runs on every rank."""
    config = {**TWO, **FOUR}[layout]
    engine = engine_on(config, built(), size=1)

    def generate(**arguments):
        results = engine.generate(PROMPTS, max_new_tokens=6, **arguments)
        return [result.token_ids for result in results]

    expected = generate()
    hook = FailingHook()
    messages: list[list[str]] = []
    for layer in layers:
        messages.append([])
        handle = engine.module.model.layers[layer].register_forward_hook(hook)
        for forward in forwards:
            for name in names:
                is_score = name == "score"
                call = partial(engine.score, PROMPTS, batch_size=1) if is_score else generate
                hook.remaining = forward
                with pytest.raises((RuntimeError, InputError)) as error:
                    call(**ARGUMENTS[name])
                messages[-1].append(f"{type(error.value).__name__}: {error.value}")
                hook.remaining = 0
        handle.remove()
        assert generate() == expected

    ids = torch.tensor([PROMPTS[0]])
    batch = [{"input_ids": ids, "labels": ids}] * config.get("gradient_accumulation_steps", 1)
    losses = [float(engine.train_batch(batch).loss) for _ in range(2)]
    assert losses[1] != losses[0]
    engine.close()
    return messages


@pytest.mark.parametrize(
    ("layout", "forwards", "names", "owners", "last_rank"),
    [
        pytest.param("pp", [1, 3], list(ARGUMENTS), {0: {0}, 3: {1}}, 1, id="pp"),
        # Each rank has two of the four stages.
        pytest.param(
            "pp, interleaved",
            [2],
            ["a token"],
            {0: {0}, 1: {1}, 2: {0}, 3: {1}},
            1,
            id="interleaved",
        ),
        pytest.param(
            "tp x pp",
            [1, 3],
            list(ARGUMENTS),
            {0: {0, 1}, 3: {2, 3}},
            2,
            id="tp x pp",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_failure_of_a_stage(pool, layout, forwards, names, owners, last_rank):
    """Ranks of the layer raise its error, and others name the rank from which they heard of it.

    `owners` are the ranks of each layer that fails. `last_rank` chooses the tokens.
    """
    ranks = 4 if layout in FOUR else 2
    arguments = (layout, list(owners), forwards, names)
    by_rank = pool.run(ranks, messages_of_failures, *arguments, timeout=60 * ranks // 2)
    for rank, messages_by_layer in enumerate(by_rank):
        for owning_ranks, messages in zip(owners.values(), messages_by_layer, strict=True):
            assert len(messages) == len(forwards) * len(names)
            source = "parallel.pp, rank 0 of the pipeline"
            if last_rank in owning_ranks:
                source = "the rank that chooses tokens"
            for message in messages:
                assert message.endswith(ERROR), (rank, message)
                if rank not in owning_ranks:
                    assert message.startswith("InputError") and source in message, (rank, message)


def generate_without_layer_numbers(rank, world):
    """Return the message about a stage that cannot keep keys and values. Runs on every rank."""
    engine = engine_on(TWO["pp"], built(), size=1)
    if rank == 1:
        for module in engine.module.modules():
            vars(module).pop("layer_idx", None)
    with pytest.raises((InputError, ModelError)) as error:
        engine.generate(PROMPTS, max_new_tokens=2)
    engine.close()
    return str(error.value)


def test_a_stage_that_cannot_keep_keys(pool):
    for message in pool.run(2, generate_without_layer_numbers, timeout=60):
        assert "does not record the index of its layer in the KV cache" in message

"""Tokens of `generate` on a layout equal those of Transformers in one process.

Training after a generation continues as if nothing had been generated.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait._torch.units import parameter_groups, sharded_modules, unsharded_parameter_bytes
from plait.errors import InputError
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.verify.keep_float64 import keeping_float64
from tests.covers import proof_after
from tests.parity import cases, generation
from tests.parity.generation import PROMPTS, engine_on
from tests.parity.layouts import FOUR, TWO
from tests.unit.inference import recurrent_models as recurrent

NEW_TOKENS = 5
IN_FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
ACTIVATIONS_IN_FILES = {
    "activation_offload": {"device": "disk", "path": tempfile.gettempdir(), "fraction": 1.0}
}
ZERO_3 = {"stage": 3}
OFFLOADED: dict[str, dict[str, Any]] = {
    "ZeRO 3, loss in chunks": {"zero_optimization": ZERO_3, "parallel": {"loss_chunk_tokens": 8}},
    "tp, loss in chunks": {"parallel": {"tp": 2, "loss_chunk_tokens": 8}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "recomputed": {"zero_optimization": ZERO_3, "parallel": {"recompute": {"mode": "full"}}},
    "files": {"zero_optimization": {**ZERO_3, "offload_param": IN_FILES}},
    "activations in files": {"zero_optimization": ZERO_3, "parallel": ACTIVATIONS_IN_FILES},
    "a pipeline's activations in files": {"parallel": {"pp": 2, **ACTIVATIONS_IN_FILES}},
    "all in files": {
        "zero_optimization": {**ZERO_3, "offload_param": IN_FILES, "offload_optimizer": IN_FILES}
    },
}
LAYOUTS = {**TWO, **FOUR, **OFFLOADED}
WITHOUT_CACHE = {"ZeRO 3", "sequence parallel", "tp x pp"}
"""Layouts that are also tested without a cache, one request at a time."""
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "qwen3": {},
}


def build(kind):
    return generation.built(kind, tied=kind == "gpt2", **KINDS[kind]).double()


def batch_of(seed):
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def expected_tokens(kind):
    """Return the tokens that Transformers generates for PROMPTS."""
    tokens = generation.by_transformers(build(kind).eval(), NEW_TOKENS)
    return tokens[:, -NEW_TOKENS:].tolist()


def token_ids(results):
    return [result.token_ids for result in results]


def parameters_of(model):
    return [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def generate_on_layouts(rank, world, kinds, layouts):
    """Return results by (kind, layout). Runs on every rank.

    The three prompts are divided among the data-parallel ranks.
    """
    results_by_layout = {}
    for kind in kinds:
        for layout in layouts:
            model = build(kind)
            with keeping_float64(model):
                engine = engine_on(LAYOUTS[layout], model)
                prompts = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
                generate = partial(engine.generate, prompts, max_new_tokens=NEW_TOKENS)
                try:
                    results = generate()
                    if layout in WITHOUT_CACHE:
                        uncached = generate(use_cache=False, batch_size=1)
                        assert token_ids(uncached) == token_ids(results), (kind, layout)
                finally:
                    # Another kind is next, also after a failure.
                    engine.close()
            results_by_layout[kind, layout] = [
                (result.prompt_ids, result.token_ids, result.logprobs) for result in results
            ]
    return results_by_layout


def check_tokens(pool, world, kinds, layouts):
    expected = {}
    for kind in kinds:
        for prompt, tokens in zip(PROMPTS, expected_tokens(kind), strict=True):
            expected[kind, tuple(prompt)] = tokens
    for rank, results in enumerate(pool.run(world, generate_on_layouts, kinds, layouts)):
        for (kind, layout), rows in results.items():
            for prompt, tokens, logprobs in rows:
                assert tokens == expected[kind, tuple(prompt)], (rank, kind, layout, prompt)
                assert len(logprobs) == len(tokens) and max(logprobs) <= 0


def test_tokens_of_two_ranks(pool):
    layouts = ["ZeRO 1", "ZeRO 3", "pp", "ZeRO 3, loss in chunks", "tp, loss in chunks"]
    check_tokens(pool, 2, ["llama"], layouts)
    check_tokens(pool, 2, ["gemma2"], ["sequence parallel", "pp, interleaved"])


def test_tokens_of_four_ranks(pool):
    check_tokens(pool, 4, ["mistral"], ["tp x pp"])
    check_tokens(pool, 4, ["gpt2"], ["pp x ZeRO 3"])


@pytest.mark.proof
def test_tokens_of_every_kind_and_layout(pool):
    check_tokens(pool, 2, list(KINDS), list(TWO))
    check_tokens(pool, 4, list(KINDS), list(FOUR))
    check_tokens(pool, 2, ["llama"], list(OFFLOADED))


def resharding(model):
    """Return for every parameter group of FSDP whether it is freed after its forward."""
    groups = [group for unit in sharded_modules(model) for group in parameter_groups(unit)]
    return [group.post_forward_mesh_info is None for group in groups]


def train_between_generations(rank, world, layouts):
    """Train three steps with dropout, with and without generations. Runs on every rank."""
    for layout in layouts:
        runs = []
        for generates in (False, True):
            model = build("gpt2")
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.1
            config = {"train_micro_batch_size_per_gpu": 2, **LAYOUTS[layout]}
            engine = cases.engine(model, config)
            offloads = engine.hooks.find(OffloadedActivations) is not None
            assert offloads == ("activations" in layout)
            # Ranks need not have equally many prompts, and the first has none.
            prompts = PROMPTS
            if engine.dp_size > 1:
                prompts = PROMPTS[: 2 * engine.sharded.mesh.dp_index]

            batch = [batch_of(rank)] * config.get("gradient_accumulation_steps", 1)
            resharding_before = resharding(model)
            losses = []
            for _ in range(3):
                losses.append(float(engine.train_batch(batch).loss))
                if generates:
                    results = engine.generate(prompts, max_new_tokens=5, temperature=0.8, seed=3)
                    assert len(results) == len(prompts)
            assert model.training and not unsharded_parameter_bytes(model)
            if layout == "ZeRO 3":
                assert resharding(model) == resharding_before
            runs.append((losses, parameters_of(model)))
            engine.close()
        expected, actual = runs
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=f"{layout}: {{}}".format)


@pytest.mark.parametrize(
    "layout",
    proof_after(
        1,
        [
            "ZeRO 3",
            "ZeRO 1",
            "tp",
            "pp",
            "recomputed",
            "all in files",
            "activations in files",
            "a pipeline's activations in files",
        ],
    ),
)
def test_generations_do_not_change_training(pool, layout):
    pool.run(2, train_between_generations, [layout])


@pytest.mark.proof
def test_generations_do_not_change_training_of_four_ranks(pool):
    pool.run(4, train_between_generations, [*FOUR, "ZeRO 3"])


def draw_tokens(rank, world):
    """Generate three times for one prompt in one call. Runs on every rank."""
    engine = engine_on(TWO["tp"], build("llama"))
    generate = partial(engine.generate, max_new_tokens=NEW_TOKENS, temperature=1.5, top_k=0)
    results = generate([PROMPTS[0]] * 3, seed=5)
    (alone,) = generate([PROMPTS[0]], seed=6)
    engine.close()
    # The seed of the second request is one more than that of the call.
    assert alone.token_ids == results[1].token_ids
    return token_ids(results)


def test_every_request_draws_its_own_numbers(pool):
    tokens, other_tokens = pool.run(2, draw_tokens)
    assert tokens == other_tokens
    assert len(set(map(tuple, tokens))) == 3


def generate_between_micro_batches(rank, world, stage):
    """Runs on every rank."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
    }
    runs = []
    for generates in (False, True):
        model = build("llama")
        engine = plait.initialize(model, config)
        for _ in range(2 * 2):
            logits = engine(input_ids=batch_of(rank)["input_ids"]).logits
            engine.backward(logits.logsumexp(-1).mean())
            if generates:
                engine.generate(PROMPTS, max_new_tokens=2)
            engine.step()
        runs.append(parameters_of(model))
        engine.close()
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


@pytest.mark.parametrize("stage", proof_after(1, [3, 2]))
def test_generation_between_micro_batches(pool, stage):
    pool.run(2, generate_between_micro_batches, stage)


def calls_of(engine, batch):
    """Return calls that run the model and are refused while it runs."""
    return [
        partial(engine.generate, PROMPTS, max_new_tokens=2),
        partial(engine.score, PROMPTS),
        partial(engine.predict, batch),
    ]


def call_in_the_loss(rank, world):
    """Call the engine in the loss of a pipeline's first step. Runs on every rank.

    This step computes the loss on every rank to check the stages.
    """
    batch = batch_of(1)
    refused_calls = []

    def loss_fn(output, micro_batch):
        for call in refused_calls:
            call()
        return plait.causal_lm_loss(output, micro_batch)

    runs = []
    for interrupts in (False, True):
        engine = plait.initialize(
            build("llama"),
            {"train_micro_batch_size_per_gpu": 2, **TWO["pp"]},
            loss_fn=plait.WeightedLoss(loss_fn, plait.causal_lm_loss.weight),
        )
        if interrupts:
            message = "was called while the pipeline runs .* call it between two steps"
            for call in calls_of(engine, batch):
                refused_calls[:] = [call]
                with pytest.raises(InputError, match=message):
                    engine.train_batch([batch])
            refused_calls.clear()
        runs.append([float(engine.train_batch([batch]).loss) for _ in range(2)])
        engine.close()
    assert runs[0] == runs[1]


def test_a_call_in_a_pipelines_step_is_refused(pool):
    pool.run(2, call_in_the_loss)


def train_with_calling_hook(layout, *, block, interrupts):
    """Call the engine in a hook of an attention, which catches the errors.

    The hook calls it in the forward of the second step and in the backward of the third.

    Returns:
        The losses of the three steps, and the messages of the refusals.
    """
    batch = batch_of(1)
    model = build("llama")
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    engine = engine_on(LAYOUTS[layout], model)
    calls = [*calls_of(engine, batch), partial(engine.train_batch, [batch])]
    due = ""
    messages = []

    def call_if_due(phase):
        nonlocal due
        if phase != due:
            return
        due = ""
        for call in calls:
            with pytest.raises(InputError) as error:
                call()
            messages.append(str(error.value))

    def hook(module, args, output):
        call_if_due("forward")
        if output[0].requires_grad:
            output[0].register_hook(lambda _: call_if_due("backward"))

    attentions[block].register_forward_hook(hook)
    losses = [float(engine.train_batch([batch]).loss)]
    for phase in ("forward", "backward"):
        due = phase if interrupts else ""
        losses.append(float(engine.train_batch([batch]).loss))
    engine.close()
    return losses, messages


def catch_refusals(rank, world, layouts, calling_rank):
    """Runs on every rank. A `calling_rank` of None stands for both."""
    interrupts = calling_rank in (None, rank)
    block = 0 if rank == 0 else -1
    for layout in layouts:
        expected, _ = train_with_calling_hook(layout, block=block, interrupts=False)
        losses, messages = train_with_calling_hook(layout, block=block, interrupts=interrupts)
        assert losses == expected, layout
        assert len(messages) == (8 if interrupts else 0)
        for index, message in enumerate(messages):
            phase = "forward" if index < 4 else "backward"
            reason = f"inside the model's {phase}"
            if layout == "pp":
                reason = "while the pipeline runs"
            assert reason in message, message


@pytest.mark.parametrize("calling_rank", proof_after(1, [1, None, 0]))
def test_a_refusal_that_a_hook_catches(pool, calling_rank):
    """The other ranks neither fail nor wait, and the losses stay the same."""
    pool.run(2, catch_refusals, ["pp", "ZeRO 1", "ZeRO 3", "tp"], calling_rank, timeout=60)


def generate_until_end(rank, world, layout, end):
    """Generate with an end token, and check that finished requests leave the batch.

    Runs on every rank.
    """
    model = build("gemma2")
    batch_sizes = []
    with keeping_float64(model):
        engine = engine_on(TWO[layout], model)
        model.get_submodule("model.norm").register_forward_pre_hook(
            lambda module, args: batch_sizes.append(args[0].shape[0])
        )
        results = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=end)
        engine.close()
    # Only the last stage of a pipeline has the final norm.
    assert not batch_sizes or batch_sizes[-1] < len(PROMPTS)
    return [(result.token_ids, result.finish_reason) for result in results]


@pytest.mark.parametrize("layout", proof_after(1, ["tp", "pp, interleaved"]))
def test_a_request_that_ends_is_dropped(pool, layout):
    tokens_by_prompt = expected_tokens("gemma2")
    end = tokens_by_prompt[1][2]
    expected = []
    for tokens in tokens_by_prompt:
        if end in tokens:
            expected.append((tokens[: tokens.index(end) + 1], "stop"))
        else:
            expected.append((tokens, "length"))
    assert pool.run(2, generate_until_end, layout, end) == [expected, expected]


def generate_in_own_loop(rank, world):
    """Generate between forward_backward and step of a pipeline. Runs on every rank."""
    model = build("llama")
    with keeping_float64(model):
        sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 2, **TWO["pp"]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sharded.forward_backward(
            {"input_ids": batch_of(1)["input_ids"]},
            lambda output, micro_batch: output.logits.logsumexp(-1).mean(),
        )
        results = plait.generate(sharded, PROMPTS, max_new_tokens=NEW_TOKENS)
        sharded.step(optimizer)
        sharded.close()
    return token_ids(results)


def test_generation_in_an_own_loop(pool):
    expected = expected_tokens("llama")
    assert pool.run(2, generate_in_own_loop) == [expected, expected]


def wrong_arguments(rank, world):
    """Return the messages about arguments that are wrong on rank 1 or on both.

    Runs on every rank.
    """
    engine = plait.initialize(
        build("llama"), {"train_micro_batch_size_per_gpu": 2, "zero_optimization": ZERO_3}
    )
    messages = []
    for prompts, arguments in (
        ([[1, 2]] if rank == 0 else [[]], {}),
        ([[1, 2]], {"max_new_tokens": 5000 if rank else 4}),
        ([[1, 2]], {"stop_strings": ["x"]}),
        ([[1, cases.VOCABULARY]], {}),
        ([[1, 2]], {"seed": -1}),
    ):
        with pytest.raises(InputError) as error:
            engine.generate(prompts, **arguments)
        messages.append(str(error.value))
    assert len(engine.generate([[1, 2]] * rank, max_new_tokens=3)) == rank
    engine.close()
    return messages


def test_wrong_arguments_of_one_rank_are_refused_by_all(pool):
    for empty, too_long, stop_strings, token, seed in pool.run(2, wrong_arguments):
        assert "rank 1, generate: prompt 0 has no token" in empty
        assert "rank 1" in too_long
        assert "5,002 tokens" in too_long and "max_position_embeddings" in too_long
        assert "stop_strings requires tokenizer=" in stop_strings
        assert "prompt 0 has token 101, but the model's tokens are 0 to 100" in token
        assert "seed = -1 must be" in seed


class FailingTokenizer:
    """A tokenizer that fails at its second text, on the ranks that call it."""

    def __len__(self):
        return cases.VOCABULARY

    def decode(self, ids, **_):
        if len(ids) > 1:
            raise RuntimeError("no text for that")
        return ""


def fail_at_a_token(rank, world, layouts):
    """Return messages by layout and reason: text, callback, logits. Runs on every rank."""

    def failing_callback(request, token):
        raise KeyError("mine")

    messages_by_layout = {}
    for layout in layouts:
        model = build("llama")
        engine = engine_on(TWO[layout], model)
        prompts = [] if "ZeRO" in layout and rank else [[1, 2]]
        messages = {}

        def fail(reason, engine=engine, prompts=prompts, messages=messages, **arguments):
            with pytest.raises((InputError, RuntimeError, KeyError)) as error:
                engine.generate(prompts, max_new_tokens=4, **arguments)
            messages[reason] = f"{type(error.value).__name__}: {error.value}"

        fail("text", stop_strings=["x"], tokenizer=FailingTokenizer())
        fail("callback", on_token=failing_callback if rank == 0 else None)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "head" in name:
                    parameter.fill_(torch.nan)
        fail("logits")
        messages_by_layout[layout] = messages
        engine.close()
    return messages_by_layout


def test_all_ranks_raise_if_the_choosing_rank_fails(pool):
    layouts = ["tp", "pp", "ZeRO 3"]
    first, second = pool.run(2, fail_at_a_token, layouts, timeout=60)
    for layout in layouts:
        choosing = first[layout]
        other = second[layout]
        if layout == "pp":
            # The last stage has the logits.
            choosing = second[layout]
            other = first[layout]
        assert choosing["text"] == "RuntimeError: no text for that"
        assert choosing["logits"].startswith("InputError")
        assert "logits are not finite" in choosing["logits"]
        assert other["logits"].startswith("InputError")
        assert first[layout]["callback"] == "KeyError: 'mine'"
        if layout == "ZeRO 3":
            expected = "InputError: another rank failed and reports its error"
            assert other["text"] == other["callback"] == expected
        else:
            assert other["text"] == "InputError: the rank that chooses tokens: no text for that"
            assert "logits are not finite" in other["logits"]
            assert "on_token failed on another rank" in second[layout]["callback"]


def generate_with_recurrent_models(rank, world, kinds):
    """Runs on every rank."""
    tokens = []
    for kind in kinds:
        engine = engine_on(TWO["pp"], recurrent.built(kind))
        results = engine.generate(recurrent.PROMPTS, max_new_tokens=recurrent.NEW)
        tokens.append(token_ids(results))
        engine.close()
    return tokens


def test_stages_whose_layers_keep_a_state(pool):
    """Jamba's first stage has no layer that counts tokens; all layers of Falcon-H1 do."""
    kinds = ["jamba", "falcon_h1"]
    expected = [recurrent.by_transformers(recurrent.built(kind)) for kind in kinds]
    results = pool.run(2, generate_with_recurrent_models, kinds, timeout=60)
    assert results == [expected, expected]

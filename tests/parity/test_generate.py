"""Tokens generated on a layout are those of one process by Transformers, and training goes on as if nothing had been generated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import plait
from plait._torch.units import parameter_groups, sharded_modules, unsharded_parameter_bytes
from plait.errors import InputError
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.verify.keep_float64 import keeping_float64
from tests.covers import proof_after
from tests.parity import cases, generation
from tests.parity.generation import PROMPTS, engine_on
from tests.parity.layouts import FOUR, TWO
from tests.unit.inference import recurrent_models as recurrent

NEW = 5
IN_FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
SAVED = {"activation_offload": {"device": "disk", "path": tempfile.gettempdir(), "fraction": 1.0}}
OFFLOADED: dict[str, dict[str, Any]] = {
    "ZeRO 3, loss in chunks": {
        "zero_optimization": {"stage": 3},
        "parallel": {"loss_chunk_tokens": 8},
    },
    "tp, loss in chunks": {"parallel": {"tp": 2, "loss_chunk_tokens": 8}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "recomputed": {"zero_optimization": {"stage": 3}, "parallel": {"recompute": {"mode": "full"}}},
    "files": {"zero_optimization": {"stage": 3, "offload_param": IN_FILES}},
    "activations in files": {"zero_optimization": {"stage": 3}, "parallel": SAVED},
    "a pipeline's activations in files": {"parallel": {"pp": 2, **SAVED}},
    "all in files": {
        "zero_optimization": {"stage": 3, "offload_param": IN_FILES, "offload_optimizer": IN_FILES}
    },
}
TRAINED = (
    "ZeRO 3",
    "ZeRO 1",
    "tp",
    "pp",
    "recomputed",
    "all in files",
    "activations in files",
    "a pipeline's activations in files",
)
RECOMPUTED = {"ZeRO 3", "sequence parallel", "tp x pp"}
"""Also without a cache, one request at a time."""
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "qwen3": {},
}


def built(kind):
    return generation.built(kind, tied=kind == "gpt2", **KINDS[kind]).double()


def by_transformers(kind):
    """New tokens of PROMPTS."""
    return generation.by_transformers(built(kind).eval(), NEW)[:, -NEW:].tolist()


def generated(rank, world, kinds, layouts):
    """Tokens and log probabilities; a data-parallel rank has one prompt of the three, or two. Runs in a worker."""
    found = {}
    for kind in kinds:
        for name in layouts:
            model = built(kind)
            with keeping_float64(model):
                engine = engine_on({**TWO, **FOUR, **OFFLOADED}[name], model)
                try:
                    mine = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
                    made = engine.generate(mine, max_new_tokens=NEW)
                    if name in RECOMPUTED:
                        again = engine.generate(
                            mine, max_new_tokens=NEW, use_cache=False, batch_size=1
                        )
                        assert [one.token_ids for one in again] == [
                            one.token_ids for one in made
                        ], (kind, name)
                    found[kind, name] = [
                        (one.prompt_ids, one.token_ids, one.logprobs) for one in made
                    ]
                finally:
                    engine.close()
    return found


def compare(results, kinds):
    expected = {
        kind: dict(zip(map(tuple, PROMPTS), by_transformers(kind), strict=True)) for kind in kinds
    }
    for rank, found in enumerate(results):
        for (kind, name), rows in found.items():
            for prompt, tokens, logprobs in rows:
                assert tokens == expected[kind][tuple(prompt)], (rank, kind, name, prompt)
                assert len(logprobs) == len(tokens) and max(logprobs) <= 0


LLAMA_LAYOUTS = ["ZeRO 1", "ZeRO 3", "pp", "ZeRO 3, loss in chunks", "tp, loss in chunks"]


def test_tokens_of_two_ranks(pool):
    compare(pool.run(2, generated, ["llama"], LLAMA_LAYOUTS), ["llama"])
    compare(
        pool.run(2, generated, ["gemma2"], ["sequence parallel", "pp, interleaved"]), ["gemma2"]
    )


def test_tokens_of_four_ranks(pool):
    compare(pool.run(4, generated, ["mistral"], ["tp x pp"]), ["mistral"])
    compare(pool.run(4, generated, ["gpt2"], ["pp x ZeRO 3"]), ["gpt2"])


def test_keys_and_values_on_the_host_are_for_a_gpu():
    engine = plait.initialize(built("llama"), {"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(InputError, match="offload_cache: this model computes on the CPU"):
        engine.generate(PROMPTS, max_new_tokens=2, offload_cache=True)
    engine.close()


@pytest.mark.proof
def test_tokens_of_every_kind_and_layout(pool):
    compare(pool.run(2, generated, list(KINDS), list(TWO)), list(KINDS))
    compare(pool.run(4, generated, list(KINDS), list(FOUR)), list(KINDS))
    compare(pool.run(2, generated, ["llama"], list(OFFLOADED)), ["llama"])


def trained(rank, world, layouts):
    """Weights and losses of three steps with dropout, with and without texts between them. Runs in a worker."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    for name in layouts:
        ends = []
        for generates in (False, True):
            model = built("gpt2")
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.1
            config = {"train_micro_batch_size_per_gpu": 2, **{**TWO, **FOUR, **OFFLOADED}[name]}
            count = config.get("gradient_accumulation_steps", 1)
            engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
            assert (engine.hooks.find(OffloadedActivations) is not None) == ("activations" in name)
            losses = []
            freed = [
                group.post_forward_mesh_info is None
                for unit in sharded_modules(model)
                for group in parameter_groups(unit)
            ]
            for _ in range(3):
                losses.append(
                    float(engine.train_batch([{"input_ids": ids, "labels": ids}] * count).loss)
                )
                if generates:  # ranks need not have as many prompts, and one has none
                    mine = (
                        PROMPTS[: 2 * engine.sharded.mesh.dp_index]
                        if engine.dp_size > 1
                        else PROMPTS
                    )
                    assert len(
                        engine.generate(mine, max_new_tokens=5, temperature=0.8, seed=3)
                    ) == len(mine)
            assert model.training and not unsharded_parameter_bytes(model)
            if generates and name == "ZeRO 3":
                assert [
                    group.post_forward_mesh_info is None
                    for unit in sharded_modules(model)
                    for group in parameter_groups(unit)
                ] == freed
            ends.append(
                (
                    losses,
                    [parameter.detach().clone() for parameter in map(local, model.parameters())],
                )
            )
            engine.close()
        assert ends[0][0] == ends[1][0], name
        assert all(
            torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1], strict=True)
        ), name


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def drawn(rank, world):
    """Of one prompt, three times in a call. Runs in a worker."""
    engine = engine_on(TWO["tp"], built("llama"))
    together = engine.generate(
        [PROMPTS[0]] * 3, max_new_tokens=NEW, temperature=1.5, top_k=0, seed=5
    )
    (alone,) = engine.generate([PROMPTS[0]], max_new_tokens=NEW, temperature=1.5, top_k=0, seed=6)
    engine.close()
    assert alone.token_ids == together[1].token_ids
    return [one.token_ids for one in together]


def test_every_request_draws_its_own_numbers(pool):
    one, other = pool.run(2, drawn)
    assert one == other and len(set(map(tuple, one))) == 3


def between_micro_batches(rank, world, stage):
    """Between the two micro-batches of a step. Runs in a worker."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    ends = []
    for generates in (False, True):
        model = built("llama")
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
        }
        engine = plait.initialize(model, config)
        for _ in range(2):
            for _ in range(2):
                logits = engine(input_ids=ids).logits
                engine.backward(logits.logsumexp(-1).mean())
                if generates:
                    engine.generate(PROMPTS, max_new_tokens=2)
                engine.step()
        ends.append([parameter.detach().clone() for parameter in map(local, model.parameters())])
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("name", proof_after(1, TRAINED))
def test_training_goes_on_as_if_nothing_had_been_generated(pool, name):
    pool.run(2, trained, [name])


@pytest.mark.proof
def test_training_of_four_ranks_goes_on(pool):
    pool.run(4, trained, [*FOUR, "ZeRO 3"])


@pytest.mark.parametrize("stage", proof_after(1, [3, 2]))
def test_in_the_middle_of_a_step(pool, stage):
    pool.run(2, between_micro_batches, stage)


def within_a_pipelines_step(rank, world):
    """From the loss of a pipeline's first step, which computes it on every rank to check the stages. Runs in a worker."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = [{"input_ids": ids, "labels": ids}]
    inner: list[Callable[[], Any]] = []

    def loss(output, piece):
        for call in inner:
            call()
        return plait.causal_lm_loss(output, piece)

    losses = []
    for interrupted in (False, True):
        engine = plait.initialize(
            built("llama"),
            {"train_micro_batch_size_per_gpu": 2, **TWO["pp"]},
            loss_fn=plait.WeightedLoss(loss, plait.causal_lm_loss.weight),
        )
        calls = (
            partial(engine.generate, PROMPTS, max_new_tokens=2),
            partial(engine.score, PROMPTS),
            partial(engine.predict, batch[0]),
        )
        for call in calls if interrupted else ():
            inner[:] = [call]
            with pytest.raises(
                InputError, match="was called while the pipeline runs .* call it between two steps"
            ):
                engine.train_batch(batch)
        inner.clear()
        losses.append([float(engine.train_batch(batch).loss) for _ in range(2)])
        engine.close()
    assert losses[0] == losses[1]


def test_inside_of_a_pipelines_step(pool):
    pool.run(2, within_a_pipelines_step)


def interrupted(name, *, first, hears):
    """Losses of three steps, and what a hook of an attention (the first one's, or the last one's) hears that calls the engine in the
    forward of the second and in the backward of the third."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = [{"input_ids": ids, "labels": ids}]
    model, armed, heard = built("llama"), list[str](), list[str]()
    attentions = [path for path, _ in model.named_modules() if path.endswith("self_attn")]
    engine = engine_on(TWO[name], model)
    made = (
        partial(engine.generate, PROMPTS, max_new_tokens=2),
        partial(engine.score, PROMPTS),
        partial(engine.predict, batch[0]),
        partial(engine.train_batch, batch),
    )

    def calls(where):
        if armed == [where]:
            armed.clear()
            for call in made:
                with pytest.raises(InputError) as found:
                    call()
                heard.append(str(found.value))

    def after(_, __, output):
        calls("forward")
        if output[0].requires_grad:
            output[0].register_hook(lambda _: calls("backward"))

    model.get_submodule(attentions[0 if first else -1]).register_forward_hook(after)
    losses = [float(engine.train_batch(batch).loss)]
    for where in ("forward", "backward"):
        armed[:] = [where] if hears else []
        losses.append(float(engine.train_batch(batch).loss))
    engine.close()
    return losses, heard


def caught_in_a_hook(rank, world, names, who):
    """By a rank (None: all). Runs in a worker."""
    for name in names:
        kept, _ = interrupted(name, first=rank == 0, hears=False)
        losses, heard = interrupted(name, first=rank == 0, hears=who in (None, rank))
        assert losses == kept, name
        said = (
            ["while the pipeline runs"] * 2
            if name == "pp"
            else ["inside the model's forward", "inside the model's backward"]
        )
        assert len(heard) == (8 if who in (None, rank) else 0) and all(
            said[at // 4] in one for at, one in enumerate(heard)
        ), heard


@pytest.mark.parametrize("who", proof_after(1, [1, None, 0]))
def test_a_refusal_that_a_hook_catches(pool, who):
    pool.run(2, caught_in_a_hook, ["pp", "ZeRO 1", "ZeRO 3", "tp"], who, timeout=60)


def ends_apart(rank, world, name):
    """Requests of which one ends early, and is no longer computed. Runs in a worker."""
    expected = by_transformers("gemma2")
    model, widths = built("gemma2"), []
    with keeping_float64(model):
        engine = engine_on(TWO[name], model)
        model.get_submodule("model.norm").register_forward_pre_hook(
            lambda _, given: widths.append(given[0].shape[0])
        )
        made = engine.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=expected[1][2])
        engine.close()
    assert widths == [] or widths[-1] < 3
    return [(one.token_ids, one.finish_reason) for one in made]


@pytest.mark.parametrize("name", proof_after(1, ["tp", "pp, interleaved"]))
def test_a_request_that_ends_is_dropped(pool, name):
    expected = by_transformers("gemma2")
    end = expected[1][2]
    wanted = [
        (row[: row.index(end) + 1], "stop") if end in row else (row, "length") for row in expected
    ]
    assert pool.run(2, ends_apart, name) == [wanted, wanted]


def in_an_own_loop(rank, world):
    """Of a pipeline, between two steps. Runs in a worker."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model = built("llama")
    with keeping_float64(model):
        sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 2, **TWO["pp"]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sharded.forward_backward(
            {"input_ids": ids}, lambda output, piece: output.logits.logsumexp(-1).mean()
        )
        made = plait.generate(sharded, PROMPTS, max_new_tokens=NEW)
        sharded.step(optimizer)
        sharded.close()
    return [one.token_ids for one in made]


def test_in_your_own_loop(pool):
    expected = by_transformers("llama")
    assert pool.run(2, in_an_own_loop) == [expected, expected]


def wrong(rank, world):
    """What every rank hears when rank 1 is wrong. Runs in a worker."""
    engine = plait.initialize(
        built("llama"), {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    )
    heard = []
    for prompts, settings in (
        ([[1, 2]] if rank == 0 else [[]], {}),
        ([[1, 2]], {"max_new_tokens": 5000} if rank else {"max_new_tokens": 4}),
        ([[1, 2]], {"stop_strings": ["x"]}),
        ([[1, cases.VOCABULARY]], {}),
        ([[1, 2]], {"seed": -1}),
    ):
        with pytest.raises(InputError) as found:
            engine.generate(prompts, **settings)
        heard.append(str(found.value))
    assert len(engine.generate([[1, 2]] * rank, max_new_tokens=3)) == rank
    engine.close()
    return heard


def test_an_error_of_one_rank_is_raised_by_all(pool):
    for empty, long, text, token, seed in pool.run(2, wrong):
        assert (
            "prompt 0 has token 101, but the model's tokens are 0 to 100" in token
            and "seed = -1 must be" in seed
        )
        assert "rank 1, generate: prompt 0 has no token" in empty
        assert "5,002 tokens" in long and "max_position_embeddings" in long and "rank 1" in long
        assert "stop_strings requires tokenizer=" in text


class Failing:
    """A tokenizer that fails at its second text, on the ranks that ask it."""

    def __len__(self):
        return cases.VOCABULARY

    def decode(self, ids, **_):
        if len(ids) > 1:
            raise RuntimeError("no text for that")
        return ""


def failing(rank, world, layouts):
    """What every rank hears when one fails at a token: at its text, its number, or in `on_token`. Runs in a worker."""
    found = []
    for name in layouts:
        model = built("llama")
        engine = engine_on(TWO[name], model)
        mine, heard = [[1, 2]] if "ZeRO" not in name or rank == 0 else [], {}

        def refused(_, token):
            raise KeyError("mine")

        for what, ways in {
            "text": {"stop_strings": ["x"], "tokenizer": Failing()},
            "on_token": {"on_token": refused if rank == 0 else None},
        }.items():
            with pytest.raises((InputError, RuntimeError, KeyError)) as error:
                engine.generate(mine, max_new_tokens=4, **ways)
            heard[what] = f"{type(error.value).__name__}: {error.value}"
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "head" in name:
                    parameter.fill_(torch.nan)
        with pytest.raises(InputError) as error:
            engine.generate(mine, max_new_tokens=4)
        heard["numbers"] = str(error.value)
        found.append(heard)
        engine.close()
    return found


def test_where_the_rank_that_chooses_fails_all_raise(pool):
    names = ["tp", "pp", "ZeRO 3"]
    both = pool.run(2, failing, names, timeout=60)
    for name, *heard in zip(names, *both, strict=True):
        chooses, other = reversed(heard) if name == "pp" else heard
        assert (
            chooses["text"] == "RuntimeError: no text for that"
            and "logits are not finite" in chooses["numbers"]
        )
        assert heard[0]["on_token"] == "KeyError: 'mine'"
        if name == "ZeRO 3":
            assert (
                other["text"]
                == other["on_token"]
                == "InputError: another rank failed and reports its error"
            )
        else:
            assert other["text"] == "InputError: the rank that chooses tokens: no text for that"
            assert "logits are not finite" in other["numbers"]
            assert "on_token failed on another rank" in heard[1]["on_token"]


def of_recurrent(rank, world, kinds):
    """Runs in a worker."""
    found = []
    for kind in kinds:
        engine = engine_on(TWO["pp"], recurrent.built(kind))
        found.append(
            [
                one.token_ids
                for one in engine.generate(recurrent.PROMPTS, max_new_tokens=recurrent.NEW)
            ]
        )
        engine.close()
    return found


def test_stages_whose_layers_keep_a_state(pool):
    """Jamba's first stage has no layer that counts tokens; all layers of Falcon-H1 do."""
    kinds = ["jamba", "falcon_h1"]
    expected = [recurrent.by_transformers(recurrent.built(kind)) for kind in kinds]
    assert pool.run(2, of_recurrent, kinds, timeout=60) == [expected, expected]

"""Weights sent between layouts on the same ranks: every value in its place, versions, hashes, and the same logits every time."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
import torch

import plait
from plait._torch.dtensor import local_tensor
from plait.checkpoint.windows import inside, window_of
from plait.errors import CommunicationError, InputError, PlaitError
from plait.inference.weight_sync import copies, direct, same_ranks, transfer
from plait.inference.weight_sync.holdings import tensors_of
from plait.inference.weight_sync.status import ReceivedWeights, note
from tests.parity import cases, experts
from tests.parity.live_content import lanes_of, total
from tests.parity.two_models import FOUR, LAYOUTS, built
from tests.pool import Pool

SAMPLE = [("ZeRO 3", "tp"), ("pp", "tp"), ("tp", "one")]


def on(layout: dict[str, Any] | None, rank: int, seed: int, **model: Any) -> Any:
    """A model on a layout."""
    if layout is None:
        return built(seed, **model) if rank == 0 else None
    return plait.parallelize(built(seed, **model), {"train_micro_batch_size_per_gpu": 2, **layout})


def received(
    rank: int, world: int, pairs: list[tuple[str, str]], tied: bool, dtype: torch.dtype, readers: Collection[int] | None = None
) -> set[str]:
    """All values are where they belong; returns the hashes. `readers`: ranks that may read the others' memory. Runs in a worker."""
    if readers is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "can_read", lambda _: rank in readers)
            same_ranks._KNOWN.clear()
            found = received(rank, world, pairs, tied, dtype)
        assert same_ranks._KNOWN.channel is not None and not same_ranks._KNOWN.channel.ranks
        same_ranks._KNOWN.clear()
        return found
    wanted = {name: tensor.to(dtype) for name, tensor in built(7, tied=tied).state_dict().items()}
    layouts, hashes = {**LAYOUTS, **FOUR}, set()
    for one, other in pairs:
        source, target = on(layouts[one], rank, 7, tied=tied), on(layouts[other], rank, 8, tied=tied, dtype=dtype)
        for version in (3, 4):
            made = plait.sync_weights(source, target, version=version, verify="content")
            assert (made is None) == (target is None)
            if made is not None:
                assert made.version == version and made.is_complete
                hashes.add(made.content)
        found = tensors_of(target if isinstance(target, torch.nn.Module | None) else target.model, "target")
        for name, tensor in found.items():
            everything = tuple((0, size) for size in wanted[name].shape)
            window = window_of(tensor)
            assert torch.equal(local_tensor(tensor).detach(), wanted[name][inside(window, everything)]), (one, other, name)
        assert found or target is None
        for model in (source, target):
            if hasattr(model, "close"):
                model.close()
    return hashes


def check(pool: Pool, world: int, pairs: list[tuple[str, str]], *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
    kept = built(7, tied=tied).to(dtype).state_dict()
    if tied:
        kept.pop("lm_head.weight")
    expected = total({name: lanes_of(name, tensor) for name, tensor in kept.items()})
    hashes = set().union(*pool.run(world, received, pairs, tied, dtype))
    # The two ends of a pipeline have a tied weight each, and both are sent.
    assert expected in hashes and (len(hashes) == 1 or tied)


def test_between_layouts(pool: Pool) -> None:
    check(pool, 2, SAMPLE)


@pytest.mark.parametrize("readers", [(), (1,)])
def test_where_memory_cannot_be_read(pool: Pool, readers: tuple[int, ...]) -> None:
    found = pool.run(2, received, [("ZeRO 3", "tp")], False, torch.float32, readers)
    assert found == pool.run(2, received, [("ZeRO 3", "tp")], False, torch.float32)


@pytest.mark.proof
def test_between_all_layouts(pool: Pool) -> None:
    check(pool, 2, list(product(LAYOUTS, repeat=2)))
    check(pool, 2, list(product(LAYOUTS, repeat=2)), tied=True)
    check(pool, 2, list(product(LAYOUTS, repeat=2)), dtype=torch.bfloat16)
    check(pool, 4, list(product(FOUR, repeat=2)))


def mixture(seed: int) -> torch.nn.Module:
    """Mixtral's shape: all experts of a layer in one tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", vocab_size=cases.VOCABULARY, **tokens, **experts.SIZES["mixtral"])
    )


def experts_received(rank: int, world: int, pairs: list[tuple[str, str]]) -> set[str]:
    """From a trainer with experts on different ranks, which has trained; the hashes. Runs in a worker."""
    layouts = {**LAYOUTS, "ep": {"parallel": {"ep": 2}}, "ep x ZeRO 3": {"parallel": {"ep": 2}, "zero_optimization": {"stage": 3}}}
    wanted, hashes = mixture(7).state_dict(), set()
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))

    def engine(layout: str, seed: int) -> Any:
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}, **(layouts[layout] or {})}
        return plait.initialize(mixture(seed), config, loss_fn=plait.causal_lm_loss)

    for one, other in pairs:
        source, target = engine(one, 7), engine(other, 8)
        source.train_batch({"input_ids": ids, "labels": ids})
        made = plait.sync_weights(source, target, verify="content")
        assert made is not None
        hashes.add(made.content)
        for name, tensor in tensors_of(target.model, "target").items():
            window, everything = window_of(tensor), tuple((0, size) for size in wanted[name].shape)
            assert torch.equal(local_tensor(tensor).detach(), wanted[name][inside(window, everything)]), (one, other, name)
        if not other.startswith("ep"):
            assert [len(row.token_ids) for row in target.generate([[5, 3, 8]], max_new_tokens=3, eos_token_id=[])] == [3]
        source.close()
        target.close()
    return hashes


def test_experts(pool: Pool) -> None:
    hashes = set().union(*pool.run(2, experts_received, [("ep", "tp"), ("ep x ZeRO 3", "ZeRO 3"), ("ep", "pp"), ("ZeRO 3", "ep")]))
    assert hashes == {total({name: lanes_of(name, tensor) for name, tensor in mixture(7).state_dict().items()})}


def unchanged(rank: int, world: int, times: int, layout: str) -> None:
    """Steps of a learning rate of 0 leave the generator's logits as they were. Runs in a worker."""
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    config = {"train_micro_batch_size_per_gpu": 2, **(LAYOUTS[layout] or {})}
    engine = plait.initialize(built(7), {**config, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}, loss_fn=plait.causal_lm_loss)
    generator = plait.parallelize(built(8), {"train_micro_batch_size_per_gpu": 2, **(LAYOUTS["tp"] or {})})
    seen = []
    for version in range(times):
        engine.train_batch({"input_ids": ids, "labels": ids})
        made = plait.sync_weights(engine, generator, verify="content")
        assert made is not None and made.version == version
        if version:
            assert made.content == seen[0][0] and torch.equal(generator.predict({"input_ids": ids}).logits, seen[0][1]), version
        else:
            seen.append((made.content, generator.predict({"input_ids": ids}).logits))
    one = plait.generate(generator, [[5, 3, 8]], max_new_tokens=4)
    assert [len(row.token_ids) for row in one] == [4]
    trainers, generators = (plait.score(of, [[5, 3, 8, 1]], vocabulary=True) for of in (engine.sharded, generator))
    for trained, generated in zip(trainers, generators, strict=True):
        torch.testing.assert_close(trained, generated, rtol=0, atol=1e-5)
    engine.close()
    generator.close()


def test_a_learning_rate_of_zero_changes_nothing(pool: Pool) -> None:
    pool.run(2, unchanged, 3, "ZeRO 3")


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["ZeRO 3", "pp"])
def test_a_thousand_times(pool: Pool, layout: str) -> None:
    pool.run(2, unchanged, 1000, layout, timeout=580)


def spoils(rank: int) -> Any:
    """As if a byte had changed in the memory of rank 1 when a message was received there."""
    hashed = transfer._Transfer._hash

    def spoiled(self: Any, message: Any, flat: torch.Tensor) -> None:
        if message.source != self._source:
            flat[-1] ^= 1
        hashed(self, message, flat)

    return spoiled if rank == 1 else hashed


def misplaces(rank: int) -> Any:
    """As if a byte had changed in the memory of rank 1 when a piece was copied there."""
    compared = copies._memcmp

    def spoiled(one: int, other: int, size: int) -> int:
        ctypes.memset(other + size - 1, 1 ^ ctypes.string_at(other + size - 1, 1)[0], 1)
        return int(compared(one, other, size))

    return spoiled if rank == 1 else compared


def refused(rank: int, world: int) -> list[str]:
    """What both ranks hear. Runs in a worker."""
    source, target = on(LAYOUTS["ZeRO 3"], rank, 7), on(LAYOUTS["tp"], rank, 8)
    heard = []

    def hears(kind: type[PlaitError], *models: Any, **options: Any) -> None:
        with pytest.raises(kind) as found:
            plait.sync_weights(*models, **options)
        heard.append(str(found.value))

    plait.sync_weights(source, target, version=5)
    hears(InputError, source, target, version=5)
    hears(InputError, source, target, version=6 + rank)
    hears(InputError, source, source)
    hears(InputError, source, built(8, tied=False).model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer._Transfer, "_hash", spoils(rank))
        hears(CommunicationError, source, target)
        hears(CommunicationError, source, target, verify="content")
        patch.undo()
        patch.setattr(copies, "_memcmp", misplaces(rank))
        hears(CommunicationError, source, target)
    with pytest.raises(InputError) as incomplete:
        plait.generate(target, [[1, 2]], max_new_tokens=1)
    heard.append(str(incomplete.value))
    assert plait.sync_weights(source, target).version == 6 and len(plait.generate(target, [[1, 2]], max_new_tokens=1)) == 1
    for verify in ("hashes", "off"):
        assert not plait.sync_weights(source, target, verify=verify).content
    hears(InputError, source, target, verify="off" if rank else "content")
    assert same_ranks._KNOWN.routes
    if rank:
        same_ranks._KNOWN.routes.clear()
    assert plait.sync_weights(source, target).version == 9, "one rank has forgotten the route"
    same_ranks._KNOWN.group = None
    same_ranks._KNOWN.begin()
    assert not same_ranks._KNOWN.routes, "ranks of another group may be others"
    source.close()
    target.close()
    return heard


def test_what_is_refused(pool: Pool) -> None:
    one, other = pool.run(2, refused)
    assert one[0] == other[0] and "version = 5 is stale" in one[0]
    assert "versions [6, 7]" in one[1] and "one model" in one[2] and "lacks" in one[3]
    assert all("rank 1, sync_weights: what arrived from rank" in one[at] for at in (4, 5))
    assert one[6].startswith("rank 1, sync_weights: model.embed") and "something else than was copied there" in one[6]
    assert "mixes two versions" in one[7] and "verify = content, off" in one[8]


def test_one_process() -> None:
    source, target = built(7), built(8)
    made = same_ranks.sync_weights(source, target)
    assert made is not None and all(map(torch.equal, source.state_dict().values(), target.state_dict().values()))
    assert made.bytes == sum(tensor.numel() * tensor.element_size() for tensor in source.state_dict().values())
    note(target, ReceivedWeights(9, "", 0, 0.0, is_complete=False))
    with pytest.raises(InputError, match="must be a whole number"):
        same_ranks.sync_weights(source, target, version=-1)
    with pytest.raises(InputError, match="is no model"):
        same_ranks.sync_weights(source, 5)
    with pytest.raises(InputError, match="meta device"):
        same_ranks.sync_weights(source, built(8).to("meta"))
